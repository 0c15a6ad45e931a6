"""Scores saved rollouts with a reward, as training would, and draws the distribution: try a reward before a run."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from learner.config.load import ConfigError, parse_value, sentences
from learner.driver.console import escaped
from learner.driver.input_checks import prefilled_notes
from rewards.base import RewardError
from rewards.call import Group
from rewards.check import try_rewards
from rewards.config import RewardConfig
from rewards.memory import DEFAULT
from rewards.pool import RewardPool, Scores
from rollout import ledger
from rollout.config import parse_size
from rollout.schema import asked_of, groups_of, rewards_of, said_of, whole

BINS = 10
WIDTH = 40
SHOWN = 400  # characters of a completion


class RescoreError(ValueError):
    """The rollouts or the reward are not usable."""


def rescore(
    use: str,
    folder: str,
    num_steps: int,
    timeout_s: float,
    arguments: Sequence[str],
    env: Sequence[str] = (),
    memory: str | int = DEFAULT,
) -> str:
    """A printable report of the reward `use` over the newest `num_steps` step files of `folder`.

    arguments: KEY=VALUE each. env: names of variables that it may see. memory: the most that its process may hold.
    """
    files = ledger.steps(Path(folder))[-num_steps:]
    if not files:
        raise RescoreError(f"--rollouts: {folder} holds no step-*.parquet; give the rollouts folder of a run")
    groups = [whole(group) for file in files for group in groups_of(_read(file))]
    if not groups:
        raise RescoreError(f"--rollouts: the step files of {folder} hold no completions; give others")
    try:
        memory_bytes = size_of(memory)
        config = RewardConfig(use=use, timeout_s=timeout_s, args=dict(map(argument, arguments)), env=tuple(env))
        tried = try_rewards([config], group_of(groups[0]), memory_bytes)
        scores = asyncio.run(_score(config, groups, memory_bytes))
    except ValidationError as error:
        raise RescoreError("; ".join(sentences(error, RewardConfig))) from None
    except (RewardError, ConfigError) as error:
        raise RescoreError(str(error)) from None
    told = [*tried.notes, *prefilled_notes([config], group_of(groups[0]).prefilled)]
    return "\n".join([_report(use, files, groups, scores), *told])


def _read(file: Path) -> pa.Table:
    try:
        return ledger.read(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise RescoreError(f"--rollouts: {file} cannot be read: {reason}; take it away") from error


def size_of(text: str | int) -> int:
    """Bytes of what --memory says. Raises RescoreError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise RescoreError(f"--memory: {error}") from None


def argument(text: str) -> tuple[str, Any]:
    """Of --arg. Raises RescoreError."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise RescoreError(f"--arg: must be written KEY=VALUE, got {text!r}")
    try:
        return key, parse_value(value)
    except ConfigError as error:
        raise RescoreError(f"--arg: {error}") from None


async def _score(config: RewardConfig, groups: Sequence[pa.Table], memory_bytes: int) -> list[Scores]:
    async with RewardPool([config], memory_bytes=memory_bytes) as pool:
        return [await pool.score(group_of(rows)) for rows in groups]


def group_of(rows: pa.Table) -> Group:
    """What a reward function was given for this group."""
    problem = asked_of(rows.column("problem")[0].as_py())
    texts, ids, said = (rows.column(name).to_pylist() for name in ("completion", "completion_ids", "messages"))
    group = Group.of(problem.messages, texts, ids, problem.columns, problem.prefilled)
    played = [group.completions[i] if row is None else said_of(row) for i, row in enumerate(said)]
    return replace(group, completions=played)


def _report(use: str, files: Sequence[Path], groups: Sequence[pa.Table], scores: Sequence[Scores]) -> str:
    rewards = np.asarray([np.nan if r is None else r for s in scores for r in s.reward], dtype=float)
    status = Counter(word for s in scores for word in s.status)
    lines = [f"{use}: {len(rewards)} completions of {len(groups)} groups, {files[0].name} to {files[-1].name}"]
    lines += [f"outcomes   {', '.join(f'{name} {count}' for name, count in status.most_common())}"]
    lines += sorted({sentence for s in scores for sentence in s.failures})[:3]
    valid = rewards[~np.isnan(rewards)]
    if len(valid):
        flat = sum(np.ptp(r) == 0 for s in scores if len(r := [x for x in s.reward if x is not None]))
        lines += [f"mean {valid.mean():.4f}  std {valid.std():.4f}  min {valid.min():.4f}  max {valid.max():.4f}"]
        lines += [f"groups without a signal (all rewards equal): {flat} of {len(groups)}"]
        counts, edges = np.histogram(valid, bins=BINS)
        for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
            lines += [f"{low:9.3f} .. {high:9.3f} {count:6d} {'#' * round(WIDTH * count / counts.max())}"]
        lines += _examples(groups, rewards)
    recorded = np.concatenate([rewards_of(group) for group in groups])
    both = ~np.isnan(rewards) & ~np.isnan(recorded)
    if both.sum() > 1 and rewards[both].std() > 0 and recorded[both].std() > 0:
        lines += [f"correlation with the recorded reward: {np.corrcoef(rewards[both], recorded[both])[0, 1]:.3f}"]
    return "\n".join(lines)


def _examples(groups: Sequence[pa.Table], rewards: npt.NDArray[np.float64]) -> list[str]:
    """A completion with the highest and one with the lowest score, so that one sees what was scored."""
    texts = [text for group in groups for text in group.column("completion").to_pylist()]
    chosen = {"highest": int(np.nanargmax(rewards)), "lowest": int(np.nanargmin(rewards))}
    return [f"{name:8} {rewards[i]:.4f}  {escaped(texts[i])[:SHOWN]}" for name, i in chosen.items()]
