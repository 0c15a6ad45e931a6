"""What TRL gives its reward functions beside the data: `log_metric` and `log_extra`, by which they tell more than their
values, and `trainer_state`, which tells them how far the run is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewards.base import writable

NAMES = ("trainer_state", "log_extra", "log_metric")
MOST = 64  # metrics of a call, and columns
LONGEST_NAME, LONGEST_TEXT = 100, 2000


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the run is as a group is scored: updates of its generator's newest policy, of how many, and the epoch."""

    step: int = 0
    steps: int = 0
    epoch: int = 0


BEGIN = Progress()


class TrainerState:
    """Of transformers' TrainerState what a run of gleaner has."""

    def __init__(self, progress: Progress) -> None:
        self.global_step, self.max_steps, self.epoch = progress.step, progress.steps, float(progress.epoch)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name}: here it has global_step, max_steps and epoch")


@dataclass(frozen=True, slots=True)
class Told:
    """What one call told. metrics: the mean of each metric's values. extras: a text for each completion, by column."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Log:
    """Takes what one call of a reward function tells, for `size` completions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[str]] = {}

    def metric(self, name: str, value: float) -> None:
        """`log_metric`. Values that are not finite are left out. Raises ValueError."""
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"log_metric: {name!s:.40} must be a number, got {type(value).__name__}") from error
        if math.isfinite(number):
            _of(self._metrics, name, "log_metric").append(number)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """`log_extra`. Raises ValueError."""
        given = list(values)
        if len(given) != self._size:
            raise ValueError(
                f"log_extra: {column!s:.40} must have one value for each of {self._size} completions, got {len(given)}"
            )
        _of(self._extras, column, "log_extra")[:] = [_text(value) for value in given]

    def told(self) -> Told:
        return Told({name: math.fsum(values) / len(values) for name, values in self._metrics.items()}, self._extras)


def _of(known: dict[str, Any], name: object, function: str) -> Any:
    key = writable(str(name))[:LONGEST_NAME]
    if key not in known and len(known) == MOST:
        raise ValueError(f"{function}: at most {MOST} names, and {key!r} is one more")
    return known.setdefault(key, [])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            value = str(value)
    return writable(value)[:LONGEST_TEXT]


def by_row(told: Sequence[Told], size: int) -> list[list[tuple[str, float | None, str | None]]]:
    """What several functions told of a group: (name, number or None, text or None) for each of its completions. Of a
    metric that several of them tell, their mean."""
    metrics: dict[str, list[float]] = {}
    texts: dict[str, Sequence[str]] = {}
    for one in told:
        for name, value in one.metrics.items():
            metrics.setdefault(name, []).append(value)
        texts |= one.extras
    same = [(name, math.fsum(values) / len(values), None) for name, values in metrics.items()]
    return [[*same, *((name, None, column[i]) for name, column in texts.items())] for i in range(size)]
