"""Which tokens the engine is asked to go on from, for histories as agents send them: told on and rewritten at will."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rollout.data.chat import Chat
from rollout.env.play import ChatDialogue, Player
from rollout.env.protocol import Asked, NoMore, Said, Step
from rollout.env.trajectory import Limits, Trajectory
from rollout.schema import Problem
from rollout.types import Completion

CHAT = Chat.load(str(Path(__file__).parents[3] / "examples" / "tiny-tools"))
STOP = CHAT.stop_ids[0]
SAID = ["8", " 12 ", "<think>so</think>3", "<tool_call>{broken", "1" * 9]
PROBLEM = Problem("p", ({"role": "user", "content": "?"},), {}, (1,), 0, 0)
LIMITS = Limits(prompt=18, tokens=28, turns=12, seconds=60)


class Policy:
    """Says the texts in turn, and keeps what it was asked with and what it said."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.asked = texts, list[tuple[list[int], list[int]]]()

    async def generate(self, token_ids: Any, max_tokens: int, turn: int) -> Completion:
        text = self.texts[turn % len(self.texts)]
        ids = [*CHAT.tokenizer.encode(text, add_special_tokens=False), STOP][:max_tokens]
        self.asked.append((list(token_ids), ids))
        size = len(ids)
        finish = "stop" if ids[-1] == STOP else "length"
        return Completion(np.array(ids, np.int32), np.full(size, -0.5, np.float32), finish, np.zeros(size, np.int32))


class Agent:
    """Sends a conversation for each of its moves. `sent` has each one that was answered, with the answers in it as they
    were sampled, and how long it was."""

    def __init__(self, moves: list[tuple[str, int]]) -> None:
        self.moves = list(moves)
        self.known: list[tuple[dict[str, Any], ...]] = [({"role": "user", "content": "begin"},)]
        self.said: list[Said | NoMore] = []
        self.last: tuple[dict[str, Any], ...] = self.known[0]

    async def reset(self, problem: Problem, seed: int) -> Asked:
        return Asked(self.last)

    async def step(self, answer: Any) -> Any:
        self.said.append(answer)
        if isinstance(answer, Said):
            self.known.append((*self.last, {"role": "assistant", "content": answer.text}))
        if not self.moves:
            return Step(done=True)
        kind, which = self.moves.pop()
        before = self.known[which % len(self.known)]
        match kind:
            case "on" if before[-1]["role"] == "assistant":
                self.last = (*before, {"role": "user", "content": "go on"})
            case "again":
                self.last = before if before[-1]["role"] == "user" else before[:-1]
            case _:
                self.last = ({"role": "system", "content": "sum"}, {"role": "user", "content": f"so far {which}"})
        return Asked(self.last)

    async def score(self) -> dict[str, float]:
        return {"x": 1.0}

    async def close(self) -> None:
        pass


def play(moves: list[tuple[str, int]], texts: list[str]) -> tuple[Trajectory, Policy, Agent]:
    policy, agent = Policy(texts), Agent(moves)
    player = Player(ChatDialogue(CHAT, "auto", CHAT.stop_ids), LIMITS)
    return asyncio.run(player.play(agent, policy, PROBLEM, 0)), policy, agent


MOVES = st.lists(st.tuples(st.sampled_from(["on", "on", "again", "anew"]), st.integers(0, 20)), max_size=12)


@given(MOVES, st.permutations(SAID))
@settings(max_examples=60)
def test_all_that_was_sampled_is_in_one_row_behind_what_it_was_sampled_behind(
    moves: list[tuple[str, int]], texts: list[str]
) -> None:
    trajectory, policy, agent = play(moves, texts)
    assert trajectory.outcome in ("done", "turns", "length"), trajectory.fault
    sampled = list(policy.asked)
    for row in trajectory.rows:
        ids, size = row.so_far, len(row.prompt_ids)
        assert 0 < size <= LIMITS.prompt
        assert len(row.ids) <= LIMITS.tokens
        mask = [False] * len(row.ids)
        for turn in row.turns:
            sampled.remove((list(ids[: size + turn.start]), list(ids[size + turn.start : size + turn.stop])))
            mask[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
        assert row.mask == mask
        assert row.turns
    assert sampled == []
    answered = sum(isinstance(one, Said) for one in agent.said)
    assert answered == len(trajectory.turns) == len(policy.asked)
    assert len(agent.said) == len(moves) + 1


@given(MOVES, st.permutations(["8", " 12 ", "3"]))
@settings(max_examples=60)
def test_the_engine_reads_the_conversation_that_was_sent(moves: list[tuple[str, int]], texts: list[str]) -> None:
    """The template of this model writes a conversation as it was appended, so that both are one text, but for the space
    around what was sampled, which a client is free to leave out."""
    _, policy, agent = play(moves, texts)
    sent = iter(policy.asked)
    replayed = Agent(moves)
    asked = asyncio.run(replayed.reset(PROBLEM, 0))
    for answer in agent.said:
        if isinstance(answer, Said):
            read = CHAT.decode(next(sent)[0], special=True)
            assert read.replace(" ", "") == CHAT.observations.render(asked.messages).replace(" ", "")
        asked = asyncio.run(replayed.step(answer))
    assert next(sent, None) is None


def test_of_two_places_that_are_told_alike_the_one_that_nothing_follows_goes_on() -> None:
    trajectory, *_ = play([("on", 2), ("on", 1), ("again", 0)], ["8"])  # the last one is the first move
    assert [len(row.turns) for row in trajectory.rows] == [2, 2]


@pytest.mark.parametrize("put_back", ["", "2"])
def test_a_stop_string_may_be_put_back(put_back: str) -> None:
    class Stopping(Agent):
        async def reset(self, problem: Problem, seed: int) -> Asked:
            return Asked(self.last, stop=("3", "2"))

        async def step(self, answer: Any) -> Any:
            self.said.append(answer)
            said = {"role": "assistant", "content": answer.text + put_back}
            return (
                Step(done=True) if len(self.said) == 2 else Asked((*self.last, said, {"role": "user", "content": "?"}))
            )

    agent, policy = Stopping([]), Policy(["1123", "8"])
    player = Player(ChatDialogue(CHAT, "auto", CHAT.stop_ids), LIMITS)
    trajectory = asyncio.run(player.play(agent, policy, PROBLEM, 0))
    (row,) = trajectory.rows
    first = agent.said[0]
    assert isinstance(first, Said)
    assert (first.text, first.stop, first.finish_reason) == ("11", "2", "stop")
    assert CHAT.decode(row.ids, special=True) == "112<|end|><|user|>?<|end|><|assistant|>8<|end|>"
    assert [CHAT.decode(row.ids[turn.start : turn.stop]) for turn in row.turns] == ["112", "8"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<think>so</think>3", ("so", "3")),
        ("so it is</think> 3", ("so it is", " 3")),
        ("<think>so", ("so", "")),
        ('It is <tool_call>{"name": "f", "arguments": {}}</tool_call>!', ("", "It is")),
        ("<tool_call>{broken", ("", "<tool_call>{broken")),
    ],
)
def test_a_client_is_told_the_answer_without_thinking_and_calls(text: str, told: tuple[str, str]) -> None:
    dialogue = ChatDialogue(CHAT, "auto", CHAT.stop_ids)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    ids = [*CHAT.tokenizer.encode(text, add_special_tokens=False), STOP]
    assert dialogue.told(dialogue.read(ids, [tool])) == told
