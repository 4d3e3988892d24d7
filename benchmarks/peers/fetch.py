"""Download the wheels of the peers and unpack the files that the benchmarks import.

    python -m benchmarks.peers.fetch [vllm] [sglang]

The wheels stay in benchmarks/peers/.fetched/ (some 360 MB; a wheel that is there is not downloaded
again); what is unpacked, less than 1 MB, goes to .fetched/vllm/ and .fetched/sglang/, and that is
all a machine without a network needs. Nothing is installed and nothing of it is executed here.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["FETCHED", "FILES", "VERSIONS", "main", "unpack"]

FETCHED = Path(__file__).parent / ".fetched"

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}

FILES = {
    "vllm": (
        "vllm/lora/ops/triton_ops/fused_moe_lora_op.py",
        "vllm/lora/ops/triton_ops/kernel_utils.py",
        "vllm/lora/ops/triton_ops/lora_expand_op.py",
        "vllm/lora/ops/triton_ops/lora_kernel_metadata.py",
        "vllm/lora/ops/triton_ops/lora_shrink_op.py",
        "vllm/lora/ops/triton_ops/utils.py",
        "vllm/model_executor/layers/fused_moe/configs/E=128,N=*,device_name=NVIDIA_H200.json",
    ),
    "sglang": (
        "sglang/kernels/ops/lora/common/*.py",
        "sglang/kernels/ops/lora/dense/chunked_sgmv_expand.py",
        "sglang/kernels/ops/lora/dense/chunked_sgmv_shrink.py",
        "sglang/kernels/ops/lora/dense/csgmv_configs/*",
        "sglang/kernels/ops/lora/dense/gate_up_lora_b.py",
        "sglang/kernels/ops/lora/dense/kernel_utils.py",
        "sglang/kernels/ops/lora/dense/lora_tuning_config.py",
        "sglang/kernels/ops/lora/dense/qkv_lora_b.py",
        "sglang/kernels/ops/lora/dense/sgemm_lora_a.py",
        "sglang/kernels/ops/lora/dense/sgemm_lora_b.py",
        "sglang/srt/lora/dense/configs/*.json",
        "sglang/srt/lora/dense/plan.py",
        "sglang/srt/lora/dense/runner.py",
        "sglang/srt/lora/utils.py",
        "sglang/srt/lora/workspace.py",
    ),
}
"""Per peer, the members of its wheel that are unpacked; * stands for anything."""


def wheel(name: str) -> Path:
    """The peer's wheel in `.fetched`, downloaded with pip if it is not there yet."""
    pattern = f"{name}-{VERSIONS[name]}-*.whl"
    if not any(FETCHED.glob(pattern)):
        FETCHED.mkdir(exist_ok=True)
        what = f"{name}=={VERSIONS[name]}"
        command = (sys.executable, "-m", "pip", "download", "--no-deps", "--dest", FETCHED, what)
        subprocess.run(command, check=True)
    return next(FETCHED.glob(pattern))


def unpack(archive: Path, name: str, target: Path) -> int:
    """Replace the folder `target` by the peer's files; how many bytes they have.

    Raises:
        FileNotFoundError: if the archive lacks a file that is listed in FILES.
    """
    with zipfile.ZipFile(archive) as members:
        found: list[zipfile.ZipInfo] = []
        for pattern in FILES[name]:
            matches = [
                m
                for m in members.infolist()
                if fnmatch.fnmatchcase(m.filename, pattern) and not m.is_dir()
            ]
            if not matches:
                raise FileNotFoundError(f"{archive.name} has no member {pattern}")
            found += matches
        shutil.rmtree(target, ignore_errors=True)
        for member in found:
            members.extract(member, target)
    return sum(member.file_size for member in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="peer", help=", ".join(VERSIONS))
    for name in parser.parse_args().names or VERSIONS:
        if name not in VERSIONS:
            parser.error(f"peers are {', '.join(VERSIONS)}; given: {name}")
        size = unpack(wheel(name), name, FETCHED / name)
        print(f"{name} {VERSIONS[name]}: {size:,} bytes in {FETCHED / name}")


if __name__ == "__main__":
    main()
