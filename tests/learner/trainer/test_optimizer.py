"""The update: learning rates, AdamW's numbers, the clip of the gradient, which weights decay, float16's loss scale."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from learner.config.settings import LearnerConfig, OptimizerConfig, ScheduleConfig, rate_factor
from learner.trainer.optimizer import FIRST_LOSS_SCALE, RoundedUpdater, Updater, build_optimizer, restore, updater_for
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
