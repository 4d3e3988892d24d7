"""MultiLora: names, slots and forwards; and that errors leave nothing behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from lorafold.errors import (
    AdapterMismatchError,
    AdapterNotFoundError,
    ModelError,
    PoolFullError,
    RouteError,
)
from lorafold.layers.linear import RoutedLinear
from lorafold.runtime import MultiLora, attach
from tests.tiny_models import bits, make_model, random_ids, write_adapter

FEW, MANY = ["q_proj", "v_proj"], ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return make_model("llama")


@pytest.fixture(scope="module")
def folders(plain: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "few": write_adapter(plain, root / "few", FEW, rank=3, alpha=4, seed=1),
        "many": write_adapter(plain, root / "many", MANY, rank=8, seed=2),
        "other": write_adapter(plain, root / "other", FEW, rank=5, seed=3),
        "head": write_adapter(plain, root / "head", ["lm_head", "q_proj"], rank=2, seed=4),
    }


@pytest.fixture
def lora(plain: nn.Module, folders: dict[str, Path]) -> MultiLora:
    lora = attach(copy.deepcopy(plain), max_loras=2, max_rank=8)
    lora.load("few", folders["few"])
    lora.load("many", folders["many"])
    return lora


def logits(lora: MultiLora, ids: Tensor, adapters: list[str | None], **kwargs: Any) -> Tensor:
    with lora.rows(adapters):
        return lora.model(ids, **kwargs).logits


def generate(lora: MultiLora, ids: Tensor, adapters: list[str | None], **kwargs: Any) -> Tensor:
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False} | kwargs
    return lora.generate(ids, adapters=adapters, **settings)


def is_clean(lora: MultiLora, plain: nn.Module) -> bool:
    """Nothing is routed, nothing is held, and the model is the plain one."""
    ids = random_ids(2, 4)
    same = torch.equal(bits(lora.model(ids).logits), bits(plain(ids).logits))
    for name in lora.names():
        lora.unload(name)
    return same and lora.names() == ()


def test_the_model_shows_its_routed_layers(lora: MultiLora) -> None:
    assert "(q_proj): RoutedLinear(" in repr(lora.model)
    assert "max_loras=2, max_rank=8" in repr(lora.model)
    assert isinstance(lora.model.get_submodule(lora.targets[0]), RoutedLinear)
    assert lora.names() == ("few", "many")


def test_the_report_says_what_became_of_the_file(plain: nn.Module, folders: Any) -> None:
    lora = attach(copy.deepcopy(plain), max_rank=8)
    report = lora.load("few", folders["few"])
    assert {line.target for line in report.bound} == {
        f"model.layers.{i}.self_attn.{word}" for i in (0, 1) for word in FEW
    }
    assert report.num_tensors == 8


def test_each_prompt_generates_with_its_own_adapter(lora: MultiLora, plain: nn.Module) -> None:
    ids = random_ids(3, 5)
    got = generate(lora, ids, ["few", None, "many"])
    for row, name in enumerate(("few", None, "many")):
        assert torch.equal(got[row], generate(lora, ids, [name] * 3)[row])
    base = plain.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(got[1], base[1])
    assert not torch.equal(got[0], base[0])
    assert not torch.equal(got[2], base[2])


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0},
        {"num_beams": 2, "do_sample": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prefill_chunk_size": 2},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
def test_every_way_to_generate_follows_the_prompt(lora: MultiLora, how: dict[str, Any]) -> None:
    prompts = 1 if "prompt_lookup_num_tokens" in how else 2
    ids = random_ids(prompts, 5)
    returned = how.get("num_return_sequences", 1)
    results = {}
    for adapters in (["few", "many"], ["few", "few"], ["many", "many"], [None, None]):
        torch.manual_seed(3)
        results[tuple(adapters)] = generate(lora, ids, adapters[:prompts], **how)
    mixed = results["few", "many"]
    assert mixed.shape == (prompts * returned, 11)
    for row in range(prompts * returned):
        same = ("few", "few") if row < returned else ("many", "many")
        assert torch.equal(mixed[row], results[same][row])
        assert not torch.equal(mixed[row], results[None, None][row])


def test_prompts_padded_on_the_left(lora: MultiLora) -> None:
    ids = random_ids(2, 6)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :3], mask[0, :3] = 0, 0
    mixed = generate(lora, padded, ["few", "many"], attention_mask=mask)
    assert torch.equal(mixed[0], generate(lora, padded, ["few"] * 2, attention_mask=mask)[0])
    assert torch.equal(mixed[1], generate(lora, padded, ["many"] * 2, attention_mask=mask)[1])
    assert torch.equal(mixed[0, 6:], generate(lora, ids[:1, 3:], ["few"])[0, 3:])


def test_prompts_by_keyword_and_as_embeddings(lora: MultiLora) -> None:
    ids = random_ids(2, 5)
    want = generate(lora, ids, ["few", "many"])
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(lora.generate(**encoded, adapters=["few", "many"], **settings), want)
    embeds = lora.model.get_input_embeddings()(ids)
    got = lora.generate(inputs_embeds=embeds, adapters=["few", "many"], **settings)
    assert torch.equal(got, want[:, 5:])
    from_nothing = lora.generate(adapters=["few"], **settings)  # one beginning-of-sequence token
    assert from_nothing.shape == (1, 7)
    with lora.rows(["few", "many"]):
        assert torch.equal(
            lora.model(inputs_embeds=embeds).logits, lora.model(input_ids=ids).logits
        )


@pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([1, 4])], ids=str)
def test_the_head_as_a_target(plain: nn.Module, folders: Any, keep: int | Tensor) -> None:
    lora = attach(copy.deepcopy(plain), max_rank=8, targets=["lm_head", "q_proj", "v_proj"])
    lora.load("head", folders["head"])
    lora.load("few", folders["few"])
    ids = random_ids(3, 5)
    kept = slice(-keep, None) if isinstance(keep, int) else keep
    alone = {
        name: logits(lora, ids, [name] * 3, logits_to_keep=keep) for name in ("head", "few", None)
    }
    mixed = logits(lora, ids, ["head", None, "few"], logits_to_keep=keep)
    for row, name in enumerate(("head", None, "few")):
        assert torch.equal(bits(mixed[row]), bits(alone[name][row]))
    base = plain(ids, logits_to_keep=keep).logits
    assert torch.equal(bits(mixed[1]), bits(base[1]))
    assert not torch.equal(mixed[0], base[0])
    # Keeping fewer tokens means the same, up to the base's own sums over another number of rows.
    whole = logits(lora, ids, ["head", None, "few"])
    torch.testing.assert_close(mixed, whole[:, kept], rtol=2e-2, atol=2e-2)
    with lora.rows(["head", None, "few"]):  # the same shape but for what is kept
        lora.model(ids)
        again = lora.model(ids, logits_to_keep=keep).logits
    assert torch.equal(bits(again), bits(mixed))
    assert generate(lora, ids, ["head", None, "few"]).shape == (3, 11)


def test_wrong_calls_name_the_numbers_and_leave_nothing(lora: MultiLora, plain: nn.Module) -> None:
    ids = random_ids(2, 4)
    with pytest.raises(RouteError, match="2 prompts; given: \\['few'\\]"):
        generate(lora, ids, ["few"])
    with pytest.raises(RouteError, match="must be a list of names"):
        generate(lora, ids[:1].repeat(3, 1), "few")  # type: ignore[arg-type]
    with pytest.raises(AdapterNotFoundError, match="nobody"):
        generate(lora, ids, ["few", "nobody"])
    with pytest.raises(RouteError, match="paged"):
        generate(lora, ids, ["few", None], cache_implementation="paged")
    with pytest.raises(RouteError, match="2 sequences, but adapters were named for 3"):
        logits(lora, ids, ["few", None, None])
    with pytest.raises(RouteError, match="2 sequences, but adapters were named for 1"):
        logits(lora, ids, [None])
    with pytest.raises(RouteError, match="2 sequences, but adapters were named for 4"):
        logits(lora, ids, ["few"] * 4)
    with pytest.raises(RouteError, match="one slot per sequence"), lora.rows([]):
        pass
    with pytest.raises(RouteError, match="input_ids or inputs_embeds"), lora.rows(["few"]):
        lora.model()
    assert is_clean(lora, plain)


def test_an_error_inside_generate_leaves_nothing(lora: MultiLora, plain: nn.Module) -> None:
    class Failing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] > 5:
                raise ZeroDivisionError
            return scores

    processors = LogitsProcessorList([Failing()])
    with pytest.raises(ZeroDivisionError):
        generate(lora, random_ids(2, 4), ["few", "many"], logits_processor=processors)
    with pytest.raises(ValueError, match="model_kwargs"):
        generate(lora, random_ids(2, 4), ["few", "many"], no_such_setting=1)
    assert is_clean(lora, plain)


def test_an_error_inside_a_layer_leaves_nothing(lora: MultiLora, plain: nn.Module) -> None:
    ids = random_ids(2, 4)
    want = logits(lora, ids, ["few", "many"])

    def fail(*args: object) -> None:
        raise ZeroDivisionError

    handle = lora.model.get_submodule("model.layers.1.self_attn.v_proj.base").register_forward_hook(
        fail
    )
    with pytest.raises(ZeroDivisionError):
        logits(lora, ids, ["few", "many"])
    handle.remove()
    assert torch.equal(bits(logits(lora, ids, ["few", "many"])), bits(want))
    assert is_clean(lora, plain)


def test_part_of_the_model_called_alone_is_routed_right_or_not_at_all(lora: MultiLora) -> None:
    ids = random_ids(2, 4)
    with lora.rows(["few", "many"]):
        with pytest.raises(RouteError, match="q_proj"):
            lora.model.model(ids)  # the hook on the whole model has seen no forward yet
        lora.model(ids)
        routed = lora.model.model(ids).last_hidden_state
    assert not torch.equal(routed, lora.model.model(ids).last_hidden_state)


def test_uses_do_not_nest(lora: MultiLora, plain: nn.Module) -> None:
    ids = random_ids(1, 4)
    with lora.rows(["few"]):
        for use in (lambda: generate(lora, ids, ["many"]), lora.detach):
            with pytest.raises(RouteError, match="inside `rows`"):
                use()
        want = lora.model(ids).logits
    assert torch.equal(bits(logits(lora, ids, ["few"])), bits(want))
    assert is_clean(lora, plain)


def test_gradients_are_off(plain: nn.Module, folders: Any) -> None:
    lora = attach(copy.deepcopy(plain).requires_grad_(True), max_rank=8)
    lora.load("few", folders["few"])
    with lora.rows(["few"]):
        assert not lora.model(random_ids(1, 4)).logits.requires_grad
    assert lora.model(random_ids(1, 4)).logits.requires_grad


def test_a_second_thread_waits_and_a_plain_forward_meanwhile_is_refused(lora: MultiLora) -> None:
    ids = random_ids(1, 4)
    want = {name: generate(lora, ids, [name]) for name in ("few", "many")}
    got: dict[str, Any] = {}

    def routed() -> None:
        got["many"] = generate(lora, ids, ["many"])

    def unrouted() -> None:
        try:
            lora.model(ids)
        except RouteError as error:
            got["error"] = str(error)

    threads = [threading.Thread(target=routed), threading.Thread(target=unrouted)]
    with lora.rows(["few"]):
        for thread in threads:
            thread.start()
        threads[1].join()
        assert "another thread" in got["error"]
        assert "many" not in got
        inside = lora.model(ids).logits
    threads[0].join()
    assert torch.equal(got["many"], want["many"])
    assert torch.equal(bits(inside), bits(logits(lora, ids, ["few"])))


def test_a_freed_slot_is_used_again_without_a_trace(lora: MultiLora, folders: Any) -> None:
    ids = random_ids(2, 4)
    before = logits(lora, ids, ["many", "many"])
    lora.unload("many")
    with pytest.raises(AdapterNotFoundError):
        logits(lora, ids, ["many", "few"])
    lora.load("other", folders["other"])  # fewer targets and a smaller rank than "many" had
    fresh = attach(copy.deepcopy(make_model("llama")), max_loras=2, max_rank=8)
    fresh.load("other", folders["other"])
    other = logits(lora, ids, ["other", "other"])
    assert torch.equal(bits(other), bits(logits(fresh, ids, ["other", "other"])))
    assert not torch.equal(other, before)
    lora.unload("other")
    lora.load("many", folders["many"])
    assert torch.equal(bits(logits(lora, ids, ["many", "many"])), bits(before))


def test_an_adapter_in_use_keeps_its_slot(lora: MultiLora, folders: Any) -> None:
    ids = random_ids(2, 4)
    with lora.rows(["few", "many"]):
        want = lora.model(ids).logits
        lora.unload("few")
        with pytest.raises(PoolFullError):
            lora.load("other", folders["other"])
        assert torch.equal(bits(lora.model(ids).logits), bits(want))
    assert lora.names() == ("many",)
    lora.load("other", folders["other"])
    assert lora.names() == ("other", "many")


def test_an_adapter_that_does_not_fit_changes_nothing(
    plain: nn.Module, folders: Any, tmp_path: Path
) -> None:
    lora = attach(copy.deepcopy(plain), max_rank=8, targets=["q_proj", "v_proj"])
    with pytest.raises(AdapterMismatchError, match="down_proj"):
        lora.load("partly", folders["many"])
    with pytest.raises(AdapterMismatchError, match="o_proj"):
        lora.load("nothing", write_adapter(plain, tmp_path / "o", ["o_proj"]))
    with pytest.raises(AdapterMismatchError, match="rank"):
        lora.load("big", write_adapter(plain, tmp_path / "big", ["q_proj"], rank=9))
    assert lora.names() == ()
    lora.load("few", folders["few"])
    assert lora.names() == ("few",)


def test_detach_restores_the_model(lora: MultiLora, plain: nn.Module) -> None:
    model = lora.model
    lora.detach()
    assert repr(model) == repr(plain)
    assert not model._forward_pre_hooks
    state, want = model.state_dict(), plain.state_dict()
    assert list(state) == list(want)
    assert all(torch.equal(bits(state[key]), bits(want[key])) for key in want)
    ids = random_ids(2, 4)
    assert torch.equal(bits(model(ids).logits), bits(plain(ids).logits))
    for use in (lambda: generate(lora, ids, [None, None]), lora.detach):
        with pytest.raises(ModelError, match="detached"):
            use()
    assert attach(model).names() == ()


def test_attaching_twice_is_refused_and_changes_nothing(lora: MultiLora) -> None:
    shown = repr(lora.model)
    with pytest.raises(ModelError, match="attached to already"):
        attach(lora.model)
    assert repr(lora.model) == shown
    generate(lora, random_ids(1, 4), ["few"])


@pytest.fixture
def no_compiler_cache() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("no_compiler_cache")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_model_is_routed_in_one_graph(lora: MultiLora) -> None:
    compiled = torch.compile(lora.model, backend="eager", fullgraph=True)
    for adapters, num_tokens in (
        (["few", None], 4),
        (["many", "few"], 4),
        ([None, None], 4),
        (["few", "many"], 1),
    ):
        ids = random_ids(2, num_tokens)
        want = logits(lora, ids, adapters)
        with lora.rows(adapters):
            assert torch.equal(bits(compiled(ids).logits), bits(want))
