"""Trainers of several runs on one base: each computes what it would compute alone, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from learner.config.settings import LoraConfig
from learner.trainer.trainer import Trainer, Trainers
from tests.learner.trainers import adapter_of, make_trainer, masters


def settings_of(run: int, adapter: str | None, dtype: str) -> dict[str, Any]:
    """Runs differ in rate, and where they do not start from an adapter in rank."""
    lora = LoraConfig(rank=8, alpha=16) if adapter or run == 0 else LoraConfig(rank=4, alpha=4)
    return {"lora": lora, "learning_rate": [1e-2, 3e-3, 1e-3][run], "adapter": adapter, "dtype": dtype}


def several(path: str, runs: int = 3, adapter: str | None = None, dtype: str = "float32", **more: Any) -> Trainers:
    def made(run: int, first: Trainer | None) -> Trainer:
        beside: dict[str, Any] = {} if first is None else {"beside": first, "number": run}
        return make_trainer(path, seed=run, **settings_of(run, adapter, dtype), **beside, **more)

    return Trainers([made] * runs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("starts", ["fresh", "adapter"])
async def test_each_run_is_what_it_is_alone(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], dtype: str, starts: str
) -> None:
    adapter = adapter_path if starts == "adapter" else None
    beta: dict[str, Any] = {"loss": {"beta": 0.1}}
    together = several(tiny_path, adapter=adapter, dtype=dtype, **beta)
    for run in (0, 1, 2, 1, 0, 0, 2, 1, 2):  # their turns are in any order
        await together.step(run, groups)
        assert all(weight.grad is None for weight in masters_of(together, run).values())
    for run in range(3):
        alone = make_trainer(tiny_path, seed=run, **settings_of(run, adapter, dtype), **beta)
        for _ in range(3):
            await alone.step(groups)
        sent: Any = (await together.outgoing(run))[0].value
        own = await adapter_of(alone)
        assert (sent.digest, sent.version) == (own.digest, 3)
        assert sent.config == own.config
        assert (await together.probe(run, [5, 6, 7])).held == (await alone.probe([5, 6, 7])).held


def masters_of(together: Trainers, run: int) -> dict[str, Tensor]:
    return together.objects[run]._policy.masters


async def test_a_run_goes_on_from_its_checkpoint_alone(tiny_path: str, groups: list[pa.Table], tmp_path: Path) -> None:
    together = several(tiny_path)
    for run in (2, 0, 1):
        await together.step(run, groups)
    await together.save(1, tmp_path / "one")
    await together.step(1, groups)
    alone = make_trainer(tiny_path, seed=1, **settings_of(1, None, "float32"))
    await alone.load(tmp_path / "one")
    await alone.step(groups)
    fresh = several(tiny_path)
    await fresh.load(1, tmp_path / "one")
    await fresh.step(0, groups)
    await fresh.step(1, groups)
    for name, weight in masters(alone).items():
        assert torch.equal(weight, masters_of(together, 1)[name])
        assert torch.equal(weight, masters_of(fresh, 1)[name])


async def test_a_policy_that_is_not_finite_is_not_sent_and_others_do_not_notice(
    tiny_path: str, groups: list[pa.Table]
) -> None:
    together = several(tiny_path, runs=2)
    with torch.no_grad():
        for weight in masters_of(together, 1).values():
            weight.fill_(1e30)
    with pytest.raises(RuntimeError, match=r"policy v0: its logprobs must be finite, 0 of 31 are; lower learner.learn"):
        await together.outgoing(1)
    await together.step(0, groups)
    alone = make_trainer(tiny_path, seed=0, **settings_of(0, None, "float32"))
    await alone.step(groups)
    assert (await together.outgoing(0))[0].value.digest == (await adapter_of(alone)).digest  # type: ignore[union-attr]


async def test_progress_of_one_run_is_progress_for_all(tiny_path: str, groups: list[pa.Table]) -> None:
    together = several(tiny_path, runs=2)
    before = await together.pulse(1)
    await together.step(0, groups)
    assert await together.pulse(1) > before
