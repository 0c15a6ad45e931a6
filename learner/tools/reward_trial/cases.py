"""Rows of the data, and the completions that reward functions are tried on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewards.config import RewardConfig
from rollout.config import DataConfig
from rollout.data import sources
from rollout.data.prompts import messages_of
from rollout.data.sources import ProblemsError, Row

REFERENCES = ("answer", "ground_truth", "solution", "completion", "chosen")  # may hold what a right completion says


class TrialError(ValueError):
    """What was asked for cannot be tried."""


@dataclass(slots=True)
class Case:
    """One row. completions: what each is called (reference, empty, given, generated), and its text."""

    id: str
    messages: list[dict[str, str]]
    columns: Row
    completions: list[tuple[str, str]] = field(default_factory=list)

    def add(self, kind: str, texts: Sequence[str]) -> None:
        self.completions += [(kind, text) for text in texts]


def read_cases(data: DataConfig, size: int, seed: int) -> list[Case]:
    """The first `size` rows, in the order of the source. Raises ProblemsError."""
    size = min(size, data.size or size)
    rows = sources.read(data.path, data.split, data.args, size, seed)
    name = sources.label(data.path, data.split)
    return [Case(f"{name}-{i}", messages_of(row, data, f"{name}-{i}"), row) for i, row in enumerate(rows)]


def reference_column(row: Mapping[str, Any], rewards: Sequence[RewardConfig]) -> str | None:
    """The column that the reward functions' `column` names, or one that is usually called so; None where there is
    none with a text or a number."""
    named = [reward.args["column"] for reward in rewards if isinstance(reward.args.get("column"), str)]
    return next((one for one in (*named, *REFERENCES) if isinstance(row.get(one), str | int | float)), None)


def reference_of(case: Case, template: str) -> str | None:
    """What the template, or the column of that name, makes of the row; None where that is empty. Raises TrialError."""
    asked = f"{{{template}}}" if template in case.columns else template
    value = case.columns.get(template, "")
    if template in case.columns and (value is None or not str(value).strip()):
        return None
    try:
        (message,) = messages_of(case.columns, DataConfig(path="-", prompt=asked), case.id)
    except ProblemsError as error:
        raise TrialError(str(error).replace("data.prompt:", "--reference:")) from None
    return message["content"]


def read_completions(file: Path) -> list[list[str]]:
    """Of each row its completions: a line is a text, a list of texts, or an object with `completion`, in JSON. Raises
    TrialError."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TrialError(f"--completions: {file} cannot be read ({error}); give a file of JSON lines") from None
    if not lines:
        raise TrialError(f"--completions: {file} is empty; write a line for each row of the data")
    return [_texts(line, f"--completions: line {number} of {file}") for number, line in enumerate(lines, 1)]


def _texts(line: str, where: str) -> list[str]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    found = found.get("completion") if isinstance(found, dict) else found
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TrialError(
            f'{where} must be in JSON a text, a list of texts or {{"completion": ...}}, got {line[:60]}; correct it'
        )
    return texts
