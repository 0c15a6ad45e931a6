"""Calls of reward functions, handed to worker processes: calls that wait together go to one process in one message, as
far as they are quick, or of one asynchronous function.

A message to a process and its answer cost the interpreter that also runs the engine about a millisecond, several times
what a short function takes for a group. A call that may be slow has a message of its own, so that it keeps no other
waiting and the workers share the work. Calls of an asynchronous function mostly wait for somebody else, and do so at
once. Those that are late beside others, as where a semaphore lets few of them go on, are made once more, alone.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from pathlib import Path

from rewards.call import Verdict
from rewards.slot import Asked, Call, Slot

log = logging.getLogger("rewards")

TOGETHER_MS = 20.0  # that the calls of one message take, by what their functions last took for a group
TOGETHER_BYTES = 16 << 20  # of the groups of one message: a process holds them all


@dataclass(eq=False, slots=True)
class Function:
    """A reward function, and the milliseconds of the slowest call in its last message: unknown before the first one and
    after one without an answer. awaited: whether its calls may wait at once; None before that is known."""

    call: Call
    ms: float = inf
    awaited: bool | None = None


@dataclass(eq=False, slots=True)
class _Waiting:
    """alone: it was in a message that failed, or late in one, and is asked for by itself now."""

    function: Function
    asked: Asked
    answer: asyncio.Future[Verdict] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    alone: bool = False


class Dispatch:
    """The worker processes of one pool. Made once; used from one event loop; closed at the end."""

    def __init__(self, functions: Sequence[Call], workers: int, memory_bytes: int, printed: Path | None = None) -> None:
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="reward-starter")
        self._slots = [Slot(memory_bytes, self._starter, printed) for _ in range(workers)]
        for slot in self._slots:
            for call in functions:
                slot.preload(call)
        self._free = list(self._slots)  # the last one first: prefer the warm worker
        self._waiting: deque[_Waiting] = deque()
        self._sent: dict[asyncio.Task[None], list[_Waiting]] = {}

    async def verdict(self, function: Function, group: bytes, size: int) -> Verdict:
        """Of the function for one pickled group of `size` samples. Cancelling it stops the function, once nobody waits
        for another group of the same message."""
        one = _Waiting(function, Asked(function.call, group, size))
        self._waiting.append(one)
        # Not at once: what else is asked for in this turn of the event loop goes along.
        asyncio.get_running_loop().call_soon(self._send)
        try:
            return await one.answer
        except asyncio.CancelledError:
            for task, together in self._sent.items():
                if all(other.answer.cancelled() for other in together):
                    task.cancel()
            raise

    def _send(self) -> None:
        while self._free and (together := self._next()):
            slot = self._free.pop()
            task = asyncio.create_task(self._message(slot, together))
            self._sent[task] = together
            # Not in the task itself, which may be cancelled before it begins.
            task.add_done_callback(partial(self._ended, slot))

    def _ended(self, slot: Slot, task: asyncio.Task[None]) -> None:
        del self._sent[task]
        self._free.append(slot)
        self._send()

    def _next(self) -> list[_Waiting]:
        """What goes into one message, the one that waits for longest first; nothing, if nothing waits."""
        together: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        ms, size = 0.0, 0
        share = ceil(len(self._waiting) / len(self._free))  # of each free process, of calls that take no time of it
        for one in self._waiting:
            if one.answer.cancelled():
                continue
            takes = 0.0 if one.function.awaited else one.function.ms
            fits = ms + takes <= TOGETHER_MS and size + len(one.asked.group) <= TOGETHER_BYTES
            others_turn = one.function.awaited and len(together) >= share
            if not together or (fits and not others_turn and _may_share(together[0], one)):
                together.append(one)
                ms, size = ms + takes, size + len(one.asked.group)
            else:
                left.append(one)
        self._waiting = left
        return together

    async def _message(self, slot: Slot, together: Sequence[_Waiting]) -> None:
        begin = time.monotonic()
        try:
            verdicts = await slot.scores([one.asked for one in together])
        except Exception as error:
            for one in together:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        if verdicts is None:
            if time.monotonic() - begin >= together[0].asked.call.timeout_s:
                _wait_no_more_at_once({one.function for one in together})
            self._again(together)
            return
        told = [*zip(together, verdicts, strict=True)]
        for function in {one.function for one in together}:
            function.ms = max(verdict.ms or inf for one, verdict in told if one.function is function)
        late = [one for one, verdict in told if len(told) > 1 and verdict.status == "timeout"]
        self._again(late)
        for one, verdict in told:
            if one.function.awaited is None:
                one.function.awaited = verdict.awaited
            if one not in late and not one.answer.done():
                one.answer.set_result(verdict)

    def _again(self, some: Sequence[_Waiting]) -> None:
        for one in some:
            one.alone = True
        self._waiting.extendleft(reversed(some))

    def close(self) -> None:
        """Ends all worker processes, whatever they are doing. Blocks for under a second; may be called twice."""
        with ThreadPoolExecutor(max(len(self._slots), 1)) as threads:
            list(threads.map(Slot.close, self._slots))
        self._starter.shutdown()


def _wait_no_more_at_once(functions: Iterable[Function]) -> None:
    """One that blocks its process keeps the others from their deadline."""
    for function in functions:
        if function.awaited:
            function.awaited = False
            log.warning(
                "reward %s: is asynchronous, and calls at once gave no answer in time, so that one follows the other "
                "from now on; let it await what it waits for, as with asyncio.to_thread",
                function.call.use,
            )


def _may_share(one: _Waiting, other: _Waiting) -> bool:
    """Whether they may be in one message, which has one deadline and answers when its last call has."""
    if one.alone or other.alone or one.asked.call.timeout_s != other.asked.call.timeout_s:
        return False
    return one.function is other.function or not (one.function.awaited or other.function.awaited)
