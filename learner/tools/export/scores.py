"""What `gleaner eval --json` printed, for the model card."""

import json
from dataclasses import dataclass
from pathlib import Path

from learner.tools.eval_scores import Estimate
from learner.tools.export.errors import ExportError


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one evaluation: metric -> value and interval."""

    data: str
    reward: str
    problems: int
    metrics: dict[str, Estimate]


def read_scores(file: Path) -> Scores:
    """Raises ExportError."""
    try:
        found = json.loads(file.read_text())
        told = {"problems": found["problems"] - found.get("unscored", 0)}  # earlier versions: of all alike
        metrics = {str(name): Estimate(**told | one) for name, one in found["metrics"].items()}
        return Scores(str(found["data"]), str(found["reward"] or "reward"), int(found["problems"]), metrics)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(
            f"--scores: must be a file of what gleaner eval --json printed, got {file} ({type(error).__name__}: "
            f"{error}); write it by: gleaner eval --run RUN --json > {file.name}"
        ) from None
