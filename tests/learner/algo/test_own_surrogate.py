"""A user's own surrogate: it trains as its paper says, and one that cannot train is refused in one line."""

from __future__ import annotations

import re
from math import exp
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from learner.algo.loss import SurrogateError, Tokens, function_of, try_surrogate
from learner.algo.surrogates import SURROGATES, LossConfig
from tests.learner import naive
from tests.learner.trainers import advantages_by_hand, distance, gradient, make_trainer, naive_gradient

EXAMPLE = f"{Path(__file__).parents[3] / 'examples' / 'my_loss.py'}:topr"


def topr(lp: Tensor, behavior: Tensor, advantage: Any, reference: Tensor | None, config: LossConfig) -> Tensor:
    """[T] TOPR's loss of one completion (2503.14286), in the place of tests.learner.naive.loss."""
    whole = (lp.detach() - behavior).sum().exp()
    weight = 1.0 if advantage >= 0 else min(float(whole), config.bounds.get("cap", 1.0))
    return lp * -weight * float(advantage)


@pytest.mark.parametrize("cap", [None, 1.5])
async def test_the_example_trains_a_step_as_its_paper_says(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], monkeypatch: pytest.MonkeyPatch, cap: float | None
) -> None:
    given: Any = {} if cap is None else {"cap": cap}
    config = LossConfig(ratio=EXAMPLE, bounds=given)
    assert refusal(EXAMPLE, **given) is None
    trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=60)
    found = await gradient(trainer, groups)
    monkeypatch.setattr(naive, "loss", topr)
    model = naive.load(tiny_path, adapter_path)
    assert distance(found, naive_gradient(model, None, groups, config, advantages_by_hand("batch"))) < 2e-5


def refusal(ratio: str, **bounds: Any) -> str | None:
    """What the trial says of a surrogate that cannot train."""
    try:
        try_surrogate(LossConfig.model_validate({"ratio": ratio, "bounds": bounds}))
    except SurrogateError as error:
        return str(error)
    return None


def test_those_of_the_table_pass_the_trial() -> None:
    assert {ratio: refusal(ratio) for ratio in SURROGATES} == dict.fromkeys(SURROGATES)


WRONG = """
import torch
def no_setting(tokens): return tokens.weighted(tokens.ratio), tokens.ratio > 2
def objective_alone(tokens): return tokens.weighted(tokens.ratio)
def three(tokens): return tokens.ratio, tokens.ratio, tokens.ratio
def mean(tokens): return tokens.ratio.mean(), tokens.ratio > 2
def by_completion(tokens): return tokens.ratio[: len(tokens.lengths)], tokens.ratio > 2
def in_double(tokens): return tokens.ratio.double(), tokens.ratio > 2
def how_much(tokens): return tokens.ratio, tokens.ratio
def detached(tokens): return tokens.advantages, tokens.ratio > 2
def other_leaf(tokens): return torch.ones(6, requires_grad=True) * 2, tokens.ratio > 2
def infinite(tokens): return tokens.unit / (tokens.ratio > 0.9), tokens.ratio > 2
def no_slope(tokens): return (tokens.unit - 1).sqrt(), tokens.ratio > 2
def raises(tokens):
    return tokens.rho, None
def needs_more(tokens, tau): return tokens.ratio, tokens.ratio > 2
def any_setting(tokens, **settings): return tokens.ratio, tokens.ratio > settings["cap"]
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "wrong.py has no function 'gone'; functions there: no_setting, objective_alone, three"),
        ("objective_alone", "must return two tensors, the objective and which tokens were clipped, got a Tensor"),
        ("three", "must return two tensors, .* got a tuple of 3"),
        ("mean", r"must return one objective per token, \[6\] torch.float32 of 6 tokens, got \[\] torch.float32"),
        ("by_completion", r"must return one objective per token, .* got \[3\] torch.float32"),
        ("in_double", r"must return one objective per token, .* got \[6\] torch.float64"),
        ("how_much", r"must say of each token whether it was clipped, \[6\] torch.bool .* got \[6\] torch.float32"),
        ("detached", "returns an objective without gradient: it must be made of tokens.ratio"),
        ("other_leaf", "returns an objective that does not depend on the logprobs"),
        ("infinite", r"must have a finite objective, got \[1, 1, inf, .* for ratios of \[1, 1.11, 0.135"),
        ("no_slope", r"must have a finite gradient, got \[inf, inf"),
        ("raises", r"raised AttributeError: 'Tokens' object has no attribute 'rho' \(wrong.py, line 15\)"),
        ("needs_more", r"raised TypeError: needs_more\(\) missing 1 required positional argument: 'tau'"),
    ],
)
def test_one_that_cannot_train_is_refused_in_one_line(tmp_path: Path, name: str, sentence: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    said = refusal(f"{file}:{name}")
    assert said is not None
    assert re.fullmatch(f"learner.loss.ratio: .*{sentence}.*", said)


def test_a_setting_that_the_function_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    said = refusal(f"{tmp_path}/wrong.py:no_setting", cap=3)
    assert said is not None
    assert re.fullmatch(r"learner.loss.bounds.cap: .*no_setting has no parameter cap; .* \(got 3.0\)", said)
    assert refusal(f"{tmp_path}/wrong.py:no_setting") is None
    assert refusal(f"{tmp_path}/wrong.py:any_setting", cap=3) is None


def test_a_file_that_is_not_there_or_does_not_import_ends_the_start(tmp_path: Path, tiny_path: str) -> None:
    with pytest.raises(SurrogateError, match=r"^learner.loss.ratio: there is no file .*gone.py"):
        make_trainer(tiny_path, loss=LossConfig(ratio=f"{tmp_path}/gone.py:f"))
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(SurrogateError, match=r"^learner.loss.ratio: .*broken.py does not import: ModuleNotFoundError"):
        function_of(f"{tmp_path}/broken.py:f")


# TRL's losses that are no setting here, as docs/trl.md says of them: by their papers.
OF_TRL = """
import torch

def sapo(tokens):  # 2511.20347: a soft gate, narrower for tokens to be unlearned
    tau = torch.where(tokens.advantages > 0, 1.0, 1.05)
    return 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1)) * tokens.advantages, tokens.ratio > torch.inf

def luspo(tokens):  # 2602.05261: gspo, each sequence by its length; with kind: grpo
    ratio = tokens.over_completions("mean").ratio
    each = torch.repeat_interleave(tokens.lengths, tokens.lengths)
    low = torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages)
    return each * low, low < ratio * tokens.advantages

def vespo(tokens):  # 2602.10693
    w, good = tokens.over_completions("sum").sg_ratio, tokens.advantages >= 0
    k, lam = torch.where(good, 2.0, 3.0), torch.where(good, 3.0, 2.0)
    return tokens.weighted((lam + k * w.log() - lam * w).exp()), w > torch.inf

def masked(tokens, cap):  # DeepSeek-V3.2's mask of sequences, its threshold as bounds.cap
    far = -tokens.over_completions("mean").log_ratio > cap
    dropped = far & (tokens.advantages < 0)
    return tokens.ratio * tokens.advantages * ~dropped, dropped
"""


@pytest.mark.parametrize("name", ["sapo", "luspo", "vespo", "masked"])
def test_losses_of_trl_that_are_no_setting_are_a_few_lines(tmp_path: Path, name: str) -> None:
    """Values and slopes token by token, from the papers' formulas in plain numbers."""
    (tmp_path / "of_trl.py").write_text(OF_TRL)
    settings = {"cap": 1.0} if name == "masked" else {}
    assert refusal(f"{tmp_path}/of_trl.py:{name}", **settings) is None
    completions = [([0.1, -0.3], 1.0), ([0.2, -0.1, 0.05], -0.5), ([-1.5, -1.0], -1.0), ([-1.5, -1.0], 2.0)]
    logs = torch.tensor([log for ratios, _ in completions for log in ratios])
    advantages = torch.tensor([a for ratios, a in completions for _ in ratios])
    tokens = Tokens.of(torch.zeros_like(logs), logs, advantages, torch.tensor([len(r) for r, _ in completions]))
    objective, _ = function_of(f"{tmp_path}/of_trl.py:{name}")(tokens, **settings)
    (slopes,) = torch.autograd.grad(objective.sum(), tokens.unit)
    wanted = [by_hand(name, log, logs, a) for logs, a in completions for log in logs]
    assert [objective.tolist(), slopes.tolist()] == [pytest.approx(one, rel=1e-5) for one in zip(*wanted, strict=True)]


def by_hand(name: str, log: float, logs: list[float], a: float) -> tuple[float, float]:
    """Of a token in a completion: the objective, and its derivative by the token's logprob."""
    size, r = len(logs), exp(log)
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + exp(-tau * (r - 1)))
        return 4 / tau * gate * a, 4 * gate * (1 - gate) * r * a
    if name == "luspo":
        whole = exp(sum(logs) / size)
        bounded = min(whole * a, min(max(whole, 0.8), 1.2) * a)
        return size * bounded, size * whole * a if bounded == whole * a else 0.0
    if name == "vespo":
        whole, (k, lam) = exp(sum(logs)), (2, 3) if a >= 0 else (3, 2)
        weight = exp(lam) * whole**k * exp(-lam * whole)
        return weight * a, weight * a
    kept = a >= 0 or -sum(logs) / size <= 1.0
    return kept * r * a, kept * r * a


def test_settings_of_an_own_function_are_those_that_are_given() -> None:
    assert LossConfig(ratio=EXAMPLE).arguments == {}
    assert LossConfig(ratio=EXAMPLE, bounds={"cap": 3, "band": (0.5, 2)}).arguments == {"cap": 3.0, "band": (0.5, 2.0)}
