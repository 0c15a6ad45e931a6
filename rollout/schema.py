"""THE schema of a rollout: one row is one trajectory, one table is one group. Facts only, nothing of GRPO.

With env.history "template" a trajectory may have several rows, one after the other, with one `sample`: see `whole`.

A trajectory is what follows a prompt: a single completion, or the turns of the policy with the observations of an
environment or of tools between them. Letters: G trajectories per group, P prompt tokens, T tokens after the prompt.
A table (never a record batch, whose slices ship the whole parent) travels by value and is read as zero-copy views; its
schema, which both ends have, does not travel (`_sent`).
"""

import copyreg
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cluster.reading import json_value
from rewards.base import counts
from rewards.pool import Scores
from rollout.types import Completion

VERSION = "4"


TURN = pa.struct(
    [
        pa.field("start", pa.int32(), nullable=False),  # tokens [start, stop) of completion_ids
        pa.field("stop", pa.int32(), nullable=False),
        pa.field("reward", pa.float32()),  # of this turn; null: none
        pa.field("generate_ms", pa.float32(), nullable=False),
        pa.field("env_ms", pa.float32(), nullable=False),  # that the environment took to answer it
        pa.field("calls", pa.int32(), nullable=False),  # tool calls that could be read
        pa.field("malformed", pa.int32(), nullable=False),  # and that could not
    ]
)
LOGGED = pa.struct(  # a number of the whole group, or a text of this completion
    [pa.field("name", pa.string(), nullable=False), pa.field("value", pa.float64()), pa.field("text", pa.string())]
)
PART = pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("value", pa.float32())])

SCHEMA = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),  # epoch-position-attempt: unique in the run
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),  # place in the seeded problem stream, counted over epochs
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),  # index in the group
        pa.field(
            "problem", pa.string(), nullable=False
        ),  # JSON: {"messages": [...], "columns": {...}, perhaps "prefilled"}
        pa.field("completion", pa.string(), nullable=False),  # decoded text, for people and reward functions
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),  # [P] what the engine was given
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),  # [T] what followed, as sampled or observed
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),  # [T] nats; of an observation 0
        pa.field("token_versions", pa.list_(pa.int32()), nullable=False),  # [T] policy version of each token
        pa.field("loss_mask", pa.list_(pa.bool_())),  # [T] true where the policy sampled; null: everywhere
        pa.field(
            "turns", pa.list_(pa.field("item", TURN, nullable=False)), nullable=False
        ),  # [] of a single completion
        pa.field("policy_version_min", pa.int64(), nullable=False),
        pa.field("policy_version_max", pa.int64(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),  # stop, length, or an outcome of rollout.env
        pa.field("reward", pa.float32()),  # weighted sum; null if a reward function failed, or none scores it
        pa.field("reward_parts", pa.list_(PART), nullable=False),  # each function's own number; see parts_of
        pa.field("reward_status", pa.string(), nullable=False),  # ok, none, error, timeout, nan, environment
        pa.field("reward_error", pa.string()),  # what failed, in words; null where nothing did
        pa.field("reward_ms", pa.float32(), nullable=False),
        pa.field("generate_ms", pa.float32(), nullable=False),
        pa.field("worker", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("messages", pa.string()),  # JSON list: the conversation after the prompt; null of a single completion
        pa.field("env_metrics", pa.list_(PART), nullable=False),  # numbers that the environment gave, summed over turns
        pa.field("logged", pa.list_(LOGGED), nullable=False),  # by reward functions (rewards.base)
        pa.field("created_at", pa.float64(), nullable=False),  # seconds since the epoch
    ],
    metadata={"gleaner.schema": VERSION},
)


def _received(batch: pa.Buffer) -> pa.Table:
    return pa.Table.from_batches([pa.ipc.read_record_batch(batch, SCHEMA)])


def _sent(table: pa.Table) -> tuple[Any, ...]:
    """How pickle, and so Ray, sends a table: a group as one Arrow IPC message without the schema. pyarrow's own way
    writes every type of every column into each group: 6 kB, a quarter of a group with short completions."""
    if table.num_rows and table.schema.equals(SCHEMA, check_metadata=True):
        return _received, (table.combine_chunks().to_batches()[0].serialize(),)
    own: tuple[Any, ...] = table.__reduce__()
    return own


copyreg.pickle(pa.Table, _sent)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of the stream, tokenised once.

    Example: Problem(id="train-17", messages=({"role": "user", "content": "2+2="},), columns={"answer": "4"},
    prompt_ids=(5, 81, 14), position=17, epoch=0)
    """

    id: str
    messages: tuple[dict[str, str], ...] | str  # chat messages, or plain text
    columns: dict[str, Any]
    prompt_ids: tuple[int, ...]
    position: int
    epoch: int
    prefilled: str = ""  # the opening tag that the prompt ends in (rewards.base.opening_at_end), once it was rendered

    def group_id(self, attempt: int) -> str:
        """Unique in the run: epoch, position in the stream, and attempt."""
        return f"{self.epoch}-{self.position}-{attempt}"

    def to_json(self) -> str:
        """The `problem` column: what a reward function needs to score the group again."""
        opened = {"prefilled": self.prefilled} if self.prefilled else {}
        return json.dumps({"messages": self.messages, "columns": self.columns, **opened}, default=str)


def build_group(columns: dict[str, Sequence[Any]]) -> pa.Table:
    """Columns of one group (all of length G) -> table. A missing, unknown or ill-typed column raises."""
    if set(columns) != set(SCHEMA.names):
        raise ValueError(
            f"rollout group: columns must be those of the schema; missing {sorted(set(SCHEMA.names) - set(columns))}, "
            f"unknown {sorted(set(columns) - set(SCHEMA.names))}"
        )
    return check(pa.table(columns, schema=SCHEMA))


def check(table: pa.Table) -> pa.Table:
    """The table itself if it is a rollout table of this version and whole; else ValueError with the difference."""
    found = (table.schema.metadata or {}).get(b"gleaner.schema", b"none").decode()
    if found != VERSION:
        raise ValueError(
            f"rollout table: schema version must be {VERSION}, got {found}; rollout.ledger reads "
            "those of versions 1 to 3, re-record others"
        )
    if not table.schema.equals(SCHEMA):
        raise ValueError(f"rollout table: fields differ from schema version {VERSION}: {table.schema}")
    for name in SCHEMA.names:
        if not SCHEMA.field(name).nullable and table.column(name).null_count:
            raise ValueError(f"rollout table: column {name} must not hold nulls, got {table.column(name).null_count}")
    return table


def check_rows(table: pa.Table) -> pa.Table:
    """The table itself if each row is whole, as one that somebody else has written may not be: no null within a list,
    as many values as tokens, texts of JSON as they must be. Else ValueError."""
    for field in SCHEMA:
        if pa.types.is_list(field.type):
            inner = [chunk.flatten() for chunk in table.column(field.name).chunks]
            parts = [part for one in inner for part in (one, *_named(one))]
            if any(part.null_count for part in parts):
                raise ValueError(f"column {field.name} must hold no nulls in its lists")
    tokens = pc.list_value_length(table.column("completion_ids"))
    for name in ("behavior_logprobs", "token_versions", "loss_mask"):
        if pc.any(pc.not_equal(pc.list_value_length(table.column(name)), tokens)).as_py():
            raise ValueError(f"column {name} must hold a value for each of completion_ids")
    for text in table.column("problem").unique().to_pylist():
        asked_of(text)
    for text in table.column("messages").unique().to_pylist():
        said_of(text)
    return table


def _named(values: pa.Array) -> list[pa.Array]:
    """The names of parts, which must be there."""
    named = pa.types.is_struct(values.type) and values.type.get_field_index("name") >= 0
    return [values.field("name")] if named else []


class Asked(NamedTuple):
    """What the column `problem` says. messages: of a chat, or plain text."""

    messages: list[dict[str, Any]] | str
    columns: dict[str, Any]
    prefilled: str


def asked_of(text: str) -> Asked:
    """Of a row's `problem`. Raises ValueError."""
    found = json_value(text, "column problem")
    if not isinstance(found, dict):
        raise ValueError(f"column problem must hold a mapping, got {type(found).__name__}")
    messages: Any = found.get("messages")
    columns, prefilled = found.get("columns"), found.get("prefilled", "")
    if not isinstance(messages, str) and not _are_messages(messages):
        raise ValueError("column problem must have messages: a text, or a list of mappings")
    if not isinstance(columns, dict) or not isinstance(prefilled, str):
        raise ValueError("column problem must have columns, a mapping, and may have prefilled, a text")
    return Asked(messages, columns, prefilled)


def said_of(text: str | None) -> list[dict[str, Any]] | None:
    """Of a row's `messages`; None of a single completion. Raises ValueError."""
    if text is None:
        return None
    found: list[dict[str, Any]] = json_value(text, "column messages")
    if not _are_messages(found):
        raise ValueError("column messages must hold a list of mappings")
    return found


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def ragged(table: pa.Table, name: str) -> list[npt.NDArray[Any]]:
    """One zero-copy numpy view per row of a list column, e.g. completion_ids -> G arrays of [T] (read-only)."""
    views: list[npt.NDArray[Any]] = []
    for chunk in table.column(name).chunks:
        values = chunk.values.to_numpy(zero_copy_only=True)
        offsets = chunk.offsets.to_numpy(zero_copy_only=True)
        views += [values[a:b] for a, b in pairwise(offsets)]
    return views


def group_position(table: pa.Table) -> tuple[int, int]:
    """(position in the stream, attempt) of the group."""
    return int(table.column("position")[0].as_py()), int(table.column("attempt")[0].as_py())


def rewards_of(table: pa.Table) -> npt.NDArray[np.float64]:
    """[G] rewards; nan where a reward function failed, or none scores it."""
    values = table.column("reward").to_numpy(zero_copy_only=False)
    return np.asarray(values, dtype=np.float64)


def failed(table: pa.Table) -> npt.NDArray[np.bool_]:
    """[G] True where a reward function failed. A completion that no function scores has not failed."""
    return np.asarray([status not in ("ok", "none") for status in table.column("reward_status").to_pylist()], bool)


def parts_of(table: pa.Table) -> list[dict[str, float | None]]:
    """G dictionaries: reward function -> its own number, nan where it failed, None where it gives none."""
    return [{part["name"]: part["value"] for part in row} for row in table.column("reward_parts").to_pylist()]


def whole(table: pa.Table) -> pa.Table:
    """One row for each trajectory, its last, which says how it ended: what rewards and outcomes are counted by."""
    return table if (last := lasts(table)).all() else table.filter(pa.array(last))


def lasts(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Of each row, whether it is the last of its trajectory."""
    sample = table.column("sample").to_numpy()
    same = sample[1:] == sample[:-1]
    if same.any():  # groups of one sample follow each other in an evaluation
        group = np.asarray(table.column("group_id").to_pylist())
        same &= group[1:] == group[:-1]
    return np.append(~same, True)


def groups_of(table: pa.Table) -> list[pa.Table]:
    """The groups that follow each other in a table, as views of it. Of a step file they are in the order in which the
    learner got them."""
    ids = table.column("group_id").to_pylist()
    starts = [i for i, own in enumerate(ids) if i == 0 or own != ids[i - 1]]
    return [table.slice(a, b - a) for a, b in pairwise([*starts, len(ids)])]


def masks_of(table: pa.Table) -> list[npt.NDArray[np.bool_]]:
    """One [T] array per row, true where the policy sampled the token."""
    lengths = pc.list_value_length(table.column("completion_ids")).to_pylist()
    rows = zip(table.column("loss_mask").to_pylist(), lengths, strict=True)
    return [np.ones(length, np.bool_) if mask is None else np.asarray(mask, np.bool_) for mask, length in rows]


def sampled_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    """[G] tokens of each trajectory that the policy sampled, in all of its rows: no observation is among them."""
    own = np.array([np.count_nonzero(mask) for mask in masks_of(table)], np.int64)
    return np.add.reduceat(own, _firsts(table))


def oldest_versions(table: pa.Table) -> npt.NDArray[np.int64]:
    """[G] policy version of each trajectory's oldest token."""
    return np.minimum.reduceat(table.column("policy_version_min").to_numpy(), _firsts(table))


def _firsts(table: pa.Table) -> npt.NDArray[np.intp]:
    """Where each trajectory begins."""
    return np.flatnonzero(np.append(True, lasts(table)[:-1]))


# What the generator knows of a group, in the columns above: everything but text and rewards.


class Origin(NamedTuple):
    """How a group came about. seed: None counts as -1. generate_ms: milliseconds that its sampling took. version: of
    the newest policy, which counts for a completion without a token."""

    run_id: str
    worker: int
    attempt: int
    seed: int | None
    generate_ms: float
    version: int = 0


def facts_of(problem: Problem, completions: Sequence[Completion], by: Origin) -> dict[str, Sequence[Any]]:
    """Schema column -> G values, one for each completion of the group."""
    size = len(completions)
    same: dict[str, Any] = {
        "run_id": by.run_id,
        "group_id": problem.group_id(by.attempt),
        "problem_id": problem.id,
        "epoch": problem.epoch,
        "position": problem.position,
        "attempt": by.attempt,
        "problem": problem.to_json(),
        "prompt_ids": list(problem.prompt_ids),
        "generate_ms": by.generate_ms,
        "worker": by.worker,
        "seed": -1 if by.seed is None else by.seed,
        "created_at": time.time(),
    }
    facts: dict[str, Sequence[Any]] = {key: [value] * size for key, value in same.items()}
    return facts | {
        "loss_mask": [None] * size,
        "turns": [[]] * size,
        "messages": [None] * size,
        "env_metrics": [[]] * size,
        "reward_error": [None] * size,
        "logged": [[]] * size,
        "sample": list(range(size)),
        "completion_ids": [c.token_ids for c in completions],
        "behavior_logprobs": [c.logprobs for c in completions],
        "token_versions": [c.versions for c in completions],
        "policy_version_min": [_least(c.versions, by.version) for c in completions],
        "policy_version_max": [-_least(-c.versions, -by.version) for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
    }


def _least(versions: npt.NDArray[np.int32], default: int) -> int:
    return int(versions.min()) if len(versions) else default


# Rewards for rows that rollout workers have scored: a further part, which a reward model gives, or others in their
# place.

KEYS = ("reward", "reward_status", "reward_parts", "reward_error")


def with_scores(rows: pa.Table, scores: Scores) -> pa.Table:
    """The rows of a group of single completions, with these rewards in the place of what they had."""
    parts = [[{"name": name, "value": values[i]} for name, values in scores.parts.items()] for i in range(len(rows))]
    rows = _with(rows, dict(zip(KEYS, (scores.reward, scores.status, parts, scores.errors), strict=True)))
    logged = [[dict(zip(("name", "value", "text"), one, strict=True)) for one in row] for row in scores.logged]
    return _with(rows, {"reward_ms": [scores.ms] * len(rows), "logged": logged})


def with_part(rows: pa.Table, name: str, weight: float, scores: Sequence[float]) -> pa.Table:
    """The rows with `scores` as the part `name` of their rewards, which grow by weight * score.

    As among reward functions (rewards.pool): a row that failed stays without a reward; one that no function scored has
    this one's alone; and a score that does not count (rewards.base) fails its row, with status nan.

    Raises ValueError: an environment has given a part of that name.
    """
    rewards, status, parts, errors = (rows.column(key).to_pylist() for key in KEYS)
    if any(part["name"] == name for row in parts for part in row):
        raise ValueError(
            f"rewards: each part must have a name of its own, and the environment gives {name} as well; set "
            "rewards.<i>.name"
        )
    summed = [
        _summed(reward, said, own, error, name, weight, score)
        for reward, said, own, error, score in zip(rewards, status, parts, errors, scores, strict=True)
    ]
    return _with(rows, dict(zip(KEYS, zip(*summed, strict=True), strict=True)))


def _with(rows: pa.Table, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    for key, values in columns.items():
        field = SCHEMA.field(key)
        rows = rows.set_column(SCHEMA.get_field_index(key), field, pa.array(values, field.type))
    return rows


def _summed(
    reward: float | None,
    status: str,
    parts: list[dict[str, Any]],
    error: str | None,
    name: str,
    weight: float,
    score: float,
) -> tuple[float | None, str, list[dict[str, Any]], str | None]:
    parts = [*parts, {"name": name, "value": score if counts(score) else math.nan}]
    if status not in ("ok", "none"):
        return None, status, parts, error
    if not counts(score):
        return None, "nan", parts, f"reward {name!r}: nan: the reward model gave {score}, which is no finite number."
    return (reward or 0.0) + weight * score, "ok", parts, error
