"""The files of a folder: what is opened, and headers checked before anything is allocated."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from lorafold.adapter import ExpertShape, TargetShape
from lorafold.errors import AdapterFormatError, AdapterMismatchError
from lorafold.peft import load_adapter
from lorafold.peft.files import MAX_CONFIG_BYTES, MAX_HEADER_BYTES, open_folder
from lorafold.peft.header import check_header, read_json
from lorafold.refusal import Decisions
from tests.peft.folders import CONFIG, dense, tensors_of, write


def read(folder: Path) -> tuple[dict[str, torch.Tensor], Decisions]:
    decisions = Decisions("sql")
    with open_folder(folder, decisions) as files:
        return files.read(), decisions


def code_of(folder: Path) -> str:
    with pytest.raises(AdapterFormatError) as caught:
        read(folder)
    return caught.value.code


def test_tensors_are_read_as_they_are_stored(tmp_path: Path) -> None:
    stored = {
        "float8": torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn),
        "other float8": torch.arange(6.0).to(torch.float8_e5m2),
        "bfloat16": torch.randn(3).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.ones(0, 4),
    }
    tensors, _ = read(write(tmp_path, stored))
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor.float(), stored[name].float())


def test_a_pickle_beside_safetensors_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, dense())
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    tensors, decisions = read(tmp_path)
    assert tensors.keys() == dense().keys()
    assert decisions.notes == ["pickle files were not read: `adapter_model.bin`"]


def test_a_pickle_alone_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(AdapterFormatError, match=r"weights_only=True.*save_file"):
        read(tmp_path)


def test_adapters_in_sub_folders_are_named(tmp_path: Path) -> None:
    write(tmp_path / "first", dense())
    with pytest.raises(AdapterFormatError, match="sub-folders `first`"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_may_stay_inside_the_folder_only(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "in", dense())
    (folder / name).rename(folder / "real")
    (folder / name).symlink_to("real")
    assert read(folder)[0].keys() == dense().keys()
    (folder / "real").rename(tmp_path / "real")
    (folder / name).unlink()
    (folder / name).symlink_to("../real")
    assert code_of(folder) == "escaping-path"
    # A folder that is itself reached by a link is no escape.
    (tmp_path / "link").symlink_to(write(tmp_path / "plain", dense()))
    assert read(tmp_path / "link")[0].keys() == dense().keys()


def test_dangling_links_loops_pipes_and_folders_are_refused(tmp_path: Path) -> None:
    weights = "adapter_model.safetensors"
    folder = write(tmp_path, dense())
    (folder / weights).unlink()
    (folder / weights).symlink_to("nothing")
    assert code_of(folder) == "missing-file"
    (folder / weights).unlink()
    (folder / weights).symlink_to(weights)
    assert code_of(folder) == "missing-file"
    (folder / weights).unlink()
    os.mkfifo(folder / weights)
    assert code_of(folder) == "broken-file"
    (folder / weights).unlink()
    (folder / weights).mkdir()
    assert code_of(folder) == "broken-file"
    assert code_of(folder / "adapter_config.json") == "missing-file"


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, MAX_HEADER_BYTES + 1, 10**6])
def test_a_header_length_is_checked_before_the_header_is_read(tmp_path: Path, length: int) -> None:
    folder = write(tmp_path, {})
    file = folder / "adapter_model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(AdapterFormatError, match=f"claims {length} bytes") as caught:
        read(folder)
    assert caught.value.code == "broken-file"
    # A sparse file of the claimed size does not help.
    if length == MAX_HEADER_BYTES + 1:
        os.truncate(file, length + 100)
        assert code_of(folder) == "broken-file"


def test_long_configs_and_indexes_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, dense())
    os.truncate(folder / "adapter_config.json", MAX_CONFIG_BYTES + 1)
    assert code_of(folder) == "bad-config"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    # The header is longer than what the system reads ahead.
    folder = write(tmp_path, {f"tensor-{i:04}": torch.zeros(1) for i in range(2000)})
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    for changed in (content[:-1], content.replace(b"tensor-1990", b"tensor-2990")):
        file.write_bytes(content)
        with open_folder(folder, Decisions("sql")) as files:
            file.write_bytes(changed)
            with pytest.raises(AdapterFormatError) as caught:
                files.read()
        assert caught.value.code == "broken-file"


def shards(folder: Path, weight_map: Any) -> Path:
    tensors = dense()
    names = list(tensors)
    for number in range(2):
        write(folder, {name: tensors[name] for name in names[number::2]}, CONFIG)
        (folder / "adapter_model.safetensors").rename(folder / f"{number}.safetensors")
    right = {name: f"{number % 2}.safetensors" for number, name in enumerate(names)}
    index = {"weight_map": weight_map(right)} if callable(weight_map) else weight_map
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("weight_map", "code"),
    [
        (lambda right: right, ""),
        (lambda right: dict(list(right.items())[:-1]), "bad-index"),
        (lambda right: right | {"another": "0.safetensors"}, "bad-index"),
        (lambda right: dict.fromkeys(right, "0.safetensors"), "bad-index"),
        (lambda right: right | {"another": "2.safetensors"}, "missing-file"),
        (lambda right: right | {"another": "/etc/x.safetensors"}, "escaping-path"),
        (lambda right: right | {"another": "..\0.safetensors"}, "missing-file"),
        (lambda right: right | {"another": 5}, "escaping-path"),
        (lambda right: right | {"another": "adapter_config.json"}, "escaping-path"),
        (lambda right: {}, "bad-index"),
        ([1, 2], "bad-index"),
        ({"weight_map": ["x"]}, "bad-index"),
    ],
)
def test_an_index_and_its_shards_must_agree(tmp_path: Path, weight_map: Any, code: str) -> None:
    folder = shards(tmp_path, weight_map)
    if code:
        assert code_of(folder) == code
    else:
        assert read(folder)[0].keys() == dense().keys()


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = shards(tmp_path, lambda right: right)
    one = (folder / "1.safetensors").read_bytes()
    (folder / "0.safetensors").write_bytes(one)
    assert code_of(folder) == "duplicate-tensor"


sizes = st.integers(-1, 6) | st.integers(-(2**65), 2**65) | st.booleans() | st.none()
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F8_E5M2", "I64", "BOOL", "F4", "f32", 4]),
        "shape": st.lists(sizes, max_size=3) | st.none(),
        "data_offsets": st.lists(sizes, max_size=3) | st.just([0, 8]) | st.just([0, 0]),
    },
    optional={"more": st.none()},
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries | st.none(), max_size=3),
    st.integers(0, 16),
)
def test_what_the_header_check_accepts_the_library_accepts(header: Any, num_bytes: int) -> None:
    text = json.dumps(header).encode()
    try:
        infos = check_header(text, num_bytes, "file")
    except ValueError:
        return
    tensors = load(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        name: info.shape for name, info in infos.items()
    }


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 5)), max_size=4))
def test_what_the_library_writes_the_header_check_accepts(parts: list[tuple[int, int]]) -> None:
    dtypes = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
    stored = {str(i): torch.zeros(n, dtype=dtypes[size]) for i, (size, n) in enumerate(parts)}
    content = save(stored)
    (length,) = struct.unpack("<Q", content[:8])
    infos = check_header(content[8 : 8 + length], len(content) - 8 - length, "file")
    assert {n: i.shape for n, i in infos.items()} == {n: tuple(t.shape) for n, t in stored.items()}


def test_the_library_misses_what_the_header_check_refuses() -> None:
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    doubled = b"{" + entry + b"," + entry + b"}"
    with pytest.raises(ValueError, match="repeated"):
        check_header(doubled, 1, "file")
    try:
        load(struct.pack("<Q", len(doubled)) + doubled + b"\0")
    except SafetensorError:
        pytest.fail("the library has learned to refuse repeated names: the check can go")


@pytest.mark.parametrize(
    ("first", "second", "num_bytes"),
    [([0, 4], [5, 9], 9), ([0, 4], [3, 7], 7), ([1, 5], [5, 9], 9), ([0, 4], [4, 8], 9)],
    ids=["gap", "overlap", "late start", "early end"],
)
def test_tensors_must_fill_the_data(first: list[int], second: list[int], num_bytes: int) -> None:
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": span}
        for name, span in (("a", first), ("b", second))
    }
    with pytest.raises(ValueError, match="data"):
        check_header(json.dumps(entries).encode(), num_bytes, "file")


@pytest.mark.parametrize("text", [b'{"a": NaN}', b"{'a': 1}", b"\xff", b"[" * 99_999, b""])
def test_json_is_read_strictly(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|deep|expect|Expect|decode"):
        read_json(text)


def test_reading_leaves_no_file_open(tmp_path: Path) -> None:
    folder = write(tmp_path, dense())
    handles = Path("/proc/self/fd")
    before = len(list(handles.iterdir())) if handles.exists() else 0
    read(folder)
    truncated = (folder / "adapter_model.safetensors").read_bytes()[:-1]
    (folder / "adapter_model.safetensors").write_bytes(truncated)
    assert code_of(folder) == "broken-file"
    assert tensors_of(write(tmp_path, dense()))
    after = len(list(handles.iterdir())) if before else 0
    assert after == before


@pytest.mark.parametrize("num_axes", [65, 1_000_000])
def test_a_shape_has_few_axes(num_axes: int) -> None:
    """The product of a million sizes takes an hour, and PyTorch has no tensor of 65 axes."""
    shape = [1] * num_axes if num_axes < 100 else [2**61] * num_axes
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
    with pytest.raises(ValueError, match=f"has {num_axes} axes; allowed: 64"):
        check_header(json.dumps({"x": entry}).encode(), 4, "f")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_in_the_place_of_a_file_leaves_nothing_open(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, dense())
    (folder / name).unlink()
    (folder / name).mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with (
        pytest.raises(AdapterFormatError, match="no regular file") as caught,
        open_folder(folder, Decisions("sql")),
    ):
        pass
    assert caught.value.code == "broken-file"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class Stepped(dict[str, TargetShape | ExpertShape]):
    """Targets through which every step is a call that a profiler sees."""

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()


@pytest.mark.parametrize(
    "names",
    [
        ("m{}.lora_A.weight", "m{}.lora_B.weight"),
        ("lora_te_m{}.lora_down.weight", "lora_te_m{}.lora_up.weight"),
    ],
    ids=lambda names: names[0],
)
def test_the_work_on_many_names_is_for_each_by_itself(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """No name is compared with every target of the model, or with every word of the config."""
    num_names, num_targets = 20_000, 2_000
    tensors = {name.format(at): torch.ones(1, 1) for at in range(num_names // 2) for name in names}
    words = [f"w{at}.weight" for at in range(num_targets)]
    folder = write(tmp_path, tensors, CONFIG | {"r": 1, "target_parameters": words})
    targets = Stepped({f"model.blocks.{at}.up": TargetShape(1, 1) for at in range(num_targets)})
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with pytest.raises(AdapterMismatchError, match="none of its modules is a target"):
            load_adapter(folder, targets, strict=False)
    finally:
        sys.setprofile(before)
    assert num_calls < 300 * (num_names + num_targets) < num_names * num_targets / 4
