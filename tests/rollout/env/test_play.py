"""A trajectory token by token: a policy that samples what it is told, and an environment of a few lines. Programs in
their processes: what they ask for is chained on this side, token by token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.env.play import Player
from rollout.env.protocol import Message, Question, Start, Step, ToolSpec, Turn
from rollout.env.trajectory import EnvironmentFault, Limits, Row, Trajectory
from rollout.schema import Problem, parts_of
from rollout.types import Adapter, Completion, Sampling
from rollout.worker import RolloutWorker
from tests.rollout.env.programs import BETWEEN, OPENING
from tests.rollout.env.test_rollouts import CHAT, PROBLEM, STOP, spec

PLAYED = Problem("train-1", "1 + 1", {}, (1, 2), 1, 0)
END, OPEN = 9, 8  # ends a turn; opens the next one
LIMITS = Limits(prompt=6, tokens=12, turns=3, seconds=5)


class Digits:
    """A message is its digits as tokens. A turn that does not end with END cannot be gone on from."""

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        return tuple(int(digit) for message in messages for digit in message["content"])

    def read(self, token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Turn:
        return Turn("".join(map(str, token_ids)), tuple(token_ids))

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return sum(len(message["content"]) for message in messages) <= tokens

    def past(self, turn: Turn) -> Message:
        return {"role": "assistant", "content": turn.text}

    def observe(self, messages: Sequence[Message], turn: Turn, tools: Sequence[ToolSpec]) -> tuple[int, ...] | None:
        return (*self.open(messages, tools), OPEN) if turn.token_ids[-1] == END else None

    def shown(self, token_ids: Sequence[int]) -> Message:
        return {"role": "user", "content": "".join(map(str, token_ids))}

    def until(self, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str]:
        raise AssertionError("only programs are told what was said")

    def told(self, turn: Turn) -> tuple[str, str]:
        raise AssertionError("only programs are told what was said")


class Lenient(Digits):
    """Cannot tell before."""

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return True


class Policy:
    """Samples the turns it is given, one version newer each; `seen`: what it was asked with."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns = turns
        self.seen: list[tuple[list[int], int]] = []

    async def generate(self, token_ids: Sequence[int], max_tokens: int, turn: int) -> Completion:
        self.seen.append((list(token_ids), max_tokens))
        ids = self.turns[turn][:max_tokens]
        finish = "stop" if len(ids) == len(self.turns[turn]) else "length"
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        return Completion(np.array(ids, np.int32), logprobs, finish, np.full(len(ids), turn + 4, np.int32))


class Answers:
    """Answers each turn with a digit and a reward, and is done after `turns` of them."""

    def __init__(self, turns: int = 2, start: str = "", wait: float = 0.0) -> None:
        self.turns, self.start, self.wait = turns, start, wait
        self.steps = 0

    async def reset(self, problem: Problem, seed: int) -> Start:
        return Start(({"role": "user", "content": self.start},) if self.start else (), state="s")

    async def step(self, turn: Turn) -> Step:
        await asyncio.sleep(self.wait)
        self.steps += 1
        done = self.steps == self.turns
        return Step(({"role": "tool", "content": "5"},), 0.25, done, {"answers": 1.0})

    async def score(self) -> Mapping[str, float]:
        return {"whole": 2.0}

    async def close(self) -> None: ...


class Forgetful(Digits):
    """Writes past turns without what they thought: the digits up to the first 0."""

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        ids: list[int] = []
        for message in messages:
            _, thought, answer = message["content"].partition("0")
            ids += [int(digit) for digit in (answer if thought else message["content"])]
            ids += [OPEN] * (message["role"] == "tool")
        return tuple(ids)


async def play(
    policy: Policy, env: Any = None, limits: Limits = LIMITS, dialogue: Digits | None = None, history: str = "append"
) -> Trajectory:
    return await Player(dialogue or Digits(), limits, history).play(env or Answers(), policy, PLAYED, 0)


async def test_what_was_sampled_is_masked_in_and_what_was_answered_is_not() -> None:
    policy = Policy([3, 4, END], [6, END])
    found = await play(policy)
    assert found.row.ids == [3, 4, END, 5, OPEN, 6, END]
    assert found.row.mask == [True, True, True, False, False, True, True]
    assert found.row.logprobs == [-1, -2, -3, 0, 0, -1, -2]
    assert found.row.versions == [4, 4, 4, 4, 4, 5, 5]  # an observation has that of the turn before
    assert [(turn.start, turn.stop, turn.reward) for turn in found.turns] == [(0, 3, 0.25), (5, 7, 0.25)]
    assert (found.outcome, found.row.prompt_ids, found.state) == ("done", (1, 2), "s")
    assert (found.parts, found.metrics) == ({"env": 0.5, "whole": 2.0}, {"answers": 2.0})
    assert policy.seen == [([1, 2], 12), ([1, 2, 3, 4, END, 5, OPEN], 7)]
    said = [("assistant", "349"), ("tool", "5"), ("assistant", "69")]
    assert [(message["role"], message["content"]) for message in found.messages] == said


@pytest.mark.parametrize(
    ("turns", "limits", "outcome", "length"),
    [
        ([[3, END]] * 3, LIMITS, "turns", 10),
        ([[3] * 20], LIMITS, "length", 12),  # cut within a turn
        ([[3] * 9 + [END]], LIMITS, "length", 10),  # two more would leave no room for a turn
        ([[3] * 8 + [END], [4] * 9], LIMITS, "length", 12),  # and here it leaves room for one token
        ([[3, 4]], LIMITS, "unclosed", 2),
    ],
)
async def test_how_a_trajectory_ends(turns: list[list[int]], limits: Limits, outcome: str, length: int) -> None:
    found = await play(Policy(*turns), Answers(turns=9), limits)
    assert (found.outcome, len(found.row.ids), found.parts["whole"]) == (outcome, length, 2.0)
    assert found.row.mask[-1]  # nothing is observed that no turn follows


@pytest.mark.parametrize("history", ["append", "template"])
async def test_an_answer_that_cannot_fit_is_never_made_tokens_of(history: str) -> None:
    """It would take seconds, in which all other trajectories wait."""

    class Refusing(Digits):
        def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
            assert sum(len(message["content"]) for message in messages) < 50
            return super().open(messages, tools)

    class Long(Answers):
        async def step(self, turn: Turn) -> Step:
            return Step(({"role": "tool", "content": "5" * 50},), 0.25)

    found = await play(Policy([3, END]), Long(), LIMITS, Refusing(), history)
    assert (found.outcome, found.row.ids, found.parts) == ("length", [3, END], {"env": 0.25, "whole": 2.0})
    found = await play(Policy(), Answers(start="7" * 50), LIMITS, Refusing(), history)
    assert (found.outcome, found.fault[:35]) == ("bad_observation", "reset: its messages have 50 charact")


async def test_a_template_that_keeps_the_past_gives_one_row_and_one_that_rewrites_it_another() -> None:
    """What was thought before the 0 is learned in the first row, and is not there in the second."""
    turns = [[3, 0, 4, END], [6, END], [7, END]]
    found = await play(Policy(*turns), Answers(3, "12"), Limits(6, 20, 3, 5), Forgetful(), "template")
    one, other = found.rows
    assert (one.prompt_ids, one.ids) == ((1, 2), [3, 0, 4, END])
    assert (other.prompt_ids, other.ids) == ((1, 2), [4, END, 5, OPEN, 6, END, 5, OPEN, 7, END])
    assert other.mask == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 2
    assert other.logprobs == [0, 0, 0, 0, -1, -2, 0, 0, -1, -2]
    assert (other.versions, found.parts["env"]) == ([4, 4, 4, 4, 5, 5, 5, 5, 6, 6], 0.75)
    assert [(t.start, t.stop) for t in found.turns] == [(0, 4), (4, 6), (8, 10)]
    kept = await play(Policy([4, END], [6, END]), Answers(2, "12"), Limits(6, 20, 3, 5), Forgetful(), "template")
    assert [row.ids for row in kept.rows] == [[4, END, 5, OPEN, 6, END]]


async def test_a_row_begins_with_as_much_of_the_first_prompt_as_is_still_there_and_fits() -> None:
    class Dated(Forgetful):
        def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
            return (1, min(len(messages), 9), *super().open(messages, tools))

    class Counted(Forgetful):
        def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
            return (min(len(messages), 9), *super().open(messages, tools))

    found = await play(Policy([4, END], [6, END]), Answers(2, "12"), Limits(6, 20, 3, 5), Counted(), "template")
    assert [row.prompt_ids for row in found.rows] == [(1, 1, 2), (3,)]  # no row is without a prompt
    assert found.rows[1].ids == [1, 2, 4, END, 5, OPEN, 6, END]
    found = await play(Policy([4, END], [6, END]), Answers(2, "12"), Limits(6, 20, 3, 5), Dated(), "template")
    assert [row.prompt_ids for row in found.rows] == [(1, 1, 1, 2), (1,)]
    assert found.rows[1].ids == [3, 1, 2, 4, END, 5, OPEN, 6, END]
    full = await play(Policy([3, 0, 4, END], [6, END]), Answers(2, "12"), Limits(6, 4, 3, 5), Forgetful(), "template")
    assert (full.outcome, len(full.rows)) == ("length", 1)


async def test_the_environments_own_messages_are_the_prompt_if_they_fit() -> None:
    assert (await play(Policy([END], [END]), Answers(start="777"))).row.prompt_ids == (7, 7, 7)
    found = await play(Policy([END]), Answers(start="777777"), Limits(5, 12, 3, 5), Lenient())
    assert (found.outcome, found.row.ids) == ("bad_observation", [])
    assert found.fault == "reset: its messages have 6 tokens, and rollout.max_prompt_length is 5"


async def test_a_trajectory_that_takes_too_long_ends_without_a_reward() -> None:
    found = await play(Policy([3, END]), Answers(wait=60), Limits(6, 12, 3, seconds=0.05))
    assert (found.outcome, found.faulted, found.parts, found.row.ids) == ("env_timeout", True, {}, [3, END])
    assert found.fault == "the trajectory took more than 0.05 s (cluster.patience)"


def raising(error: Exception) -> Callable[..., Any]:
    async def method(*_: Any) -> Any:
        raise error

    return method


@pytest.mark.parametrize(("where", "tokens"), [("reset", 0), ("step", 2), ("score", 6)])
async def test_a_fault_is_the_outcome_and_what_was_sampled_stays(where: str, tokens: int) -> None:
    env = Answers()
    setattr(env, where, raising(EnvironmentFault("env_killed", "gone")))
    found = await play(Policy([3, END], [4, END]), env)
    assert (found.outcome, found.fault, len(found.row.ids), found.parts) == ("env_killed", "gone", tokens, {})


@pytest.mark.parametrize("error", [TimeoutError("of the engine"), RuntimeError("the engine died")])
async def test_what_the_engine_raises_is_no_fault_of_the_environment(error: Exception) -> None:
    policy = Policy()
    policy.generate = raising(error)  # type: ignore[method-assign]
    with pytest.raises(type(error), match=str(error)):
        await play(policy)


@pytest.mark.parametrize(("wanted", "outcome"), [(2, "done"), (None, "length"), (13, "length")])
async def test_a_program_s_turn_is_cut_by_the_trajectory_s_limit_alone(wanted: int | None, outcome: str) -> None:
    class Short(Answers):
        async def reset(self, problem: Problem, seed: int) -> Any:
            return Question((1, 2), wanted)

    assert (await play(Policy([3] * 20), Short(turns=1))).outcome == outcome


# Programs in their processes: what they ask for is chained on this side, token by token.

PROGRAMS = Path(__file__).with_name("programs.py")
TURN = [11, 12, 13, 14, 15, STOP]


async def rows(folder: Path, how: str = "", turns: int = 2, **env: Any) -> list[dict[str, Any]]:
    """Two trajectories of the program; the policy samples TURN each time."""
    settings = spec(
        folder, sample=lambda ids, _: list(TURN), use=f"{PROGRAMS}:Asking", args={"turns": turns, "how": how}, **env
    )
    worker = RolloutWorker(settings)
    try:
        await worker.take_policy(Adapter.build(3, b"three", {}))
        table = await worker.rollout(PROBLEM, Sampling(n=2, max_tokens=400, seed=70), 0)
        assert table is not None
        return [row | {"parts": parts} for row, parts in zip(table.to_pylist(), parts_of(table), strict=True)]
    finally:
        await worker.close()


async def test_prompts_that_extend_each_other_are_one_row(tmp_path: Path) -> None:
    one, other = await rows(tmp_path)
    assert one["prompt_ids"] == OPENING
    assert one["completion_ids"] == [*TURN, *BETWEEN, *TURN]
    assert one["loss_mask"] == [True] * 6 + [False] * 2 + [True] * 6
    assert one["behavior_logprobs"] == [-0.5] * 6 + [0.0] * 2 + [-0.5] * 6
    assert one["token_versions"] == [3] * 14
    assert [(turn["start"], turn["stop"]) for turn in one["turns"]] == [(0, 6), (8, 14)]
    assert one["finish_reason"] == "done"
    assert one["parts"]["given"] == 12.0
    assert [message["role"] for message in json.loads(one["messages"])] == ["assistant", "user", "assistant"]
    assert other["completion_ids"] == one["completion_ids"]


@pytest.mark.parametrize(
    ("how", "outcome", "tokens"),
    [
        ("again", "branched", 6),
        ("raises", "env_error", 6),
        ("silent", "bad_observation", 0),
        ("no token", "bad_observation", 6),
    ],
)
async def test_what_cannot_be_trained_on_has_a_name_and_no_reward(
    tmp_path: Path, how: str, outcome: str, tokens: int
) -> None:
    row, _ = await rows(tmp_path, how)
    assert (row["finish_reason"], row["reward"], row["parts"]) == (outcome, None, {})
    assert len(row["completion_ids"]) == tokens


async def test_a_program_is_refused_more_turns_than_it_may_have_and_still_gives_its_reward(tmp_path: Path) -> None:
    row, _ = await rows(tmp_path, turns=99)
    assert (row["finish_reason"], len(row["turns"]), row["loss_mask"][-1]) == ("turns", 8, True)
    assert (row["parts"]["given"], row["parts"]["refused"]) == (48.0, 1.0)


async def test_a_program_that_lets_it_pass_has_ended_as_one_that_is_cut(tmp_path: Path) -> None:
    row, _ = await rows(tmp_path, "lets pass", turns=99)
    assert (row["finish_reason"], len(row["turns"]), row["reward_status"]) == ("turns", 8, "ok")


async def test_over_http_as_a_client_of_vllm_sees_it(tmp_path: Path) -> None:
    row, _ = await rows(tmp_path, "http")
    told = ("ok", "whole", "refused", "told", "unknown", "ended")
    assert {name: row["parts"][name] for name in told} == dict.fromkeys(told, 1.0)
    assert row["completion_ids"] == TURN[:4]
    assert row["finish_reason"] == "length"  # of the trajectory; its reward is there all the same


def test_the_tokens_are_the_tokenizers() -> None:
    assert max(*TURN, *OPENING, *BETWEEN) < len(CHAT.tokenizer)


def test_experts_of_a_row_are_those_with_which_its_tokens_were_first_computed() -> None:
    def turn(tokens: list[int], computed: int, expert: int) -> Completion:
        experts = np.full((computed, 2, 1), expert, np.int16)
        return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop",
                          np.zeros(len(tokens), np.int32), experts)  # fmt: skip

    row = Row((1, 2, 3))
    assert row.all_experts() is None
    row.sampled(turn([4, 5], 4, 7), 1.0)
    row.read([6], 0)
    row.sampled(turn([7, 7], 7, 8), 1.0)  # computes the tokens before it again, under a newer policy
    row.read([8, 8], 0)
    found = row.all_experts()
    assert found is not None
    assert found[:, 0, 0].tolist() == [7, 7, 7, 7, 8, 8, 8, -1, -1]  # of 3 + 7 tokens the last is not computed
