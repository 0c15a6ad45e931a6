"""What the hub reads of a model card: the YAML at its head, by huggingface_hub's own class."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from learner.tools.export.scores import Scores
from learner.tools.export.source import Source
from rollout.data.hub import is_hub_name, split
from rollout.data.sources import is_made

TASK, KIND = "text-generation", "accuracy"


def header(source: Source, scores: Scores | None, *, adapter_only: bool) -> str:
    """The YAML, without the lines of dashes around it."""
    config = source.config
    base, data = config.model.path, config.data.path
    results = [*_held_out(source), *(_scored(scores) if scores is not None else ())]
    tags = ["gleaner", config.learner.algorithm, "reinforcement-learning", "lora" if not source.whole_model else "full"]
    found = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=[data] if is_hub_name(data) else None,
        library_name="peft" if adapter_only else "transformers",
        license=license_of(config.model.source),
        pipeline_tag=TASK,
        tags=tags,
        model_name=source.name if results else None,
        eval_results=results or None,
    )
    return str(found.to_yaml())


def named(path: str) -> str:
    """A model or data as others may know it: of what lies here the last part of its path alone."""
    return path if is_hub_name(path) or is_made(path) else Path(path).name


def license_of(base: str) -> str | None:
    """What the base's own card says, where that is here."""
    (name, revision), own = split(base), Path(base) / "README.md"
    try:
        file: Any = own if own.parent.is_dir() else try_to_load_from_cache(name, own.name, revision=revision)
        return ModelCard.load(file).data.license if isinstance(file, str | Path) and Path(file).is_file() else None
    except (HFValidationError, OSError, ValueError):  # no card that can be read
        return None


def _held_out(source: Source) -> list[EvalResult]:
    """The newest evaluation of the run."""
    value = source.evaluations[-1].metrics.get("eval/accuracy") if source.evaluations else None
    data = source.config.data
    elsewhere = data.eval.path or data.path
    return [] if value is None else [_result(named(elsewhere), "accuracy on held-out problems", value)]


def _scored(scores: Scores) -> list[EvalResult]:
    return [_result(named(scores.data), f"{scores.reward}, {name}", one.value) for name, one in scores.metrics.items()]


def _result(data: str, metric: str, value: float) -> EvalResult:
    return EvalResult(
        task_type=TASK, dataset_type=data, dataset_name=data, metric_type=KIND, metric_name=metric,
        metric_value=round(value, 4),
    )  # fmt: skip
