"""Scores groups for the rollout workers: RewardPool calls each reward function of a run in worker processes, under a
deadline, and returns the weighted sum of their numbers as Scores. Judges are asked over HTTP from here, without a
worker process. RewardServer offers a pool to other processes (`cluster.rewards`).

The pool combines what rewards.slot (one worker process) and rewards.call (one call of a function) give.
"""

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

# How calls are divided among the worker processes. Several calls that wait are sent in one message if they are quick,
# or if they are calls of one asynchronous function.
#
# A message and its answer take about a millisecond of the interpreter that also runs the engine, several times what a
# short function takes for a group. A call that may be slow gets a message of its own, so that it delays no other call
# and the workers share the work. Calls of an asynchronous function mostly wait for another service, so they run at the
# same time. A call that is late in a message of several (for example because a semaphore admits few of them) is made
# once more in a message of its own.

log = logging.getLogger("rewards")

TOGETHER_MS = 20.0  # the calls of one message take at most this together, judged by each function's last message
TOGETHER_BYTES = 16 << 20  # pickled groups of one message, at most, since the worker holds all of them


@dataclass(eq=False, slots=True)
class Function:
    """A reward function with what is known of its speed.

    ms: milliseconds of the slowest call in its last message; infinite before the first answer and after a call without
    an answer. awaited: whether the function is asynchronous, so that its calls can run at the same time; None before
    that is known.
    """

    call: Call
    ms: float = inf
    awaited: bool | None = None


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that waits for a worker or for its answer. alone: the call was in a message that failed, or was late in
    one, and now gets a message of its own."""

    function: Function
    asked: ScoreCall
    answer: asyncio.Future[Verdict] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    alone: bool = False


class Dispatch:
    """Gives the calls of one pool to its worker processes. Used from one event loop; must be closed."""

    def __init__(self, functions: Sequence[Call], workers: int, memory_bytes: int, printed: Path | None = None) -> None:
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="reward-starter")
        self._slots = [Slot(memory_bytes, self._starter, printed) for _ in range(workers)]
        for slot in self._slots:
            for call in functions:
                slot.preload(call)
        self._free = list(self._slots)  # used from the end, so that the worker that answered last is preferred
        self._waiting: deque[_Waiting] = deque()
        self._sent: dict[asyncio.Task[None], list[_Waiting]] = {}

    async def verdict(self, function: Function, group: bytes, size: int) -> Verdict:
        """Returns the function's verdict on one pickled group of `size` completions. Cancelling this stops the
        function, once all other calls of the same message are cancelled too."""
        one = _Waiting(function, ScoreCall(function.call, group, size))
        self._waiting.append(one)
        # Sent in the loop's next turn, so that other calls made in this turn can join the message.
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
            # A callback frees the worker, since the task itself may be cancelled before it begins.
            task.add_done_callback(partial(self._ended, slot))

    def _ended(self, slot: Slot, task: asyncio.Task[None]) -> None:
        del self._sent[task]
        self._free.append(slot)
        self._send()

    def _next(self) -> list[_Waiting]:
        """Removes the calls of the next message from the queue, beginning with the call that has waited longest. Empty
        if no call waits."""
        together: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        ms, size = 0.0, 0
        share = ceil(len(self._waiting) / len(self._free))  # the most calls of an asynchronous function in one message
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
        """Kills all worker processes, also busy ones. Blocks for less than a second; may be called twice."""
        with ThreadPoolExecutor(max(len(self._slots), 1)) as threads:
            list(threads.map(Slot.close, self._slots))
        self._starter.shutdown()


def _wait_no_more_at_once(functions: Iterable[Function]) -> None:
    """Makes the calls of asynchronous functions run one after another from now on. A function that blocks its event
    loop instead of awaiting delays the other calls of its message beyond their deadline."""
    for function in functions:
        if function.awaited:
            function.awaited = False
            log.warning(
                "reward %s: is asynchronous, and calls at once gave no answer in time, so that one follows the other "
                "from now on; let it await what it waits for, as with asyncio.to_thread",
                function.call.use,
            )


def _may_share(one: _Waiting, other: _Waiting) -> bool:
    """Whether two calls may be in one message, which has one deadline and is answered when its last call has ended."""
    if one.alone or other.alone or one.asked.call.timeout_s != other.asked.call.timeout_s:
        return False
    return one.function is other.function or not (one.function.awaited or other.function.awaited)


_WORSE: tuple[Status, ...] = ("ok", "nan", "timeout", "error")  # from best to worst
LONGEST_ERROR = 1000  # characters that are kept of the failures on one completion
NOT_SCORED = "none"  # status of a completion for which every function returned None
_ADVICE = {
    "nan": "Return a finite number for each completion",
    "timeout": "Make the reward function faster or raise its timeout_s",
    "error": "Correct the reward function or its configuration",
}


@dataclass(frozen=True)
class Judging:
    """What the judges of a pool need to know of the run. folder: holds a folder of kept answers for each judge (None:
    answers are not kept). share: this pool's part of the requests per minute that a judge may make in the whole run."""

    folder: Path | None = None
    share: float = 1.0


NOWHERE = Judging()


@dataclass(frozen=True)
class Scores:
    """The scores of one group; all lists have one entry per completion."""

    reward: list[float | None]
    """Weighted sum over the functions that scored the completion; None if no function did, or if any failed on it.
    Watches do not count in it, nor in `status` and `errors`."""
    parts: dict[str, list[float | None]]
    """Each function's numbers without its weight, by its metrics name; None: not scored, nan: the function failed."""
    status: list[str]
    """The worst status of the functions (ok, nan, timeout or error); none: no function scored the completion."""
    ms: float
    """Milliseconds that scoring took, with the wait for a free worker."""
    failures: tuple[str, ...]
    """One sentence for each function that failed."""
    errors: list[str | None]
    """For each completion the sentences of the functions that failed on it, and the reasons why a function gave it 0
    although its answer was not found wrong (rewards.base.Zeroed); None if there are none."""
    zeroed: Mapping[str, str] = field(default_factory=dict)
    """Reasons for a 0 as in `errors`, one sentence for each kind of reason, by the kind."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """One sentence for each environment variable that a function looked for and that is withheld from it."""
    logged: list[list[tuple[str, float | None, str | None]]] = field(default_factory=list)
    """For each completion what functions passed to TRL's log hooks: (name, number or None, text or None)."""


class RewardPool:
    """Scores groups with the reward functions of a run, in worker processes. Used from one event loop; must be closed.

    A reward function that hangs, dies or exhausts its memory fails for its own group, and its process is replaced;
    other groups of the same message are scored once more. Processes that a function starts are killed together with it;
    they can survive only if the driver is killed with SIGKILL. These are resource limits, not a security boundary.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        workers: int = 1,
        memory_bytes: int = limits.DEFAULT_MEMORY,
        judged: Judging = NOWHERE,
        printed: Path | None = None,
    ) -> None:
        """rewards: the reward functions and judges, with their settings. workers: how many processes to start (none are
        started if `rewards` has only judges). memory_bytes: the memory that each process may hold. judged: see Judging.
        printed: the file for the output of functions (None: standard error).

        Raises ValueError if workers < 1, WrongInput for an environment variable that is named and not set, and for
        wrong args of a judge.
        """
        if workers < 1:
            raise ValueError(f"workers: must be >= 1, got {workers}")
        self.names = resolved_names(rewards)
        self._rewards = tuple(rewards)
        self._calls = [_call(r, name, judged) for name, r in zip(self.names, rewards, strict=True)]
        functions = [one.call for one in self._calls if isinstance(one, Function)]
        self._dispatch = Dispatch(functions, workers if functions else 0, memory_bytes, printed)

    async def score(self, group: Group) -> Scores:
        """Scores one group.

        Raises WrongInput if a function with `on_error: fail` has another status than ok. Cancelling this stops the
        reward functions, once all other calls of the same messages are cancelled too.
        """
        begin = time.perf_counter()
        verdicts = await self.verdicts(group)
        for i, (reward, verdict) in enumerate(zip(self._rewards, verdicts, strict=True)):
            if verdict.status != "ok" and reward.on_error == "fail":
                raise WrongInput(self.sentence(i, verdict))
        return self.combine(verdicts, len(group.completions), (time.perf_counter() - begin) * 1e3)

    async def verdicts(self, group: Group, places: Sequence[int] | None = None) -> list[Verdict]:
        """Returns the verdict of each reward function on a group, in the order of the rewards, whatever their
        `on_error`. places: indices of the functions to call (None: all)."""
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
        """Makes the Scores of a group of `size` completions from the verdicts of all reward functions, which took `ms`
        milliseconds."""
        rows = [self._row(verdicts, i) for i in range(size)]
        sentences = {i: self.sentence(i, v) for i, v in enumerate(verdicts) if v.status != "ok"}
        why = {i: (f"reward {self.names[i]!r}: 0: ", v.why) for i, v in enumerate(verdicts) if v.why}
        return Scores(
            reward=[reward for reward, _ in rows],
            parts={name: verdict.values for name, verdict in zip(self.names, verdicts, strict=True)},
            status=[status for _, status in rows],
            ms=ms,
            failures=tuple(sentences.values()),
            errors=[
                _joined(
                    [
                        *(said for i, said in sentences.items() if self._counts(i) and _failed(verdicts[i], at)),
                        *(f"{begin}{told[at]}" for i, (begin, told) in why.items() if self._counts(i) and at in told),
                    ]
                )
                for at in range(size)
            ],
            logged=by_row([verdict.told for verdict in verdicts], size),
            asked={f"{i} {name}": self._kept(i, name) for i, one in enumerate(verdicts) for name in one.asked},
            zeroed={begin + _kind(one): begin + one for begin, told in why.values() for one in told.values()},
        )

    def _counts(self, i: int) -> bool:
        """Whether the i-th reward decides about a completion's reward; a watch does not."""
        return not self._rewards[i].watch

    def _row(self, verdicts: Sequence[Verdict], i: int) -> tuple[float | None, str]:
        """Reward and status of completion `i`. As in TRL (nansum), the sum leaves out functions that returned None.
        Unlike in TRL, a completion that no function scored has no reward instead of 0."""
        said = [
            (reward.share * value, verdict.status)
            for reward, verdict in zip(self._rewards, verdicts, strict=True)
            if reward.share is not None and (value := verdict.values[i]) is not None
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
        """The sentence for the user about the verdict of the i-th reward function: its name, the status, the reason,
        and what to do."""
        reward = self._rewards[i]
        label = f"reward {self.names[i]!r}" + (f" ({reward.use})" if reward.use != self.names[i] else "")
        return f"{label}: {verdict.status}: {verdict.problem}. {_ADVICE[verdict.status]}."

    def close(self) -> None:
        """Kills all worker processes, also busy ones. Blocks for less than a second; may be called twice."""
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
    """Makes what the pool calls for one configured reward. Raises WrongInput."""
    if reward.use == JUDGE:
        from rewards.judge import Judge

        return Judge(reward, name, judged.folder and judged.folder / name, judged.share)
    env = values_of(reward.env, f"reward {name!r}")
    return Function(Call(reward.use, _arguments(reward, name), env, reward.timeout_s))


def _failed(verdict: Verdict, at: int) -> bool:
    value = verdict.values[at]
    return value is not None and math.isnan(value)


def _kind(reason: str) -> str:
    """The beginning of a reason, which is the same for all completions: the text before the first detail."""
    return re.split(r"[(0-9:;\n]", reason, maxsplit=1)[0]


def _joined(sentences: Iterable[str]) -> str | None:
    return " ".join(sentences)[:LONGEST_ERROR] or None


def _arguments(reward: RewardConfig, name: str) -> dict[str, Any]:
    return resolved(reward.args, f"reward {name!r}: args")


class RewardService(Protocol):
    """The methods that rollout workers, on any node, call in a process that only scores (`cluster.rewards`), by
    cluster.actor.Actor.call."""

    async def score(self, group: Group) -> Scores | str:
        """Scores a group as RewardPool.score does; returns the text of WrongInput instead of raising it."""

    async def close(self) -> None:
        """Kills the worker processes."""


class RewardServer:
    """The RewardService in such a process; holds a RewardPool."""

    def __init__(
        self, rewards: Sequence[RewardConfig], workers: int, memory_bytes: int, judged: Judging, printed: Path
    ) -> None:
        """The arguments are those of RewardPool."""
        self._pool = RewardPool(rewards, workers, memory_bytes, judged, printed)

    async def score(self, group: Group) -> Scores | str:
        try:
            return await self._pool.score(group)
        except WrongInput as error:  # the caller in another process would get RemoteError instead
            return str(error)

    async def close(self) -> None:
        self._pool.close()
