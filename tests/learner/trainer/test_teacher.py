"""model.teacher in the learner: what it said is in the rollouts, and takes the place of a reference. In float64 the
learner's gradients are the textbook's to the last digits, those of the other kinds of teacher too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from learner.algo.surrogates import LossConfig
from learner.batch.micro_batch import MicroBatch
from learner.trainer.trainer import Trainer
from rollout.schema import SCHEMA, ragged
from tests.learner import naive
from tests.learner.adapters import written_adapter
from tests.learner.rollouts import said, taught
from tests.learner.trainer.test_memory_limit import break_above
from tests.learner.trainer.test_step import naive_teaching
from tests.learner.trainers import TEMPERATURE, advantages_by_hand, distance, gradient, make_trainer, naive_gradient

TEACHER, WORDS, ZEROS = {"teacher": "a larger model"}, 260, [[0.0] * 4] * 3
Logs = Callable[[list[int], list[int]], np.ndarray]


@pytest.fixture(scope="module")
def logs(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> Logs:
    """The logprobs of another adapter, at temperature 1."""
    model = naive.load(tiny_path, written_adapter(tiny_path, tmp_path_factory.mktemp("teacher"), seed=2))

    def of(prompt: list[int], completion: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
        return np.asarray(logits.log_softmax(-1)[len(prompt) - 1 : -1].numpy())

    return of


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer], Trainer]:
    """What makes a trainer compute in float64, all but the norms of transformers, which are not fused then."""

    def norm(self: Any, states: Tensor) -> Tensor:
        found: Tensor = self.weight * states * (states.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return found

    to = MicroBatch.to

    def widened(batch: MicroBatch, device: torch.device) -> MicroBatch:
        moved = to(batch, device)
        for name in MicroBatch.__slots__:
            value = getattr(moved, name)
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                object.__setattr__(moved, name, value.double())
        return moved

    def made(trainer: Trainer) -> Trainer:
        trainer._policy._lm.double()
        return trainer

    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm)
    monkeypatch.setattr("learner.model.policy.fuse", lambda *_, **__: None)
    monkeypatch.setattr(MicroBatch, "to", widened)
    return made


def textbook(
    model: Any, groups: list[pa.Table], advantages: list[list[float]], top: int
) -> tuple[dict[str, Tensor], float]:
    """The gradient, and the mean KL, of whole distributions, one completion at a time; top 0: of the sampled token."""
    names = ("prompt_ids", "completion_ids", "behavior_logprobs", "teacher_logprobs")
    rows = [
        (*(values.tolist() for values in row), advantage)
        for group, own in zip(groups, advantages, strict=True)
        for row, advantage in zip(zip(*(ragged(group, name) for name in names), strict=True), own, strict=True)
    ]
    best = [
        [ragged(group, f"teacher_top_{name}")[row] for group in groups for row in range(len(group))]
        for name in ("ids", "logprobs")
    ]
    total = sum(len(row[1]) for row in rows if not math.isnan(row[-1]))
    kls = 0.0
    for (prompt, completion, behavior, teacher, advantage), ids, known in zip(rows, *best, strict=True):
        if math.isnan(advantage):
            continue
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        every = (logits / TEMPERATURE).log_softmax(-1)
        lp = every.gather(1, torch.tensor(completion)[:, None])[:, 0]
        ratio = (lp.detach() - torch.tensor(behavior).double()).exp().clamp(max=2)
        value = -ratio * float(np.float32(advantage)) * lp
        if top:
            chosen = torch.tensor(ids.tolist()).view(-1, top)
            theirs = torch.tensor(known.tolist()).double().view(-1, top)
            own = every.gather(1, chosen)
            kl = (own.exp() * (own - theirs)).sum(-1)
            if top < WORDS:
                rest = every.exp().scatter(1, chosen, 0.0).sum(-1)
                kl = kl + rest * (rest / (1 - theirs.exp().sum(-1))).log()
            value, kls = value + kl, kls + kl.sum().item()
        else:
            value = value + ratio * (lp.detach() - torch.tensor(teacher)) * lp
        (value.sum() * float(np.float32(1 / total))).backward()
    found = {n.replace(".default.", "."): w.grad for n, w in model.named_parameters() if w.requires_grad}
    return found, kls / total


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(("algorithm", "top"), [("distill", 0), ("distill", 1), ("distill", 20), ("grpo", 3)])
async def test_what_a_larger_teacher_said_gives_the_textbooks_gradient(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], logs: Logs, algorithm: str, top: int, mode: str,
    in_float64: Callable[[Trainer], Trainer],
) -> None:  # fmt: skip
    groups = [said(group, logs, top) for group in groups]
    loss = LossConfig(beta=1, teacher_top=top, ratio="truncated" if algorithm == "grpo" else "masked")
    advantages = ZEROS if algorithm == "distill" else advantages_by_hand("batch")
    start = adapter_path if mode == "lora" else None
    trainer = in_float64(
        make_trainer(
            tiny_path, adapter=start, mode=mode, model=TEACHER, algorithm=algorithm, loss=loss, token_budget=60
        )
    )
    found = await gradient(trainer, groups)
    wanted, _ = textbook(naive.load(tiny_path, start).double(), groups, advantages, top)
    assert distance(found, wanted) < 1e-12


@pytest.mark.parametrize("kind", ["reference", "prompt"])
async def test_other_teachers_give_the_textbooks_gradient_in_float64(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], kind: str, tmp_path: Path,
    in_float64: Callable[[Trainer], Trainer],
) -> None:  # fmt: skip
    """As the tests in test_step.py, whose bounds are the rounding of a float32 model; here 1 / tokens alone is one."""
    loss, shown, teacher = LossConfig(beta=1), [list(range(40, 70)), [7], [3, 4]], None
    if kind == "prompt":
        groups = [taught(group, other) for group, other in zip(groups, shown, strict=True)]
    else:
        teacher = written_adapter(tiny_path, tmp_path, seed=2)
    model = {"reference": teacher}
    trainer = make_trainer(tiny_path, adapter=adapter_path, model=model, algorithm="distill", loss=loss)
    found = await gradient(in_float64(trainer), groups)
    policy = naive.load(tiny_path, adapter_path).double()
    if teacher is None:
        wanted = naive_teaching(policy, groups, shown, ZEROS)
    else:
        wanted = naive_gradient(policy, naive.load(tiny_path, teacher).double(), groups, loss, ZEROS)
    assert distance(found, wanted) < 1e-7


async def test_metrics_of_a_larger_teacher(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], logs: Logs
) -> None:
    """No reference is computed, in a rehearsal neither, and fewer tokens than were recorded may be asked for."""
    groups = [said(group, logs, 5) for group in groups]
    settings: dict[str, Any] = {"adapter": adapter_path, "model": TEACHER, "algorithm": "distill", "token_budget": 1000}
    trainer = make_trainer(tiny_path, **settings, loss=LossConfig(beta=0.5, teacher_top=3))
    sizes = break_above(trainer, 10_000, "forward")
    metrics = await trainer.step(groups)
    assert len(sizes) == 1
    fewer = [said(group, logs, 3) for group in groups]
    _, kl = textbook(naive.load(tiny_path, adapter_path).double(), fewer, ZEROS, 3)
    assert metrics["loss/total"] == pytest.approx(0.5 * kl, rel=1e-4)
    assert kl < metrics["policy/kl"]
    known = np.concatenate([row for group in fewer for row in ragged(group, "teacher_top_logprobs")]).reshape(-1, 3)
    assert metrics["policy/teacher_top_mass"] == pytest.approx(float(np.exp(known).sum(1).mean()), rel=1e-5)
    assert 0.001 < metrics["policy/top_mass"] < 0.9
    sizes.clear()
    await trainer.rehearse(9)
    assert len(sizes) == 1


async def test_rollouts_without_what_a_larger_teacher_said_are_refused(
    tiny_path: str, groups: list[pa.Table], logs: Logs
) -> None:
    def changed(prompt: list[int], completion: list[int], value: float) -> np.ndarray:
        found = logs(prompt, completion).copy()
        found[0, 0] = value
        return found

    told = [said(group, logs, 2) for group in groups]
    broken = said(groups[0], partial(changed, value=math.inf), 2)
    place, field = SCHEMA.get_field_index("teacher_top_ids"), SCHEMA.field("teacher_top_ids")
    far = [(row + 10**6).tolist() for row in ragged(told[0], "teacher_top_ids")]
    beyond = told[0].set_column(place, field, pa.array(far, field.type))
    for top, given, message in (
        (0, groups, "teacher_logprobs: must hold 1 for each token"),
        (0, [told[0], *groups[1:]], "teacher_logprobs: must hold 1 for each token .*row 4 has 0"),
        (3, told, "teacher_top_ids: must hold 3 for each token"),
        (2, [broken, *told[1:]], "must be finite; the teacher is broken"),
        (2, [beyond, *told[1:]], "vocab"),
    ):
        trainer = make_trainer(tiny_path, model=TEACHER, loss=LossConfig(beta=1, teacher_top=top))
        with pytest.raises(ValueError, match=message):
            await trainer.step(given)
    plain = make_trainer(tiny_path, algorithm="distill", loss=LossConfig(beta=1))  # what is recorded is another run's
    assert (await plain.step(told))["policy/kl"] == pytest.approx((await plain.step(groups))["policy/kl"], abs=1e-6)
