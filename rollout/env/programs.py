"""Plays the trajectories of programs: of those that ask with tokens (Drive), and of those that send a conversation
(Conversations), of which each request either goes on from an earlier one, or begins a further row."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from rollout.env.protocol import (
    Asked,
    Hosted,
    Message,
    NoMore,
    Question,
    Refused,
    Said,
    Sampled,
    Step,
    ToolCall,
    ToolSpec,
    Turn,
)
from rollout.env.trajectory import Dialogue, EnvironmentFault, Limits, Policy, Trajectory
from rollout.types import Completion

# With tokens: each prompt extends what was asked and sampled before.


class Drive:
    """Plays one trajectory of a program that asks with tokens."""

    def __init__(self, trajectory: Trajectory, model: Policy, dialogue: Dialogue, limits: Limits) -> None:
        self._trajectory, self._model, self._dialogue = trajectory, model, dialogue
        self._limits = limits
        self._cut = ""  # the outcome, if the program was refused a turn

    async def play(self, env: Hosted, asked: Any) -> None:
        """Answers the program's requests until it ends, and sets the outcome. Raises EnvironmentFault if a prompt of
        tokens does not extend what came before."""
        while True:
            answer = await self._answer(asked)
            begun = time.perf_counter()
            step = await env.step(answer)
            took = (time.perf_counter() - begun) * 1e3
            if isinstance(step, Step):
                break
            if self._trajectory.row.turns:
                self._trajectory.row.turns[-1].env_ms += took
            asked = step
        if self._trajectory.row.turns:
            self._trajectory.answered(step, self._trajectory.row.turns[-1].env_ms + took)
        self._trajectory.outcome = self._cut or "done"

    async def _answer(self, asked: Question) -> Sampled | NoMore:
        trajectory = self._trajectory
        so_far = trajectory.row.so_far
        if asked.token_ids[: len(so_far)] != so_far:
            raise EnvironmentFault(
                "branched",
                f"run: the prompt of turn {len(trajectory.turns) + 1} must extend all that was asked and sampled "
                "before it, and does not; keep the sampled ids instead of encoding their text again",
            )
        seen = asked.token_ids[len(so_far) :]
        room = self._limits.tokens - len(trajectory.row.ids) - len(seen)
        if (refused := self._over(room)) is not None:
            return refused
        if seen:
            trajectory.observed((self._dialogue.shown(seen),), seen)
        completion = await self._sampled(asked.max_tokens, room)
        trajectory.spoke(self._dialogue.read(completion.token_ids.tolist(), ()))
        return Sampled(completion.token_ids.tolist(), completion.logprobs.tolist(), completion.finish_reason)

    def _over(self, room: int) -> NoMore | None:
        """The refusal of a further turn, if a limit is reached. room: tokens that are left for it."""
        if len(self._trajectory.turns) == self._limits.turns:
            self._cut = self._cut or "turns"
            return NoMore(f"the trajectory has had its {self._limits.turns} turns (env.max_turns)")
        if room < 1:
            self._cut = self._cut or "length"
            return NoMore(f"the trajectory has had its {self._limits.tokens} tokens (rollout.max_completion_length)")
        return None

    async def _sampled(self, wanted: int | None, room: int, stop: Sequence[str] = ()) -> Completion:
        """Samples the next turn behind the row's tokens. wanted: most tokens that the program asks for."""
        trajectory, begun = self._trajectory, time.perf_counter()
        most = room if wanted is None else min(room, wanted)
        completion = await self._model.generate(trajectory.row.so_far, most, len(trajectory.turns))
        completion = self._stopped(completion, stop)
        trajectory.row.sampled(completion, (time.perf_counter() - begun) * 1e3)
        # A turn is cut off only if the run's limit of tokens ended it, and not the program's own max_tokens.
        self._cut = "length" if completion.finish_reason == "length" and most == room else ""
        return completion

    def _stopped(self, completion: Completion, stop: Sequence[str]) -> Completion:
        """The completion up to the first of these strings. What the engine samples later has no say in what it sampled
        before, so that these are the tokens and logprobs of a sampling that had stopped there."""
        size = len(completion.token_ids)
        kept, found = self._dialogue.until(completion.token_ids.tolist(), stop) if stop else (size, "")
        if not found:
            return completion
        experts = completion.experts
        return Completion(
            completion.token_ids[:kept], completion.logprobs[:kept], "stop", completion.versions[:kept],
            None if experts is None else experts[: len(experts) - (size - kept)],
        )  # fmt: skip


# With messages: a client sends all of its conversation each time, so what the policy sampled comes back as text. The
# tokens of a turn are found again by what its client was told of it.

ANSWERS = ("tool", "user")  # roles of messages that can be appended behind a turn
KEPT = ("role", "content", "name")  # of such a message; the ids of calls are the client's own


@dataclass(frozen=True, slots=True)
class Head:
    """A place behind a turn of the policy, from which a request may go on.

    Attributes:
        said: the conversation up to the turn and with it, as `_same` has it and as its client knows it.
        stopped: the same with the stop string that ended the turn, which some clients put back.
        row, size: index of the turn's row, and how many tokens that row had behind its prompt when the turn was over.
    """

    said: tuple[Any, ...]
    stopped: tuple[Any, ...]
    tools: tuple[ToolSpec, ...]
    turn: Turn
    row: int
    size: int


class Place(NamedTuple):
    """Where a request goes on. row: index of the row that it extends; None: in a further row. ids: its whole prompt.
    new: its messages that the trajectory does not have yet."""

    row: int | None
    ids: tuple[int, ...]
    new: tuple[Message, ...]


class Conversations(Drive):
    """Plays one trajectory of a program that asks with conversations.

    A request goes on from the head that it begins with: its new messages are written behind the tokens up to there.
    Where others follow those already (a second request from the same place), and where there is no such head (the
    program has rewritten its history), the trajectory goes on in a further row.
    """

    def __init__(self, trajectory: Trajectory, model: Policy, dialogue: Dialogue, limits: Limits) -> None:
        super().__init__(trajectory, model, dialogue, limits)
        self._heads: list[Head] = []
        self._calls = 0  # that were told

    async def _answer(self, asked: Asked) -> Said | NoMore | Refused:  # type: ignore[override]
        trajectory, limits = self._trajectory, self._limits
        if not self._dialogue.may_fit(asked.messages, limits.prompt + limits.tokens):
            return self._over(0) or NoMore("")
        try:
            place = self._place(asked)
        except EnvironmentFault as fault:
            return Refused(fault.sentence)
        prompt = min(len(place.ids), limits.prompt)
        if place.row is not None:
            prompt = len(trajectory.rows[place.row].prompt_ids)
        room = limits.tokens - (len(place.ids) - prompt)
        if (refused := self._over(room)) is not None:
            return refused
        if place.row is None:
            trajectory.forked(place.new, place.ids, prompt)
        else:
            trajectory.place = place.row
            if place.new:
                trajectory.observed(place.new, place.ids[len(trajectory.row.so_far) :])
        completion = await self._sampled(asked.max_tokens, room, asked.stop)
        return self._said(asked, completion, len(place.ids))

    def _place(self, asked: Asked) -> Place:
        rows, said = self._trajectory.rows, tuple(map(_same, asked.messages))
        if not self._heads:  # the trajectory began with this request
            return Place(0, rows[0].so_far, ())
        heads = [head for head in self._heads if head.tools == asked.tools and _goes_on(said, head, asked)]
        # They end with the request's last message of an assistant, so that they are told alike. The one that nothing
        # follows yet is better, and of several the newest.
        heads.sort(key=lambda head: head.size == len(rows[head.row].ids))
        if heads:
            head, new = heads[-1], asked.messages[len(heads[-1].said) :]
            answers = [{key: one[key] for key in KEPT if key in one} for one in new]
            seen, row = self._dialogue.observe(answers, head.turn, asked.tools), rows[head.row]
            if seen is not None:  # None: the template cannot go on behind the turn's last token
                ids = (*row.prompt_ids, *row.ids[: head.size], *seen)
                return Place(head.row if head.size == len(row.ids) else None, ids, new)
        known = max(_common(said, head.said) for head in self._heads)
        return Place(None, self._dialogue.open(asked.messages, asked.tools), asked.messages[known:])

    def _said(self, asked: Asked, completion: Completion, prompt: int) -> Said:
        """Reads a sampled turn, and records it with what the client is told of it."""
        trajectory, ids = self._trajectory, completion.token_ids.tolist()
        stop = self._dialogue.until(ids, asked.stop)[1] if asked.stop else ""
        turn = self._dialogue.read(ids, asked.tools if asked.calls != 0 else ())
        trajectory.spoke(turn)
        thinking, text = self._dialogue.told(turn)
        if stop:
            thinking, text = thinking.partition(stop)[0], text.partition(stop)[0]
        calls = turn.calls[: asked.calls]
        before, functions = tuple(map(_same, asked.messages)), [_function(call) for call in calls]
        said, stopped = (
            (*before, _same({"role": "assistant", "content": text + end, "tool_calls": functions}))
            for end in ("", stop)
        )
        self._heads.append(Head(said, stopped, asked.tools, turn, trajectory.place, len(trajectory.row.ids)))
        named = tuple((f"call{self._calls + index:05d}", call) for index, call in enumerate(calls))
        self._calls += len(calls)
        return Said(text, thinking, named, completion.finish_reason, stop, prompt, len(ids), bool(self._cut))


def _function(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _same(message: Message) -> tuple[Any, ...]:
    """What of a message must be equal for it to be the same message. Ids of calls and the space around an assistant's
    text are not of it, since clients change both."""
    if message["role"] != "assistant":
        return (message["role"], message["content"], message.get("name"))
    calls = [call["function"] for call in message.get("tool_calls", ())]
    asked = tuple((call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls)
    return ("assistant", message["content"].strip(), asked)


def _goes_on(said: tuple[Any, ...], head: Head, asked: Asked) -> bool:
    """Whether a conversation is that of a head, with answers to its turn behind it."""
    new = asked.messages[len(head.said) :]
    same = said[: len(head.said)] in (head.said, head.stopped)
    return bool(new) and same and all(one["role"] in ANSWERS for one in new)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
