"""Which layers can be targets, and that wrapping them is undone without a trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorafold.errors import ModelError
from lorafold.layers.attach import find_targets, unwrap_targets, wrap_targets
from lorafold.layers.linear import RoutedLinear
from lorafold.layers.routing import Routing
from lorafold.pool import Pool
from lorafold.route import LoraPair, LoraRoute
from lorafold.runtime import attach
from tests.tiny_models import FAMILIES, make_model, old_peft, random_ids

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
DENSE = {"gate_proj", "up_proj", "down_proj"}
WORDS = {
    "llama": ATTENTION | DENSE,
    "qwen3": ATTENTION | DENSE,
    "qwen3_next": ATTENTION
    | DENSE
    | {"in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"},
    "qwen3_5": ATTENTION
    | DENSE
    | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
}


def wrap_all(model: nn.Module, targets: list[str] | None = None) -> Routing:
    """Wrap with routes of one slot, all ones."""

    def route_of(path: str) -> LoraRoute:
        layer = layers[path]
        a = torch.ones(1, layer.in_features, dtype=torch.bfloat16)
        b = torch.ones(layer.out_features, 1, dtype=torch.bfloat16)
        return LoraRoute.from_pairs([LoraPair(a, b, 0.01)])

    layers = find_targets(model, targets)
    routing = Routing(torch.device("cpu"), 1, has_head=True)
    wrap_targets(model, layers, route_of, routing)
    return routing


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_layers_of_the_decoder_and_not_the_head(family: str) -> None:
    model = make_model(family)
    layers = find_targets(model)
    assert {path.rpartition(".")[2] for path in layers} == WORDS[family]
    linears = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    assert set(layers) == linears - {"lm_head"}
    assert list(find_targets(model, "all-linear")) == list(layers)
    for path, layer in layers.items():
        assert layer.module is model.get_submodule(path)
        assert layer.in_features * layer.out_features == layer.module.weight.numel()
        assert (layer.device, layer.is_head) == (torch.device("cpu"), False)


def test_all_linear_layers_and_others_by_name() -> None:
    model = make_model()
    default = list(find_targets(model))
    assert list(find_targets(model, ["all-linear"])) == default
    layers = find_targets(model, ["all-linear", "embed_tokens", "lm_head"])
    assert list(layers) == ["model.embed_tokens", *default, "lm_head"]
    shapes = [layer.shape for layer in layers.values()]
    assert [shape.is_embedding for shape in shapes] == [True, *[False] * (len(default) + 1)]
    assert (shapes[0].in_features, shapes[0].out_features) == (96, 48)


def test_the_features_of_a_transposed_linear_layer() -> None:
    layers = find_targets(make_model("gpt2"), ["c_fc"])
    assert {(at.in_features, at.out_features) for at in layers.values()} == {(48, 192)}


@pytest.mark.parametrize(
    ("targets", "endings"),
    [
        (["q_proj"], {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        (["self_attn.q_proj"], {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        (["model.layers.1.mlp.up_proj"], {"1.mlp.up_proj"}),
        (r".*\.1\.(self_attn\.v|mlp\.gate)_proj", {"1.self_attn.v_proj", "1.mlp.gate_proj"}),
        (["lm_head"], {"lm_head"}),
        (["embed_tokens", "lm_head"], {"model.embed_tokens", "lm_head"}),
        (r"model\.embed_tokens|.*1\.mlp\.up_proj", {"model.embed_tokens", "1.mlp.up_proj"}),
    ],
)
def test_words_and_regular_expressions(targets: list[str] | str, endings: set[str]) -> None:
    found = find_targets(make_model(), targets)
    assert {path.removeprefix("model.layers.") for path in found} == endings
    assert [path for path, at in found.items() if at.is_head] == ["lm_head"] * ("lm_head" in found)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["q_proj", "qproj"],
            "`qproj` is not in the model; linear layers and embeddings here end in: .*k_proj",
        ),
        (["proj"], "`proj` is not in the model"),
        (["conv1d"], "`conv1d` is not linear but Conv1d"),
        (["norm"], "`norm` is not linear but Qwen3NextRMSNorm"),
        (["experts"], "`experts` is not linear but Qwen3NextExperts"),
        ("q_proj", "'q_proj' matches no whole path"),
        ("(q_proj", "'\\(q_proj' is no regular expression: missing"),
        ([], "no linear layer that could be a target"),
    ],
)
def test_targets_that_are_not_there(targets: list[str] | str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_targets(make_model("qwen3_next"), targets)


class Odd(nn.Module):
    """A model with layers that must not be wrapped, each for its own reason."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.good = nn.Linear(8, 8)
        self.read_around = nn.Linear(8, 8)
        self.called_twice = nn.Linear(8, 8)
        self.never_called = nn.Linear(8, 8)
        self.sees_some_rows = nn.Linear(8, 8)
        self.gives_a_tuple = Tupled(8, 8)
        self.in_fp32 = nn.Linear(8, 8)
        self.to(torch.bfloat16)
        self.in_fp32.float()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.good(nn.functional.dropout(self.embedding(input_ids), training=self.training))
        x = x @ self.read_around.weight.T
        x = self.called_twice(self.called_twice(x))
        x[:, :1] = self.sees_some_rows(x[:, :1])
        return self.in_fp32(self.gives_a_tuple(x)[0].float())


class Tupled(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("read_around", "calls it 0 times"),
        ("called_twice", "calls it 2 times"),
        ("never_called", "calls it 0 times"),
        ("sees_some_rows", r"\(2, 1, 8\) where 6 tokens are"),
        ("gives_a_tuple", "else than one tensor: tuple"),
        ("in_fp32", "it maps torch.float32 to torch.float32, and only bfloat16 is supported"),
    ],
)
def test_a_layer_that_cannot_be_a_target_is_left_out_or_named(name: str, reason: str) -> None:
    model = Odd()
    assert list(find_targets(model)) == ["good"]
    with pytest.raises(ModelError, match=f"`{name}`: .*{reason}"):
        find_targets(model, ["good", name])


def test_the_probe_leaves_nothing_behind() -> None:
    model = Odd().train()
    state = torch.get_rng_state()
    find_targets(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())
    model.forward = None  # type: ignore[assignment, method-assign]
    with pytest.raises(ModelError, match="cannot run on plain tokens"):
        find_targets(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_models_that_are_refused() -> None:
    with pytest.raises(ModelError, match=r"`model.to\(torch.bfloat16\)`"):
        find_targets(make_model().float())
    with pytest.raises(ModelError, match=r"`model.to\(torch.bfloat16\)`"):
        find_targets(make_model().half())
    with pytest.raises(ModelError, match="not a causal language model"):
        find_targets(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ModelError, match="attach first, then compile"):
        find_targets(torch.compile(make_model(), backend="eager"))  # type: ignore[arg-type]
    kernelized = make_model()
    kernelized._use_kernels = True  # type: ignore[assignment]
    with pytest.raises(ModelError, match="use_kernels=False"):
        find_targets(kernelized)
    peft = pytest.importorskip("peft")
    with old_peft():
        adapted = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="carries PEFT layers"):
        find_targets(adapted)
    wrapped = make_model()
    wrap_all(wrapped)
    with pytest.raises(ModelError, match="attached to already"):
        find_targets(wrapped)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrapping_shows_and_is_undone_exactly(family: str) -> None:
    model = make_model(family)
    modules, shown = dict(model.named_modules()), repr(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    pointers = {key: value.data_ptr() for key, value in model.state_dict().items()}
    wrap_all(model, [*WORDS[family], "lm_head"])
    assert "RoutedLinear" in repr(model)
    assert sum(isinstance(module, RoutedLinear) for module in model.modules()) > 4
    unwrap_targets(model)
    assert repr(model) == shown
    again = dict(model.named_modules())
    assert list(again) == list(modules)
    assert all(again[path] is module for path, module in modules.items())
    assert list(model.state_dict()) == list(state)
    for key, value in model.state_dict().items():
        assert value.data_ptr() == pointers[key]
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("family", FAMILIES)
def test_base_rows_keep_their_bits_and_others_do_not(family: str) -> None:
    plain = make_model(family)
    model = copy.deepcopy(plain)
    routing = wrap_all(model)
    ids = random_ids(3, 5)
    want = plain(ids).logits
    assert torch.equal(model(ids).logits, want)  # no routing
    routing.begin([-1, 0, -1])
    routing.step(3, 5, 5)
    mixed = model(ids).logits
    assert torch.equal(mixed[0], want[0])
    assert torch.equal(mixed[2], want[2])
    assert not torch.equal(mixed[1], want[1])


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("llama", [ATTENTION - {"o_proj"}, {"gate_proj", "up_proj"}]),
        (
            "qwen3_5",
            [
                {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"},
                {"gate_proj", "up_proj"},
                ATTENTION - {"o_proj"},
            ],
        ),
        ("gpt2", []),
    ],
)
def test_siblings_of_one_input_are_grouped(family: str, groups: list[set[str]]) -> None:
    model = make_model(family)
    wrap_all(model)
    found: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, RoutedLinear) and module.shared is not None:
            assert module in module.shared.layers
            found.setdefault(id(module.shared), set()).add(path.rpartition(".")[2])
    assert {frozenset(words) for words in found.values()} == set(map(frozenset, groups))


class Packed(nn.Module):
    """A quantised layer as libraries write them: no nn.Linear, no floating weight."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        scale = dense.weight.abs().amax() / 127
        self.register_buffer("weight", (dense.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T


def test_a_quantised_layer_is_called_as_it_is() -> None:
    model = make_model()
    for layer in model.model.layers:
        layer.mlp.down_proj = Packed(layer.mlp.down_proj)
    ids = random_ids(2, 3)
    plain = model(ids).logits
    routing = wrap_all(model, ["down_proj"])
    routing.begin([-1, 0])
    routing.step(2, 3, 3)
    mixed = model(ids).logits
    assert isinstance(model.model.layers[0].mlp.down_proj.base, Packed)
    assert torch.equal(mixed[0], plain[0])
    assert not torch.equal(mixed[1], plain[1])


def test_targets_on_two_devices_are_refused() -> None:
    class Spread(Odd):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.good(self.embedding(input_ids))
            return self.never_called(x.to("meta"))

    model = Spread()
    model.never_called.to("meta")
    with pytest.raises(ModelError, match="one device; given: cpu, meta"):
        find_targets(model)
    assert list(find_targets(model, ["good"])) == ["good"]


def test_a_tied_head_stays_tied() -> None:
    model = make_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    wrap_all(model, ["lm_head"])
    assert isinstance(model.lm_head, RoutedLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    unwrap_targets(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("num_wrapped", [0, 1, 9])
def test_attaching_that_is_interrupted_leaves_the_model_as_it_was(
    num_wrapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    shown, route, calls = repr(model), Pool.route, []

    def interrupted(pool: Pool, target: str) -> Any:
        calls.append(target)
        if len(calls) > num_wrapped:
            raise KeyboardInterrupt
        return route(pool, target)

    monkeypatch.setattr(Pool, "route", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attach(model, max_rank=8)
    assert repr(model) == shown
    assert not model._forward_pre_hooks
    monkeypatch.undo()
    attach(model, max_rank=8).detach()
