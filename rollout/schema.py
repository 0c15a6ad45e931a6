"""Defines the Arrow table that carries a group from a rollout worker to the learner, and reads and writes its columns.

A row is a trajectory, a table is a group. A row holds facts only, nothing of GRPO: the learner computes advantages.

A trajectory is what follows a prompt: a single completion, or the turns of the policy with the observations of an
environment or of tools between them. With env.history "template" a trajectory may take several consecutive rows, which
have the same value of `sample`; `whole` keeps the last row of each. Letters: G trajectories per group, P prompt tokens,
T tokens after the prompt.

Tables are sent by value and read as zero-copy views. Record batches are not sent, since a slice of one ships its whole
parent. The schema is not sent with a table, because sender and receiver both have it (`_sent`).
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

VERSION = "7"


TURN = pa.struct(
    [
        pa.field("start", pa.int32(), nullable=False),  # tokens [start, stop) of completion_ids
        pa.field("stop", pa.int32(), nullable=False),
        pa.field("reward", pa.float32()),  # the environment's reward for this turn; null: it gave none
        pa.field("generate_ms", pa.float32(), nullable=False),
        pa.field("env_ms", pa.float32(), nullable=False),  # time that the environment took to answer the turn
        pa.field("calls", pa.int32(), nullable=False),  # tool calls that could be parsed
        pa.field("malformed", pa.int32(), nullable=False),  # tool calls that could not be parsed
    ]
)
LOGGED = pa.struct(  # what a reward function logged: a number for the whole group, or a text for this completion
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
        pa.field("sample", pa.int32(), nullable=False),  # index of the trajectory in its group
        pa.field(
            "problem", pa.string(), nullable=False
        ),  # JSON: {"messages": [...], "columns": {...}, perhaps "prefilled"}
        pa.field("completion", pa.string(), nullable=False),  # decoded text, for people and reward functions
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),  # [P] tokens that the engine was given
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),  # [T] sampled tokens and observations
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),  # [T] nats; 0 for observations
        pa.field("token_versions", pa.list_(pa.int32()), nullable=False),  # [T] policy version of each token
        pa.field("loss_mask", pa.list_(pa.bool_())),  # [T] true where the policy sampled; null: everywhere
        pa.field(
            "turns", pa.list_(pa.field("item", TURN, nullable=False)), nullable=False
        ),  # [] for a single completion
        pa.field("policy_version_min", pa.int64(), nullable=False),
        pa.field("policy_version_max", pa.int64(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),  # stop, length, or an outcome of rollout.env
        pa.field("reward", pa.float32()),  # weighted sum; null if a reward function failed, or no function scores
        pa.field("reward_parts", pa.list_(PART), nullable=False),  # each reward function's own number; see parts_of
        pa.field("reward_status", pa.string(), nullable=False),  # ok, none, error, timeout, nan, environment
        pa.field("reward_error", pa.string()),  # message of the failed reward function; null where none failed
        pa.field("reward_ms", pa.float32(), nullable=False),
        pa.field("generate_ms", pa.float32(), nullable=False),
        pa.field("worker", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("messages", pa.string()),  # JSON list: conversation after the prompt; null for a single completion
        pa.field("env_metrics", pa.list_(PART), nullable=False),  # numbers that the environment gave, summed over turns
        pa.field("logged", pa.list_(LOGGED), nullable=False),  # what reward functions logged (rewards.base)
        pa.field("created_at", pa.float64(), nullable=False),  # seconds since the epoch
        # int16 numbers [P + T - 1, layers, k] as bytes: the experts of each token that the generator computed, -1 where
        # that is not known; null: not recorded
        pa.field("routed_experts", pa.binary()),
        # the prompt that a teacher is given in place of prompt_ids (data.teacher); null: the same
        pa.field("teacher_prompt_ids", pa.list_(pa.int32())),
        # logprobs under model.teacher; null: there is no such teacher
        pa.field("teacher_logprobs", pa.list_(pa.float32())),  # [T] nats, of completion_ids; 0 for observations
        # the k tokens that it finds likeliest at each place (learner.loss.teacher_top), row-major, the likeliest first;
        # null where k is 0
        pa.field("teacher_top_ids", pa.list_(pa.int32())),  # [T * k]
        pa.field("teacher_top_logprobs", pa.list_(pa.float32())),  # [T * k] nats
    ],
    metadata={"gleaner.schema": VERSION},
)


def _received(batch: pa.Buffer) -> pa.Table:
    return pa.Table.from_batches([pa.ipc.read_record_batch(batch, SCHEMA)])


def _sent(table: pa.Table) -> tuple[Any, ...]:
    """Has pickle, which Ray uses, send a group as one Arrow IPC message without the schema; see copyreg.

    pyarrow's own way writes every column's type into each group: 6 kB, a quarter of a group with short completions.
    """
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
    columns: dict[str, Any]  # columns of the data set that reward functions are given
    prompt_ids: tuple[int, ...]
    position: int  # in the stream, counted over epochs
    epoch: int
    prefilled: str = ""  # the opening tag that the rendered prompt ends in (rewards.base.opening_at_end)
    teacher_ids: tuple[int, ...] | None = None  # the prompt that a teacher is given (data.teacher); None: the same

    def group_id(self, attempt: int) -> str:
        """The group's name, unique in the run: epoch-position-attempt."""
        return f"{self.epoch}-{self.position}-{attempt}"

    def to_json(self) -> str:
        """The value of the column `problem`: all that a reward function needs to score the group again."""
        opened = {"prefilled": self.prefilled} if self.prefilled else {}
        return json.dumps({"messages": self.messages, "columns": self.columns, **opened}, default=str)


def build_group(columns: dict[str, Sequence[Any]]) -> pa.Table:
    """The table of one group from its columns, each of length G. A missing, unknown or ill-typed column raises."""
    if set(columns) != set(SCHEMA.names):
        raise ValueError(
            f"rollout group: columns must be those of the schema; missing {sorted(set(SCHEMA.names) - set(columns))}, "
            f"unknown {sorted(set(columns) - set(SCHEMA.names))}"
        )
    return check(pa.table(columns, schema=SCHEMA))


def check(table: pa.Table) -> pa.Table:
    """Returns the table if it has this version's schema, and no nulls where none are allowed; else ValueError."""
    found = (table.schema.metadata or {}).get(b"gleaner.schema", b"none").decode()
    if found != VERSION:
        raise ValueError(
            f"rollout table: schema version must be {VERSION}, got {found}; rollout.ledger reads "
            "those of versions 1 to 6, re-record others"
        )
    if not table.schema.equals(SCHEMA):
        raise ValueError(f"rollout table: fields differ from schema version {VERSION}: {table.schema}")
    for name in SCHEMA.names:
        if not SCHEMA.field(name).nullable and table.column(name).null_count:
            raise ValueError(f"rollout table: column {name} must not hold nulls, got {table.column(name).null_count}")
    return table


def check_rows(table: pa.Table) -> pa.Table:
    """Returns the table if each row is well formed, which a table from a user's file may not be; else ValueError.

    Lists must hold no nulls, per-token columns as many values as there are tokens, JSON columns what they must.
    """
    for field in SCHEMA:
        if pa.types.is_list(field.type):
            inner = [chunk.flatten() for chunk in table.column(field.name).chunks]
            parts = [part for one in inner for part in (one, *_named(one))]
            if any(part.null_count for part in parts):
                raise ValueError(f"column {field.name} must hold no nulls in its lists")
    tokens = pc.list_value_length(table.column("completion_ids"))
    for name in ("behavior_logprobs", "token_versions", "loss_mask", "teacher_logprobs"):
        if pc.any(pc.not_equal(pc.list_value_length(table.column(name)), tokens)).as_py():
            raise ValueError(f"column {name} must hold a value for each of completion_ids")
    _check_top(table, tokens.to_pylist())
    experts_of(table)
    for text in table.column("problem").unique().to_pylist():
        asked_of(text)
    for text in table.column("messages").unique().to_pylist():
        said_of(text)
    return table


def _check_top(table: pa.Table, tokens: Sequence[int]) -> None:
    """Raises ValueError where the teacher's likeliest tokens are not as many for each token, with a logprob each."""
    ids, logs = (pc.list_value_length(table.column(f"teacher_top_{name}")).to_pylist() for name in ("ids", "logprobs"))
    alone = pc.is_null(table.column("teacher_logprobs")).to_pylist()
    for row, (length, count, other, missing) in enumerate(zip(tokens, ids, logs, alone, strict=True)):
        if count != other:
            raise ValueError(
                f"columns teacher_top_ids and teacher_top_logprobs must be of one length, row {row} has {count} "
                f"and {other}"
            )
        if count is None:
            continue
        if missing:
            raise ValueError(f"column teacher_top_ids must come with teacher_logprobs, row {row} has none")
        if count % length if length else count:
            raise ValueError(
                f"column teacher_top_ids must hold as many for each of {length} tokens, row {row} has {count}"
            )


def _named(values: pa.Array) -> list[pa.Array]:
    """The field `name` of structs, which must hold no nulls though other fields may."""
    named = pa.types.is_struct(values.type) and values.type.get_field_index("name") >= 0
    return [values.field("name")] if named else []


class RecordedProblem(NamedTuple):
    """The parsed value of the column `problem`. messages: chat messages, or plain text."""

    messages: list[dict[str, Any]] | str
    columns: dict[str, Any]
    prefilled: str


def asked_of(text: str) -> RecordedProblem:
    """Parses the value of a row's column `problem`. Raises ValueError."""
    found = json_value(text, "column problem")
    if not isinstance(found, dict):
        raise ValueError(f"column problem must hold a mapping, got {type(found).__name__}")
    messages: Any = found.get("messages")
    columns, prefilled = found.get("columns"), found.get("prefilled", "")
    if not isinstance(messages, str) and not _are_messages(messages):
        raise ValueError("column problem must have messages: a text, or a list of mappings")
    if not isinstance(columns, dict) or not isinstance(prefilled, str):
        raise ValueError("column problem must have columns, a mapping, and may have prefilled, a text")
    return RecordedProblem(messages, columns, prefilled)


def said_of(text: str | None) -> list[dict[str, Any]] | None:
    """Parses the value of a row's column `messages`; None for a single completion. Raises ValueError."""
    if text is None:
        return None
    found: list[dict[str, Any]] = json_value(text, "column messages")
    if not _are_messages(found):
        raise ValueError("column messages must hold a list of mappings")
    return found


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def ragged(table: pa.Table, name: str) -> list[npt.NDArray[Any]]:
    """One read-only, zero-copy numpy view per row of a list column, e.g. of completion_ids G arrays of shape [T]."""
    views: list[npt.NDArray[Any]] = []
    for chunk in table.column(name).chunks:
        values = chunk.values.to_numpy(zero_copy_only=True)
        offsets = chunk.offsets.to_numpy(zero_copy_only=True)
        views += [values[a:b] for a, b in pairwise(offsets)]
    return views


def group_position(table: pa.Table) -> tuple[int, int]:
    """Returns (position in the stream, attempt) of the group."""
    return int(table.column("position")[0].as_py()), int(table.column("attempt")[0].as_py())


def rewards_of(table: pa.Table) -> npt.NDArray[np.float64]:
    """[G] rewards; nan where a reward function failed, or no function scores the trajectory."""
    values = table.column("reward").to_numpy(zero_copy_only=False)
    return np.asarray(values, dtype=np.float64)


def failed(table: pa.Table) -> npt.NDArray[np.bool_]:
    """[G] True where a reward function failed. A completion that no function scores has not failed."""
    return np.asarray([status not in ("ok", "none") for status in table.column("reward_status").to_pylist()], bool)


def parts_of(table: pa.Table) -> list[dict[str, float | None]]:
    """G dictionaries: name of a reward function -> its number, nan where it failed, None where it returned None."""
    return [{part["name"]: part["value"] for part in row} for row in table.column("reward_parts").to_pylist()]


def whole(table: pa.Table) -> pa.Table:
    """The last row of each trajectory, which says how the trajectory ended: rewards and outcomes are counted by it."""
    return table if (last := lasts(table)).all() else table.filter(pa.array(last))


def lasts(table: pa.Table) -> npt.NDArray[np.bool_]:
    """[rows] True where a row is the last of its trajectory."""
    sample = table.column("sample").to_numpy()
    same = sample[1:] == sample[:-1]
    if same.any():  # two rows may also be groups of a single sample each, as in an evaluation
        group = np.asarray(table.column("group_id").to_pylist())
        same &= group[1:] == group[:-1]
    return np.append(~same, True)


def groups_of(table: pa.Table) -> list[pa.Table]:
    """The groups in a table, as views of it, in the table's order; for a step's file that is the learner's order."""
    ids = table.column("group_id").to_pylist()
    starts = [i for i, own in enumerate(ids) if i == 0 or own != ids[i - 1]]
    return [table.slice(a, b - a) for a, b in pairwise([*starts, len(ids)])]


def masks_of(table: pa.Table) -> list[npt.NDArray[np.bool_]]:
    """One [T] array per row, true where the policy sampled the token."""
    lengths = pc.list_value_length(table.column("completion_ids")).to_pylist()
    rows = zip(table.column("loss_mask").to_pylist(), lengths, strict=True)
    return [np.ones(length, np.bool_) if mask is None else np.asarray(mask, np.bool_) for mask, length in rows]


def experts_of(table: pa.Table) -> list[npt.NDArray[np.int16] | None]:
    """One read-only [P + T - 1, layers * k] array per row, of the column routed_experts; None where it is null. Raises
    ValueError for a row whose bytes are not so many numbers for each token."""
    prompts, lengths = (
        pc.list_value_length(table.column(name)).to_pylist() for name in ("prompt_ids", "completion_ids")
    )
    found: list[npt.NDArray[np.int16] | None] = []
    for row, (cell, prompt, length) in enumerate(zip(table.column("routed_experts"), prompts, lengths, strict=True)):
        content, tokens = cell.as_buffer(), prompt + length - 1
        if content is None or tokens == 0:
            found.append(None)
        elif content.size == 0 or content.size % (2 * tokens):
            raise ValueError(
                f"routed_experts: must hold int16 numbers for each of {tokens} tokens, row {row} has {content.size} "
                "bytes; re-record these rollouts"
            )
        else:
            found.append(np.frombuffer(content, np.int16).reshape(tokens, -1))
    return found


class Teaching(NamedTuple):
    """The logprobs of model.teacher for the tokens of rows, row after row, M tokens in all."""

    logprobs: npt.NDArray[np.float32]  # [M] of completion_ids, nats; 0 for observations
    top_ids: npt.NDArray[np.int32]  # [M, k] its likeliest tokens in the place of each, the likeliest first
    top_logprobs: npt.NDArray[np.float32]  # [M, k] nats


def teaching_of(tables: Sequence[pa.Table], top: int) -> Teaching:
    """Reads the logprobs of model.teacher, of its likeliest tokens the first `top`. Raises ValueError for rows that
    lack them, or a logprob that is not finite."""
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    logprobs = _per_token(table, "teacher_logprobs", 1)
    ids, logs = (_per_token(table, f"teacher_top_{name}", top) for name in ("ids", "logprobs"))
    if not (np.isfinite(logprobs).all() and np.isfinite(logs).all()):
        raise ValueError("teacher_logprobs, teacher_top_logprobs: must be finite; the teacher is broken")
    return Teaching(logprobs[:, 0], ids, logs)


def _per_token(table: pa.Table, name: str, width: int) -> npt.NDArray[Any]:
    """[M, width] the first values of each token, in a column of as many values for each of a row's tokens."""
    parts: list[npt.NDArray[Any]] = [np.empty((0, width), SCHEMA.field(name).type.value_type.to_pandas_dtype())]
    lengths = pc.list_value_length(table.column("completion_ids")).to_pylist()
    for row, (own, length) in enumerate(zip(ragged(table, name), lengths, strict=True)):
        if len(own) < width * length or len(own) % max(length, 1):
            raise ValueError(
                f"{name}: must hold {width} for each token (model.teacher, learner.loss.teacher_top), row {row} has "
                f"{len(own)} for {length}; generate these rollouts with that teacher"
            )
        parts += [own.reshape(length, -1)[:, :width]] if length else []
    return np.concatenate(parts)


def sampled_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    """[G] how many tokens the policy sampled in each trajectory, all rows together; observations do not count."""
    own = np.array([np.count_nonzero(mask) for mask in masks_of(table)], np.int64)
    return np.add.reduceat(own, _firsts(table))


def oldest_versions(table: pa.Table) -> npt.NDArray[np.int64]:
    """[G] the oldest policy version of each trajectory's tokens."""
    return np.minimum.reduceat(table.column("policy_version_min").to_numpy(), _firsts(table))


def _firsts(table: pa.Table) -> npt.NDArray[np.intp]:
    """[G] index of each trajectory's first row."""
    return np.flatnonzero(np.append(True, lasts(table)[:-1]))


# The columns that are known when a group was generated: all but the text and the rewards.


class Origin(NamedTuple):
    """Who generated a group, how, and in which time.

    worker: its rank. seed: of the sampling; None is recorded as -1. generate_ms: milliseconds that sampling the group
    took. version: of the newest policy, which is recorded for a completion without tokens.
    """

    run_id: str
    worker: int
    attempt: int
    seed: int | None
    generate_ms: float
    version: int = 0


def facts_of(problem: Problem, completions: Sequence[Completion], by: Origin) -> dict[str, Sequence[Any]]:
    """The columns [G] of a group of single completions, without text and rewards."""
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
        "teacher_prompt_ids": problem.teacher_ids,
        "teacher_logprobs": None,
        "teacher_top_ids": None,
        "teacher_top_logprobs": None,
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
        "routed_experts": [None if c.experts is None else c.experts.tobytes() for c in completions],
    }


def _least(versions: npt.NDArray[np.int32], default: int) -> int:
    return int(versions.min()) if len(versions) else default


# New rewards for rows that have rewards already: other ones in their place, or one more part from a reward model.

KEYS = ("reward", "reward_status", "reward_parts", "reward_error")


def with_scores(rows: pa.Table, scores: Scores) -> pa.Table:
    """The rows of a group of single completions, with `scores` in place of their rewards."""
    parts = [[{"name": name, "value": values[i]} for name, values in scores.parts.items()] for i in range(len(rows))]
    rows = _with(rows, dict(zip(KEYS, (scores.reward, scores.status, parts, scores.errors), strict=True)))
    logged = [[dict(zip(("name", "value", "text"), one, strict=True)) for one in row] for row in scores.logged]
    return _with(rows, {"reward_ms": [scores.ms] * len(rows), "logged": logged})


def with_part(rows: pa.Table, name: str, weight: float | None, scores: Sequence[float]) -> pa.Table:
    """The rows with `scores` as one more part, `name`, of their rewards, which grow by weight * score. With weight None
    the part is that of a watch, and rewards and status stay as they are.

    The rules are those of reward functions (rewards.pool): a row whose scoring failed stays without a reward; a row
    that no function scored gets weight * score alone; a score that cannot be a reward (rewards.base.counts) makes its
    row fail with status nan.

    Raises ValueError if an environment has given a part of that name.
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
    weight: float | None,
    score: float,
) -> tuple[float | None, str, list[dict[str, Any]], str | None]:
    parts = [*parts, {"name": name, "value": score if counts(score) else math.nan}]
    if weight is None:
        return reward, status, parts, error
    if status not in ("ok", "none"):
        return None, status, parts, error
    if not counts(score):
        return None, "nan", parts, f"reward {name!r}: nan: the reward model gave {score}, which is no finite number."
    return (reward or 0.0) + weight * score, "ok", parts, error
