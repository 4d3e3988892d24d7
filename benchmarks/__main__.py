"""A first look: the dense operators on the GPU, or the CPU reference where there is no GPU.

    python -m benchmarks [options of the benchmark that runs]

Runs benchmarks.ops on two sites at rank 16, or benchmarks.reference with few repeats.
"""

from __future__ import annotations

import sys

import torch


def main() -> None:
    if torch.cuda.is_available():
        from benchmarks import ops

        ops.main(sys.argv[1:] or ["--sites", "o,qkv", "--ranks", "16", "--processes", "2"])
    else:
        from benchmarks import reference

        sys.argv[1:] = sys.argv[1:] or ["--repeats", "5"]
        reference.main()


if __name__ == "__main__":
    main()
