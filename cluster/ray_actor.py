"""Implements cluster.actor with Ray: Host runs in the actor's process and holds a plain object made by
`factory(*args)`; Remote (in the process that started it) and Called (in any other) are the handles for its callers.

Ray itself restarts only processes without state that several processes call (Session.spawn). All others are restarted
by `Remote.revive`, since Ray does not report a restart while the constructor runs, and each loss must be counted.
ExitReasons finds out why a process ended.
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
from cluster.errors import WrongInput
from cluster.files import WriteFailed

NO_WORD = "it was killed by a signal (as `kill -9` and the kernel's out-of-memory killer do), or called os._exit"


class Found(NamedTuple):
    """Why a process ended. text: for messages. reason: the same text for the same fault; None if the process may have
    been killed from outside."""

    text: str
    reason: str | None


class ExitReasons:
    """Finds out why processes of one cluster ended: from Ray's report, their logs, and the kernel's count of processes
    killed for memory. logs: the folder with their output; None if it is not on this machine."""

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self._memory_kills = memory_kills()

    def of(self, ray_says: str, pid: int | None) -> Found:
        """Returns what ended the process `pid` (None: the id is looked for in `ray_says`, the text of Ray's
        exception)."""
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
        """The last line in a process's output that reports a crash of the interpreter or of C++ code."""
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
    """How many processes the kernel has killed for memory in this process's control group (version 2 or 1), or on the
    whole machine if the control group has no count."""
    for path in _counters():
        try:
            text = path.read_text()
        except OSError:  # the machine uses the other version of control groups, or the group is the root
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


LOOK_EVERY_S = 15.0  # at most this between two checks whether a process still answers
MAX_SENTENCE = 500  # characters that in_one_line keeps of an exception's text


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns the automatic garbage collector off inside this block. Imports create a million objects and no garbage;
    collecting during them took a fifth of a role's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Started(NamedTuple):
    """A process's report of its start. It has the exception of the constructor as text, since not every exception can
    be pickled."""

    pid: int
    address: str  # of the process's node
    error: str | None = None  # the constructor's exception on one line; None if there was none
    wrong_input: bool = False  # see cluster.actor.StartFailed
    story: str = ""  # the traceback of `error`; empty for WrongInput, whose text is complete for a user


class Host:
    """The only Ray actor class of a run: constructs any object in its process, and calls its methods."""

    def __init__(self, factory: Callable[..., Any], args: Sequence[Any], path: Sequence[str] = ()) -> None:
        """path: the driver's sys.path; its entries are appended to this process's own."""
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        _forget_script()
        sys.path += [entry for entry in path if entry and entry not in sys.path]
        self._object: Any = None
        try:
            with uncollected():
                self._object = factory(*args)
        except Exception as error:  # reported by started(), since Ray would report only that the process died
            if isinstance(error, WrongInput):
                said = " ".join(str(error).split()), True, ""
            else:
                said = in_one_line(error), _is_of_input(error), traceback.format_exc()
            self._started = Started(os.getpid(), _address(), *said)
        else:
            self._started = Started(os.getpid(), _address())

    async def started(self) -> Started:
        return self._started

    async def until_ended(self) -> None:
        """Never returns. Ray reports to the caller when the process ends."""
        await asyncio.Event().wait()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        # After a restart by Ray itself nobody calls started(), so the constructor's error is raised here.
        if self._started.error is not None:
            raise Unusable(self._started.error)
        return await getattr(self._object, method)(*args, **kwargs)

    async def apart(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Calls a method marked by cluster.actor.stays_there. Returns the value of its Shared and the second part of
        the answer, which Ray stores as two objects."""
        shared, beside = await getattr(self._object, method)(*args, **kwargs)
        return shared.value, beside


def _forget_script() -> None:
    """Removes the file name of the main module, which is Ray's worker script. Otherwise each process that
    multiprocessing spawns from here would run that script and import ray, for a quarter of a second of a core and
    40 MB."""
    vars(sys.modules["__main__"]).pop("__file__", None)


class Called(Generic[S_co]):
    """A handle for calls of an object in another process. It can be pickled and used in any process of the cluster."""

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
        # Caught first, since Ray's exception for a TimeoutError that the method raised is a TimeoutError too.
        except ray.exceptions.RayTaskError as error:
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
        except asyncio.CancelledError:  # the method is cancelled too, since nobody waits for its answer
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
        """The exception for a process that ended, with what Ray says of it."""
        return ActorDied(f"{self.name}: process died during {method}: {' '.join(ray_says.split())[:MAX_SENTENCE]}")


class Remote(Called[S_co]):
    """The RevivableActor in the process that starts and ends the actor's process.

    start: starts a process and returns its Ray handle. exits: explains why a process ended. lost: returns the message
    for ClusterLost if one of Ray's own processes has ended, else None.
    """

    def __init__(self, name: str, start: Callable[[], Any], exits: ExitReasons, lost: Callable[[], str | None]) -> None:
        super().__init__(name, start())
        self._start, self._exits, self._lost = start, exits, lost
        self.pid: int | None = None  # set by `ready`
        self.address = ""  # of the process's node, set by `ready`

    async def revive(self, deadline_s: float) -> None:
        await self.kill()  # Ray never notices a hung process
        self._handle, self.pid = self._start(), None
        await self.ready(deadline_s)

    async def ready(self, deadline_s: float) -> None:
        """Waits until the constructor has returned. Raises StartFailed if it raised."""
        started: Started = await self._await(self._handle.started.remote(), "start", deadline_s)
        self.pid, self.address = started.pid, started.address
        if started.error is not None and not started.story:
            raise StartFailed(started.error, started.error, started.wrong_input, says_all=True)
        if started.error is not None:
            failed = StartFailed(f"{self.name}: {started.error}", started.error, started.wrong_input)
            failed.add_note(f"In the process of {self.name} (pid {started.pid}):\n{started.story}")
            raise failed

    async def until_ended(self, silence_s: float) -> None:
        once = {"max_task_retries": 0}  # Ray must not repeat these calls in the process that replaces this one
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
        """Kills a process that hangs and that Ray itself restarts (Session.spawn)."""
        import ray

        ray.kill(self._handle, no_restart=False)

    async def _died(self, method: str, ray_says: str) -> Exception:
        """ClusterLost if Ray itself has ended, else ActorDied with what ExitReasons finds."""
        for _ in range(5):  # the call may fail a moment before this process learns that the node has ended
            if text := self._lost():
                return ClusterLost(text)
            await asyncio.sleep(0.1)
        found = self._exits.of(ray_says, self.pid)
        return ActorDied(f"{self.name}: process died during {method}: {found.text}", reason=found.reason)


def _address() -> str:
    """The address of this node, by which Ray's other processes know it."""
    import ray

    return str(ray.util.get_node_ip_address())


def in_one_line(error: BaseException) -> str:
    """The type and the text of an exception without line breaks, cut after MAX_SENTENCE characters. The type is left
    out for a plain ValueError or RuntimeError, whose texts are whole sentences."""
    text = " ".join(str(error).split())
    if len(text) > MAX_SENTENCE:
        text = text[:MAX_SENTENCE] + "..."
    return text if text and type(error) in (ValueError, RuntimeError) else f"{type(error).__name__}: {text}"


def _is_of_input(error: Exception) -> bool:
    """Whether the exception says that an input is wrong: a refused value, or a missing or damaged file. An OSError
    without an error number is how transformers reports that a model folder lacks something."""
    return isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno in (None, errno.ENOENT))


def _reference(shared: Shared[Any]) -> Any:
    """The handle of the value in Ray's object store. Ray replaces it by the value if it is a direct argument of a
    call."""
    if shared.handle is None:
        import ray

        shared.handle = ray.put(shared.value)
    return shared.handle


def _cause(error: Any) -> str:
    """The text of Ray's exception, which ends with the remote traceback, behind that of the original exception."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {cause}\n{error}" if cause is not None else str(error)
