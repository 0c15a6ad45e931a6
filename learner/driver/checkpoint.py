"""Commits checkpoints so that each is complete or does not exist, finds the newest, and publishes what users load.

A SIGKILL in a plain save loop leaves an unreadable newest file almost every time, and torch and safetensors load a file
with a flipped bit without an error. So a checkpoint is written into a temporary folder, and becomes visible by one
rename after everything in it is on the disk; its manifest, written last, has the digest of every file. No file points
to the newest checkpoint: the folder's listing says which it is. Only one process writes to a folder (cluster.files).
"""

import asyncio
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from cluster.errors import WrongInput
from cluster.files import Digest, digest_of, digests_in, fsync, writing
from cluster.reading import read_mapping
from learner.model.adapter_config import CONFIG_FILE, MODEL, VLLM_FOLDER
from rollout.data.model_files import WEIGHTS_FILE

MANIFEST = "manifest.json"
STATE = "state.json"
TEMPORARY = ".tmp-"

log = logging.getLogger(__name__)

T = TypeVar("T")


Count = Annotated[int, Field(ge=0, lt=2**62, strict=True)]


class Place(BaseModel):
    """The place in the problem stream: the arguments of Cursor.restore."""

    low: Count
    done: list[Count]


class Scored(BaseModel):
    """An evaluation: the arguments of learner.driver.evaluate.Evaluation."""

    step: Count
    metrics: dict[str, float]
    samples: list[dict[str, Any]]


class State(BaseModel):
    """The content of state.json.

    step: number of steps taken. total_steps: number of steps that the run was planned for. problems: number of problems
    in an epoch. cursor: the place in the problem stream. dropped_stale: number of groups dropped as too old.
    evaluations: those so far. None: the version of gleaner that wrote the checkpoint did not record it.
    """

    step: Count | None = None
    total_steps: Count | None = None
    problems: Count | None = None
    cursor: Place
    dropped_stale: Count = 0
    evaluations: list[Scored] = []


@asynccontextmanager
async def commit(
    root: Path, step: int, keep: int, written: Mapping[str, Digest] | None = None, spared: int | None = None
) -> AsyncIterator[Path]:
    """Commits a checkpoint: `async with commit(root, step, keep) as folder: save into folder`.

    When the block ends without an exception, the folder appears as `root/step-000012`; otherwise it is deleted. Then
    all checkpoints are deleted but the `keep` newest whole ones and that of the step `spared`.

    written: path in the folder -> digest of what another process says it wrote there; may be filled until the block
    ends. Where this process finds other content, it raises WrongInput and commits nothing.

    A thread hashes the files, which are gigabytes in full mode, and puts them on the disk, so that the event loop
    serves the generators meanwhile.
    """
    folder = await to_its_end(_begin, root, step)
    try:
        yield folder
        await to_its_end(_seal, folder, step, written or {})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the next commit deletes what cannot be deleted now
        raise
    await to_its_end(_name, folder, root / name_of(step))
    await to_its_end(_prune, root, step, keep, spared)


async def to_its_end(work: Callable[..., T], *args: Any) -> T:
    """The result of work(*args), which runs in a thread. A caller that is cancelled still waits for the thread, so that
    the next commit never meets one that is still writing."""
    task = asyncio.create_task(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def set_aside_after(root: Path, step: int) -> None:
    """Renames the checkpoints after this step, from which the run continues (0: from the start), so that the next
    automatic resume does not take one of them for the newest. To be called before the records of those steps are
    deleted. The next commit or start deletes the renamed folders."""
    later = [folder for folder in reversed(listing(root)) if step_of(folder) > step]
    for folder in later:
        log.warning("checkpoint %s is set aside: the run goes on from step %d", folder, step)
        folder.rename(root / f"{TEMPORARY}left-{folder.name}-{uuid.uuid4().hex[:8]}")
    if later:
        fsync(root)


def forget_leftovers(root: Path) -> None:
    """Deletes the folders that killed writers have left, and those that were set aside."""
    for leftover in root.glob(f"{TEMPORARY}*"):
        _delete(leftover)


def _begin(root: Path, step: int) -> Path:
    """Makes a new temporary folder in `root`, and deletes all others."""
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        forget_leftovers(root)
        folder = root / f"{TEMPORARY}{name_of(step)}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
    return folder


def _name(folder: Path, final: Path) -> None:
    """Makes the sealed folder a checkpoint, by renaming it."""
    with writing(final):
        if final.exists():  # a checkpoint that did not verify is moved away: a rename cannot replace a full folder
            final.rename(final.with_name(f"{TEMPORARY}replaced-{final.name}"))
        folder.rename(final)
    fsync(final.parent)


def name_of(step: int) -> str:
    """The folder's name: step 12 -> step-000012."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name: step-000012 -> 12."""
    match = re.fullmatch(r"step-(\d{6,})", folder.name)
    if not match:
        raise WrongInput(
            f"resume: a checkpoint's folder must be named like {name_of(12)}, got {folder}; "
            "give one of those in the run's checkpoints/"
        )
    return int(match[1])


def verify(folder: Path) -> str | None:
    """None if every file is as the manifest says, else the first reason why the checkpoint is not whole."""
    try:
        step, files = _read(folder)
        for name, expected in sorted(files.items()):
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != expected["bytes"]:
                return f"{name} has {size} bytes, not {expected['bytes']}"
            if digest_of(file) != expected:
                return f"{name} has another sha256 than when it was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is not usable: {type(error).__name__}: {error}"
    return None if step == step_of(folder) else f"{MANIFEST} is of step {step}"


def files_of(folder: Path) -> dict[str, Digest]:
    """Path in the checkpoint -> the file's digest, from the manifest of a whole checkpoint."""
    return _read(folder)[1]


def newest(root: Path, before: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint (below the step `before`, if given), and the reason for each newer one skipped."""
    skipped: list[str] = []
    for folder in reversed(listing(root)):
        if before is not None and step_of(folder) >= before:
            continue
        reason = verify(folder)
        if reason is None:
            return folder, skipped
        skipped.append(f"{folder.name}: {reason}")
    return None, skipped


def resolve(resume: str, root: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that the setting `resume` means (None: start from the beginning), and a text for each checkpoint
    that was skipped, with the reason.

    `auto` means the newest whole checkpoint in `root`. A path means that checkpoint, or, if it is not whole, the newest
    whole one before it in the same folder. Raises WrongInput where there are checkpoints and none is whole, since a
    silent fresh start would throw work away.
    """
    if resume == "none":
        return None, []
    if resume == "auto":
        found, skipped = newest(root)
        if skipped and found is None:
            raise WrongInput(_none_whole(root, skipped))
        return found, skipped
    try:
        asked = Path(resume).expanduser().absolute()
    except RuntimeError as error:  # the user has no home folder
        raise WrongInput(
            f"resume: must be auto, none or the folder of a checkpoint, got {resume!r} ({error}); write its path out"
        ) from None
    if not asked.is_dir():
        there = ", ".join(folder.name for folder in listing(asked.parent)) or "none"
        raise WrongInput(
            f"resume: must be auto, none or the folder of a checkpoint, got {resume!r}, which is not there; "
            f"checkpoints in {asked.parent}: {there}"
        )
    step, reason = step_of(asked), verify(asked)
    if reason is None:
        return asked, []
    found, skipped = newest(asked.parent, before=step)
    skipped.insert(0, f"{asked.name}: {reason}")
    if found is None:
        raise WrongInput(_none_whole(asked.parent, skipped))
    return found, skipped


def _none_whole(root: Path, skipped: list[str]) -> str:
    return (
        f"resume: a checkpoint must verify, and none of {len(skipped)} in {root} does ({'; '.join(skipped)}); "
        "give the folder of another checkpoint, or start again under another name="
    )


def listing(root: Path) -> list[Path]:
    """The folders of the committed checkpoints, oldest first."""
    return sorted((f for f in root.glob("step-*") if re.fullmatch(r"step-\d{6,}", f.name)), key=step_of)


def read_state(folder: Path) -> State:
    """Reads state.json of a checkpoint. Raises WrongInput."""
    file = folder / STATE
    try:
        return State.model_validate(read_mapping(file))
    except (WrongInput, FileNotFoundError, ValidationError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            said = f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        else:
            said = str(error)
        raise WrongInput(
            f"resume: the state of a checkpoint must be as gleaner writes it: {said}; give the folder of another "
            "checkpoint, or this run another name="
        ) from None


def _read(folder: Path) -> tuple[int, dict[str, Digest]]:
    manifest = read_mapping(folder / MANIFEST)
    files = dict(manifest["files"])
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:  # published files get these names too
            raise ValueError(f"it names {name[:80]!r}, which lies outside of the checkpoint")
    step = manifest["step"]
    if type(step) is not int or step < 0:  # isinstance would accept JSON's true
        raise ValueError(f"its step must be a whole number from 0, got {repr(step)[:80]}")
    return step, files


def _seal(folder: Path, step: int, written: Mapping[str, Digest]) -> None:
    """Puts every file on the disk, then the manifest with their digests."""
    with writing(folder):
        for file in folder.rglob("*"):
            if file.is_file():
                fsync(file)
        files = digests_in(folder)
    _compare(folder, files, written)
    manifest = folder / MANIFEST
    with writing(manifest):
        manifest.write_text(json.dumps({"step": step, "files": files}, indent=1))
    fsync(manifest)
    for directory, _, _ in os.walk(folder):
        fsync(Path(directory))  # without it the file names may not survive a power cut


def _compare(folder: Path, found: Mapping[str, Digest], written: Mapping[str, Digest]) -> None:
    """Raises WrongInput if this process finds other files than the learner wrote."""
    differing = [name for name, digest in written.items() if found.get(name) != digest]
    if differing:
        name = differing[0]
        here = f"has {found[name]['bytes']} bytes of other content" if name in found else "is not there"
        raise WrongInput(
            "output_dir: must be a folder that the learner's node and the driver's share; of what the learner wrote in "
            f"{folder.parent} the driver finds {len(differing)} of {len(written)} files missing or different (first: "
            f"{name}, {written[name]['bytes']} bytes, {here}); no checkpoint was made. Put output_dir on a shared file "
            "system, or both on one node"
        )


def _prune(root: Path, step: int, keep: int, spared: int | None) -> None:
    """Deletes all checkpoints but the `keep` newest whole ones and that of the step `spared`. step: that of the
    checkpoint which has just been committed, which is not verified again."""
    kept = 0
    with writing(root):
        for folder in reversed(listing(root)):
            if step_of(folder) == step or (kept < keep and verify(folder) is None):
                kept += 1
                continue
            if step_of(folder) == spared:
                continue
            # The folder is renamed first, so that a deletion cut short leaves no half checkpoint under this name.
            _delete(folder.rename(root / f"{TEMPORARY}pruned-{folder.name}"))
        for replaced in root.glob(f"{TEMPORARY}replaced-*"):
            _delete(replaced)


def _delete(path: Path) -> None:
    """Deletes a folder, or a file that somebody has put here."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# Publishing: users load runs/<name>/adapter (model/ after full fine-tuning), a copy from a committed checkpoint.
#
# A checkpoint holds the files in the form in which they are published. So if the run is killed between a commit and its
# publication, the next start publishes without a learner. Files are replaced one by one, each by one rename, so a
# reader of the folder finds an adapter in it at any moment. Within a run only the weights change, which are one file
# (and one in vllm/), so the folder never mixes two policies.

ADAPTER = "adapter"  # folder of a run with the published adapter; a whole model is in MODEL
TRAINER = "trainer"  # folder of a checkpoint with the learner's part
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, f"{VLLM_FOLDER}/{CONFIG_FILE}", f"{VLLM_FOLDER}/{WEIGHTS_FILE}")
PARTIAL = ".partial-"


def learned_in(run_dir: Path) -> Path | None:
    """The folder with the run's published adapter, or its model after full fine-tuning; None before its first
    checkpoint."""
    return next((folder for name in (MODEL, ADAPTER) if (folder := run_dir / name).is_dir()), None)


def publish(folder: Path, run_dir: Path, *, whole_model: bool) -> Path | None:
    """Copies a committed checkpoint's adapter, or its whole model, to the published folder, where files are missing or
    different. Reads the published folder to compare.

    Returns the published folder if anything was copied, else None. Raises OSError, which names the path.
    """
    files = files_of(folder)
    if whole_model:
        final, prefix = run_dir / MODEL, f"{TRAINER}/{MODEL}/"
        sources = {name.removeprefix(prefix): name for name in files if name.startswith(prefix)}
    else:
        final = run_dir / ADAPTER
        sources = {name: f"{TRAINER}/{name}" for name in ADAPTER_FILES if f"{TRAINER}/{name}" in files}
    due = {
        name: source
        for name, source in sources.items()
        if not (final / name).is_file() or digest_of(final / name) != files[source]
    }
    if not due:
        return None
    with writing(final):
        final.mkdir(exist_ok=True)
        for name, source in sorted(due.items()):
            _replace(folder / source, final / name)
    for changed in sorted({(final / name).parent for name in due} | {final, run_dir}, reverse=True):
        fsync(changed)
    return final


def _replace(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    partial = target.with_name(PARTIAL + target.name)
    try:
        with writing(partial):
            shutil.copyfile(source, partial)
        fsync(partial)
        os.replace(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk the partial copy would take the last free space
        raise
