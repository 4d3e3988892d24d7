"""The cluster kernel, as far as it goes without a GPU: which calls take it, and when none does."""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
from importlib.resources import files
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorafold.errors import BackendError
from lorafold.ops import cluster, cluster_choice, launch
from lorafold.ops.cluster_choice import Choice, Shape, candidates
from lorafold.ops.nearest import nearest
from tests.ops.cases import make_case
from tests.ops.test_kernels import plan_of_height

CHOICES = st.builds(
    Choice,
    cluster=st.sampled_from([1, 2, 4, 8, 16]),
    groups=st.sampled_from([1, 2, 4]),
    warpgroups=st.sampled_from([1, 2]),
    wgmma=st.booleans(),
    x_parts=st.sampled_from([1, 2, 4]),
)
SHAPES = st.builds(
    Shape,
    tile_rows=st.sampled_from([8, 16, 32, 64]),
    k_in=st.integers(1, 200).map(lambda n: n * 64),
    n_outs=st.lists(st.integers(1, 4000).map(lambda n: n * 4), min_size=1, max_size=4).map(tuple),
    max_rank=st.integers(1, 40).map(lambda n: n * 4),
    choice=CHOICES,
)
ANY = {
    "num_tiles": st.integers(1, 5000),
    "tile_rows": st.sampled_from([8, 16, 32, 64]),
    "k_in": st.integers(1, 40_000),
    "n_outs": st.lists(st.integers(1, 60_000), min_size=1, max_size=5).map(tuple),
    "max_rank": st.integers(1, 512),
}


@pytest.fixture(autouse=True)
def _fresh():
    """No answer of one test is another one's."""
    caches = cluster_choice.cluster_choice, cluster._function, cluster.has_clusters, launch.prepare
    for cached in caches:
        cached.cache_clear()
    cluster._failures.clear()
    yield
    for cached in caches:
        cached.cache_clear()
    cluster._failures.clear()


def put_table(monkeypatch, entries) -> None:
    monkeypatch.setattr(cluster_choice, "_table", lambda: entries)
    cluster_choice.cluster_choice.cache_clear()


# ---- the choice ---------------------------------------------------------------------------------


@given(shape=SHAPES)
def test_what_fits_can_be_run(shape):
    if not shape.fits:
        return
    assert shape.tile_rows in (8, 16)
    assert shape.k_in % 128 == shape.max_rank % 8 == 0
    assert all(n % 8 == 0 for n in shape.n_outs)  # rows of 16-byte vectors
    assert shape.shared_bytes <= 227 * 1024
    segments = -(-shape.k_in // 1024)
    units = segments * -(-shape.blocks // (shape.unit_ranks // 16))
    assert units <= shape.choice.cluster * shape.choice.warpgroups
    assert shape.unit_ranks in (16, 32, 48, 64)
    assert 1 <= shape.min_ctas <= 3
    assert shape.min_ctas * (shape.shared_bytes + 1024) <= 228 * 1024


@given(**ANY, choice=CHOICES)
def test_a_choice_fits_whatever_was_measured(num_tiles, tile_rows, k_in, n_outs, max_rank, choice):
    segments = -(-k_in // 1024)
    measured = (tile_rows, num_tiles, max_rank, len(n_outs), sum(n_outs), segments)
    with pytest.MonkeyPatch.context() as monkeypatch:
        put_table(monkeypatch, [(measured, choice)])
        found = cluster_choice.cluster_choice(num_tiles, tile_rows, k_in, n_outs, max_rank)
        assert found in (None, choice)
        assert (found is choice) == Shape(tile_rows, k_in, n_outs, max_rank, choice).fits
        put_table(monkeypatch, [])
        assert cluster_choice.cluster_choice(num_tiles, tile_rows, k_in, n_outs, max_rank) is None


def test_the_nearest_measurement_decides(monkeypatch):
    one, other = Choice(8), Choice(16)
    shapes = [(8, 8, 16, 1, 4096, 4), (8, 64, 16, 1, 4096, 4), (16, 8, 16, 1, 4096, 4)]
    put_table(monkeypatch, list(zip(shapes, [one, None, other], strict=True)))

    def choice(num_tiles: int, tile_rows: int = 8, rank: int = 16) -> Choice | None:
        return cluster_choice.cluster_choice(num_tiles, tile_rows, 4096, (4096,), rank)

    assert choice(8) is choice(4) is one
    assert choice(64) is choice(50) is None  # measured: Triton was faster
    assert choice(8, 16) is other
    assert choice(1, rank=64) is None  # nothing near


def test_the_table_that_is_shipped():
    entries = cluster_choice._table()
    assert len({shape for shape, _ in entries}) == len(entries)
    for shape, choice in entries:
        assert len(shape) == len(cluster_choice._WEIGHTS)
        assert all(n > 0 for n in shape)
        assert choice is None or shape[0] in (8, 16)
        weights, far = cluster_choice._WEIGHTS, cluster_choice._FARTHEST
        assert nearest(entries, shape, weights, larger=2.0, farthest=far) == choice


@pytest.mark.parametrize("max_rank", [8, 16, 32, 64])
@pytest.mark.parametrize("n_outs", [(4096,), (4096, 1024, 1024), (14336, 14336)], ids=str)
def test_candidates_fit(n_outs, max_rank):
    for tile_rows in (8, 16):
        found = list(candidates(tile_rows, 4096, n_outs, max_rank))
        assert len(set(found)) == len(found)
        assert all(Shape(tile_rows, 4096, n_outs, max_rank, choice).fits for choice in found)
        assert found or max_rank * len(n_outs) * tile_rows > 512


# ---- where there is none ------------------------------------------------------------------------


def pretend_hopper(monkeypatch, capability=(9, 0)) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    return torch.device("cuda", 0)


def test_without_the_bindings(monkeypatch):
    device = pretend_hopper(monkeypatch)
    for name in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not cluster.has_clusters(device)
    shape = Shape(8, 1024, (512,), 16, Choice(2))
    assert cluster.cluster_launch(shape, 4, 1, 1024, (512,), device) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_on_other_devices(monkeypatch, capability):
    device = pretend_hopper(monkeypatch, capability)
    monkeypatch.setattr(cluster, "_has_bindings", lambda: True)
    assert not cluster.has_clusters(device)
    assert not cluster.has_clusters(torch.device("cpu"))


def test_what_cannot_be_compiled_is_told_once(monkeypatch, caplog):
    device = pretend_hopper(monkeypatch)
    monkeypatch.setattr(cluster, "_has_bindings", lambda: True)

    def refuse(shape):
        raise BackendError(f"NVRTC: no {shape.max_rank}")

    monkeypatch.setattr(cluster, "compile_cubin", refuse)
    monkeypatch.setattr(cluster, "_load", lambda shape, _: cluster.compile_cubin(shape))
    with caplog.at_level(logging.WARNING):
        for max_rank in (16, 8, 16):
            shape = Shape(8, 1024, (512,), max_rank, Choice(2))
            assert cluster.cluster_launch(shape, 4, 1, 1024, (512,), device) is None
            cluster.compile_ahead([shape])
    assert [r.message for r in caplog.records] == [
        "calls take the Triton kernels, as the cluster kernel failed: BackendError: NVRTC: no 16"
    ]


@pytest.mark.parametrize(("x_stride", "out_stride"), [(1028, 512), (1024, 515)])
def test_rows_that_are_not_aligned(monkeypatch, x_stride, out_stride):
    device = pretend_hopper(monkeypatch)
    monkeypatch.setattr(cluster, "_function", pytest.fail)
    shape = Shape(8, 1024, (512,), 16, Choice(2))
    assert cluster.cluster_launch(shape, 4, 1, x_stride, (out_stride,), device) is None


def test_calls_that_it_cannot_do_do_not_ask_for_it(monkeypatch):
    asked = []
    monkeypatch.setattr(launch, "cluster_launch", lambda *args: asked.append(args))
    put_table(monkeypatch, [((8, 1, 16, 1, 512, 1), Choice(2))])
    plain = {
        "num_rows": 8, "k_in": 1024, "n_outs": (512,), "x_stride": 1024, "out_strides": (512,),
        "is_x_aligned": True, "are_outs_aligned": (True,), "max_rank": 16, "numerics": "mma",
        "top_k": 1, "has_source": False, "plan_tiles": (1, 8), "folds": True,
        "device": torch.device("cpu"),
    }  # fmt: skip
    for change in (
        {"numerics": "gemv"}, {"plan_tiles": None},
        {"is_x_aligned": False}, {"are_outs_aligned": (False,)}, {"folds": False},
    ):  # fmt: skip
        call = launch.prepare(**(plain | change))
        assert len(call.launches) == 2
        assert not asked, change
    assert len(launch.prepare(**plain).launches) == 2
    assert asked[0][0].choice == Choice(2)


def test_a_cpu_takes_the_triton_kernels(device):
    if device != "cpu":
        pytest.skip("needs a machine without a GPU")
    case = make_case(5, [4, None], 256, [64], 8, device="cpu")
    plan = plan_of_height(case, 8)
    call = launch.prepare_call(
        case.x, tuple(case.outs), 8, "mma", plan.tile_key, plan.tile_rows, cluster=Choice(1)
    )
    assert len(call.launches) == 2
    assert call.xa_bytes


# ---- the sources --------------------------------------------------------------------------------


def test_the_sources_are_shipped():
    source, headers = cluster._sources()
    included = {line.split('"')[1] for text in (source, *headers.values())
                for line in text.decode().splitlines() if line.startswith("#include")}  # fmt: skip
    assert included == {name.decode() for name in headers}
    assert b"lora_cluster" in source
    assert files("lorafold").joinpath("data/clusters.json").is_file()


def test_parameters_are_laid_out_as_the_kernel_reads_them():
    params = cluster._params(3)
    assert ctypes.sizeof(params) == 6 * 8 + 3 * 6 * 8
    assert params.source.offset == 24
    assert params.x_stride.offset == 32
    assert params.slice.offset == 48
    assert cluster._Slice.stride.offset == 40


def fake_launch(monkeypatch, statuses: list[int]) -> tuple[cluster.ClusterLaunch, MagicMock, list]:
    """A launch of two slices, a driver that answers with these statuses, and what it was given."""
    driver, seen = MagicMock(), []
    driver.CUresult.CUDA_ERROR_INVALID_CONTEXT = 201

    def start(config, function, pointers, extra):
        (address,) = (ctypes.c_void_p * 1).from_address(pointers)
        seen.append((function, bytes(cluster._params(2).from_address(address))))
        return (statuses.pop(0),)

    driver.cuLaunchKernelEx.side_effect = start
    driver.cuCtxGetCurrent.return_value = (0, 0)
    driver.cuDevicePrimaryCtxRetain.return_value = (0, "primary")
    driver.cuCtxSetCurrent.return_value = (0,)
    bindings = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    shape = Shape(8, 1024, (512, 64), 16, Choice(2))
    sizes = 5, 3, 1024, (512, 64)
    made = cluster.ClusterLaunch(shape, "kernel", *sizes, torch.device("cuda", 1))
    return made, driver, seen


OPERANDS = (1, (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), 12, 13, 14)
PARAMS = struct.pack("18q", 1, 12, 13, 14, 1024, 3, 4, 6, 8, 10, 2, 512, 5, 7, 9, 11, 3, 64)


def test_what_the_driver_is_given(monkeypatch):
    made, driver, seen = fake_launch(monkeypatch, [0, 0])
    assert made.bound(0) is None
    bound = made.bound(1)
    assert bound is not None
    bound(OPERANDS)
    assert seen == [("kernel", PARAMS)]
    config = driver.CUlaunchConfig()
    assert (config.gridDimX, config.gridDimY, config.blockDimX) == (10, 1, 128)
    assert config.sharedMemBytes == made.shape.shared_bytes
    driver.CUstream.assert_called_with(77)
    x, key = torch.zeros(8), torch.zeros(8).int()
    made(x, (x, x), (x, x), (x, x), (x, x), (x, x), key, key, None)
    assert struct.unpack_from("2q", seen[1][1]) == (x.data_ptr(), key.data_ptr())
    assert struct.unpack_from("q", seen[1][1], 24) == (0,)


def test_a_threads_first_use_of_cuda(monkeypatch):
    made, driver, seen = fake_launch(monkeypatch, [201, 0])
    made._start(OPERANDS)
    assert len(seen) == 2
    driver.cuCtxSetCurrent.assert_called_once_with("primary")


def test_a_launch_that_fails_says_so(monkeypatch):
    made, _, _ = fake_launch(monkeypatch, [719])
    with pytest.raises(BackendError, match="719"):
        made._start(OPERANDS)


def test_code_is_loaded_from_a_folder_of_ones_own_only(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cluster._cache_folder()
    assert folder == tmp_path / "lorafold" / "cubins"
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    assert cluster._cache_folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    assert cluster._cache_folder() is None


def nvrtc() -> object:
    """NVRTC, where it is installed."""
    module = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        module.nvrtcVersion()
    except RuntimeError:
        pytest.skip("there is no NVRTC")
    return module


COMPILED = [
    Shape(8, 4096, (4096,), 16, Choice(8)),
    Shape(16, 2432, (520, 192, 64), 24, Choice(8, 2, 1, x_parts=2)),
    Shape(16, 4096, (4096, 1024, 1024), 64, Choice(16, 1, 2, False, 4)),
    Shape(8, 128, (8,), 8, Choice(1)),
]


@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_it_compiles(monkeypatch, tmp_path, shape):
    nvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cubin = cluster.compile_cubin(shape)
    assert cubin[:4] == b"\x7fELF"
    monkeypatch.setattr(cluster, "_nvrtc", pytest.fail)
    assert cluster.compile_cubin(shape) == cubin  # from disk
    monkeypatch.undo()


def test_what_nvrtc_says_is_in_the_error(monkeypatch, tmp_path):
    nvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, headers = cluster._sources()
    monkeypatch.setattr(cluster, "_sources", lambda: (source + b"\nwrong;", headers))
    with pytest.raises(BackendError, match="wrong"):
        cluster.compile_cubin(COMPILED[0])
