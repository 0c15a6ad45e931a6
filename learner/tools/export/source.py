"""What is exported: a whole checkpoint of a run, which may still be going on."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from cluster.reading import read_text
from learner.config import RunConfig
from learner.driver import checkpoint
from learner.driver.checkpoint import TRAINER
from learner.driver.evaluate import Evaluation
from learner.driver.identity import (
    FILE,
    REVISION,
    Fingerprints,
    content_of,
    differing,
)
from learner.model.adapter_config import CONFIG_FILE, MODEL
from learner.tools.export.errors import ExportError
from rollout.data.weight_files import WEIGHTS_FILE


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that verifies, and what it was made with.

    Attributes:
        run: the run's folder.
        evaluations: those of the run up to the checkpoint, oldest first.
        inputs: digests of data, reward functions and base.
    """

    run: Path
    config: RunConfig
    checkpoint: Path
    step: int
    evaluations: list[Evaluation]
    inputs: Fingerprints

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return self.run.name

    @property
    def whole_model(self) -> bool:
        """Whether all weights were trained; else it is a LoRA adapter."""
        return self.config.learner.mode == "full"

    @property
    def learned(self) -> Path:
        """Where in the checkpoint the adapter is, or the whole model."""
        return self.checkpoint / TRAINER / MODEL if self.whole_model else self.checkpoint / TRAINER


def find(run: Path, step: int | None, model: str | None = None) -> Source:
    """The newest whole checkpoint of a run's folder, or that of a step. Raises ExportError.

    model: the base, where it is no longer at model.path.
    """
    run = run.resolve()
    if not (run / "config.yaml").is_file():
        raise ExportError(f"RUN: must be a run folder such as runs/demo-seed0, got {run}; check the path")
    folder = _checkpoint(run / "checkpoints", step)
    try:
        config = RunConfig.model_validate_json(read_text(folder / "config.json"))
        inputs = Fingerprints.read(folder / FILE)
        evaluations = [Evaluation(**dict(one)) for one in checkpoint.read_state(folder).evaluations]
    except (ValidationError, OSError, ValueError, checkpoint.CheckpointError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ExportError(
            f"RUN: {folder} was made by another version of gleaner, of which this one cannot read all ({first}); "
            "export it with that version, or go on with the run for a step"
        ) from None
    if model is not None:
        config = _with_base(config, model)
    source = Source(run, config, folder, checkpoint.step_of(folder), evaluations, inputs)
    wanted = "config.json" if source.whole_model else CONFIG_FILE
    if not (source.learned / wanted).is_file() or not (source.whole_model or (source.learned / WEIGHTS_FILE).is_file()):
        raise ExportError(
            f"RUN: {folder} holds no {wanted}, as those of an older version of gleaner; go on with the run for a step"
        )
    return source


def _with_base(config: RunConfig, model: str) -> RunConfig:
    if config.learner.mode == "full":
        raise ExportError("--model: is the base of an adapter, and this run trained all weights; leave it out")
    path = str(Path(model).absolute()) if Path(model).is_dir() else model
    revision = config.model.revision if path == config.model.path else None
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path, "revision": revision})})


def _checkpoint(root: Path, step: int | None) -> Path:
    kept = checkpoint.listing(root)
    if not kept:
        raise ExportError(f"RUN: {root.parent} has no checkpoint yet; wait for its first (checkpoint.every)")
    if step is None:
        found, skipped = checkpoint.newest(root)
        if found is None:
            raise ExportError(f"RUN: no checkpoint in {root} is whole ({'; '.join(skipped)}); copy the run again")
        return found
    folder = root / checkpoint.name_of(step)
    if folder not in kept:
        steps = ", ".join(str(checkpoint.step_of(one)) for one in kept)
        raise ExportError(
            f"--step: must be one whose checkpoint is kept ({steps}), got {step}; raise checkpoint.keep to keep more"
        )
    if reason := checkpoint.verify(folder):
        raise ExportError(f"--step: {folder} is not whole ({reason}); give another step")
    return folder


def check_base(source: Source) -> bool:
    """Whether it is known that the base is the one that the adapter was trained on: a hub's revision says nothing of a
    folder. Raises ExportError if it is another."""
    path, recorded = source.config.model.source, source.inputs.base
    now = content_of(path)
    own = {name: digest for name, digest in recorded.items() if not name.startswith(("reference ", "value "))}
    if {REVISION} in (now.keys(), own.keys()) and not now.keys() & own.keys():
        return False  # the one by its commit, the other by its files
    differ = [name for name in differing(now, own) if name.endswith(".safetensors") or name == REVISION]
    if differ:
        raise ExportError(
            f"model.path: {path} must be the base that the run was trained on, and has another {', '.join(differ)}; "
            "put the same model there, or say with --model where it is"
        )
    return True
