"""Partial rollouts: a group that was stopped goes on from what it has, instead of from nothing.

Kimi k1.5 (2501.12599) and APRIL (2509.18521). Begun anew, a straggler has its tokens thrown away, and the more often
the longer it is, which favours problems with short completions. Here the completions that are whole are taken as they
are, and each of the others goes on behind its own last token: its prompt is then the problem's with those tokens.

A beginning is a value, so any worker goes on with it. It lives in memory only: a run that is resumed from a checkpoint
begins such problems anew. It may be of a newer policy than what another worker, still without that policy, adds to it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollout.engine import Engine
from rollout.types import Completion, Sampling

Begun = Sequence[Completion]  # G completions, of which some have finish_reason "abort"; or none: from the prompt


class Sampler:
    """Samples groups with an engine, until they are whole or somebody stops them by their name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, tuple[asyncio.Future[None], asyncio.Task[list[Completion]]]] = {}

    async def sample(
        self, name: str, prompt_ids: Sequence[int], sampling: Sampling, begun: Begun
    ) -> list[Completion] | None:
        """The group, on from `begun`; None if it was stopped. Raises as Engine.generate."""
        until = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(go_on(self._engine, prompt_ids, sampling, begun, until))
        self._running[name] = until, task
        try:
            completions = await task
        finally:
            del self._running[name]
        return None if until.done() else completions

    async def stop(self, name: str) -> list[Completion]:
        """Ends a group. What is there of its completions; nothing if it was whole already, or is not known here."""
        if name not in self._running:
            return []
        until, task = self._running[name]
        if not until.done():
            until.set_result(None)
        await asyncio.wait([task])  # not the task itself: who cancels the group must not cancel this answer
        if task.cancelled() or task.exception() is not None:
            return []
        completions = task.result()
        return completions if any(c.finish_reason == "abort" for c in completions) else []


async def go_on(
    engine: Engine, prompt_ids: Sequence[int], sampling: Sampling, begun: Begun, until: asyncio.Future[None]
) -> list[Completion]:
    """sampling.n completions of the prompt [P], as Engine.generate; but `begun`, if there is any, is the first part of
    them. Number j goes on with the seed that it would begin with."""

    async def whole(j: int, first: Completion) -> Completion:
        if first.finish_reason != "abort":
            return first
        seed = None if sampling.seed is None else sampling.seed + j
        rest = replace(sampling, n=1, max_tokens=sampling.max_tokens - len(first.token_ids), seed=seed)
        (more,) = await engine.generate([*prompt_ids, *first.token_ids.tolist()], rest, until)
        return _joined(first, more)

    if not begun:
        return await engine.generate(prompt_ids, sampling, until)
    return await asyncio.gather(*(whole(j, first) for j, first in enumerate(begun)))


def _joined(first: Completion, more: Completion) -> Completion:
    return Completion(
        np.concatenate([first.token_ids, more.token_ids]),
        np.concatenate([first.logprobs, more.logprobs]),
        more.finish_reason,
        np.concatenate([first.versions, more.versions]),
    )
