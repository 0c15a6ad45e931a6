"""Layers with a state over packed rows: each completion is computed as behind a copy of its own prompt."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial, wraps
from inspect import unwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from learner.batch.layout import Layout, Segment
from learner.batch.micro_batch import Rows, micro_batches
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model import recurrence
from learner.model.policy import Policy
from learner.model.recurrence import recurrent_layers
from learner.model.roles import ScoredRole
from tests.learner.model.test_packing_check import SMALL, gradients, random_adapter
from tests.learner.model.test_policy import make_policy, save_model

BASE = {name: value for name, value in SMALL.items() if name != "head_dim"} | {
    "num_hidden_layers": 3, "initializer_range": 0.1,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "qwen3_5": transformers.Qwen3_5TextConfig(**BASE, **LINEAR, head_dim=8),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(**BASE, **LINEAR, **EXPERTS, head_dim=8),
    "qwen3_next": transformers.Qwen3NextConfig(**BASE, **LINEAR, **EXPERTS, head_dim=8),
    "lfm2": transformers.Lfm2Config(**BASE, layer_types=["conv", "full_attention", "conv"]),
    "olmo_hybrid": transformers.OlmoHybridConfig(**BASE, **LINEAR),
}


def save_slow(name: str, folder: Path) -> str:
    """A random model whose states last for many tokens, as those of trained models do: in transformers' random ones
    they are gone after the next."""
    torch.manual_seed(0)
    path = save_model(CONFIGS[name], folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for own, weight in model.named_parameters():
            if own.endswith("A_log"):
                weight.uniform_(-6, -2)
    model.save_pretrained(path)
    return path


def make_rows(*, observed: bool = False) -> Rows:
    """Four groups: a prompt longer than a chunk; one shorter than a convolution reaches, whose group has completions of
    one token and of whole chunks; one with a group of two; one with a single completion. `observed`: an environment
    said some of the tokens of each completion."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 64, size).astype(np.int32) for size in (70, 2, 9, 67)]
    lengths = np.array([5, 130, 1, 66, 12, 65, 1, 3, 7, 70])
    owners = [0] * 4 + [1] * 3 + [2] * 2 + [3]
    tokens = rng.integers(0, 64, lengths.sum()).astype(np.int32)
    behavior, versions = np.zeros(len(tokens), np.float32), np.zeros_like(tokens)
    sampled = np.arange(len(tokens)) % 7 < 4 if observed else None
    own = [prompts[owner] for owner in owners]
    return Rows([], own, tokens, behavior, versions, lengths, lengths < 0, sampled=sampled)


# What the layers compute, token by token from its definition.


def plain_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule, 2412.06464, equation 10: [B, L, H, .] -> (outputs, last state [B, H, D, E])."""
    state = query.new_zeros(*query[:, 0].shape, value.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(query.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        read = torch.einsum("bhde,bhd->bhe", state, key[:, t])
        state = state + torch.einsum("bhd,bhe->bhde", key[:, t], beta[:, t, :, None] * (value[:, t] - read))
        outputs.append(scale * torch.einsum("bhde,bhd->bhe", state, query[:, t]))
    return torch.stack(outputs, 1), state


def plain_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:  # fmt: skip
    assert activation == "silu"
    reach = weight.shape[1] - 1
    behind = [F.pad(x, (reach, 0))[..., i : i + x.shape[2]] * weight[:, i, None] for i in range(reach + 1)]
    return F.silu(torch.stack(behind).sum(0))


SEGMENTS = [
    Segment(0, 70), Segment(70, 75, 0, 70), Segment(75, 210, 0, 70), Segment(210, 211, 0, 70),  # a group
    Segment(211, 213), Segment(213, 277, 211, 213), Segment(277, 278, 211, 213), Segment(278, 300, 211, 213),
    Segment(300, 365),  # a completion alone, with its prompt
    Segment(365, 366), Segment(366, 367, 365, 366),
]  # fmt: skip


def by_segment(compute: Callable[..., Tensor], inputs: tuple[Tensor, ...], axis: int) -> Tensor:
    """What each segment computes behind a copy of its prefix."""
    found = []
    for start, stop, first, last in SEGMENTS:
        places = torch.tensor([*range(first, last), *range(start, stop)])
        found.append(compute(*(x.index_select(axis, places) for x in inputs)).narrow(axis, last - first, stop - start))
    return torch.cat(found, axis)


def assert_same(found: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> None:
    weights = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(5))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    for own, other in zip(*(torch.autograd.grad(x, inputs, weights) for x in (found, wanted)), strict=True):
        assert (own - other).norm() < 1e-12 * other.norm()


def test_a_packed_row_is_the_rule_of_each_completion_after_its_own_prompt() -> None:
    random = torch.Generator().manual_seed(0)
    count, heads = SEGMENTS[-1].stop, 2
    q, k, v = (torch.randn(1, count, heads, width, dtype=torch.float64, generator=random) for width in (4, 4, 3))
    g, beta = (torch.rand(1, count, heads, dtype=torch.float64, generator=random) for _ in range(2))
    inputs = q, F.normalize(k, dim=-1), v, -g / 20, beta
    for x in inputs:
        x.requires_grad_()
    found, state = recurrence._delta_rule(
        plain_rule, *inputs, packed_layout=Layout(SEGMENTS), initial_state=None, output_final_state=False, scale=0.5
    )
    assert state is None
    assert_same(
        found, by_segment(lambda q, k, v, g, beta: plain_rule(q, k, v, g, beta, scale=0.5)[0], inputs, 1), inputs
    )


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("name", ["packed_layout", "seq_idx"])
def test_a_packed_row_is_the_convolution_of_each_completion_after_its_own_prompt(width: int, name: str) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = (1, 3, SEGMENTS[-1].stop), (3, width)
    x, weight = (torch.randn(shape, dtype=torch.float64, generator=random, requires_grad=True) for shape in shapes)
    packed: dict[str, Any] = {name: Layout(SEGMENTS)}
    found = recurrence._convolution(plain_convolution, x, weight, None, "silu", **packed)
    wanted = by_segment(lambda row: plain_convolution(row, weight, activation="silu"), (x,), 2)
    assert_same(found, wanted, (x, weight))


def test_pieces_end_at_whole_chunks_where_a_quarter_of_a_batch_has_ended() -> None:
    """Nine completions of up to 300 tokens, in chunks of 64. At 64 tokens seven of them go on, more than three
    quarters; at 128 it is two."""
    lengths = [300, 290, 128, 128, 127, 100, 70, 64, 1]
    ends = np.cumsum([10, *lengths]).tolist()
    layout = Layout([Segment(0, 10), *(Segment(a, b, 0, 10) for a, b in pairwise(ends))])
    pieces = layout.pieces(64, torch.device("cpu"))
    assert pieces.whole == [(1, 10)]
    assert pieces.following == [(9, 128), (2, 172)]
    assert pieces.owners is not None
    assert pieces.owners.taken.tolist() == [0] * 9
    assert len(pieces.order) == 10 + 9 * 128 + 2 * 172
    assert pieces.order[pieces.places].tolist() == list(range(layout.segments[-1].stop))
    assert pieces.order[10:138].tolist() == list(range(10, 138))  # the first tokens of the longest
    assert pieces.order[-172:].tolist() == [
        *range(438, 600),
        *[layout.segments[-1].stop] * 10,
    ]  # and its neighbour's last


# Whole models, against each completion in a row of its own by transformers' attention and layers.

WAYS = [
    *((name, "none") for name in CONFIGS),
    *(("qwen3_5", checkpointing) for checkpointing in ("full", "mlp", 2)),
    *((name, "full") for name in ("lfm2", "olmo_hybrid", "qwen3_next")),
]


@pytest.mark.parametrize(("name", "checkpointing"), WAYS)
def test_packed_gradient_is_that_of_one_row_at_a_time(name: str, checkpointing: Any, tmp_path: Path) -> None:
    policy = make_policy(save_slow(name, tmp_path), checkpointing=checkpointing)
    assert policy.packed
    random_adapter(policy, 0.05)
    rows = make_rows(observed=checkpointing != "none")
    found = [gradients(policy, rows, budget, packed=True) for budget in (10_000, 250)]  # in one micro-batch, in several
    policy._lm.set_attn_implementation("eager")
    wanted, wanted_grad = gradients(policy, rows, 1, packed=False)
    for logprobs, grad in found:
        assert (logprobs - wanted).square().mean().sqrt() < 5e-6
        assert (grad - wanted_grad).norm() < 1e-5 * wanted_grad.norm()


def test_values_of_a_packed_row_are_those_of_one_row_at_a_time(tmp_path: Path) -> None:
    """PPO's value: another adapter on the same layers, and a head of its own."""
    policy = Policy(
        ModelConfig(path=save_slow("qwen3_5", tmp_path), dtype="float32"), LoraConfig(rank=8, alpha=16),
        checkpointing="full", seed=0, device=torch.device("cpu"),
        roles=(ScoredRole("value", None, trained=True, key="learner.value"),),
    )  # fmt: skip
    value, rows = policy.scored["value"], make_rows()
    assert value.masters is not None
    for weight in value.weights.values():
        torch.nn.init.normal_(weight, std=0.05)
    numbers = np.arange(len(rows.lengths), dtype=np.float64)
    found = []
    for budget, packed in ((10_000, True), (1, False)):
        batches = micro_batches(
            rows, np.repeat(numbers, rows.lengths), numbers, numbers >= 0, budget, packed=packed
        )  # fmt: skip
        value.masters.clear_gradients()
        values, places = [], []
        with policy.acting_as("value"):
            for batch in batches:
                values.append(value.head(policy.predicting(batch)))
                torch.autograd.backward(values[-1], torch.cos(batch.advantages + 1))
                places.append(batch.places)
        value.masters.collect_gradients()
        grads = [master.grad.flatten() for master in value.masters.named.values() if master.grad is not None]
        found.append((torch.cat(values).detach()[torch.cat(places).argsort()], torch.cat(grads)))
    (values_found, grad), (wanted, wanted_grad) = found
    assert (values_found - wanted).norm() < 5e-6 * wanted.norm()
    assert (grad - wanted_grad).norm() < 1e-5 * wanted_grad.norm()


# The trial at start-up.


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in CONFIGS), ("qwen3_5", "float16")])
def test_what_rounding_explains_is_packed_in_16_bits(name: str, dtype: str, tmp_path: Path) -> None:
    assert make_policy(save_slow(name, tmp_path), dtype=dtype).packed


def forgets(through: Any, rule: Any, parts: Any, count: int, state: Tensor | None) -> Any:
    return through(rule, parts, count, None)


def cuts_the_gradient(through: Any, rule: Any, parts: Any, count: int, state: Tensor | None) -> Any:
    return through(rule, parts, count, None if state is None else state.detach())


def mixes_up(through: Any, rule: Any, parts: Any, count: int, state: Tensor | None) -> Any:
    return through(rule, parts, count, None if state is None else state.roll(1, 0))


def ignores_the_layout(convolution: Any, plain: Any, *inputs: Any, packed_layout: Any, seq_idx: Any, **own: Any) -> Any:
    return convolution(plain, *inputs, **own)


def begins_with_zeros(convolution: Any, plain: Any, *inputs: Any, packed_layout: Any, seq_idx: Any, **own: Any) -> Any:
    alone = packed_layout and Layout([Segment(*one[:2]) for one in packed_layout.segments])
    return convolution(plain, *inputs, packed_layout=alone, **own)


@pytest.mark.parametrize(
    ("function", "wrong", "dtype"),
    [
        ("_through", cuts_the_gradient, "float32"),
        *(
            (function, wrong, dtype)
            for function, wrong in (
                ("_through", forgets),
                ("_through", mixes_up),
                ("_convolution", ignores_the_layout),
                ("_convolution", begins_with_zeros),
            )
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_a_wrong_state_is_refused(
    function: str, wrong: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, function, partial(wrong, getattr(recurrence, function)))
    policy = make_policy(save_slow("qwen3_5", tmp_path), dtype=dtype)
    assert not policy.packed
    layers = recurrent_layers(policy._lm)["linear_attention"]
    assert not any("forward" in vars(layer) for layer in layers)  # it computes its padded rows as transformers does


def test_only_the_layers_of_this_model_change(tmp_path: Path) -> None:
    home: Any = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    names = (recurrence.CONVOLUTION, recurrence.DELTA_RULE)
    before = {name: getattr(home, name) for name in names}
    forward = home.Qwen3_5GatedDeltaNet.forward
    policy = make_policy(save_model(CONFIGS["qwen3_5"], tmp_path))
    assert policy.packed
    assert {name: getattr(home, name) for name in names} == before
    assert home.Qwen3_5GatedDeltaNet.forward is forward
    other = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path))
    assert not any("forward" in vars(module) for module in other.modules())


@pytest.mark.parametrize("packed", [True, False])
def test_a_reference_of_its_own_computes_packed_rows_as_the_policy_does(packed: bool, tmp_path: Path) -> None:
    """The reference of a model in shards is a second model."""
    path = save_slow("qwen3_5", tmp_path)
    policy = make_policy(path)
    if not packed:
        recurrence.forget_layouts(recurrent_layers(policy._lm)["linear_attention"])
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    other.set_attn_implementation(policy._lm.config._attn_implementation)
    recurrence.carry_as(other, policy._lm)
    rows = make_rows()
    every = np.ones(len(rows.lengths))
    (batch,) = micro_batches(rows, np.ones(len(rows.completions)), every, every > 0, 10_000, packed=True)
    told = {"position_ids": batch.positions, "packed_layout": batch.layout, "seq_idx": batch.layout}
    with torch.no_grad():
        found = other.base_model(input_ids=batch.ids, use_cache=False, **told).last_hidden_state[0]
        (apart,) = micro_batches(rows, np.ones(len(rows.completions)), every, every > 0, 10_000, packed=False)
        wanted = other.base_model(input_ids=apart.ids, use_cache=False).last_hidden_state.flatten(0, 1)
    order, own = (one.places.argsort() for one in (batch, apart))
    same = torch.allclose(found[batch.index][order], wanted[apart.index][own], atol=1e-4)
    assert same is packed


@pytest.mark.parametrize("fault", ["ignores the state", "fails"])
def test_a_faulty_kernel_of_a_package_gives_way_to_torch(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flash-linear-attention runs on a card alone; in its place stands a function that transformers has taken."""
    home: Any = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    torchs = unwrap(home.torch_chunk_gated_delta_rule)

    @wraps(torchs)
    def faulty(*inputs: Tensor, initial_state: Tensor | None = None, **options: Any) -> Any:
        if initial_state is not None and fault == "fails":
            raise RuntimeError("no kernel image is available")
        return torchs(*inputs, **options)

    monkeypatch.setattr(home, "torch_chunk_gated_delta_rule", faulty)
    monkeypatch.setattr(recurrence, "find_spec", lambda name: name)
    policy = make_policy(save_slow("qwen3_5", tmp_path))
    assert policy.packed
    told = "qwen3_5_text is packed by gleaner_segments and functions of torch, which is slower: "
    assert (
        told + {"fails": "gleaner_segments: RuntimeError", "ignores the state": "rows differ by"}[fault] in caplog.text
    )


def test_layers_of_an_unknown_rule_are_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model whose linear attention calls another function than the gated delta rule's."""
    monkeypatch.setattr(recurrence, "DELTA_RULE", "another_rule")
    assert not make_policy(save_model(CONFIGS["qwen3_5"], tmp_path)).packed
    assert "qwen3_5_text cannot be packed (layers of linear_attention)" in caplog.text


def test_a_packed_row_with_a_state_of_its_own_is_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="begins with no state"):
        recurrence._delta_rule(plain_rule, x, x, x, x, x, packed_layout=Layout(SEGMENTS), initial_state=x)
