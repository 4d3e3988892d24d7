"""Damaged folders: each ends in an error of ours with a code, and leaves no trace in the pool.

The normal run tries `NUM_FOLDERS` of each kind; `python -m tests.peft.test_fuzz 2000` tries more.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from lorafold.adapter import TargetShape
from lorafold.errors import AdapterError
from lorafold.peft import load_adapter
from lorafold.pool import Pool
from lorafold.refusal import Refusal
from tests.peft.folders import CONFIG, dense, targets, write

NUM_FOLDERS = 300

SHAPES = {path: s for path, s in targets().items() if isinstance(s, TargetShape)}
FULL_CONFIG = CONFIG | {
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {"down_proj": 3},
    "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
    "init_lora_weights": True,
    "peft_version": "0.21.2",
    "lora_dropout": 0.1,
    "auto_mapping": None,
}
Damage = Callable[[Path], None]


def weights_of(folder: Path) -> tuple[Path, dict[str, Any], bytes]:
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return file, json.loads(content[8 : 8 + length]), content[8 + length :]


def put(file: Path, header: bytes, data: bytes, *, length: int | None = None) -> None:
    stated = len(header) if length is None else length
    file.write_bytes(struct.pack("<Q", stated) + header + data)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["LORA", "pissa", "all", "q_proj", ".*", "CAUSAL_LM"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.just("q_proj"), inner, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def entry_damage(draw: st.DrawFn) -> Damage:
    """One entry of the header no longer fits the data."""
    index, part = draw(st.integers(0, 7)), draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    kind = draw(st.sampled_from(["shift", "junk", "missing", "renamed", "doubled", "extra"]))
    shift = draw(st.integers(-(2**63), 2**64).filter(bool))
    junk = draw(json_values)

    def damage(folder: Path) -> None:
        note(f"{kind} {part} of tensor {index}: {shift}, {junk}")
        file, header, data = weights_of(folder)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        name = list(tensors)[index]
        entry = dict(tensors[name])
        if kind == "missing":
            del header[name]
        elif kind == "renamed":
            header[name.replace(".lora_A", ".lora_C").replace(".lora_B", ".lora_D")] = header.pop(
                name
            )
        elif kind == "extra":
            header["another"] = entry
        elif kind == "doubled":
            text = json.dumps(header)
            put(file, (text[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}").encode(), data)
            return
        elif kind == "junk":
            header[name] = entry | {part: junk} if junk != entry[part] else None
        elif part == "dtype":
            header[name] = entry | {"dtype": "F16"}
        else:
            values = list(entry[part])
            values[index % 2] += shift
            header[name] = entry | {part: values}
        put(file, json.dumps(header).encode(), data)

    return damage


@st.composite
def file_damage(draw: st.DrawFn) -> Damage:
    """The file is cut, extended, or lies about the length of its header."""
    kind = draw(st.sampled_from(["cut", "extended", "length", "nan", "no json", "deep"]))
    share = draw(st.floats(0, 1, exclude_max=True))
    number = draw(st.integers(0, 2**64 - 1) | st.integers(0, 1500))
    tail = draw(st.binary(min_size=1, max_size=9))

    def damage(folder: Path) -> None:
        note(f"{kind}: {share}, {number}, {tail!r}")
        file, header, data = weights_of(folder)
        content = file.read_bytes()
        text = json.dumps(header).encode()
        if kind == "cut":
            file.write_bytes(content[: int(share * len(content))])
        elif kind == "extended":
            file.write_bytes(content + tail)
        elif kind == "length":
            (length,) = struct.unpack("<Q", content[:8])
            file.write_bytes(
                struct.pack("<Q", number ^ 1 if number == length else number) + content[8:]
            )
        elif kind == "nan":
            at = int(share * (len(data) // 4)) * 4
            put(file, text, data[:at] + struct.pack("<f", float("nan")) + data[at + 4 :])
        elif kind == "deep":
            put(file, b"[" * 50_000, data)
        else:
            put(file, b"!" + tail + text, data)  # white space alone would be JSON

    return damage


REFUSED_FIELDS = {
    "use_dora": True,
    "lora_bias": True,
    "bias": "all",
    "peft_type": "VERA",
    "task_type": "SEQ_CLS",
    "use_next_variant": 1,
    "modules_to_save": ["norm"],
    "layer_replication": [[0, 1]],
    "init_lora_weights": "olora",
    "rank_pattern": {"nothing": 4},
    "alpha_pattern": {"(x+)+": 4},
    "exclude_modules": ["q_proj"],
    "layers_to_transform": [0],
    "target_modules": ["q_proj", "absent"],
}


@st.composite
def config_damage(draw: st.DrawFn) -> Damage:
    """The config has a wrong type, asks for what is refused, or contradicts the tensors."""
    field, value = draw(
        st.sampled_from(sorted(REFUSED_FIELDS.items(), key=str))
        | st.tuples(
            st.sampled_from(["r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"]),
            st.just("text") | st.just([1]) | st.just(-(2**800)),
        )
        | st.tuples(st.just("r"), st.integers().filter(lambda r: r != 4))
        | st.tuples(st.text(min_size=1), st.just("set")).filter(lambda f: f[0] not in FULL_CONFIG)
    )

    def damage(folder: Path) -> None:
        note(f"{field}: {value}")
        (folder / "adapter_config.json").write_text(json.dumps(FULL_CONFIG | {field: value}))

    return damage


@st.composite
def any_change(draw: st.DrawFn) -> Damage:
    """A change that may or may not be damage: bytes flipped, fields replaced."""
    name = draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    flips = draw(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=3))
    fields = draw(st.dictionaries(st.sampled_from(sorted(FULL_CONFIG)), json_values, max_size=2))

    def damage(folder: Path) -> None:
        note(f"{name}: {flips}, {fields}")
        (folder / "adapter_config.json").write_text(json.dumps(FULL_CONFIG | fields))
        content = bytearray((folder / name).read_bytes())
        # Most of the file is data: half of the flips are sent to its first bytes.
        for share, bits in flips:
            reach = len(content) - 1 if bits % 2 else min(1000, len(content) - 1)
            content[int(share * reach)] ^= bits
        (folder / name).write_bytes(content)

    return damage


class Trace:
    """A pool with one adapter, and everything of it that a failed load might change."""

    def __init__(self) -> None:
        self.pool = Pool(SHAPES, max_loras=2, max_rank=4)
        with tempfile.TemporaryDirectory() as name:
            self.pool.place(load_adapter(write(Path(name), dense()), SHAPES, name="kept"))
        self.before = self.state()

    def state(self) -> list[Any]:
        tables = [t.clone() for t in self.pool._tables.values()]
        numbers = [t.tolist() for t in [self.pool._memory.view(torch.int16), *tables]]
        return [numbers, self.pool.names(), self.pool.generation("kept")]

    def check(self, damage: Damage, *, may_load: bool) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = write(Path(name), dense(), FULL_CONFIG)
            damage(folder)
            try:
                adapter = load_adapter(folder, SHAPES, name="damaged")
            except AdapterError as error:
                Refusal(error.code)
                assert self.state() == self.before
                return
            assert may_load, "a damaged folder was loaded"
            assert adapter.report.num_tensors == 8


def fuzz(num_folders: int) -> None:
    """Try so many folders of each kind."""
    trace = Trace()
    run = settings(max_examples=num_folders, deadline=None, suppress_health_check=list(HealthCheck))

    @run
    @given(entry_damage() | file_damage() | config_damage())
    def damaged(damage: Damage) -> None:
        trace.check(damage, may_load=False)

    @run
    @given(any_change())
    def changed(damage: Damage) -> None:
        trace.check(damage, may_load=True)

    damaged()
    changed()


def test_damaged_folders_end_in_our_error_and_leave_no_trace() -> None:
    fuzz(NUM_FOLDERS)


def test_the_unchanged_folder_loads() -> None:
    Trace().check(lambda folder: None, may_load=True)


if __name__ == "__main__":
    fuzz(int(sys.argv[1]))
