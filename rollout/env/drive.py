"""A program's trajectory: each question of it continues what was asked and sampled before, or ends the trajectory."""

import time
from collections.abc import Sequence
from typing import Protocol

from rollout.env.program import Asked, Hosted, NoMore, Sampled
from rollout.env.protocol import Message, Step, ToolSpec, Turn
from rollout.env.trajectory import EnvironmentFault, Trajectory
from rollout.types import Completion


class Reading(Protocol):
    """How tokens read: rollout.env.dialogue.ChatDialogue."""

    def read(self, token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Turn:
        """What the policy sampled."""
        ...

    def shown(self, token_ids: Sequence[int]) -> Message:
        """What a program put between two turns, as a message. Raises EnvironmentFault for what are no tokens."""
        ...


class Policy(Protocol):
    """The policy, for one trajectory."""

    async def generate(self, token_ids: Sequence[int], max_tokens: int, turn: int) -> Completion:
        """The next turn after token_ids (prompt and all that followed)."""
        ...


class Drive:
    """One trajectory of a program. tokens: most that follow the first prompt. turns: of the policy, at most."""

    def __init__(self, trajectory: Trajectory, model: Policy, dialogue: Reading, tokens: int, turns: int) -> None:
        self._trajectory, self._model, self._dialogue = trajectory, model, dialogue
        self._tokens, self._turns = tokens, turns
        self._cut = ""  # the outcome, if the program was refused a turn

    async def play(self, env: Hosted, asked: Asked) -> None:
        """Answers until the program ends, and sets the outcome. Raises EnvironmentFault where it branches."""
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

    async def _answer(self, asked: Asked) -> Sampled | NoMore:
        trajectory = self._trajectory
        so_far = trajectory.row.so_far
        if asked.token_ids[: len(so_far)] != so_far:
            raise EnvironmentFault(
                "branched",
                f"run: the prompt of turn {len(trajectory.turns) + 1} must extend all that was asked and sampled "
                "before it, and does not; keep the sampled ids instead of encoding their text again",
            )
        seen = asked.token_ids[len(so_far) :]
        room = self._tokens - len(trajectory.row.ids) - len(seen)
        if len(trajectory.turns) == self._turns:
            self._cut = self._cut or "turns"
            return NoMore(f"the trajectory has had its {self._turns} turns (env.max_turns)")
        if room < 1:
            self._cut = self._cut or "length"
            return NoMore(f"the trajectory has had its {self._tokens} tokens (rollout.max_completion_length)")
        if seen:
            trajectory.observed((self._dialogue.shown(seen),), seen)
        return await self._sampled(asked, room)

    async def _sampled(self, asked: Asked, room: int) -> Sampled:
        trajectory, begun = self._trajectory, time.perf_counter()
        most = room if asked.max_tokens is None else min(room, asked.max_tokens)
        completion = await self._model.generate(list(asked.token_ids), most, len(trajectory.turns))
        trajectory.row.sampled(completion, (time.perf_counter() - begun) * 1e3)
        trajectory.spoke(self._dialogue.read(completion.token_ids.tolist(), ()))
        # A turn that the program itself wanted no longer is whole.
        self._cut = "length" if completion.finish_reason == "length" and most == room else ""
        return Sampled(completion.token_ids.tolist(), completion.logprobs.tolist(), completion.finish_reason)
