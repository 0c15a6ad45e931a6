"""The start of a role, without its process."""

import gc
from pathlib import Path

import pytest

from cluster import ray_actor
from cluster.ray_actor import NO_WORD, ExitReasons, Found, Host, in_one_line


async def test_garbage_is_collected_again_after_the_object_is_built_and_after_it_failed() -> None:
    during = []
    assert gc.isenabled()
    Host(lambda: during.append(gc.isenabled()), ())
    assert during == [False]
    assert gc.isenabled()
    failed = Host(lambda: 1 / 0, ())
    assert gc.isenabled()
    started = await failed.started()
    assert (started.error, started.wrong_input) == ("ZeroDivisionError: division by zero", False)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a:\n  b"), "a: b"),
        (RuntimeError(""), "RuntimeError: "),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("x" * 501), "x" * 500 + "..."),
    ],
)
def test_an_exception_on_one_line(error: Exception, line: str) -> None:
    assert in_one_line(error) == line


# What is found out of a process's end, from texts as Ray 2.60 writes them.

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: t0
\tpid: 77
The actor is dead because its worker process has died. """
SILENT = (
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End "
    "of file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) "
    "ray stop --force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another unexpected error."
)
EXITED = (
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code 3."
)
NODE = "The actor is dead because its node has died. Node Id: 93fd"
MONITOR = "Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed as memory ran low."


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's count, now and at each later look; the last one stays."""
    counts = [5]
    monkeypatch.setattr(ray_actor, "memory_kills", lambda: counts[-1])
    return counts


@pytest.mark.parametrize(
    ("ray_says", "found"),
    [
        (DIED + SILENT, Found(f"pid 77: {NO_WORD}", None)),
        (DIED + EXITED, Found("pid 77: exit code 3", "exit code 3")),
        (DIED + EXITED + "\nThe actor never ran.", Found("pid 77: exit code 3", "exit code 3")),
        (
            DIED + MONITOR,
            Found("pid 77: Ray's memory monitor ended it, since the machine was nearly out of memory", None),
        ),
        (NODE, Found("its node was lost", None)),
    ],
)
def test_what_ray_says_of_an_end(kills: list[int], ray_says: str, found: Found) -> None:
    assert ExitReasons(None).of(ray_says, None) == found


def test_a_kill_for_memory_is_named_once(kills: list[int]) -> None:
    exits = ExitReasons(None)
    kills.append(7)
    assert exits.of(DIED + SILENT, 78).text == (
        "pid 78: killed, and the kernel's out-of-memory killer struck 2 times meanwhile"
    )
    assert exits.of(DIED + SILENT, 79).text == f"pid 79: {NO_WORD}"


def test_a_crash_is_told_from_the_output_of_that_process(kills: list[int], tmp_path: Path) -> None:
    (tmp_path / "worker-ab12-01000000-77.err").write_bytes(
        b"\xff noise\nFatal Python error: Segmentation fault\n\nStack\n"
    )
    exits = ExitReasons(tmp_path)
    crash = "Fatal Python error: Segmentation fault"
    assert exits.of(DIED + SILENT, None) == Found(f"pid 77: {crash}", crash)
    assert exits.of(DIED + SILENT, 7).reason is None


def test_the_kernel_counts() -> None:
    assert ray_actor.memory_kills() >= 0
