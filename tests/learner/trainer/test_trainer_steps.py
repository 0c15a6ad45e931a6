"""Trainer: what a step leaves behind in weights, versions and files, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM

from learner.config.settings import AUTO_TOKEN_BUDGET, OptimizerConfig, ScheduleConfig
from learner.trainer.step import Learned, Update
from learner.trainer.trainer import MAX_IN_A_ROW, NonFiniteGuard, Trainer
from tests.learner import naive
from tests.learner.rollouts import make_group, make_groups, uniform
from tests.learner.trainers import TEMPERATURE, adapter_of, distance, make_trainer, masters, probe_of


async def test_no_signal_at_all_leaves_the_weights_and_counts_the_version(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path)
    before = masters(trainer)
    # More steps than may be skipped in a row: nothing to learn is no failure.
    metrics = [await trainer.step(make_groups([[1, 1], [None, 0]], uniform)) for _ in range(MAX_IN_A_ROW)][-1]
    assert metrics["loss/trained_tokens"] == 0
    assert metrics["reward/zero_variance_groups"] == 2
    assert metrics["loss/skipped_nonfinite"] == metrics["loss/grad_norm"] == 0
    assert not [name for name in metrics if name.startswith("policy/")]
    assert distance(masters(trainer), before) == 0
    assert (await adapter_of(trainer)).version == MAX_IN_A_ROW


async def test_learning_raises_the_probability_of_the_rewarded(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, learning_rate=0.01)
    good, bad, prompt = [7, 8, 9], [10], [1, 2, 3]

    async def score(completion: list[int]) -> float:
        return float((await probe_of(trainer, prompt + completion))[-len(completion) :].sum())

    before = await score(good) - await score(bad)
    policy = trainer._policy

    def behavior(p: list[int], c: list[int]) -> list[float]:
        with torch.no_grad():
            logs = (policy.hidden(torch.tensor([p + c])) @ policy.head.t() / TEMPERATURE).log_softmax(-1)
        return [float(logs[len(p) - 1 + i, token]) for i, token in enumerate(c)]

    for version in range(5):
        metrics = await trainer.step([make_group(prompt, [good, bad], [1, 0], behavior, version=version)])
        assert metrics["policy/mismatch_max"] == metrics["policy/mismatch_max_current"] < 1e-4
        assert metrics["policy/clip_fraction"] == 0
        # On policy it is the mean of -A over four tokens; A = 0.5 / (sqrt(0.5) + 1e-4) and its opposite.
        assert metrics["loss/total"] == pytest.approx(-(3 - 1) / 4 * 0.5 / (0.5**0.5 + 1e-4), rel=1e-4)
        assert 0 < metrics["time/train"] < 60
    assert await score(good) - await score(bad) > before + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
async def test_smoke_of_types_and_optimizers(
    tiny_path: str, groups: list[pa.Table], dtype: Any, optimizer: Any
) -> None:
    trainer = make_trainer(tiny_path, dtype=dtype, optimizer=OptimizerConfig(kind=optimizer), learning_rate=1e-3)
    before = masters(trainer)
    metrics = [await trainer.step(groups) for _ in range(3)][-1]
    assert metrics["loss/skipped_nonfinite"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    after = masters(trainer)
    assert all(weight.dtype == torch.float32 for weight in after.values())
    assert all(not torch.equal(after[name], before[name]) for name in before)
    sent = load_safetensors(bytes((await adapter_of(trainer)).payload))
    wanted = getattr(torch, dtype)
    assert all(torch.equal(sent[name], weight.to(wanted)) for name, weight in after.items())
    assert all(weight.dtype == wanted for weight in sent.values())


async def test_nonfinite_updates_are_skipped_and_three_in_a_row_raise(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path)
    groups, head, before = make_groups([[0, 1]], uniform), trainer._policy.head, masters(trainer)
    sound = float(head[5, 5])
    head[5, 5] = math.nan
    metrics = [await trainer.step(groups) for _ in range(2)]
    assert [m["loss/skipped_nonfinite"] for m in metrics] == [1, 1]
    assert distance(masters(trainer), before) == 0
    head[5, 5] = sound
    assert (await trainer.step(groups))["loss/skipped_nonfinite"] == 0  # and the count starts anew
    assert distance(masters(trainer), before) > 0
    head[5, 5] = math.nan
    await trainer.step(groups)
    await trainer.step(groups)
    with pytest.raises(
        RuntimeError, match=r"the policy's .* 3 steps .*last: step 6, loss/total 0.0, loss/grad_norm nan"
    ):
        await trainer.step(groups)


def test_the_role_that_is_not_finite_is_named() -> None:
    good, bad = Update([], 1.0, done=True), Update([], math.nan, done=False)
    assert Learned([good], [good, bad], {}).failed is None
    metrics = {"loss/total": 1.0, "loss/grad_norm": 1.0, "value/loss": math.nan, "value/grad_norm": 2.0}
    guard, failed = NonFiniteGuard(), Learned([good], [bad], {}).failed
    for step in (1, 2):
        guard.after(failed, metrics, may_overflow=False, step=step)
    with pytest.raises(RuntimeError, match=r"the value's .*value/loss nan, .*norm 2.0.*learner.value.learning_rate"):
        guard.after(failed, metrics, may_overflow=False, step=3)


async def test_steps_that_the_loss_scale_may_have_spoilt_are_no_fault_of_the_run(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, dtype="float16")
    trainer._policy.head[5, 5] = math.nan
    metrics = [await trainer.step(make_groups([[0, 1]], uniform)) for _ in range(4)]
    assert [one["loss/skipped_nonfinite"] for one in metrics] == [1] * 4


async def test_a_step_has_its_own_learning_rate(tiny_path: str) -> None:
    """Of ten steps, the first four warm up: a quarter of the rate in the first, a half in the second."""
    trainer = make_trainer(tiny_path, learning_rate=0.01, schedule=ScheduleConfig(warmup=0.4))
    for wanted in (0.0025, 0.005):
        metrics = await trainer.step(make_groups([[0, 1]], uniform))
        assert metrics["loss/learning_rate"] == pytest.approx(wanted)
        (optimizer,) = trainer._updates.updater.optimizers
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([wanted])


async def test_the_pulse_counts_passes_and_on_a_cpu_seconds_of_computation(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, token_budget="auto")
    await trainer.step(make_groups([[0, 1]], uniform))
    assert trainer._updates.passed == 1
    assert 1 < await trainer.pulse() < 60
    assert trainer._thread.progress(on_cpu=False) == 0
    assert trainer._budget.tokens == AUTO_TOKEN_BUDGET
    await trainer.release_cache()
    _, exported = await trainer.outgoing()
    assert 0 < exported.seconds < 60


async def test_adapter_has_peft_names_and_plain_config(tiny_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_path, learning_rate=0.01)
    adapter = await adapter_of(trainer)
    adapter.verify()
    assert adapter.version == 0
    await trainer.step(make_groups([[0, 1]], uniform))
    newer = await adapter_of(trainer)
    assert newer.version == 1
    assert newer.digest != adapter.digest
    assert newer.config["base_model_name_or_path"] == tiny_path
    assert (newer.config["r"], newer.config["lora_alpha"], newer.config["peft_type"]) == (8, 16, "LORA")
    assert json.loads(json.dumps(newer.config)) == newer.config
    (tmp_path / "adapter_model.safetensors").write_bytes(newer.payload)
    (tmp_path / "adapter_config.json").write_text(json.dumps(newer.config))
    await assert_same_model(trainer, tiny_path, tmp_path)


async def test_export_round_trip(tiny_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_path, learning_rate=0.01)
    await trainer.step(make_groups([[0, 1], [0, 2]], uniform))
    await trainer.save(tmp_path / "new" / "adapter")
    await assert_same_model(trainer, tiny_path, tmp_path / "new" / "adapter")
    again = make_trainer(tiny_path, adapter=str(tmp_path / "new" / "adapter"))
    assert distance(masters(again), masters(trainer)) == 0


async def assert_same_model(trainer: Trainer, path: str, folder: Path) -> None:
    tokens = list(range(3, 40))
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain = naive.logprobs(base, tokens[:1], tokens[1:], 1.0).detach().numpy()
    model = PeftModel.from_pretrained(base, folder).eval()
    wanted = naive.logprobs(model, tokens[:1], tokens[1:], 1.0).detach().numpy()
    found = await probe_of(trainer, tokens)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-5
    assert np.abs(found - plain).max() > 1e-3  # the adapter does something


async def test_errors_are_sentences(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path)
    with pytest.raises(ValueError, match="token_ids: at least two"):
        await probe_of(trainer, [1])
    with pytest.raises(ValueError, match=r"vocabulary of model.path, 260, got 260"):
        await probe_of(trainer, [1, 260])
    with pytest.raises(ValueError, match=r"vocabulary of model.path, 260, got 999"):
        await trainer.step([make_group([1], [[2], [999]], [0, 1], uniform)])
