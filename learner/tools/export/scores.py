"""What `gleaner eval --json` printed, for the model card."""

import os
from dataclasses import dataclass
from pathlib import Path

from cluster.reading import read_json
from learner.driver.checkpoint import ADAPTER_FILES, TRAINER, files_of
from learner.tools.eval_scores import Estimate
from learner.tools.export.errors import ExportError
from learner.tools.export.source import Source
from rollout.data.hub import is_hub_name, split


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one evaluation: metric -> value and interval. model, adapter, adapter_digest: as of evaluation.Evaluated, of
    which older files have no digest."""

    model: str
    adapter: str | None
    adapter_digest: str | None
    data: str
    reward: str
    problems: int
    metrics: dict[str, Estimate]


def read_scores(file: Path) -> Scores:
    """Raises ExportError."""
    try:
        found = read_json(file)
        told = {"problems": found["problems"] - found.get("unscored", 0)}  # earlier versions: of all alike
        metrics = {str(name): Estimate(**told | one) for name, one in found["metrics"].items()}
        return Scores(
            str(found["model"]), _text(found["adapter"]), _text(found.get("adapter_digest")), str(found["data"]),
            str(found["reward"] or "reward"), int(found["problems"]), metrics,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(
            f"--scores: must be a file of what gleaner eval --json printed, got {file} ({type(error).__name__}: "
            f"{error}); write it by: gleaner eval --run RUN --json > {file.name}"
        ) from None


def check_whose(scores: Scores, source: Source) -> bool:
    """Whether it is known that they are the checkpoint's: neither an older file says it, nor one of a whole model.
    Raises ExportError where they cannot be."""
    if reason := _other(scores, source):
        option = "--model" if source.whole_model else "--adapter"
        raise ExportError(
            f"--scores: must be of {source.name}, {source.checkpoint.name}, and are of {reason}; leave them out, or "
            f"measure it: gleaner eval --run {source.run} {option} {source.learned} --json"
        )
    return not source.whole_model and scores.adapter_digest is not None


def _other(scores: Scores, source: Source) -> str | None:
    """What else they are of."""
    base, adapter, digest = source.config.model.source, scores.adapter, scores.adapter_digest
    if source.whole_model and adapter is not None:
        return f"the adapter {adapter}, where the run trained all weights"
    if adapter is None and _same(scores.model, base):
        return f"the base alone ({scores.model})"
    if adapter is not None and _other_name(scores.model, base):
        return f"an adapter on {scores.model}, where its base is {base}"
    if digest is not None and digest not in _digests(source):
        return f"another adapter ({adapter}), or of another step of it"
    if digest is None and _of_another_run(adapter or scores.model, source.run):
        return adapter or scores.model
    return None


def _same(one: str, other: str) -> bool:
    names = split(one)[0], split(other)[0]
    return names[0] == names[1] or (all(map(os.path.isdir, names)) and os.path.samefile(*names))


def _other_name(one: str, other: str) -> bool:
    """On the hub; of a folder nobody can say that it is not one of the hub's models, or was moved."""
    names = split(one)[0], split(other)[0]
    return names[0] != names[1] and all(map(is_hub_name, names))


def _of_another_run(folder: str, run: Path) -> bool:
    parent = os.path.dirname(os.path.realpath(folder))
    return os.path.isdir(os.path.join(parent, "checkpoints")) and not os.path.samefile(parent, run)


def _digests(source: Source) -> set[object]:
    files = files_of(source.checkpoint)
    return {files[name]["sha256"] for one in ADAPTER_FILES if (name := f"{TRAINER}/{one}") in files}


def _text(value: object) -> str | None:
    return None if value is None else str(value)
