"""runs/<name>/adapter (or model/, of a full fine-tune): what users load, always a copy out of a committed checkpoint.

A checkpoint holds the files in the form in which they are published, so a folder that is missing or behind, because the
run was killed between the two, is made good at the next start without a learner. Files are replaced one by one, each by
one rename: who reads the folder finds an adapter in it at any moment. Within a run only the weights change, which are
one file (and one in vllm/), so the folder never mixes two policies.
"""

import os
import shutil
from pathlib import Path

from cluster.files import digest_of, fsync, writing
from learner.driver import checkpoint
from learner.model.adapter_config import CONFIG_FILE, MODEL, VLLM_FOLDER
from rollout.data.weight_files import WEIGHTS_FILE

ADAPTER = "adapter"  # folder of a run; a whole model is in MODEL
TRAINER = "trainer"  # the learner's part of a checkpoint
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, f"{VLLM_FOLDER}/{CONFIG_FILE}", f"{VLLM_FOLDER}/{WEIGHTS_FILE}")
PARTIAL = ".partial-"


def learned_in(run_dir: Path) -> Path | None:
    """The folder with what the run has learned, an adapter or after full fine-tuning a model; None before its first
    checkpoint."""
    return next((folder for name in (MODEL, ADAPTER) if (folder := run_dir / name).is_dir()), None)


def publish(folder: Path, run_dir: Path, *, whole_model: bool) -> Path | None:
    """Makes the published folder equal to what the committed checkpoint holds for it: an adapter, or a whole model.
    Costs a read of the published folder where it is equal already.

    Returns the published folder if anything was missing or different in it, else None.

    Raises OSError, with the path in it, if it cannot be written.
    """
    files = checkpoint.files_of(folder)
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
        partial.unlink(missing_ok=True)  # of a full disk it would take what is left
        raise
