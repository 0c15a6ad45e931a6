"""Which steps go into a page that has a limit: first and last, then ever closer between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.tools.report.completions import Step
from learner.tools.report.packing import Block
from learner.tools.report.run_folder import ReportError

MOST_COMPLETIONS = 2**14  # of a page: to read and pack them takes seconds, and nobody reads them all
MOST_ERRORS = 50  # different sentences of what failed


@dataclass(frozen=True, slots=True)
class Sample:
    """What was kept of a run's completions.

    Attributes:
        blocks: step -> its packed groups.
        index: what the list and its filters need of every group that was kept, in the order of steps.
        token_ids: those that occur in the blocks.
        remarks: what was left out, and why.
    """

    blocks: dict[int, Block] = field(default_factory=dict)
    index: dict[str, list[Any]] = field(default_factory=dict)
    token_ids: set[int] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)


def spread(steps: Sequence[int]) -> list[int]:
    """The steps in an order of which every beginning lies evenly: of 1 to 5 it is 1, 5, 3, 2, 4.

    steps: ascending. Behind the first and the last, a step has its place by its own number, whatever others there are:
    as a run goes on, its report keeps what it has read.
    """
    between = sorted(steps[1:-1], key=lambda step: f"{step - 1:064b}"[::-1])  # the van der Corput sequence
    return [*dict.fromkeys((*steps[:1], *steps[-1:])), *between]


def sampled(files: Sequence[Path], read: Callable[[Path, int | None], Step], limit: int) -> Sample:
    """As many steps as `limit` bytes of blocks hold, until they have MOST_COMPLETIONS; of a first one that is larger
    than all of it, the first groups.

    read: a file and how many groups of it, None for all (completions.read_step).
    """
    kept: list[Step] = []
    made = Sample()
    room, completions = limit, 0
    by_step = {int(file.stem.removeprefix("step-")): file for file in files}
    for number in spread(sorted(by_step)):
        try:
            step = read(by_step[number], None)
            while len(step.block) > room and not kept and len(step.lines) > 1:
                step = read(by_step[number], len(step.lines) // 2)
        except ReportError as error:
            made.remarks.append(f"{error}.")
            continue
        completions += sum(len(line["rewards"]) for line in step.lines)
        if len(step.block) > room or (completions > MOST_COMPLETIONS and kept):
            limits = f"--limit ({limit / 2**20:.3g} MiB)" if len(step.block) > room else f"{MOST_COMPLETIONS:,}"
            made.remarks.append(
                f"Completions of {len(kept)} of {len(files)} steps are shown, evenly spread: all of them would be more "
                f"than {limits}; gleaner rollouts show has the others."
            )
            break
        room -= len(step.block)
        kept.append(step)
        made.blocks[step.step] = step.block
        made.token_ids.update(step.token_ids)
    made.index.update(_index(sorted(kept, key=lambda step: step.step)))
    return made


def _index(steps: Sequence[Step]) -> dict[str, list[Any]]:
    """Columns: for each group its step, its place in the block of the step, and the values of its line."""
    rows = [(step.step, place, line) for step in steps for place, line in enumerate(step.lines)]
    texts = list(dict.fromkeys((line["problem"], line["prompt"]) for *_, line in rows))
    places = {text: place for place, text in enumerate(texts)}
    return {
        "step": [step for step, *_ in rows],
        "place": [place for _, place, _ in rows],
        "problem": [places[line["problem"], line["prompt"]] for *_, line in rows],
        "rewards": [line["rewards"] for *_, line in rows],
        "failed": [sum(status not in ("ok", "none") for status in line["statuses"]) for *_, line in rows],
        "problems": [list(text) for text in texts],
        "errors": _errors(rows),
    }


def _errors(rows: Sequence[tuple[int, int, dict[str, Any]]]) -> list[list[Any]]:
    """[sentence, completions, first step, last step] of what failed, most first."""
    found: dict[str, list[int]] = {}
    for step, _, line in rows:
        for error in line["errors"]:
            found.setdefault(error, []).append(step)
    most = sorted(found.items(), key=lambda one: -len(one[1]))[:MOST_ERRORS]
    return [[error, len(steps), min(steps), max(steps)] for error, steps in most]
