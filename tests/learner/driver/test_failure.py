"""How a run ends that fails: which steps are kept, and what is said last."""

import asyncio
import errno
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.actor import ActorDied, ClusterLost, Local, RemoteError, StartFailed, ValueLost
from cluster.files import WriteFailed, write_failed, writing
from learner.driver import checkpoint, failure
from learner.driver.failure import LearnerError, LearnerLost, RunEnded, WatchedLearner
from learner.driver.launch import Restarts
from learner.driver.preflight import Prepared
from learner.trainer.service import TrainerService
from rollout.service import RolloutService
from tests.learner.checkpoints import commit
from tests.learner.loops import Trainer, Worker, build, configure, consumed, finish, first, lines


class Dying(Local[Any]):
    """A generator whose every process dies at the policy `version`, or at once with it."""

    def __init__(self, version: int) -> None:
        super().__init__("generator-0", Worker, [0.0, None])
        self.version = version

    async def call(self, method: Any, deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        if method is RolloutService.take_policy and args[0].value.version >= self.version:
            raise ActorDied("generator-0: process died during take_policy")
        return await super().call(method, deadline_s, *args, **kwargs)


async def test_a_generator_that_is_given_up_costs_no_step(tmp_path: Path) -> None:
    """Checkpoints come every 100 steps; the sixth is under way when the generator is given up."""
    config = configure(max_staleness=1, checkpoint={"every": 100})
    loop = build(tmp_path, config, 50, workers=[Dying(5)], trainer_s=0.02)
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(loop)
    assert type(first(caught.value)) is RuntimeError
    assert str(first(caught.value)).startswith("generator-0: ")
    newest, skipped = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert not skipped
    trainer = loop.trainer._object  # type: ignore[attr-defined]
    assert checkpoint.step_of(newest) == loop.step == trainer.version >= 5
    assert [line["step"] for line in lines(tmp_path)] == list(range(loop.step + 1))
    assert len(consumed(tmp_path)) == loop.step

    resumed = build(tmp_path, config, loop.step + 3, resume_step=loop.step)
    await finish(resumed, newest)
    positions = [p for step in consumed(tmp_path) for p in step]
    assert len(positions) == len(set(positions)) == 3 * resumed.total_steps


async def test_what_runs_beside_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    loop = build(tmp_path, configure(checkpoint={"every": 100}), 10**6)

    async def beside() -> None:
        while loop.step < 3:
            await asyncio.sleep(0)
        raise ClusterLost("Ray's gcs_server (pid 1) has ended")

    with pytest.raises(BaseExceptionGroup):
        await loop.run(None, beside())
    loop.sinks.metrics.close()
    loop.sinks.timeline.close()
    newest, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert checkpoint.step_of(newest) == loop.step >= 3


class Failing(Trainer):
    """Its third step comes to no good end."""

    ends: BaseException | None = None

    async def step(self, groups: list[Any]) -> dict[str, float]:
        if self.version == 2:
            assert self.ends is not None
            raise self.ends
        return await super().step(groups)


@pytest.mark.parametrize(
    ("ends", "comes_out"),
    [(ActorDied("learner: died"), LearnerLost), (RemoteError("learner: step failed"), LearnerError)],
)
async def test_what_a_failed_learner_holds_is_not_saved(
    tmp_path: Path, ends: BaseException, comes_out: type[BaseException]
) -> None:
    failing = Local("learner", Failing, [0.0, 0.0])
    assert failing._object is not None
    failing._object.ends = ends
    loop = build(tmp_path, configure(checkpoint={"every": 100}), 9, trainer=WatchedLearner(failing, 60))
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(loop)
    assert type(first(caught.value)) is comes_out
    assert checkpoint.newest(tmp_path / "checkpoints") == (None, [])


class Stuck:
    """A learner whose calls last, and get on or not."""

    def __init__(self, gets_on: bool, answers: bool = True) -> None:
        self.gets_on, self.answers, self.looks = gets_on, answers, 0
        self.over = asyncio.Event()

    async def step(self) -> str:
        await self.over.wait()
        return "done"

    save = step

    async def pulse(self) -> float:
        if not self.answers:
            await asyncio.Event().wait()
        self.looks += 1
        if self.looks > 5 and self.gets_on:  # by then it has lasted for longer than anybody may be silent
            self.over.set()
        return float(self.looks * self.gets_on)


@pytest.mark.parametrize(
    ("method", "gets_on", "answers", "said"),
    [
        ("step", True, True, None),
        ("step", False, True, "^learner: step has not got on for 1 s: it hangs"),
        ("step", True, False, "^learner: step is without an answer, and so is its process, for 1 s: it hangs"),
        ("save", True, False, "^learner: save is without an answer"),
    ],
)
async def test_a_learner_that_hangs_is_told_from_one_that_takes_long(
    method: str, gets_on: bool, answers: bool, said: str | None
) -> None:
    learner = WatchedLearner(Local[Any]("learner", Stuck, [gets_on, answers]), silence_s=1.0)
    if said is None:
        assert await learner.call(getattr(TrainerService, method), 60) == "done"
    else:
        with pytest.raises(LearnerLost, match=said):
            await learner.call(getattr(TrainerService, method), 60)
    assert len(asyncio.all_tasks()) == 1  # nothing is left behind


async def test_a_call_that_tells_nothing_of_itself_is_held_by_its_deadline_alone() -> None:
    learner = WatchedLearner(Local[Any]("learner", Stuck, [False, True]), silence_s=0.4)
    with pytest.raises(LearnerLost, match="learner: save gave no answer within 2 s"):
        await learner.call(cast(Any, TrainerService.save), 2)


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (StartFailed("learner: no such layer", "no such layer", wrong_input=True), "learner: no such layer", 2),
        (
            StartFailed("learner: RuntimeError: no card", "no card", wrong_input=False),
            "learner: RuntimeError: no card",
            1,
        ),
        (RuntimeError("\n  generator-0: lost\nremote traceback"), "generator-0: lost", 1),
        (KeyError("a"), "KeyError: 'a'", 1),
        (RuntimeError(), "RuntimeError", 1),
    ],
)
def test_the_last_line_is_the_cause(error: Exception, line: str, code: int) -> None:
    lost = ClusterLost("Ray's raylet has ended")
    assert failure.first_of(ExceptionGroup("a", [ExceptionGroup("b", [error, ValueError()])])) is error
    assert failure.first_of(ExceptionGroup("a", [error, ExceptionGroup("b", [lost])])) is lost
    text, exit_code = failure.tell(error)
    assert (text.splitlines()[-1], exit_code) == (f"error: {line}", code)


@pytest.mark.parametrize("kind", [RunEnded, LearnerLost, ClusterLost])
def test_a_run_that_ends_for_a_reason_is_told_without_a_traceback(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        raise kind("step 7: the mismatch is too large")
    assert failure.tell(caught.value) == ("error: step 7: the mismatch is too large", 1)


AGAIN = ", and start the same command again: it goes on from the last checkpoint"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"the disk of F is full \(No space left on device\); free some of it \([\d.]+ [KMG]iB left\)"),
        (errno.EDQUOT, r"the disk of F is full \(Disk quota exceeded\); free some of it"),
        (errno.EROFS, r"F cannot be written \(Read-only file system\); a system makes a disk that fails read-only .*"),
        (errno.EIO, r"F cannot be written \(Input/output error\); its disk, or the way there, has failed .*"),
        (errno.ESTALE, r"F cannot be written \(Stale file handle\); its disk, or the way there, has failed .*"),
        (errno.EFBIG, r"F cannot be written \(File too large\); raise the limit on the size of a file \(ulimit -f\)"),
        (errno.ENOENT, r"F cannot be written \(No such file or directory\); its folder was deleted or replaced.*"),
        (errno.EACCES, r"F cannot be written \(Permission denied\); give this user the right to write there"),
        (errno.EINVAL, r"F cannot be written \(Invalid argument\); mend that"),
    ],
)
def test_what_a_disk_does_is_one_sentence(tmp_path: Path, number: int, said: str) -> None:
    """Whether the system says it, or a library in words of its own, in another process."""
    file = tmp_path / "metrics.jsonl"

    def behind() -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:  # torch's
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 64") from error

    def system() -> None:
        with writing(file):
            raise OSError(number, os.strerror(number))

    def library(raised: Callable[[], None]) -> None:
        try:
            raised()
        except RuntimeError as error:
            raise write_failed(file, error) from error

    def rust() -> None:
        raise RuntimeError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    for raises in (system, partial(library, behind), partial(library, rust)):
        with pytest.raises(WriteFailed) as caught:
            raises()
        text, code = failure.tell(ExceptionGroup("g", [pickle.loads(pickle.dumps(caught.value))]).exceptions[0])
        assert code == 1
        assert text.endswith(AGAIN)
        assert re.fullmatch(f"error: {said}", text.removesuffix(AGAIN).replace(str(file), "F")), text


# Runs of one process, one for each word, in a folder of the first argument; each ends as a run's process does.
RUNS = """
import asyncio, os, resource, sys
from pathlib import Path
from learner.driver import checkpoint, failure
from tests.learner.loops import build, configure, started

async def run(folder, what):
    loop = build(folder, configure(), 400)
    running = await started(loop, 5)
    if what == "limit":
        size = (folder / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size, resource.RLIM_INFINITY))
    elif what == "gone":
        os.rename(folder, folder.with_name("elsewhere"))
    else:
        room = os.statvfs(folder)
        with open(folder.parent / "filler", "wb", buffering=0) as file:
            file.write(b"x" * (room.f_bavail * room.f_frsize - int(what)))
    await running

for what in sys.argv[2:]:
    folder = Path(sys.argv[1], what)
    folder.mkdir()
    try:
        asyncio.run(run(folder, what))
    except Exception as error:
        print(failure.tell(failure.first_of(error))[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    if what.isdigit():
        (folder.parent / "filler").unlink()
        newest, skipped = checkpoint.newest(folder / "checkpoints")
        print(newest.name >= "step-000004", skipped, [one.name for one in (folder / "checkpoints").glob(".tmp-*")])
"""
OF_8_MB = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"']


def ended(folder: Path, *what: str, disk: Sequence[str] = ()) -> list[str]:
    """What runs say whose folder meets with that, with D for it. disk: what gives it a disk of its own."""
    command = [*disk, *([str(folder)] if disk else []), sys.executable, "-c", RUNS, str(folder), *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if re.search("unshare: |mount: ", done.stderr):
        pytest.skip(f"no disk of 8 MB: {done.stderr.strip()}")
    assert "Traceback" not in done.stdout + done.stderr
    return [line.replace(str(folder), "D") for line in done.stdout.splitlines()]


def test_a_disk_that_fills_costs_no_checkpoint_that_is_there(tmp_path: Path) -> None:
    """Of nothing, of some lines, and of a part of a checkpoint there is room; told once, without a traceback."""
    said = ended(tmp_path, "0", "5000", "100000", disk=OF_8_MB)
    full = r"error: the disk of D/\d+/\S+ is full \(No space left on device\); free some of it \([\d.]+ KiB left\)"
    assert [re.sub(full, "full", line) for line in said] == [f"full{AGAIN}", "True [] []"] * 3


@pytest.mark.long
def test_a_limit_on_files_and_a_folder_that_is_gone_are_told_once(tmp_path: Path) -> None:
    limit, gone = ended(tmp_path, "limit", "gone")
    assert re.match(r"error: D/limit/\S+ cannot be written \(File too large\); raise .* \(ulimit -f, [\d.]+ KiB", limit)
    assert gone.startswith(
        "error: D/gone: the run folder was deleted or replaced while the run was writing to it (step "
    )


def test_a_lost_learner_is_replaced_as_often_as_is_allowed_and_nothing_else_is(tmp_path: Path) -> None:
    notes: list[str] = []
    config = configure(learner={"groups_per_step": 3, "restarts": 3}, output_dir=str(tmp_path), name="r")
    old, absent = tmp_path / "elsewhere" / "step-000020", cast(Any, None)
    prepared = Prepared(config, absent, [], 40, old, 20, [], [], absent, absent)
    restarts = Restarts(prepared, notes.append)
    lost = ExceptionGroup("g", [LearnerLost("learner: step died\nmore")])
    assert not restarts.after(LearnerError("learner: step failed"), begun=True)
    assert not restarts.after(RuntimeError("generator-0: lost"), begun=True)
    went_on = []
    for begun in (True, False, True):  # at first nothing was saved since the start
        assert restarts.after(lost, begun=begun)
        went_on.append((restarts.prepared.resume_from, restarts.prepared.finished_steps))
        newest = commit(tmp_path / "r" / "checkpoints", 24, {})
    assert went_on == [(old, 20), (old, 20), (newest, 24)]
    assert not restarts.after(lost, begun=True)
    assert notes[2] == "learner: step died; restart 3 of 3, with fresh processes, from step 24"
    assert len(notes) == 3
    fresh = Restarts(replace(prepared, resume_from=None, finished_steps=0), notes.append)
    gone = ValueLost("generator-0: take_policy: what it was sent is gone with the node that had it")
    assert fresh.after(gone, begun=False)
    assert notes[-1].endswith("restart 1 of 3, with fresh processes, from the start")
