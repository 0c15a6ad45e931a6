"""Groups are scored here: every reward function in a worker process, under a deadline, every failure with its name."""

import asyncio
import logging
import math
import pickle
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from cluster.errors import WrongInput
from rewards import limits
from rewards.base import JUDGE, by_row
from rewards.call import Group, Status, Verdict
from rewards.config import RewardConfig, resolved, resolved_names
from rewards.limits import values_of
from rewards.slot import Call, ScoreCall, Slot

if TYPE_CHECKING:
    from rewards.judge import Judge

# Calls of reward functions, handed to worker processes: calls that wait together go to one process in one message, as
# far as they are quick, or of one asynchronous function.
#
# A message to a process and its answer cost the interpreter that also runs the engine about a millisecond, several
# times what a short function takes for a group. A call that may be slow has a message of its own, so that it keeps no
# other waiting and the workers share the work. Calls of an asynchronous function mostly wait for somebody else, and do
# so at once. Those that are late beside others, as where a semaphore lets few of them go on, are made once more, alone.

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
    asked: ScoreCall
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
        one = _Waiting(function, ScoreCall(function.call, group, size))
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


_WORSE: tuple[Status, ...] = ("ok", "nan", "timeout", "error")
LONGEST_ERROR = 1000  # characters of what failed on a completion
NOT_SCORED = "none"  # status of a completion of which every function says None
_ADVICE = {
    "nan": "Return a finite number for each completion",
    "timeout": "Make the reward function faster or raise its timeout_s",
    "error": "Correct the reward function or its configuration",
}


@dataclass(frozen=True)
class Judging:
    """What judges of this pool share with others: where their answers are kept, a folder for each judge (None:
    nowhere), and this pool's part of the requests a minute."""

    folder: Path | None = None
    share: float = 1.0


NOWHERE = Judging()


@dataclass(frozen=True)
class Scores:
    """The scores of one group; all lists have one entry per completion."""

    reward: list[float | None]
    """Weighted sum over the functions that score it; None if none has, or if any failed."""
    parts: dict[str, list[float | None]]
    """Each function's own numbers, unweighted, by its metrics name; None: it gives none, nan: it failed."""
    status: list[str]
    """ok, nan, timeout or error: the worst of the functions; or none, where none scores it."""
    ms: float
    """Milliseconds from asking to answer, waiting for a free worker included."""
    failures: tuple[str, ...]
    """One sentence for each function that failed."""
    errors: list[str | None]
    """The sentences of the functions that failed on this completion, or of why one of ours gave it 0 for another reason
    than a wrong answer; None: there are none."""
    zeroed: Mapping[str, str] = field(default_factory=dict)
    """One sentence for each kind of such reasons, by the kind."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """One sentence for each variable that a function looked for, and that is kept from it."""
    logged: list[list[tuple[str, float | None, str | None]]] = field(default_factory=list)
    """Of each completion what functions told by TRL's hooks: a name, and a number or a text (rewards.base)."""


class RewardPool:
    """Worker processes that score groups. Made once; used from one event loop; closed at the end.

    A reward function that hangs, dies or eats memory costs its own group and a new process; groups that were asked for
    in the same message are scored once more. What it starts itself is killed with it; only if the
    driver is killed (SIGKILL) may such grandchildren outlive it. These are resource limits, not a security boundary.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        workers: int = 1,
        memory_bytes: int = limits.DEFAULT_MEMORY,
        judged: Judging = NOWHERE,
        printed: Path | None = None,
    ) -> None:
        """`workers`: processes, each making one call at a time, or several of an asynchronous function; none without
        functions, and nothing is scored then. `memory_bytes`: the most that each may hold. `printed`: the file for what
        functions print (None: standard error). Raises ValueError without a
        worker, WrongInput for a variable that is named and not set, and for wrong args of a judge."""
        if workers < 1:
            raise ValueError(f"workers: must be >= 1, got {workers}")
        self.names = resolved_names(rewards)
        self._rewards = tuple(rewards)
        self._calls = [_call(r, name, judged) for name, r in zip(self.names, rewards, strict=True)]
        functions = [one.call for one in self._calls if isinstance(one, Function)]
        self._dispatch = Dispatch(functions, workers if functions else 0, memory_bytes, printed)

    async def score(self, group: Group) -> Scores:
        """Scores one group.

        Raises WrongInput if one with `on_error: fail` was not ok. Cancelling it stops the reward functions, once
        nobody waits for another group of the same message.
        """
        begin = time.perf_counter()
        verdicts = await self.verdicts(group)
        for i, (reward, verdict) in enumerate(zip(self._rewards, verdicts, strict=True)):
            if verdict.status != "ok" and reward.on_error == "fail":
                raise WrongInput(self.sentence(i, verdict))
        return self.combine(verdicts, len(group.completions), (time.perf_counter() - begin) * 1e3)

    async def verdicts(self, group: Group, places: Sequence[int] | None = None) -> list[Verdict]:
        """The outcome of each reward function for a group, in the order of the rewards, whatever their `on_error`.
        places: of those alone."""
        size, packed = len(group.completions), pickle.dumps(group, pickle.HIGHEST_PROTOCOL)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(
                    self._dispatch.verdict(one, packed, size) if isinstance(one, Function) else one.verdict(group)
                )
                for one in (self._calls if places is None else [self._calls[i] for i in places])
            ]
        return [task.result() for task in asked]

    def combine(self, verdicts: Sequence[Verdict], size: int, ms: float) -> Scores:
        """The scores of one group of `size`, from the outcomes of all reward functions; they took `ms` milliseconds."""
        rows = [self._row(verdicts, i) for i in range(size)]
        sentences = {i: self.sentence(i, v) for i, v in enumerate(verdicts) if v.status != "ok"}
        why = {f"reward {name!r}: 0: ": v.why for name, v in zip(self.names, verdicts, strict=True) if v.why}
        return Scores(
            reward=[reward for reward, _ in rows],
            parts={name: verdict.values for name, verdict in zip(self.names, verdicts, strict=True)},
            status=[status for _, status in rows],
            ms=ms,
            failures=tuple(sentences.values()),
            errors=[
                _joined(
                    [
                        *(said for i, said in sentences.items() if _failed(verdicts[i], at)),
                        *(f"{begin}{told[at]}" for begin, told in why.items() if at in told),
                    ]
                )
                for at in range(size)
            ],
            logged=by_row([verdict.told for verdict in verdicts], size),
            asked={f"{i} {name}": self._kept(i, name) for i, one in enumerate(verdicts) for name in one.asked},
            zeroed={begin + _kind(one): begin + one for begin, told in why.items() for one in told.values()},
        )

    def _row(self, verdicts: Sequence[Verdict], i: int) -> tuple[float | None, str]:
        """Reward and status of sample `i`. As in TRL, the sum is over the functions that do not say None (its nansum);
        unlike there, a completion without any is not given 0."""
        said = [
            (reward.weight * value, verdict.status)
            for reward, verdict in zip(self._rewards, verdicts, strict=True)
            if (value := verdict.values[i]) is not None
        ]
        failures = [status for value, status in said if math.isnan(value)]
        if failures:
            return None, max(failures, key=_WORSE.index)
        return (sum(value for value, _ in said), "ok") if said else (None, NOT_SCORED)

    def _kept(self, i: int, variable: str) -> str:
        return (
            f"reward {self.names[i]!r} looked for {variable}, which is set here and kept from reward functions; if it "
            f"is to have it, set its env=[{', '.join([*self._rewards[i].env, variable])}]"
        )

    def sentence(self, i: int, verdict: Verdict) -> str:
        """For people: which reward function (the i-th), the outcome, the reason, and what to do."""
        reward = self._rewards[i]
        label = f"reward {self.names[i]!r}" + (f" ({reward.use})" if reward.use != self.names[i] else "")
        return f"{label}: {verdict.status}: {verdict.problem}. {_ADVICE[verdict.status]}."

    def close(self) -> None:
        """Ends all worker processes, whatever they are doing. Blocks for under a second; may be called twice."""
        self._dispatch.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)
        for one in self._calls:
            if not isinstance(one, Function):
                await one.close()


def _call(reward: RewardConfig, name: str, judged: Judging) -> "Function | Judge":
    """Raises WrongInput."""
    if reward.use == JUDGE:
        from rewards.judge import Judge

        return Judge(reward, name, judged.folder and judged.folder / name, judged.share)
    env = values_of(reward.env, f"reward {name!r}")
    return Function(Call(reward.use, _arguments(reward, name), env, reward.timeout_s))


def _failed(verdict: Verdict, at: int) -> bool:
    value = verdict.values[at]
    return value is not None and math.isnan(value)


def _kind(reason: str) -> str:
    """Its beginning, before what is of this one case."""
    return re.split(r"[(0-9:;\n]", reason, maxsplit=1)[0]


def _joined(sentences: Iterable[str]) -> str | None:
    return " ".join(sentences)[:LONGEST_ERROR] or None


def _arguments(reward: RewardConfig, name: str) -> dict[str, Any]:
    return resolved(reward.args, f"reward {name!r}: args")


# Reward functions in a process that is asked by others: generators, of their own node or another.


class RewardService(Protocol):
    """What may be asked of it: the methods that cluster.actor.Actor.call takes at that border."""

    async def score(self, group: Group) -> Scores | str:
        """As RewardPool.score; the text of WrongInput in place of raising it."""

    async def close(self) -> None:
        """Ends the reward functions."""


class RewardServer:
    """The RewardService of a process: a pool for whoever asks."""

    def __init__(
        self, rewards: Sequence[RewardConfig], workers: int, memory_bytes: int, judged: Judging, printed: Path
    ) -> None:
        """As RewardPool."""
        self._pool = RewardPool(rewards, workers, memory_bytes, judged, printed)

    async def score(self, group: Group) -> Scores | str:
        try:
            return await self._pool.score(group)
        except WrongInput as error:  # its type would be lost on the way
            return str(error)

    async def close(self) -> None:
        self._pool.close()
