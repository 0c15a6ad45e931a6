"""Which settings go with a generator whose model is spread over several processes."""

from __future__ import annotations

from collections.abc import Callable

from learner.config.rule import Rule
from learner.config.settings import Settings

SPREAD = ("cluster.tensor_parallel", "cluster.gpus.generator")


def _spread(needs: str, mend: str, got: str, broken: Callable[[Settings], bool]) -> Rule:
    return Rule(
        "cluster.tensor_parallel:", f"above 1 (or cluster.gpus.generator) needs {needs}",
        f"{mend}, or take one card for each generator", (*SPREAD, got),
        lambda c: c.cluster.shards > 1 and broken(c),
    )  # fmt: skip


SHARDS = (
    Rule(
        "cluster.tensor_parallel:", "must be the number of cards of a generator, which has a process for each",
        "leave it out, or set cluster.gpus.generator to it", SPREAD,
        lambda c: c.cluster.gpus.generator > 0 and c.cluster.shards != max(1, c.cluster.gpus.generator),
    ),
    _spread(
        "model.base=none: each process would quantise its part by itself, and in other blocks than the learner",
        "set that", "model.base", lambda c: c.model.base == "nf4",
    ),
    _spread(
        "memory.base=own: the learner maps the base of one process", "set that", "memory.base",
        lambda c: c.memory.base == "shared",
    ),
)  # fmt: skip
