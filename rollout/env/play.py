"""One trajectory from its start to its end, whatever the environment does."""

import time
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.deadline import within
from rollout.data.ordinary_text import OwnText
from rollout.env.drive import Drive, Policy, Reading
from rollout.env.history import HISTORIES, Writing
from rollout.env.program import Asked, Hosted
from rollout.env.protocol import Message, Start, Step, own_messages
from rollout.env.trajectory import EnvironmentFault, Row, Trajectory
from rollout.schema import Problem


class Dialogue(Writing, Reading, Protocol):
    """How a conversation is written as tokens, and read: rollout.env.dialogue.ChatDialogue."""


@dataclass(frozen=True, slots=True)
class Limits:
    """prompt: most tokens before the first turn. tokens: most of what follows, observations included. seconds: of a
    trajectory."""

    prompt: int
    tokens: int
    turns: int
    seconds: float


class Player:
    """Plays trajectories within limits, writing them by a dialogue. history: env.history."""

    def __init__(self, dialogue: Dialogue, limits: Limits, history: str = "append") -> None:
        self._dialogue, self._limits = dialogue, limits
        self._answer = HISTORIES[history](dialogue, limits.tokens)

    async def play(self, env: Hosted, model: Policy, problem: Problem, seed: int) -> Trajectory:
        """A whole trajectory. A fault of the environment is its outcome; what the engine raises is passed on.

        The environment is closed by who made it.
        """
        trajectory = Trajectory([Row(problem.prompt_ids)])
        clock = within(self._limits.seconds)
        try:
            async with clock:
                begun = await env.reset(problem, seed)
                start = self._begin(trajectory, begun, problem)
                if isinstance(begun, Asked):
                    limits = self._limits
                    await Drive(trajectory, model, self._dialogue, limits.tokens, limits.turns).play(env, begun)
                while not trajectory.outcome:
                    await self._turn(trajectory, env, model, start)
                trajectory.scored(await env.score())
        except EnvironmentFault as fault:
            trajectory.outcome, trajectory.fault = fault.outcome, fault.sentence
        except TimeoutError:
            if not clock.expired():
                raise
            sentence = f"the trajectory took more than {self._limits.seconds:g} s (env.timeout_s)"
            trajectory.outcome, trajectory.fault = "env_timeout", sentence
        return trajectory

    def _begin(self, trajectory: Trajectory, begun: Start | Asked, problem: Problem) -> Start:
        prompt = problem.prompt_ids
        if isinstance(begun, Asked):
            start, prompt = Start((self._dialogue.shown(begun.token_ids),)), begun.token_ids
        else:
            start = replace(begun, messages=opened(begun, problem))
            if not self._dialogue.may_fit(start.messages, self._limits.prompt):
                raise EnvironmentFault(
                    "bad_observation",
                    f"reset: its messages have {sum(len(message['content']) for message in start.messages)} "
                    f"characters, more than rollout.max_prompt_length, {self._limits.prompt}, can hold",
                )
            if begun.messages or begun.tools:
                prompt = self._dialogue.open(start.messages, start.tools)
        trajectory.begin(start, prompt)
        if len(prompt) > self._limits.prompt:
            raise EnvironmentFault(
                "bad_observation",
                f"reset: its messages have {len(prompt)} tokens, and rollout.max_prompt_length is "
                f"{self._limits.prompt}",
            )
        return start

    async def _turn(self, trajectory: Trajectory, env: Hosted, model: Policy, start: Start) -> None:
        """The policy's next turn and the answer to it; sets the outcome if it is the last."""
        limits, begun = self._limits, time.perf_counter()
        row, played = trajectory.row, len(trajectory.turns)
        completion = await model.generate(row.so_far, limits.tokens - len(row.ids), played)
        row.sampled(completion, _ms(begun))
        turn = self._dialogue.read(completion.token_ids.tolist(), start.tools)
        trajectory.spoke(turn)
        if completion.finish_reason == "length":
            trajectory.outcome = "length"
            return
        begun = time.perf_counter()
        step = await env.step(turn)
        assert isinstance(step, Step)
        trajectory.answered(step, _ms(begun))
        if step.done or played + 1 == limits.turns:
            trajectory.outcome = "done" if step.done else "turns"
            return
        trajectory.outcome = self._answer(trajectory, turn, step.messages, start)


def opened(start: Start, problem: Problem) -> tuple[Message, ...]:
    """The messages that a trajectory begins with: the environment's, else the problem's own. In those of the problem
    special tokens count, as in every prompt of the data."""
    own = own_messages(problem)
    return tuple(
        {**message, "content": OwnText(message["content"])} if message in own else message
        for message in start.messages or own
    )


def _ms(since: float) -> float:
    return (time.perf_counter() - since) * 1e3
