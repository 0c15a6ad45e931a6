"""The pictures of system_vs_trl and async_vs_sync."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.system.system_run import Record

COLOURS = ("tab:gray", "tab:blue", "tab:orange", "tab:green", "tab:purple")
PARTS = (("generate", "tab:green"), ("train", "tab:blue"), ("other", "lightgray"))


def _labels(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    keys = dict.fromkeys((record.system, record.dtype) for record in records)
    return [
        (f"{system}\n{dtype}", [r for r in records if (r.system, r.dtype) == (system, dtype)]) for system, dtype in keys
    ]


def _rates(axes: Any, labelled: Sequence[tuple[str, list[Record]]], skip: int) -> None:
    """Bars of the medians, a dot for each run."""
    for row, (_, own) in enumerate(labelled):
        rates = [record.rate(skip) for record in own]
        axes.barh(row, median(rates), color="tab:blue", alpha=0.7)
        axes.plot(rates, [row] * len(rates), "k.", markersize=5)
        axes.text(max(rates), row, f"  {median(rates):.2f}", va="center")
    axes.set_yticks(range(len(labelled)), [label for label, _ in labelled])
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.15)
    axes.set_xlabel("samples per second")


def _steps(axes: Any, labelled: Sequence[tuple[str, list[Record]]], skip: int) -> None:
    """What a step's seconds went into; where both roles work at once, their bars together exceed the step's line."""
    for row, (_, own) in enumerate(labelled):
        left = 0.0
        for part, colour in PARTS:
            seconds = median([r.other(skip) if part == "other" else r.mean(skip, part) for r in own])
            axes.barh(row, seconds, left=left, color=colour, label=part if row == 0 else None)
            left += seconds
        step = median([record.mean(skip, "seconds") for record in own])
        axes.plot([step, step], [row - 0.42, row + 0.42], "k-", label="the step" if row == 0 else None)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step, by part")
    axes.legend(fontsize=8)


def parts(records: Sequence[Record], options: argparse.Namespace, file: Path) -> None:
    """Samples per second of each system, and where its seconds go."""
    labelled = _labels(records)
    figure = Figure(figsize=(11, 1.6 + 0.6 * len(labelled)), layout="constrained")
    left, right = figure.subplots(1, 2)
    _rates(left, labelled, options.skip)
    _steps(right, labelled, options.skip)
    figure.savefig(file, dpi=140)


def curves(records: Sequence[Record], options: argparse.Namespace, file: Path) -> None:
    """Held-out accuracy over seconds of training, a line for each seed."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    _curves(figure.subplots(), records)
    figure.axes[0].axhline(options.accuracy, color="black", linestyle="--", linewidth=1)
    figure.savefig(file, dpi=140)


def both(speed: Sequence[Record], learning: Sequence[Record], options: argparse.Namespace, file: Path) -> None:
    """Samples per second, a step's parts, and the curves of the demo."""
    labelled = _labels(speed)
    figure = Figure(figsize=(15, max(3.6, 1.6 + 0.6 * len(labelled))), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _rates(left, labelled, options.skip)
    _steps(middle, labelled, options.skip)
    _curves(right, learning)
    figure.savefig(file, dpi=140)


def _curves(axes: Any, records: Sequence[Record]) -> None:
    systems = list(dict.fromkeys(record.system for record in records))
    for record in records:
        first = next(other for other in records if other.system == record.system) is record
        seconds, scores = zip(*record.curve(), strict=True)
        axes.plot(seconds, scores, ".-", color=COLOURS[systems.index(record.system) % len(COLOURS)],
                  label=record.system if first else None)  # fmt: skip
    axes.set_xlabel("seconds of training, without start-up and evaluation")
    axes.set_ylabel("held-out accuracy")
    axes.legend(fontsize=8)
