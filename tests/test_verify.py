"""`lorafold.verify`: it agrees where the library is right, and every check can fail.

Each fault is put into the operators that the checks call; the check must see it, narrow it, write
it, and see it again when the file is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lorafold import ops
from lorafold.errors import BackendError, LoraError
from lorafold.numerics import TensorCoreModel
from lorafold.ops import reference
from lorafold.verify import (
    Report,
    golden,
    operands,
    replay,
    run,
    runner,
    tensor_cores_follow,
)
from lorafold.verify.case import Case, write_case
from lorafold.verify.checks import CHECKS
from lorafold.verify.operands import Shape, dense_case
from lorafold.verify.plot import plot

CPU = torch.device("cpu")
Change = Callable[[Sequence[Any], dict[str, Any]], None]


def flip(out: Tensor) -> None:
    """The last bit of the first element, in place."""
    out.view(torch.int16)[0, 0] ^= 1


def after(monkeypatch, name: str, change: Change) -> None:
    """Let a change follow every call of an operator."""
    original = getattr(ops, name)

    def broken(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        change(args, kwargs)

    monkeypatch.setattr(ops, name, broken)


def dense(condition: Callable[[Sequence[Any], dict[str, Any]], bool]) -> Callable[[Any], None]:
    """A fault of `apply_lora_bgmv`: a flipped bit under a condition on (route, x, out, slots)."""

    def change(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if condition(args, kwargs):
            flip(args[2][0] if isinstance(args[2], list) else args[2])

    return lambda monkeypatch: after(monkeypatch, "apply_lora_bgmv", change)


def flipping(name: str, condition: Callable[[dict[str, Any]], bool]) -> Callable[[Any], None]:
    """A fault of another operator; all of them take the output third."""

    def change(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if condition(kwargs):
            flip(args[2])

    return lambda monkeypatch: after(monkeypatch, name, change)


def swap_two_rows(monkeypatch) -> None:
    def change(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        out = args[2]
        if not isinstance(out, list) and out.shape[0] > 2:
            out[:2] = out[:2].flip(0).clone()

    after(monkeypatch, "apply_lora_bgmv", change)


def fuse_the_fold(monkeypatch) -> None:
    def fused(out: Tensor, delta: Tensor, scale: Any) -> Tensor:
        scale = torch.as_tensor(scale, dtype=torch.float32).double()
        return (out.double() + scale * delta.double()).float().bfloat16()

    monkeypatch.setattr(reference, "fold", fused)


def write_beside(monkeypatch) -> None:
    def change(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        out = args[2]
        if not isinstance(out, list) and out.stride(0) > out.shape[1]:
            wider = out.as_strided((1, 1), (out.stride(0), 1), out.storage_offset() + out.shape[1])
            wider.zero_()

    after(monkeypatch, "apply_lora_bgmv", change)


def rewrite_base_rows(monkeypatch) -> None:
    def change(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        out, slots = args[2], args[3]
        if not isinstance(out, list):
            out[slots < 0] += 0.0

    after(monkeypatch, "apply_lora_bgmv", change)


def change_with_time(monkeypatch) -> None:
    calls = iter(range(10**9))
    dense(lambda args, kwargs: next(calls) % 2 == 1)(monkeypatch)


FAULTS: dict[str, list[Callable[[Any], None]]] = {
    "recordings": [
        lambda monkeypatch: monkeypatch.setattr(golden, "HOPPER", TensorCoreModel(16, 24))
    ],
    "controls": [
        lambda monkeypatch: monkeypatch.setattr(operands, "_SCALES", (2.0, 0.5, -1.0)),
        lambda monkeypatch: monkeypatch.setattr(
            operands, "cancelling", lambda t, mirrored: t.bfloat16()
        ),
    ],
    "contract": [fuse_the_fold, swap_two_rows, dense(lambda args, kwargs: True)],
    "row alone": [dense(lambda args, kwargs: args[1].shape[0] > 1), swap_two_rows],
    "order": [dense(lambda args, kwargs: True), swap_two_rows],
    "neighbours": [dense(lambda args, kwargs: bool(args[1][1:].isnan().any()))],
    "chunks": [dense(lambda args, kwargs: args[1].shape[0] > 3)],
    "padding": [dense(lambda args, kwargs: args[0].max_rank == 160)],
    "slots": [dense(lambda args, kwargs: args[0].max_loras > 4)],
    "one adapter": [flipping("apply_lora_delta", lambda kwargs: True)],
    "together": [dense(lambda args, kwargs: isinstance(args[0], list))],
    "planned": [dense(lambda args, kwargs: kwargs.get("plan") is not None)],
    "guard cells": [write_beside],
    "base rows": [rewrite_base_rows],
    "repeats": [change_with_time],
    "windows": [flipping("moe_lora_grouped_down", lambda kwargs: kwargs["row_offset"] > 0)],
    "grouped": [flipping("moe_lora_grouped_down", lambda kwargs: True)],
    "gathered": [flipping("moe_lora_gather_bgmv", lambda kwargs: True)],
}


def test_a_sound_library_agrees_in_every_bit():
    told: list[tuple[int, int, str]] = []
    report = run(quick=True, device="cpu", progress=lambda *each: told.append(each))
    assert report.ok, str(report)
    assert report.elements > 100_000
    assert report.failure is None
    skipped = {line.check for line in report.lines if line.status == "skipped"}
    assert skipped == {check.name for check in CHECKS if check.needs_cuda or not check.in_quick}
    compared = {line.check for line in report.lines if line.elements}
    assert compared == {check.name for check in CHECKS} - skipped
    assert told[0] == (0, len(report.lines), "recordings (mma)")
    assert told[-1][0] == len(report.lines)


def test_every_check_that_runs_here_has_a_fault():
    assert FAULTS.keys() == {check.name for check in CHECKS if not check.needs_cuda}


@pytest.mark.parametrize(
    ("name", "index"), [(name, i) for name, faults in FAULTS.items() for i in range(len(faults))]
)
def test_every_check_sees_its_fault(name, index, monkeypatch, tmp_path):
    file = tmp_path / "case.safetensors"
    with monkeypatch.context() as patch:
        FAULTS[name][index](patch)
        patch.setattr(runner, "_NARROWING_SECONDS", 2.0)
        report = run(quick=True, device="cpu", only=[name])
        assert_failed(report, name)
        report.write_failure(file)
        again = replay(file)
        assert_failed(again, name)
        if name != "repeats":  # its fault comes and goes
            assert again.differences == report.failure.differences
            assert again.failure.first == report.failure.first
    if name != "controls":  # its operands are the fault
        assert replay(file).ok


def assert_failed(report: Report, name: str) -> None:
    assert not report.ok
    assert report.differences > 0
    assert report.failure is not None
    assert report.failure.check == name
    assert report.failure.first is not None


def test_a_failing_case_is_narrowed(monkeypatch):
    """A fault that needs company needs two rows, and one of everything else."""
    dense(lambda args, kwargs: args[1].shape[0] > 1)(monkeypatch)
    report = run(quick=True, device="cpu", only=["row alone"])
    sizes = report.failure.case.sizes()
    assert (sizes["rows"], sizes["cols"], sizes["k"], sizes["rank"]) == (2, 1, 1, 1)
    assert sizes["adapters"] == 1


def test_an_error_in_a_check_is_a_line_and_a_case(monkeypatch, tmp_path):
    def broken(*args: Any, **kwargs: Any) -> None:
        if args[1].shape[1] > 100:
            raise RuntimeError("the kernel stopped\nat some line")

    monkeypatch.setattr(ops, "apply_lora_bgmv", broken)
    report = run(quick=True, device="cpu", only=["repeats", "base rows"])
    assert not report.ok
    assert {line.status for line in report.lines} == {"error"}
    assert report.lines[0].note == "RuntimeError: the kernel stopped"
    file = tmp_path / "case.safetensors"
    report.write_failure(file)
    assert replay(file).lines[0].note == "RuntimeError: the kernel stopped"
    monkeypatch.undo()
    assert replay(file).ok


def test_nothing_compared_is_not_a_proof():
    report = run(quick=True, device="cpu", only=["graph"])
    assert report.elements == 0
    assert not report.ok


def test_unknown_checks_and_devices_are_refused():
    with pytest.raises(BackendError, match="checks are: recordings"):
        run(only=["nothing"])
    with pytest.raises(BackendError, match="given: none"):
        run(only=[])
    for name in ("meta", "gpu", "", "cuda:99"):
        with pytest.raises(BackendError, match=f"device `{name}` is not there; devices here: cpu"):
            run(device=name)


def test_a_report_is_json_text_and_a_picture(tmp_path):
    report = run(quick=True, device="cpu", only=["slots", "graph"])
    read = json.loads(json.dumps(report.to_json()))
    assert read["ok"] is True
    assert read["elements"] == sum(line["elements"] for line in read["checks"])
    assert {line["check"] for line in read["checks"]} == {"slots", "graph"}
    assert "every bit agrees" in str(report)
    with pytest.raises(ValueError, match="nothing failed"):
        report.write_failure(tmp_path / "case.safetensors")
    pytest.importorskip("matplotlib")
    plot(report, tmp_path / "report.svg")
    assert (tmp_path / "report.svg").read_text().startswith("<?xml")
    with pytest.raises(LoraError, match="cannot be written"):
        plot(report, tmp_path / "report.nothing")


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(BackendError, match=r"pip install 'lorafold\[plot\]'"):
        plot(run(quick=True, device="cpu", only=["slots"]), tmp_path / "report.svg")


def test_the_header_of_a_case_holds_everything_but_tensors(monkeypatch, tmp_path):
    swap_two_rows(monkeypatch)
    report = run(quick=True, device="cpu", only=["order"])
    file = tmp_path / "case.safetensors"
    report.write_failure(file)
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    about = json.loads(header["about"])
    assert header["numerics"] in ("gemv", "mma")
    assert about["check"] == "order"
    assert about["differences"] == report.failure.differences
    assert about["machine"]["versions"]["torch"] == torch.__version__
    assert load_file(file).keys() == {"x", "out", "slots", "a", "b", "scales", "ranks"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_case_of_a_device_that_is_not_here(tmp_path):
    file = tmp_path / "case.safetensors"
    about = {"check": "graph", "machine": {"device": "cuda:3"}}
    write_case(file, small(), about)
    with pytest.raises(BackendError, match="`cuda` is not there; devices here: cpu"):
        replay(file)
    with pytest.raises(BackendError, match="needs a CUDA device"):
        replay(file, device="cpu")


def small(numerics: str = "gemv", **sizes: Any) -> Case:
    shape = {"rows": 6, "k": 20, "cols": 5, "ranks": (3, 0, 4)} | sizes
    return dense_case(Shape(**shape), numerics, 0)


@pytest.mark.gpu
def test_the_gpu_agrees_in_every_bit():
    report = run(quick=True, device="cuda")
    assert report.ok, str(report)
    quick = {check.name for check in CHECKS if check.in_quick}
    assert all(line.status == "same" for line in report.lines if line.check in quick)


@pytest.mark.gpu
def test_the_gpu_follows_the_model():
    assert tensor_cores_follow("cuda")
