"""The Ray end of an actor: a plain object made by `factory(*args)` in another process, and the handle to it.

Its `async def` methods take and return values. `Remote` and `cluster.actor.Local` have one interface, so the same loop
runs with and without a cluster. Ray restarts by itself only what has no state and is called from several processes
(Session.spawn), and nothing else: it would not say so while a constructor runs, and who counts losses must see each.
"""

import asyncio
import errno
import gc
import logging
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, cast

from cluster.actor import (
    ActorDied,
    ClusterLost,
    DeadlineExceeded,
    Method,
    P,
    RemoteError,
    S_co,
    Shared,
    StartFailed,
    T,
    Unusable,
    ValueLost,
    within,
)
from cluster.files import WriteFailed

# Why a process ended: worked out from Ray's report of its exit, its log, and the kernel's count of memory kills.

NO_WORD = "it was killed by a signal (as `kill -9` and the kernel's out-of-memory killer do), or called os._exit"


class Found(NamedTuple):
    """text: for people. reason: equal for equal faults; None if the process may have been killed from outside."""

    text: str
    reason: str | None


class ExitReasons:
    """Explains the exits of one cluster's processes. logs: the folder with their output, if it is on this machine."""

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self._memory_kills = memory_kills()

    def of(self, ray_says: str, pid: int | None) -> Found:
        """What ended the process `pid`; ray_says: the text of Ray's exception."""
        pid = pid or _pid_in(ray_says)
        who = f"pid {pid}: " if pid else ""
        if "OutOfMemory" in ray_says or "OUT_OF_MEMORY" in ray_says:
            return Found(f"{who}Ray's memory monitor ended it, since the machine was nearly out of memory", None)
        code = re.search(r"exit code (\S[^\n]*?)\.?\s*(?:\n|$)", ray_says)
        if code:
            return Found(f"{who}exit code {code[1]}", f"exit code {code[1]}")
        crash = self._crash(pid)
        if crash:
            return Found(f"{who}{crash}", crash)
        kills, self._memory_kills = memory_kills() - self._memory_kills, memory_kills()
        if kills > 0:
            return Found(f"{who}killed, and the kernel's out-of-memory killer struck {kills} times meanwhile", None)
        if "node" in ray_says and "connection error" not in ray_says:
            return Found(f"{who}its node was lost", None)
        return Found(f"{who}{NO_WORD}", None)

    def _crash(self, pid: int | None) -> str | None:
        """The line that a crash leaves at the end of a process's output."""
        if self._logs is None or pid is None:
            return None
        for path in self._logs.glob(f"worker-*-{pid}.err"):
            found = re.findall(
                r"^(Fatal Python error: .*|terminate called .*)$", path.read_text(errors="replace"), re.M
            )
            if found:
                return str(found[-1])
        return None


def memory_kills() -> int:
    """How many processes the kernel has killed for memory: in our control group (version 2 or 1), or, where that does
    not count, on this machine."""
    for path in _counters():
        try:
            text = path.read_text()
        except OSError:  # the other version of control groups, or the root of them
            continue
        found = re.search(r"^oom_kill (\d+)$", text, re.M)
        if found:
            return int(found[1])
    return 0


def _counters() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, folder = line.split(":", 2)
        if number == "0":
            yield root / folder.lstrip("/") / "memory.events"
        elif controllers == "memory":
            yield root / "memory" / folder.lstrip("/") / "memory.oom_control"
    yield from (root / "memory.events", Path("/proc/vmstat"))


def _pid_in(ray_says: str) -> int | None:
    found = re.search(r"\bpid: (\d+)", ray_says)
    return int(found[1]) if found else None


LOOK_EVERY_S = 15.0  # whether a process still answers
MAX_SENTENCE = 500  # characters of an exception's text that stand on one line


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside this block the garbage collector does not run by itself. Imports make a million objects and no garbage,
    and searching them took a fifth of a role's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Started(NamedTuple):
    """A process's report of its start. Exceptions travel as text, since not all can be pickled."""

    pid: int
    address: str  # of its node
    error: str | None = None  # of the constructor, on one line
    wrong_input: bool = False
    story: str = ""  # its traceback; none of an exception that has an attribute `says_all`


class Host:
    """The one Ray actor class: holds any object."""

    def __init__(self, factory: Callable[..., Any], args: Sequence[Any], path: Sequence[str] = ()) -> None:
        """path: where what is not found on this process's own is looked for, last: the driver's."""
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        _forget_script()
        sys.path += [entry for entry in path if entry and entry not in sys.path]
        self._object: Any = None
        try:
            with uncollected():
                self._object = factory(*args)
        except Exception as error:  # told by started(), since of a constructor Ray says only that the process died
            if getattr(error, "says_all", False):
                said = " ".join(str(error).split()), True, ""
            else:
                said = in_one_line(error), _is_of_input(error), traceback.format_exc()
            self._started = Started(os.getpid(), _address(), *said)
        else:
            self._started = Started(os.getpid(), _address())

    async def started(self) -> Started:
        return self._started

    async def until_ended(self) -> None:
        """Gives no answer: Ray tells the caller when the process ends."""
        await asyncio.Event().wait()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        # Told by started(), for which nobody waits of a process that Ray has started again.
        if self._started.error is not None:
            raise Unusable(self._started.error)
        return await getattr(self._object, method)(*args, **kwargs)

    async def apart(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The two parts of an answer of which one is Shared: Ray keeps each by itself."""
        shared, beside = await getattr(self._object, method)(*args, **kwargs)
        return shared.value, beside


def _forget_script() -> None:
    """Of Ray's worker, the main module of this process: each process that multiprocessing spawns from here would run
    the file of that again, which imports ray, for a quarter of a second of a core and 40 MB."""
    vars(sys.modules["__main__"]).pop("__file__", None)


class Called(Generic[S_co]):
    """An object in another process, to be called from whichever process this is sent to."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name, self._handle = name, handle
        self._last_answer = time.monotonic()

    def __reduce__(self) -> tuple[Any, ...]:
        return Called, (self.name, self._handle)

    async def call(
        self,
        method: Method[S_co, P, T],
        deadline_s: float,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        name, sent = method.__name__, [_reference(arg) if isinstance(arg, Shared) else arg for arg in args]
        answer: Any
        if hasattr(method, "stays_there"):
            value, beside = self._handle.apart.options(num_returns=2).remote(name, *sent, **kwargs)
            answer = Shared(None, value), await self._await(beside, name, deadline_s)
        else:
            answer = await self._await(self._handle.call.remote(name, *sent, **kwargs), name, deadline_s)
        return cast(T, answer)

    async def _await(self, ref: Any, method: str, deadline_s: float) -> Any:
        import ray

        try:
            async with within(deadline_s):
                result = await ref
        except ray.exceptions.RayTaskError as error:  # first: that of a TimeoutError in there is a TimeoutError, too
            cause = getattr(error, "cause", None)
            if isinstance(cause, WriteFailed):
                raise cause from None
            if isinstance(cause, Unusable):
                raise ActorDied(f"{self.name}: {cause}", reason=str(cause)) from error
            if isinstance(cause, ValueLost):
                raise ValueLost(f"{self.name}: {method}: {cause}") from error
            if isinstance(cause, ray.exceptions.ObjectLostError):
                raise ValueLost(f"{self.name}: {method}: what it was sent is gone with the node that had it") from error
            raise RemoteError(f"{self.name}: {method} failed: {_cause(error)}") from error
        except asyncio.CancelledError:  # nobody wants the answer any more; over there it is cancelled, too
            ray.cancel(ref)
            raise
        except TimeoutError:
            ray.cancel(ref)
            silent = time.monotonic() - self._last_answer
            raise DeadlineExceeded(
                f"{self.name}: {method} gave no answer within {deadline_s:g} s (last answer {silent:.0f} s ago)"
            ) from None
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            raise await self._died(method, str(error)) from error
        self._last_answer = time.monotonic()
        return result

    async def _died(self, method: str, ray_says: str) -> Exception:
        """Why the process is gone, as far as Ray says."""
        return ActorDied(f"{self.name}: process died during {method}: {' '.join(ray_says.split())[:MAX_SENTENCE]}")


class Remote(Called[S_co]):
    """The same in the process that starts and ends it. start: makes the process, and its handle; exits: what dead ones
    left."""

    def __init__(self, name: str, start: Callable[[], Any], exits: ExitReasons, lost: Callable[[], str | None]) -> None:
        super().__init__(name, start())
        self._start, self._exits, self._lost = start, exits, lost
        self.pid: int | None = None  # once it has started
        self.address = ""  # of its node, likewise

    async def revive(self, deadline_s: float) -> None:
        await self.kill()  # Ray never notices a hung process
        self._handle, self.pid = self._start(), None
        await self.ready(deadline_s)

    async def ready(self, deadline_s: float) -> None:
        """Waits for the constructor; StartFailed if it raised."""
        started: Started = await self._await(self._handle.started.remote(), "start", deadline_s)
        self.pid, self.address = started.pid, started.address
        if started.error is not None and not started.story:
            raise StartFailed(started.error, started.error, started.wrong_input, says_all=True)
        if started.error is not None:
            failed = StartFailed(f"{self.name}: {started.error}", started.error, started.wrong_input)
            failed.add_note(f"In the process of {self.name} (pid {started.pid}):\n{started.story}")
            raise failed

    async def until_ended(self, silence_s: float) -> None:
        once = {"max_task_retries": 0}  # also of one that Ray restarts: this process is meant, and not the next
        waits = self._handle.until_ended.options(**once).remote()
        ended = asyncio.ensure_future(self._await(waits, "its work", math.inf))
        try:
            while not ended.done():
                await self._await(self._handle.started.options(**once).remote(), "pulse", silence_s)
                await asyncio.wait({ended}, timeout=min(silence_s / 4, LOOK_EVERY_S))
            await ended
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def kill(self) -> None:
        import ray

        ray.kill(self._handle)

    async def restart(self) -> None:
        """Of one that Ray itself restarts (Session.spawn): ends this process, which hangs."""
        import ray

        ray.kill(self._handle, no_restart=False)

    async def _died(self, method: str, ray_says: str) -> Exception:
        """Why the process is gone: since Ray itself is, or what can be found out of its own end."""
        for _ in range(5):  # of the end of its node an actor hears a moment before this process does
            if text := self._lost():
                return ClusterLost(text)
            await asyncio.sleep(0.1)
        found = self._exits.of(ray_says, self.pid)
        return ActorDied(f"{self.name}: process died during {method}: {found.text}", reason=found.reason)


def _address() -> str:
    """Of this node, as Ray's other processes know it."""
    import ray

    return str(ray.util.get_node_ip_address())


def in_one_line(error: BaseException) -> str:
    """The text of an exception without line breaks, cut where it grows long; with its type, unless that is a plain
    ValueError or RuntimeError, whose texts are whole sentences."""
    text = " ".join(str(error).split())
    if len(text) > MAX_SENTENCE:
        text = text[:MAX_SENTENCE] + "..."
    return text if text and type(error) in (ValueError, RuntimeError) else f"{type(error).__name__}: {text}"


def _is_of_input(error: Exception) -> bool:
    """Files that are not there or not right, and values that are refused. A bare OSError, without a number of the
    operating system, is how transformers says that a model folder lacks something."""
    return isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno in (None, errno.ENOENT))


def _reference(shared: Shared[Any]) -> Any:
    """What Ray replaces by the value where it arrives, as a direct argument of a call."""
    if shared.handle is None:
        import ray

        shared.handle = ray.put(shared.value)
    return shared.handle


def _cause(error: Any) -> str:
    """The exception itself first, then where it happened."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {cause}\n{error}" if cause is not None else str(error)
