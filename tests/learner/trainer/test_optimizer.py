"""The update: learning rates, AdamW's numbers, the clip of the gradient, which weights decay, float16's loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

from cluster.memory.shape import OptimizerKind
from examples.random_model import make_tiny_model
from learner.algo.surrogates import LossConfig
from learner.config.settings import LearnerConfig, OptimizerConfig, ScheduleConfig, rate_factor
from learner.trainer.optimizer import (
    FIRST_LOSS_SCALE,
    LIMIT,
    Alone,
    ExactSums,
    FloatSums,
    RoundedUpdater,
    Updater,
    build_optimizer,
    least_tokens,
    restore,
    rounded,
    rounded_sum,
    updater_for,
    wants_masters,
)
from rollout.types import Weights
from tests.learner import naive
from tests.learner.trainers import (
    adapter_of,
    advantages_by_hand,
    distance,
    gradient,
    groups_near,
    make_trainer,
    masters,
    naive_gradient,
    probe_of,
)
from tests.peak import peak_bytes

CPU = torch.device("cpu")


def test_fused_adamw_is_adamw_without_temporaries() -> None:
    torch.manual_seed(0)
    first = [torch.randn(64, 64), torch.randn(3, 100)]
    mine, plain = ([weight.clone().requires_grad_() for weight in first] for _ in range(2))
    config = OptimizerConfig(weight_decay=0.1)
    fused = build_optimizer(mine, config, CPU)
    reference = torch.optim.AdamW(plain, lr=1e-3, betas=config.betas, weight_decay=0.1, foreach=False, fused=False)
    for _ in range(20):
        for one, other in zip(mine, plain, strict=True):
            one.grad = other.grad = torch.randn_like(one) * 1e-3
        fused.step()
        reference.step()
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(mine, plain, strict=True))
    assert peak_bytes(fused.step) < 1000
    assert peak_bytes(reference.step) > 16_000  # one weight's, so the measure sees temporaries


def updater_of(weights: list[torch.Tensor], dtype: str = "float32", **optimizer: Any) -> Updater | RoundedUpdater:
    config = LearnerConfig(mode="full", optimizer=OptimizerConfig(**optimizer))
    return updater_for(weights, config, dtype=dtype, device=CPU)


def state_of(updater: Updater | RoundedUpdater, name: str) -> torch.Tensor:
    """Of the first weight of the first optimizer."""
    optimizer = updater.optimizers[0]
    state: torch.Tensor = optimizer.state[optimizer.param_groups[0]["params"][0]][name]
    return state


@pytest.mark.parametrize(
    ("kind", "dtype", "name"), [("adamw", torch.float32, "exp_avg"), ("adamw_8bit", torch.bfloat16, "state1")]
)
def test_a_gradient_above_max_grad_norm_is_scaled_down_to_it(kind: str, dtype: torch.dtype, name: str) -> None:
    """(3, 4) has norm 5: with max_grad_norm 0.5 the optimizer sees (0.3, 0.4), and its first moment is a tenth."""
    weight = torch.ones(1, 2, dtype=dtype).requires_grad_()
    updater = updater_of([weight], kind=kind, betas=(0.9, 0.99), max_grad_norm=0.5)
    weight.grad = torch.tensor([[3.0, 4.0]], dtype=dtype)
    assert updater.step(1e-3, loss_is_finite=True) == (5.0, True)
    assert state_of(updater, name).flatten().tolist() == pytest.approx([0.03, 0.04], rel=1e-5)
    below = updater_of([weight], kind=kind, betas=(0.9, 0.99), max_grad_norm=10)
    weight.grad = torch.tensor([[3.0, 4.0]], dtype=dtype)
    below.step(1e-3, loss_is_finite=True)
    assert state_of(below, name).flatten().tolist() == pytest.approx([0.3, 0.4], rel=1e-5)


def test_a_float16_gradient_is_unscaled_before_it_is_measured_and_clipped() -> None:
    weight = torch.ones(1, 2).requires_grad_()
    updater = updater_of([weight], dtype="float16", betas=(0.9, 0.99), max_grad_norm=0.5)
    assert updater.scale(torch.ones(())).item() == FIRST_LOSS_SCALE
    weight.grad = torch.tensor([[3.0, 4.0]]) * FIRST_LOSS_SCALE
    assert updater.step(1e-3, loss_is_finite=True) == (5.0, True)
    assert state_of(updater, "exp_avg").flatten().tolist() == pytest.approx([0.03, 0.04])


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_biases_do_not_decay(kind: str, dtype: torch.dtype) -> None:
    """Gradients of 0: what moves is decay alone, 1 - rate * decay a step, of the matrix and the embedding."""
    shapes = [(4, 2), (4,), (8, 2), (1,)]
    weights = [torch.full(shape, 2.0, dtype=dtype).requires_grad_() for shape in shapes]
    updater = updater_of(weights, kind=kind, weight_decay=0.5)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    updater.step(0.5, loss_is_finite=True)
    assert [weight.unique().tolist() for weight in weights] == [[1.5], [2.0], [1.5], [2.0]]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_resumed_optimizer_keeps_its_moments_and_takes_the_settings_of_its_own_run(kind: str) -> None:
    def step(decay: float, state: Any = None) -> tuple[Any, Any]:
        weights = [torch.full((4, 2), 2.0).requires_grad_(), torch.full((3,), 2.0).requires_grad_()]
        updater = updater_of(weights, kind=kind, weight_decay=decay)
        if state is not None:
            updater.load_state_dict(state)
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.1)
        updater.step(0.5, loss_is_finite=True)
        return updater, weights

    first, _ = step(0.5)
    second, weights = step(0.0, first.state_dict())
    assert [group["weight_decay"] for group in second.optimizers[0].param_groups] == [0, 0]
    assert state_of(second, "exp_avg" if kind == "adamw" else "state1")[0, 0] == pytest.approx(0.01 * 0.9 + 0.01)
    assert weights[0].mean().item() == pytest.approx(weights[1].mean().item())  # neither decays now


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_states_of_a_paged_optimizer_go_back_into_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which has none, into what it takes for them; their bits and the next step stay."""
    from bitsandbytes.optim.adamw import PagedAdamW8bit

    def stepped(optimizer: Any, weight: Any) -> Any:
        weight.grad = torch.linspace(-1, 1, weight.numel()).reshape(weight.shape)
        optimizer.step()
        return weight.detach().clone()

    def made() -> tuple[Any, Any]:
        weight = torch.ones(64, 128).requires_grad_()
        return PagedAdamW8bit([weight]), weight

    first, weight = made()
    stepped(first, weight)
    second, other = made()
    asked: list[Any] = []
    make = second.get_state_buffer

    def noted(weight: Any, dtype: Any) -> Any:
        asked.append(dtype)
        return make(weight, dtype=dtype)

    monkeypatch.setattr(second, "get_state_buffer", noted)
    other.data.copy_(weight.data)
    restore(second, first.state_dict())
    assert asked == [torch.uint8] * 2
    assert torch.equal(stepped(second, other), stepped(first, weight))


def test_a_checkpoint_of_before_norms_were_spared_is_refused_with_what_to_do() -> None:
    weights = [torch.zeros(4, 4, requires_grad=True), torch.zeros(4, requires_grad=True)]
    state = {"optimizer": torch.optim.AdamW(weights).state_dict(), "scaler": {}}  # all in one group
    with pytest.raises(ValueError, match=r"^resume: .* must have .* groups .* Start afresh .* under another name=$"):
        updater_of(weights).load_state_dict(state)


def test_schedules() -> None:
    constant, cosine = ScheduleConfig(warmup=0.25), ScheduleConfig(kind="cosine", warmup=0.0)
    assert [rate_factor(s, 8, constant) for s in range(4)] == [0.5, 1, 1, 1]
    assert rate_factor(0, 10, constant) == 1 / 3  # 2.5 steps are three
    found = [rate_factor(s, 4, cosine) for s in range(4)]
    assert found == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    both = ScheduleConfig(kind="cosine", warmup=0.5)
    assert [rate_factor(s, 4, both) for s in range(4)] == pytest.approx([0.5, 1, 1, 0.5])
    for step in (4, 5, 99):  # beyond the plan: the last rate, never 0
        assert rate_factor(step, 4, cosine) == pytest.approx(found[-1])
    for kind in ("cosine", "linear"):  # nothing but warm-up, and beyond it
        assert [rate_factor(step, 1, ScheduleConfig(kind=kind, warmup=0.99)) for step in (0, 1, 2)] == [1, 1, 1]


def test_a_linear_schedule_is_transformers_and_no_step_is_of_rate_0() -> None:
    """Two steps of warm-up, then a straight line to 0 after the last of ten."""
    weight = torch.zeros(1, requires_grad=True)
    theirs = get_linear_schedule_with_warmup(torch.optim.SGD([weight], lr=1.0), 2, 10).lr_lambdas[0]
    linear = ScheduleConfig(kind="linear", warmup=0.2)
    found = [rate_factor(step, 10, linear) for step in range(10)]
    assert found == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert found[2:] == pytest.approx([theirs(step) for step in range(2, 10)])
    assert rate_factor(12, 10, linear) == pytest.approx(1 / 8)


CUDA = torch.device("cuda")


def test_paged_states_need_cuda() -> None:
    weight = torch.zeros(4, 2, requires_grad=True)
    paged = LearnerConfig(optimizer=OptimizerConfig(kind="paged_adamw_8bit"))
    with pytest.raises(ValueError, match="paged_adamw_8bit needs CUDA's unified memory, got device cpu"):
        Updater([weight], paged, dtype="bfloat16", device=CPU)
    assert type(build_optimizer([weight], paged.optimizer, CUDA)).__name__ == "PagedAdamW8bit"
    plain = build_optimizer([weight], OptimizerConfig(kind="adamw_8bit", betas=(0.8, 0.7)), CUDA)
    assert type(plain).__name__ == "AdamW8bit"
    assert plain.param_groups[0]["betas"] == (0.8, 0.7)
    assert Updater([weight], paged, dtype="bfloat16", device=CUDA).missing_state_bytes() == 0


@pytest.mark.parametrize(("kind", "size"), [("adamw", 8), ("adamw_8bit", 2)])
def test_an_update_that_is_not_finite_is_none_and_allocates_no_state(kind: Any, size: int) -> None:
    weight = torch.ones(1, 2).requires_grad_()
    updater = Updater([weight], LearnerConfig(optimizer=OptimizerConfig(kind=kind)), dtype="float32", device=CPU)
    assert updater.missing_state_bytes() == 2 * size
    weight.grad = torch.tensor([[3.0, 4.0]])
    assert updater.step(1e-3, loss_is_finite=False) == (5.0, False)
    weight.grad = torch.tensor([[3.0, math.nan]])
    norm, done = updater.step(1e-3, loss_is_finite=True)
    assert (math.isnan(norm), done) == (True, False)
    assert weight.tolist() == [[1, 1]]
    assert updater.missing_state_bytes() == 2 * size


# Sums of gradients: by hand, and as exact fractions whatever their order and division.

NUMBERS = st.floats(-(2.0**24), 2.0**24, width=32, exclude_min=True, exclude_max=True)


class With(Alone):
    """Rank 0 of ranks whose parts are known."""

    def __init__(self, others: Sequence[ExactSums]) -> None:
        self._others, self.count = others, len(others) + 1

    def sum(self, values: Tensor) -> None:
        for other in self._others:
            values += other._sums


def summed(*ranks: Sequence[Sequence[float]]) -> list[float]:
    """Of two weights, [2, n - 2] and [2]; for each rank the gradients of its micro-batches, flat."""
    size = len(next(gradient for rank in ranks for gradient in rank))
    weights = [torch.zeros(1, size - 2), torch.zeros(2)]
    others = [_added(ExactSums(weights, Alone()), weights, rank) for rank in ranks[1:]]
    _added(ExactSums(weights, With(others)), weights, ranks[0]).finish()
    return [float(x) for weight in weights if weight.grad is not None for x in weight.grad.flatten()]


def _added(sums: ExactSums, weights: list[Tensor], gradients: Sequence[Sequence[float]]) -> ExactSums:
    for one in gradients:
        flat = torch.tensor(one)
        weights[0].grad, weights[1].grad = flat[None, :-2], flat[-2:]
        sums.add()
    return sums


def nearest(value: Fraction) -> float:
    """float32, ties to even; of a number that is far from its least and its greatest."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value))) - 23
    exponent += (abs(value) >= Fraction(2) ** (exponent + 24)) - (abs(value) < Fraction(2) ** (exponent + 23))
    return float(round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent)


def on_grid(x: float) -> Fraction:
    """To a multiple of 2^-53; ties, of which float32 has a few there, to even."""
    return Fraction(round(Fraction(x) * 2**53), 2**53)


@pytest.mark.parametrize(
    ("summands", "total"),
    [
        ([1.0, 2.0, 4.0], 7.0),
        ([2.0**20, 2.0**-30, -(2.0**20)], 2.0**-30),  # float32 would have lost it
        ([1.0, 2.0**-24, 2.0**-53], 1 + 2.0**-23),  # beyond the middle of two numbers, by less than float64 sees
        ([1.0, 2.0**-24, -(2.0**-53)], 1.0),
        ([1.0, 2.0**-24], 1.0),  # the middle itself: to even
        ([1 + 2.0**-23, 2.0**-24], 1 + 2.0**-22),
        ([2.0**-53, 2.0**-54], 2.0**-53),  # nothing below the grid
        ([3.0] * 7, 21.0),
    ],
)
def test_by_hand(summands: list[float], total: float) -> None:
    assert summed([[x, -x, 0.0] for x in summands]) == [total, -total, 0.0]
    assert summed([[x, -x, 0.0] for x in summands[:1]], [], [[x, -x, 0.0] for x in summands[1:]]) == [total, -total, 0]


@given(st.data(), st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_any_order_and_division_gives_the_rounded_sum(
    data: st.DataObject, gradients: list[tuple[float, float, float]]
) -> None:
    order = data.draw(st.permutations(gradients))
    cuts = data.draw(st.lists(st.integers(0, len(order)), max_size=3).map(sorted))
    ranks = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    found = summed(*ranks)
    wanted = [nearest(sum(map(on_grid, column), Fraction(0))) for column in zip(*gradients, strict=True)]
    assert found == wanted


# Sums whose float64 numbers are two steps beside the middle between two float32 numbers, inexact towards it.
MIDDLE, STEP = 2048 * 2**14 + 2, 2**12


@given(st.integers(-(2**53), 2**53), st.integers(-(2**53), 2**53))
@example(MIDDLE, 2 * STEP - 1)
@example(MIDDLE, 1 - 2 * STEP)
@example(-MIDDLE, 2 * STEP - 1)
@example(-MIDDLE, 1 - 2 * STEP)
def test_two_parts_are_rounded_once(coarse: int, fine: int) -> None:
    high, low = coarse * 2.0**-14, fine * 2.0**-53
    found = rounded_sum(*(torch.tensor([x], dtype=torch.float64) for x in (high, low)))
    assert float(found) == nearest(Fraction(high) + Fraction(low))


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_a_whole_model_has_masters_with_adamw_alone(mode: Any, kind: Any) -> None:
    config = LearnerConfig(mode=mode, optimizer=OptimizerConfig(kind=kind))
    assert wants_masters(config) == (mode == "lora" or kind == "adamw")


def test_a_sum_below_1_is_rounded_outwards_too() -> None:
    middle = torch.tensor([0.5 + 2.0**-25, -0.5 - 2.0**-25], dtype=torch.float64)  # between two float32 numbers
    more = torch.tensor([2.0**-80, -(2.0**-80)], dtype=torch.float64)
    assert rounded_sum(middle, more).tolist() == [0.5 + 2.0**-24, -0.5 - 2.0**-24]
    assert rounded_sum(middle, -more).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, LIMIT, -3e38])
def test_a_number_out_of_bounds_is_seen_by_every_rank(bad: float) -> None:
    for ranks in ([[[1.0, bad, 2.0]], [[1.0, 1.0, 1.0]]], [[], [[1.0, 1.0, bad]]]):
        assert np.isnan(summed(*ranks)).all()


def test_float32_sums_are_of_every_weight_and_every_rank() -> None:
    class Two(Alone):
        count = 2

        def sum(self, values: Tensor) -> None:
            values += torch.tensor([10.0, 20.0, 30.0, 40.0])

    weights = [torch.zeros(1, 2), torch.zeros(2)]
    weights[0].grad, weights[1].grad = torch.tensor([[1.0, 2.0]]), None
    FloatSums(weights, Two()).finish()
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [[[11.0, 22.0]], [30.0, 40.0]]


def test_a_weight_without_gradient_counts_as_0_and_clear_forgets() -> None:
    weights = [torch.zeros(3), torch.zeros(2)]
    sums = ExactSums(weights, Alone())
    for number in (5.0, 7.0):
        sums.clear()
        weights[0].grad, weights[1].grad = torch.full((3,), number), None
        sums.add()
    sums.finish()
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [[7.0] * 3, [0.0] * 2]


@pytest.mark.parametrize(("reduce", "ranks", "fine"), [("exact", 1, 512), ("fast", 1, None), ("fast", 2, 512)])
def test_one_rank_with_exact_sums_divides_its_work_as_several_do(reduce: Any, ranks: int, fine: int | None) -> None:
    config = LearnerConfig(reduce=reduce)
    assert least_tokens(config, With([ExactSums([torch.zeros(1)], Alone())] * (ranks - 1)), torch.device("cpu")) == fine


# The whole model trained: the textbook's gradient, float32 masters, and a folder that anybody can load.

FULL: dict[str, Any] = {"mode": "full", "learning_rate": 1e-3}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
async def test_gradient_is_the_textbooks(tmp_path: Path, tied: bool, checkpointing: Any) -> None:
    path = str(make_tiny_model(tmp_path, tied=tied))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    groups, config = groups_near(model), LossConfig(ratio="clip")
    trainer = make_trainer(path, loss=config, token_budget=60, checkpointing=checkpointing, **FULL)
    found = await gradient(trainer, groups)
    wanted = naive_gradient(model, None, groups, config, advantages_by_hand("batch"))
    assert found.keys() == wanted.keys()
    assert ("lm_head.weight" in found) != tied
    assert distance(found, wanted) < 2e-5


async def test_masters_are_float32_and_what_is_sent_is_what_computes(tiny_path: str) -> None:
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    trainer = make_trainer(tiny_path, dtype="bfloat16", **FULL | {"learning_rate": 1e-6})
    before = masters(trainer)
    metrics = [await trainer.step(groups) for _ in range(2)][-1]
    assert metrics["loss/skipped_nonfinite"] == 0
    after = masters(trainer)
    moved = {name: float((after[name] - before[name]).abs().max()) for name in after}
    assert all(weight.dtype == torch.float32 for weight in after.values())
    assert all(0 < step < 1e-5 for step in moved.values())  # far below what bfloat16 can tell apart
    sent = await adapter_of(trainer)
    assert isinstance(sent, Weights)
    sent.verify()
    assert sent.version == 2
    computing = dict(trainer._policy._lm.named_parameters())
    arrived = load_safetensors(bytes(sent.payload))
    assert arrived.keys() == computing.keys() == after.keys()
    assert all(torch.equal(arrived[name], computing[name]) for name in arrived)


def test_a_loss_that_is_not_finite_changes_no_rounded_weight() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    updater = RoundedUpdater([weight], LearnerConfig(mode="full"), torch.device("cpu"))
    weight.grad = torch.ones_like(weight)
    assert updater.step(0.1, loss_is_finite=False)[1] is False
    assert torch.equal(weight.detach(), torch.ones(2, 3, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    assert updater.step(0.1, loss_is_finite=True)[1] is True
    assert (weight < 1).all()


def test_random_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    for value in (1.0 + 2**-10, -3.001, 1e-30, 0.0):
        found = rounded(torch.full((200_000,), value))
        near = torch.tensor(value, dtype=torch.bfloat16)
        assert found.dtype == torch.bfloat16
        assert float(found.double().mean()) == pytest.approx(value, rel=2e-5, abs=1e-34)
        assert len(found.unique()) == 1 + (float(near) != value)
    assert torch.equal(rounded(torch.tensor([torch.inf, -torch.inf])), torch.tensor([torch.inf, -torch.inf]).bfloat16())


@pytest.mark.parametrize(("kind", "size"), [("adamw_8bit", 2), ("adamw_rounded", 8)])
def test_without_masters_no_update_is_lost(kind: OptimizerKind, size: int) -> None:
    """200 updates of 1e-5 on weights whose bfloat16 neighbours are 2e-3 away: rounded to nearest, none would stay."""
    config = LearnerConfig(mode="full", optimizer=OptimizerConfig(kind=kind, max_grad_norm=1e9))
    torch.manual_seed(0)
    weight = torch.full((8192,), 0.5, dtype=torch.bfloat16).requires_grad_()
    updater = updater_for([weight], config, dtype="bfloat16", device=torch.device("cpu"))
    assert isinstance(updater, RoundedUpdater)
    assert updater.missing_state_bytes() == size * 8192
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        norm, updated = updater.step(1e-5, loss_is_finite=True)
        assert updated
        assert norm == pytest.approx(8192**0.5, rel=1e-3)
    assert weight.dtype == torch.bfloat16
    assert float(weight.detach().double().mean()) == pytest.approx(0.5 - 200e-5, abs=1e-4)
    weight.grad = torch.full_like(weight, torch.nan)
    before = weight.detach().clone()
    assert updater.step(1e-5, loss_is_finite=True)[1] is False
    assert torch.equal(weight, before)
    assert updater.missing_state_bytes() == 0


def test_states_without_masters_are_float32_and_as_adamws() -> None:
    """The same gradients, with masters and without: the same states, and weights apart by their rounding alone."""
    torch.manual_seed(0)
    first, gradients = torch.randn(64, 64), [torch.randn(64, 64).bfloat16() for _ in range(10)]
    rounding, plain = first.bfloat16().requires_grad_(), first.bfloat16().float().requires_grad_()
    optimizers = []
    for weight, kind in ((rounding, "adamw_rounded"), (plain, "adamw")):
        config = LearnerConfig.model_validate({"mode": "full", "optimizer": {"kind": kind, "max_grad_norm": 1e9}})
        updater = updater_for([weight], config, dtype="bfloat16", device=torch.device("cpu"))
        for one in gradients:
            weight.grad = one.to(weight.dtype)
            updater.step(1e-3, loss_is_finite=True)
        (optimizer,) = updater.optimizers
        optimizers.append(optimizer.state[weight])
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizers[0][name].dtype == torch.float32
        assert torch.allclose(optimizers[0][name], optimizers[1][name], rtol=1e-6)
    assert float((rounding.detach().float() - plain.detach()).abs().mean()) < 5e-3  # steps of bfloat16: 4e-3 at 1


async def test_a_model_moves_as_it_does_with_masters(tiny_path: str) -> None:
    """20 steps of 1e-4 along the same way as far: rounded to the nearest bfloat16 it would come a third of it."""
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    moves = []
    for kind in ("adamw", "adamw_rounded"):
        optimizer = OptimizerConfig.model_validate({"kind": kind})
        trainer = make_trainer(tiny_path, dtype="bfloat16", optimizer=optimizer, **FULL | {"learning_rate": 1e-4})
        before = masters(trainer)
        for _ in range(20):
            await trainer.step(groups)
        after = masters(trainer)
        moves.append(torch.cat([(after[name].float() - before[name].float()).flatten() for name in after]))
    with_masters, without = moves
    assert float(without @ with_masters / with_masters.square().sum()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_rounded"])
async def test_training_without_masters_resumes_bit_for_bit(
    kind: OptimizerKind, tiny_path: str, tmp_path: Path
) -> None:
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    settings: dict[str, Any] = {"dtype": "bfloat16", "optimizer": OptimizerConfig(kind=kind)}
    trainer, other = (make_trainer(tiny_path, **settings, **FULL) for _ in range(2))
    before = masters(trainer)
    await trainer.step(groups)
    own = dict(trainer._policy._lm.named_parameters())
    assert all(
        weight is own[name] and weight.dtype == torch.bfloat16 for name, weight in trainer._policy.masters.items()
    )
    assert all(not torch.equal(own[name], before[name]) for name in before)
    await trainer.save(tmp_path)
    await trainer.step(groups)
    await other.load(tmp_path)
    await other.step(groups)
    assert (await adapter_of(other)).digest == (await adapter_of(trainer)).digest


async def test_export_is_a_model_and_a_checkpoint_goes_on(tiny_path: str, tmp_path: Path) -> None:
    groups = groups_near(AutoModelForCausalLM.from_pretrained(tiny_path))
    trainer, other = make_trainer(tiny_path, **FULL), make_trainer(tiny_path, **FULL)
    await trainer.step(groups)
    await trainer.save(tmp_path)
    ids = list(range(3, 40))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    wanted = naive.logprobs(exported, ids[:1], ids[1:], 1.0).detach().numpy()
    assert np.abs(await probe_of(trainer, ids) - wanted).max() < 1e-5
    assert np.abs(await probe_of(other, ids) - wanted).max() > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([104, 105])
    assert exported.generation_config.eos_token_id == [258, 256]

    await other.load(tmp_path)
    await trainer.step(groups)
    await other.step(groups)
    assert distance(masters(other), masters(trainer)) == 0
    assert (await adapter_of(other)).digest == (await adapter_of(trainer)).digest


def test_a_reference_is_kept_for_a_kl_alone_and_boundaries_go_where_they_are_told_to(tiny_path: str) -> None:
    plain, other = (
        make_trainer(tiny_path, loss=LossConfig(beta=beta), checkpointing="offloaded" if beta > 0 else "full", **FULL)
        for beta in (0.0, 0.1)
    )
    with pytest.raises(KeyError, match="reference"):
        plain._policy.acting_as("reference")
    with other._policy.acting_as("reference"):
        pass
    assert (plain._policy._offload, other._policy._offload) == (False, True)
