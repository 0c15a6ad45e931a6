"""A checkpoint is whole or not there, whatever kills the writer, and damage at rest is seen. What users load is what
the newest checkpoint holds, whenever the run was killed, and it is there at any moment.
"""

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from cluster.files import WriteFailed, digest_of, fsync
from learner.driver import checkpoint
from learner.driver.checkpoint import publish
from tests.learner import checkpoints
from tests.learner.checkpoints import commit

SAVE_LOOP = """
import asyncio, os, pathlib, sys
from learner.driver import checkpoint
async def main(root, step):
    while True:
        step += 1
        async with checkpoint.commit(root, step, keep=2) as folder:
            (folder / "adapter").mkdir()
            (folder / "adapter" / "weights.bin").write_bytes(os.urandom(1 << 20))
            (folder / "optimizer.bin").write_bytes(os.urandom(2 << 20))
        print(step, flush=True)
for line in sys.stdin:  # the last step that is there; forks, since the imports take longer than what is tried
    writer = os.fork()
    if not writer:
        print(os.getpid(), flush=True)
        asyncio.run(main(pathlib.Path(sys.argv[1]), int(line)))
    os.waitpid(writer, 0)
    print("killed", flush=True)
"""


def save(root: Path, step: int, keep: int = 9) -> Path:
    files = {"adapter/weights.bin": chr(step % 128) * 1000, "state.json": json.dumps({"step": step})}
    return commit(root, step, files, keep)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)


def of_step(written: str, number: int = 10) -> Callable[[Path], object]:
    """The manifest says so of a folder of that step."""

    def damage(folder: Path) -> None:
        folder = folder.rename(folder.parent / checkpoint.name_of(number))
        (folder / "manifest.json").write_text(f'{{"step": {written}, "files": {{}}}}')

    return damage


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_sigkill_at_random_moments_always_leaves_a_whole_newest(tmp_path: Path) -> None:
    rng, done, stalest = random.Random(7), 0, 0
    writers = subprocess.Popen(
        [sys.executable, "-c", SAVE_LOOP, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    told = writers.stdout
    assert writers.stdin is not None
    assert told is not None
    for _ in range(8):
        writers.stdin.write(f"{done}\n")
        writers.stdin.flush()
        writer, first = int(told.readline()), int(told.readline())
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(writer, signal.SIGKILL)
        printed = [first, *map(int, iter(lambda: told.readline().rstrip(), "killed"))]
        stalest += bool(list(tmp_path.glob(".tmp-*")))
        found, skipped = checkpoint.newest(tmp_path)
        assert found is not None
        assert skipped == []
        done = checkpoint.step_of(found)
        assert done >= printed[-1]  # what was reported as committed is there
    writers.stdin.close()
    assert writers.wait() == 0
    assert stalest > 0  # else no kill hit a write, and this test saw nothing


async def test_an_exception_or_a_cancellation_while_saving_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="disk"):
        async with checkpoint.commit(tmp_path, 1, keep=2):
            raise RuntimeError("disk full")
    saving = asyncio.Event()

    async def cancelled() -> None:
        async with checkpoint.commit(tmp_path, 2, keep=2):
            saving.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(cancelled())
    await saving.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert names(tmp_path) == []
    assert checkpoint.newest(tmp_path) == (None, [])


async def test_a_commit_that_is_cancelled_amid_its_hashing_has_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop that is cancelled saves once more: that commit must not meet the thread of this one."""
    hashing, go_on = threading.Event(), threading.Event()

    def slowly(path: Path) -> None:
        hashing.set()
        assert go_on.wait(20)
        fsync(path)

    monkeypatch.setattr(checkpoint, "fsync", slowly)

    async def save_one() -> None:
        async with checkpoint.commit(tmp_path, 1, keep=2) as folder:
            (folder / "state.json").write_text("{}")

    task = asyncio.create_task(save_one())
    await asyncio.to_thread(hashing.wait, 20)  # this loop answers while the files are hashed
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert names(tmp_path) == []


def test_a_flipped_bit_is_named_and_the_older_checkpoint_is_chosen(tmp_path: Path) -> None:
    older, damaged = save(tmp_path, 10), save(tmp_path, 20)
    flip_a_bit(damaged / "adapter" / "weights.bin")
    found, skipped = checkpoint.resolve("auto", tmp_path)
    assert found == older
    assert skipped == ["step-000020: adapter/weights.bin has another sha256 than when it was written"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "state.json").write_text("{"), "state.json has 1 bytes, not 12"),
        (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is not usable: WrongInput"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is not usable: FileNotFoundError"),
        (lambda f: f.rename(f.parent / "step-000011"), "manifest.json is of step 10"),
        (
            of_step("Infinity"),
            "manifest.json is not usable: ValueError: its step must be a whole number from 0, got inf",
        ),
        (of_step("10.9"), "its step must be a whole number from 0, got 10.9"),
        (of_step("true", 1), "its step must be a whole number from 0, got True"),
    ],
    ids=["truncated", "missing", "manifest-broken", "manifest-missing", "renamed", "infinite", "fraction", "true"],
)
def test_damage_has_a_reason(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(save(tmp_path, 10))
    found, skipped = checkpoint.newest(tmp_path)
    assert found is None
    assert reason in skipped[0]


def test_pruning_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"  # neither is there yet
    for step in (1, 2, 3):
        save(root, step)
    flip_a_bit(root / "step-000003" / "state.json")
    save(root, 4, keep=2)
    assert names(root) == ["step-000002", "step-000004"]  # 3 is broken, so it does not count among the two


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-x").write_text("a plain file, of whomever")
    (tmp_path / ".tmp-step-000001-dead").mkdir()
    (tmp_path / ".tmp-step-000001-dead" / "weights.bin").write_bytes(b"half")
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-000002"]


def test_a_resume_from_an_earlier_step_leaves_the_old_lineage_behind(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    flip_a_bit(tmp_path / "step-000020" / "state.json")
    checkpoint.set_aside_after(tmp_path, 10)
    # A kill before the next commit does not bring the others back.
    assert [path.name for path in checkpoint.listing(tmp_path)] == ["step-000010"]
    assert len(names(tmp_path)) == 3
    again = save(tmp_path, 20)
    assert names(tmp_path) == ["step-000010", "step-000020"]
    assert checkpoint.verify(again) is None
    assert checkpoint.newest(tmp_path) == (again, [])


def test_resume_by_path(tmp_path: Path) -> None:
    folders = [save(tmp_path, step) for step in (10, 20, 30)]
    assert checkpoint.resolve(str(folders[1]), tmp_path / "elsewhere") == (folders[1], [])
    flip_a_bit(folders[1] / "state.json")
    found, skipped = checkpoint.resolve(str(folders[1]), tmp_path)
    assert found == folders[0]  # the one before it, never a later one
    assert skipped[0].startswith("step-000020: state.json has another sha256")
    flip_a_bit(folders[0] / "state.json")
    both = r"none of 2 in .* does \(step-000020: state\.json .*; step-000010: state\.json .*\); give"
    with pytest.raises(WrongInput, match=both):
        checkpoint.resolve(str(folders[1]), tmp_path)


def test_the_newest_is_that_of_the_greatest_step_not_of_the_last_name(tmp_path: Path) -> None:
    folders = [save(tmp_path, step) for step in (999_999, 1_000_000)]
    assert checkpoint.newest(tmp_path) == (folders[1], [])


def test_resume_that_cannot_be_had_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    assert checkpoint.resolve("none", tmp_path) == (None, [])
    assert checkpoint.resolve("auto", tmp_path) == (None, [])  # a first start
    flip_a_bit(save(tmp_path, 10) / "state.json")
    with pytest.raises(WrongInput, match="start again under another name="):
        checkpoint.resolve("auto", tmp_path)
    save(tmp_path, 20)
    save(tmp_path, 30)
    with pytest.raises(WrongInput, match="not there; checkpoints in .*: step-000020, step-000030$"):
        checkpoint.resolve(str(tmp_path / "step-000077"), tmp_path)
    with pytest.raises(WrongInput, match="not there; checkpoints in .*: none$"):
        checkpoint.resolve(str(tmp_path / "elsewhere" / "step-000077"), tmp_path)
    with pytest.raises(WrongInput, match="must be named like step-000012"):
        checkpoint.resolve(str(tmp_path), tmp_path)


def test_files_that_are_no_checkpoints_are_passed_over(tmp_path: Path) -> None:
    older = save(tmp_path, 1)
    (tmp_path / "step-000003").write_text("a plain file under a checkpoint's name")
    found, skipped = checkpoint.newest(tmp_path)
    assert found == older
    assert len(skipped) == 1
    assert skipped[0].startswith("step-000003: manifest.json is not usable: FileNotFoundError")
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000003"]


def test_nothing_is_sealed_over_what_the_learner_did_not_write(tmp_path: Path) -> None:
    """Its folder may be another node's, of the same name; or what it wrote may have changed on the way."""
    truth = tmp_path / "truth"
    truth.mkdir()
    (truth / "weights").write_text("right")
    written = {"trainer/weights": digest_of(truth / "weights")}
    root = tmp_path / "checkpoints"
    with pytest.raises(WrongInput) as missing:
        commit(root, 1, {"state.json": "{}"}, written=written)
    assert str(missing.value) == (
        "output_dir: must be a folder that the learner's node and the driver's share; of what the learner wrote in "
        f"{root} the driver finds 1 of 1 files missing or different (first: trainer/weights, 5 bytes, is not there); "
        "no checkpoint was made. Put output_dir on a shared file system, or both on one node"
    )
    with pytest.raises(WrongInput, match="5 bytes, has 5 bytes of other content"):
        commit(root, 1, {"trainer/weights": "wrong"}, written=written)
    assert names(root) == []
    commit(root, 1, {"trainer/weights": "right"}, written=written)
    assert names(root) == ["step-000001"]
    assert checkpoint.files_of(root / "step-000001") == written


async def test_a_disk_that_is_full_at_the_last_file_has_a_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '.*/manifest\.json'"):
        async with checkpoint.commit(tmp_path, 1, keep=1) as folder:
            (folder / "manifest.json").symlink_to("/dev/full")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("module", "work", "path"),
    [
        (Path, "mkdir", "checkpoints"),
        (checkpoint, "digests_in", "checkpoints/.tmp-step-000002-"),
        (Path, "rename", "checkpoints/step-000002"),
        (shutil, "rmtree", "checkpoints"),
        (checkpoint, "_replace", "adapter"),
    ],
)
def test_whatever_cannot_be_written_is_told_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, work: str, path: str
) -> None:
    """Also where the error of the system names no file."""
    _, newer = adapter(tmp_path, 0), adapter(tmp_path, 1)

    def full(*_: Any, **how: Any) -> None:
        if not how.get("ignore_errors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, work, full)

    def write() -> None:
        commit(tmp_path / "checkpoints", 2, {}, keep=2)
        publish(newer, tmp_path, whole_model=False)

    with pytest.raises(WriteFailed) as caught:
        write()
    assert str(caught.value.filename).startswith(f"{tmp_path}/{path}")


def test_everything_is_on_the_disk_before_it_has_a_name_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut must not undo, in order: content, manifest, the folders' lists of names, the rename."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def recorded_rename(source: Any, target: Any) -> None:
        events.append(f"rename to {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    commit(tmp_path, 1, {"adapter/weights.bin": "x", "state.json": "x"})
    content, (manifest, *directories, named, root) = set(events[:2]), events[2:]
    assert content == {"fsync weights.bin", "fsync state.json"}
    assert manifest == "fsync manifest.json"
    adapter, temporary = sorted(directories, reverse=True)
    assert adapter == "fsync adapter"
    assert temporary.startswith("fsync .tmp-step-000001-")
    assert (named, root) == ("rename to step-000001", f"fsync {tmp_path.name}")


# What users load is what the newest checkpoint holds, whenever the run was killed, and it is there at any moment.


def commit_learned(run: Path, step: int, files: dict[str, str]) -> Path:
    return checkpoints.commit(run / "checkpoints", step, {f"trainer/{name}": text for name, text in files.items()})


def adapter(run: Path, step: int) -> Path:
    return commit_learned(
        run, step, {"adapter_config.json": "{}", "adapter_model.safetensors": str(step), "trainer.pt": "s"}
    )


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["missing", "behind", "half", "cut", "killed amid"])
def test_whatever_is_there_becomes_the_checkpoints(tmp_path: Path, damage: str) -> None:
    older, newer = adapter(tmp_path, 1), adapter(tmp_path, 2)
    if damage != "missing":
        assert publish(older, tmp_path, whole_model=False) == tmp_path / "adapter"
    if damage == "half":
        (tmp_path / "adapter" / "adapter_config.json").unlink()
    if damage == "cut":
        (tmp_path / "adapter" / "adapter_model.safetensors").write_text("")
    if damage == "killed amid":
        (tmp_path / "adapter" / ".partial-adapter_model.safetensors").write_text("2 and a ha")
    assert publish(newer, tmp_path, whole_model=False) == tmp_path / "adapter"
    assert texts(tmp_path / "adapter") == {"adapter_config.json": "{}", "adapter_model.safetensors": "2"}
    assert publish(newer, tmp_path, whole_model=False) is None


def test_a_whole_model_and_not_its_masters(tmp_path: Path) -> None:
    files = {"adapter_model.safetensors": "masters", "model/config.json": "{}", "model/model.safetensors": "weights"}
    assert publish(commit_learned(tmp_path, 1, files), tmp_path, whole_model=True) == tmp_path / "model"
    assert texts(tmp_path / "model") == {"config.json": "{}", "model.safetensors": "weights"}
    assert not (tmp_path / "adapter").exists()


def test_content_is_on_the_disk_before_it_has_its_name_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, events, fsync, replace = adapter(tmp_path, 1), [], os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        events.append(f"rename to {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    publish(folder, tmp_path, whole_model=False)
    files = ("adapter_config.json", "adapter_model.safetensors")
    assert events[:-2] == [event for name in files for event in (f".partial-{name}", f"rename to {name}")]
    assert events[-2:] == ["adapter", tmp_path.name]


def test_who_looks_meanwhile_always_finds_a_whole_adapter(tmp_path: Path) -> None:
    folders = [adapter(tmp_path, step) for step in range(1, 5)]
    publish(folders[0], tmp_path, whole_model=False)
    seen: list[dict[str, str]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            names = ("adapter_config.json", "adapter_model.safetensors")
            seen.append({name: (tmp_path / "adapter" / name).read_text() for name in names})

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(20):
        for folder in folders:
            publish(folder, tmp_path, whole_model=False)
    stop.set()
    looking.join()
    assert len(seen) > 20
    assert all(one["adapter_model.safetensors"] in "1234" and one["adapter_config.json"] == "{}" for one in seen)
    assert all(len(one["adapter_model.safetensors"]) == 1 for one in seen)


def test_an_adapter_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = adapter(tmp_path, 1), adapter(tmp_path, 2)
    publish(older, tmp_path, whole_model=False)
    (tmp_path / "adapter" / ".partial-adapter_model.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"\[Errno 28\] .*partial-adapter_model.safetensors"):
        publish(newer, tmp_path, whole_model=False)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_text() == "1"
