"""Which settings go with several ranks of the learner, and with exact sums."""

from __future__ import annotations

from collections.abc import Callable

from learner.config.rule import Rule
from learner.config.settings import Settings

SEVERAL = "cluster.learners:"


def _several(needs: str, mend: str, got: str, broken: Callable[[Settings], bool]) -> Rule:
    return Rule(
        SEVERAL, f"above 1 needs {needs}", f"{mend}, or cluster.learners=1", ("cluster.learners", got),
        lambda c: c.cluster.learners > 1 and broken(c),
    )  # fmt: skip


def _sharded(
    needs: str, mend: str, got: str, broken: Callable[[Settings], bool], instead: str = "memory.base=own"
) -> Rule:
    return Rule(
        "memory.base: sharded", f"needs {needs}", f"{mend}, or {instead}", (got,),
        lambda c: c.memory.base == "sharded" and broken(c),
    )  # fmt: skip


ONE = "cluster.learners=1 with memory.base=own"


RANKS = (
    _several(
        "memory.base=sharded where a whole model is trained: else each rank has all of it, and all of its optimizer",
        "set that, or learner.mode=lora", "memory.base",
        lambda c: c.learner.mode == "full" and c.memory.base == "own",
    ),
    _several(
        "a card or none for each rank: NCCL takes no two on one card", "set cluster.gpus.learner=1",
        "cluster.gpus.learner", lambda c: 0 < c.cluster.gpus.learner < 1 and c.memory.layout != "alternating",
    ),
    _several(
        "a layout in which each rank has its card to itself", "set memory.layout=auto", "memory.layout",
        lambda c: c.memory.layout == "alternating",
    ),
    _several(
        "memory.base=own: the base of a generator is mapped by one learner", "set that", "memory.base",
        lambda c: c.memory.base == "shared",
    ),
    _sharded(
        "cluster.learners above 1, over which it is divided", "set cluster.learners=2", "cluster.learners",
        lambda c: c.cluster.learners == 1,
    ),
    _sharded(
        "model.base=none: the blocks of 4 bits are not divided", "set that", "model.base",
        lambda c: c.model.base == "nf4",
    ),
    _sharded(
        "learner.push=adapter: no rank has the weights that an adapter would be merged with", "set that",
        "learner.push", lambda c: c.learner.push == "merged",
    ),
    _sharded(
        "model.reference_dtype=auto: a reference in 8 bits is not divided", "set that", "model.reference_dtype",
        lambda c: c.learner.mode == "full" and c.model.reference_dtype == "int8", ONE,
    ),
    _sharded(
        "learner.optimizer.kind=adamw or adamw_8bit where a whole model is trained: each rank's rows are float32 "
        "masters", "set one of them", "learner.optimizer.kind",
        lambda c: c.learner.mode == "full" and c.learner.optimizer.kind not in ("adamw", "adamw_8bit"), ONE,
    ),
    Rule(
        "learner.reduce: exact", "needs learner.mode=lora: it takes 16 bytes for each weight that is trained",
        "set that, or reduce=fast", ("learner.mode",),
        lambda c: c.learner.reduce == "exact" and c.learner.mode == "full",
    ),
)  # fmt: skip
