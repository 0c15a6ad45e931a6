"""Partial rollouts: a group that was stopped (cluster.oversampling) is continued later instead of begun anew.

Kimi k1.5 (2501.12599) and APRIL (2509.18521). Begun anew, its tokens would be thrown away, and the more often the
longer its completions are, which favours problems with short ones. Here finished completions are kept as they are, and
each of the others is continued behind its own last token: its prompt is then the problem's, followed by its tokens.

What there is of a group is a value (Begun), so any worker can continue it. It lives in memory only: a run that is
resumed from a checkpoint begins such problems anew. It may be of a newer policy than the tokens that a worker still
without that policy adds to it.

`PartialRollouts` stands beside the producers, `Sampler` in the worker's process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from cluster.group_slot import GroupSlot
from rollout.engine import Engine
from rollout.types import Completion, Sampling

Begun = Sequence[Completion]  # G completions, of which some have finish_reason "abort"; or none: from the prompt


class PartialRollouts:
    """What there is of stopped groups, for the producers of one run; and what it saves, counted from the start."""

    def __init__(self) -> None:
        self.begun: dict[int, Begun] = {}  # by position
        self._stopped = 0  # groups
        self._resumed = 0  # completions that were not begun anew
        self._resumed_tokens = 0  # that those had by then

    def set_oldest(self, slot: GroupSlot, position: int) -> None:
        """Tells the slot of this position's next attempt how old its oldest tokens are."""
        begun = self.begun.get(position, ())
        slot.oldest = min([slot.version, *(int(first.versions.min()) for first in begun if len(first.versions))])

    async def attempt(
        self,
        slot: GroupSlot,
        position: int,
        generate: Callable[[Begun], Awaitable[pa.Table]],
        stop: Callable[[], Awaitable[Begun]],
    ) -> pa.Table | None:
        """What `generate` makes of the group that was begun. None once the slot is stopped: then what `stop` gives is
        kept for the next attempt; if that is nothing, the next attempt starts where this one did."""
        if slot.stopped.done():
            return None
        call = asyncio.ensure_future(generate(self.begun.get(position, ())))
        try:
            await asyncio.wait({call, slot.stopped}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            if begun := await stop():
                self.begun[position] = begun
            return None
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)  # nobody else hears how it ended

    def gave_up(self, slot: GroupSlot) -> None:
        """The attempt brought no group."""
        self._stopped += slot.stopped.done()

    def finished(self, position: int) -> None:
        """The group is whole and in the Buffer."""
        lengths = [len(completion.token_ids) for completion in self.begun.pop(position, ())]
        self._resumed += sum(length > 0 for length in lengths)
        self._resumed_tokens += sum(lengths)

    def metrics(self) -> dict[str, float]:
        """Counts since the start of the run."""
        return {
            "rollout/early_stopped": float(self._stopped),
            "rollout/resumed": float(self._resumed),
            "rollout/resumed_tokens": float(self._resumed_tokens),
        }


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
        """Ends a group. What there is of its completions; nothing if it was whole already, or is not known here."""
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
    """sampling.n completions of the prompt [P], as Engine.generate. With `begun`, completion j starts with the tokens
    of begun[j], and what follows is sampled with seed + j."""

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
