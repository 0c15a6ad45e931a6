"""The columns of a batch's groups that the learner needs, read out of their Arrow tables.

Letters: P prompt tokens, T tokens after the prompt, R completions and M their tokens in the optimizer batch, K
trajectories (of one completion each, but with env.history "template" several: rows of rollout.schema), C
completions and N the tokens of theirs that the policy sampled in a micro-batch. What an environment said between its
turns belongs to a completion, and to M, but is not predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollout.schema import check, lasts, masks_of, ragged, rewards_of, whole


@dataclass(frozen=True)
class Rows:
    """The completions of one optimizer batch, group after group; [M] arrays hold their tokens one after the other."""

    rewards: list[npt.NDArray[np.float64]]  # one [G] per group, nan where a reward function failed; K in all
    prompts: list[npt.NDArray[np.int32]]  # [R] views into the Arrow tables
    completions: npt.NDArray[np.int32]  # [M] token ids
    behavior: npt.NDArray[np.float32]  # [M] logprobs of the sampler, nats
    versions: npt.NDArray[np.int32]  # [M] policy version of each token
    lengths: npt.NDArray[np.int64]  # [R] T of each completion
    truncated: npt.NDArray[np.bool_]  # [R] whether it was cut at rollout.max_completion_length
    sampled: npt.NDArray[np.bool_] | None = None  # [M] whether the policy sampled the token; None: all of them
    # [M] of the turn that ends with the token; None: no turn has one
    turn_rewards: npt.NDArray[np.float64] | None = None
    owners: npt.NDArray[np.int64] | None = None  # [R] which of the K trajectories a row is of; None: each of its own

    def of_rows(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[K] of each trajectory -> [R] of each of its rows."""
        return values if self.owners is None else values[self.owners]

    def of_trajectories(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[R] of each row -> [K] the sum over a trajectory's rows."""
        if self.owners is None:
            return counts
        return np.bincount(self.owners, counts, minlength=sum(map(len, self.rewards))).astype(np.int64)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """[R] tokens of each completion that the policy sampled."""
        if self.sampled is None:
            return self.lengths
        total = np.concatenate([[0], np.cumsum(self.sampled)])
        return np.asarray(total[self.starts + self.lengths] - total[self.starts])

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[R] where in [M] each completion begins."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def highest_id(self) -> int:
        """Of all tokens; 0 if there are none."""
        return int(np.concatenate([[0], *self.prompts, self.completions]).max())

    def places(self, chosen: Sequence[int]) -> npt.NDArray[np.int64]:
        """[N] where in [M] the sampled tokens of the chosen completions stand, completion after completion."""
        every = ranges(self.starts[chosen], self.lengths[chosen])
        return every if self.sampled is None else every[self.sampled[every]]

    def inputs(self, chosen: Sequence[int]) -> npt.NDArray[np.int32]:
        """All their tokens but the last of each, which predicts nothing."""
        return self.completions[ranges(self.starts[chosen], self.lengths[chosen] - 1)]


def read(groups: Sequence[pa.Table]) -> Rows:
    """The columns that the learner needs.

    Raises:
        ValueError: a table is not of rollout.schema, a prompt is empty, the lists of one completion differ in length,
            or a logprob is not finite (masked as a ratio, it would go unseen).
    """
    tables = [check(group) for group in groups]
    kinds = {"completion_ids": np.int32, "behavior_logprobs": np.float32, "token_versions": np.int32}
    sizes = [
        _joined([pc.list_value_length(table.column(name)).to_numpy() for table in tables], np.int64) for name in kinds
    ]
    prompts = [prompt for table in tables for prompt in ragged(table, "prompt_ids")]
    empty = np.flatnonzero([len(prompt) == 0 for prompt in prompts])
    if len(empty):
        raise ValueError(f"prompt_ids: must hold at least one token, row {empty[0]} is empty; check data.prompt")
    odd = np.flatnonzero((sizes[0] != sizes[1]) | (sizes[0] != sizes[2]))
    if len(odd):
        raise ValueError(
            f"completion_ids, behavior_logprobs, token_versions: must have one length per row, row {odd[0]} has "
            f"{', '.join(str(size[odd[0]]) for size in sizes)}; re-record these rollouts"
        )
    completions, behavior, versions = (
        _joined([chunk.flatten().to_numpy() for table in tables for chunk in table.column(name).chunks], dtype)
        for name, dtype in kinds.items()
    )
    broken = np.flatnonzero(~np.isfinite(behavior))
    if len(broken):
        row = np.searchsorted(np.cumsum(sizes[0]), broken[0], side="right")
        raise ValueError(
            f"behavior_logprobs: must be finite, row {row} has {behavior[broken[0]]}; the generator is broken"
        )
    rewards, sampled = [rewards_of(whole(table)) for table in tables], _sampled(tables, sizes[0])
    last = _joined([lasts(table) for table in tables], np.bool_)
    cut = _joined([pc.equal(table.column("finish_reason"), "length").to_numpy() for table in tables], np.bool_)
    of_turns = _turn_rewards(tables, sizes[0], sampled)
    owners = None if last.all() else np.cumsum(last) - last
    return Rows(rewards, prompts, completions, behavior, versions, sizes[0], cut, sampled, of_turns, owners)


def _sampled(tables: Sequence[pa.Table], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
    """[M] loss_mask of all rows; None where no row has one."""
    if all(table.column("loss_mask").null_count == len(table) for table in tables):
        return None
    masks = [mask for table in tables for mask in masks_of(table)]
    odd = [row for row, (mask, length) in enumerate(zip(masks, lengths, strict=True)) if len(mask) != length]
    if odd:
        raise ValueError(
            f"loss_mask: must have one value per token, row {odd[0]} has {len(masks[odd[0]])} for {lengths[odd[0]]}; "
            "re-record these rollouts"
        )
    return np.concatenate(masks)


def _turn_rewards(
    tables: Sequence[pa.Table], lengths: npt.NDArray[np.int64], sampled: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.float64] | None:
    """[M] each turn's reward at its last token; None where no turn has one."""
    if all(pc.sum(pc.list_value_length(table.column("turns"))).as_py() == 0 for table in tables):
        return None
    starts, rewards = np.cumsum(lengths) - lengths, np.zeros(int(lengths.sum()))
    rows = (row for table in tables for row in table.column("turns").to_pylist())
    found = [(at, turn) for at, turns in enumerate(rows) for turn in turns if turn["reward"] is not None]
    for at, turn in found:
        last = starts[at] + turn["stop"] - 1
        if not turn["start"] < turn["stop"] <= lengths[at] or (sampled is not None and not sampled[last]):
            raise ValueError(
                f"turns: must end with a token that the policy sampled, one of row {at} is [{turn['start']}, "
                f"{turn['stop']}) of {lengths[at]} tokens; re-record these rollouts"
            )
        rewards[last] += turn["reward"]
    return rewards if found else None


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])


def ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[sum of lengths] start, start + 1, … of each range, range after range."""
    stops = np.cumsum(lengths)
    return np.asarray(np.arange(lengths.sum()) + np.repeat(starts - (stops - lengths), lengths))
