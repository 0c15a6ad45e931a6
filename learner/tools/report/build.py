"""A run folder -> the blocks of its page."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cluster.reading import printable
from learner.algo.advantage import ADVANTAGES
from learner.tools.report.completions import read_step
from learner.tools.report.packing import Block, packed
from learner.tools.report.run_folder import Run, read_runs
from learner.tools.report.sample import sampled
from learner.tools.report.summary import summary
from learner.tools.report.words import Words
from rollout.data.hub import joined


def blocks_of(folder: Path, against: Path | None, limit: int) -> tuple[str, dict[str, Block]]:
    """Title and blocks of the whole page: head, index, pieces, and step-<number> for the completions of each step.

    limit: bytes that the steps may take. Raises ReportError.
    """
    runs = read_runs(folder, against)
    run = runs[0]
    words = Words(model_of(run))
    found = sampled(
        run.rollouts,
        partial(read_step, advantage=advantage_of(run), trained=trained_of(run), tokens=words.known),
        limit,
    )
    run.remarks.extend(found.remarks)
    head = head_of(runs, words)
    pieces = words.pieces(sorted(found.token_ids)) if words.known else {}
    blocks = {"head": packed(head), "index": packed(found.index), "pieces": packed(pieces)}
    blocks |= {f"step-{step}": block for step, block in sorted(found.blocks.items())}
    return title_of(runs), blocks


def head_of(runs: Sequence[Run], words: Words) -> dict[str, Any]:
    """What the page shows besides completions."""
    return summary(runs) | {"colours": words.missing, "title": title_of(runs)}


def title_of(runs: Sequence[Run]) -> str:
    """Names of the runs."""
    return printable(" against ".join(run.name for run in runs))


def model_of(run: Run) -> str | None:
    """Where the run's tokenizer is."""
    model = run.config.get("model")
    if not isinstance(model, dict) or not model.get("path"):
        return None
    revision = model.get("revision")
    return joined(str(model["path"]), None if revision is None else str(revision))


def advantage_of(run: Run) -> str | None:
    """The kind of advantage that GRPO used; None for PPO, whose advantages need its values."""
    learner = run.config.get("learner")
    if not isinstance(learner, dict) or learner.get("algorithm") != "grpo":
        return None
    loss = learner.get("loss")
    kind = loss.get("advantage") if isinstance(loss, dict) else None
    return kind if isinstance(kind, str) and kind in ADVANTAGES else None


def trained_of(run: Run) -> int | None:
    """How many groups of a step's file were trained on, the first; None if the configuration does not say."""
    learner = run.config.get("learner")
    count = learner.get("groups_per_step") if isinstance(learner, dict) else None
    return count if type(count) is int and count > 0 else None
