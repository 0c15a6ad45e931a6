"""The tokens on which merged weights are compared with the adapter: completions that the run has recorded."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rollout import ledger
from rollout.schema import masks_of, ragged

ROWS, LENGTH, TOTAL = 16, 512, 4096  # completions; ids of each at most; and of all together
CONTEXT = LENGTH // 2  # of a prompt's last ids


class Window(NamedTuple):
    """ids: [L] the end of a prompt and the begin of what followed. places: where in them a sampled token stands."""

    ids: list[int]
    places: list[int]


def recorded(rollouts: Path, step: int) -> list[Window]:
    """Of the newest step up to `step` whose file can be read, from all over the file; none if there is no such file."""
    for file in reversed(ledger.steps(rollouts)):
        if int(file.stem.removeprefix("step-")) > step:
            continue
        try:
            rows = ledger.read(file)
        except (OSError, ValueError):  # cut short, or of a schema that is no longer read
            continue
        if found := list(_within(_windows(rows))):
            return found
    return []


def made_up(vocabulary: int) -> list[Window]:
    """Random ids, always the same, for a run whose rollouts are gone."""
    rng = np.random.default_rng(0)
    return [Window(rng.integers(0, vocabulary, 64).tolist(), list(range(1, 64))) for _ in range(ROWS)]


def _windows(rows: pa.Table) -> Iterator[Window]:
    prompts, completions, masks = ragged(rows, "prompt_ids"), ragged(rows, "completion_ids"), masks_of(rows)
    for row in np.unique(np.linspace(0, rows.num_rows - 1, ROWS).astype(int)):
        prompt = prompts[row][-CONTEXT:].tolist()
        ids = [*prompt, *completions[row].tolist()][:LENGTH]
        places = [len(prompt) + at for at in np.flatnonzero(masks[row]).tolist() if len(prompt) + at < len(ids)]
        if places:
            yield Window(ids, places)


def _within(windows: Iterator[Window]) -> Iterator[Window]:
    left = TOTAL
    for window in windows:
        left -= len(window.ids)
        if left < 0:
            return
        yield window
