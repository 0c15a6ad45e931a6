"""The columns of a batch's groups that the learner needs, read out of their Arrow tables.

Letters: P prompt tokens, T completion tokens, R completions and M their tokens in the optimizer batch, C completions
and N their tokens in a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollout.schema import check, ragged, rewards_of


@dataclass(frozen=True)
class Rows:
    """The completions of one optimizer batch, group after group; [M] arrays hold their tokens one after the other."""

    rewards: list[npt.NDArray[np.float64]]  # one [G] per group, nan where a reward function failed
    prompts: list[npt.NDArray[np.int32]]  # [R] views into the Arrow tables
    completions: npt.NDArray[np.int32]  # [M] token ids
    behavior: npt.NDArray[np.float32]  # [M] logprobs of the sampler, nats
    versions: npt.NDArray[np.int32]  # [M] policy version of each token
    lengths: npt.NDArray[np.int64]  # [R] T of each completion
    truncated: npt.NDArray[np.bool_]  # [R] whether it was cut at rollout.max_completion_length

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[R] where in [M] each completion begins."""
        return np.cumsum(self.lengths) - self.lengths

    def places(self, chosen: Sequence[int]) -> npt.NDArray[np.int64]:
        """[N] where in [M] the tokens of the chosen completions stand, completion after completion."""
        return ranges(self.starts[chosen], self.lengths[chosen])

    def inputs(self, chosen: Sequence[int]) -> npt.NDArray[np.int32]:
        """[N - C] their tokens but the last of each, which predicts nothing."""
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
    cut = _joined([pc.equal(table.column("finish_reason"), "length").to_numpy() for table in tables], np.bool_)
    return Rows([rewards_of(table) for table in tables], prompts, completions, behavior, versions, sizes[0], cut)


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])


def ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[sum of lengths] start, start + 1, … of each range, range after range."""
    stops = np.cumsum(lengths)
    return np.asarray(np.arange(lengths.sum()) + np.repeat(starts - (stops - lengths), lengths))
