"""How the roles of a run lie on its hardware: what memory.layout names, a class each.

An arrangement has the rules between its settings, and its part of the memory plan: what the planner may choose from,
and what it leaves to the learner. What the driver does otherwise for it is in learner.driver.arrangement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cluster.memory.generator import asleep
from cluster.memory.plan import Layout, Plan
from cluster.memory.shape import total
from learner.config.rule import Rule

if TYPE_CHECKING:
    from learner.config.settings import Settings

GPUS = ("cluster.gpus.generator", "cluster.gpus.learner")


class Arrangement:
    """`auto`: cards of their own where they are asked for, else one card, awake or in turns, by the memory plan."""

    name: ClassVar[str] = "auto"
    rules: ClassVar[tuple[Rule, ...]] = ()
    one_base: ClassVar[bool] = False  # the learner maps the generator's base
    one_learner: ClassVar[bool] = False  # there may be no further ranks
    in_turns: ClassVar[bool] = False  # the generators sleep while the learner trains
    in_shards: ClassVar[bool] = False  # the learner's ranks divide the model

    def layouts(self, config: Settings) -> tuple[Layout, ...]:
        """Those that the planner may choose from, the preferred first."""
        if config.cluster.gpus.own_cards:
            return ("separate",)
        return ("slices", "alternating") if config.cluster.gpus.one_card and config.max_staleness == 0 else ("slices",)

    def shards(self, config: Settings) -> int:
        """Ranks over which the learner's model is divided."""
        return 1

    def undoes(self, config: Settings) -> bool:
        """Whether the ranks keep what a step began with, so that one which is lost is replaced, and the step taken
        again."""
        return config.cluster.learners > 1

    def planned(self, layout: Layout) -> Arrangement:
        """What it is once the plan has chosen."""
        return ARRANGEMENTS[layout]

    def beside(self, found: Plan) -> int:
        """Bytes of the card that the generators have while the learner trains."""
        return 0

    def room(self, found: Plan) -> int:
        """Bytes of the card that a generator waits for as it is replaced: the learner may still have them."""
        return 0


class _Chosen(Arrangement):
    """One that the user names: the plan leaves it."""

    layout: ClassVar[Layout]

    def layouts(self, config: Settings) -> tuple[Layout, ...]:
        return (self.layout,)

    def planned(self, layout: Layout) -> Arrangement:
        return self


class Separate(_Chosen):
    """A card for each role."""

    name, layout = "separate", "separate"
    rules = (
        Rule(
            "memory.layout: separate", "needs a card for each role",
            "set cluster.gpus.generator=1 and cluster.gpus.learner=1", GPUS,
            lambda c: c.memory.layout == "separate" and not c.cluster.gpus.own_cards,
        ),
    )  # fmt: skip


class Slices(_Chosen):
    """Both roles on one card, or on a CPU, all the time."""

    name, layout = "slices", "slices"
    rules = (
        Rule(
            "memory.layout: slices", "needs both roles on one card",
            "set cluster.gpus.generator + cluster.gpus.learner to at most 1", GPUS,
            lambda c: c.memory.layout == "slices" and c.cluster.gpus.own_cards,
        ),
    )  # fmt: skip

    def beside(self, found: Plan) -> int:
        return found.generators * found.generator_bytes


class Alternating(_Chosen):
    """Both roles on one card; the generators sleep while the learner trains."""

    name, layout = "alternating", "alternating"
    one_learner = in_turns = True
    rules = (
        Rule(
            "memory.layout: alternating", "needs both roles on one CUDA card, and one learner",
            "set cluster.gpus.generator=0.5, cluster.gpus.learner=0.5 and cluster.learners=1",
            (*GPUS, "cluster.learners"),
            lambda c: c.memory.layout == "alternating" and not (c.cluster.gpus.one_card and c.cluster.learners == 1),
        ),
        Rule(
            "memory.layout: alternating", "needs max_staleness=0: a generator cannot generate while it sleeps",
            "set that, or memory.layout=slices", ("max_staleness",),
            lambda c: c.memory.layout == "alternating" and c.max_staleness > 0,
        ),
    )  # fmt: skip

    def beside(self, found: Plan) -> int:
        return found.generators * total(asleep(found.generator))


def _one_pair(config: Settings) -> bool:
    """Whether there is one generator of one process, and one learner, on one card, or both on a CPU."""
    cluster, gpus = config.cluster, config.cluster.gpus
    together = gpus.one_card or max(gpus.generator, gpus.learner) == 0
    return together and config.rollout.workers == cluster.shards == cluster.learners == 1


class Shared(Slices):
    """One copy of the base: the generator owns it, the learner maps it."""

    name = "shared"
    one_base = one_learner = True
    rules = (
        Rule(
            "memory.layout: shared",
            "needs one generator of one process and one learner, both on one card or both on a CPU: one maps the base "
            "of the other, and of one that stays awake",
            "set rollout.workers=1, cluster.learners=1, and cluster.gpus.generator=0.5 and cluster.gpus.learner=0.5 or "
            "neither, or memory.layout=auto",
            (*GPUS, "rollout.workers", "cluster.learners", "cluster.tensor_parallel"),
            lambda c: c.memory.layout == "shared" and not _one_pair(c),
        ),
    )  # fmt: skip

    def room(self, found: Plan) -> int:
        return found.generator["weights"] + found.kv_bytes


class Sharded(Arrangement):
    """The learner's ranks divide the model among them; generators lie as the cards say."""

    name = "sharded"
    in_shards = True
    rules = (
        Rule(
            "memory.layout: sharded", "needs cluster.learners above 1, over which the model is divided",
            "set cluster.learners=2, or memory.layout=auto", ("cluster.learners",),
            lambda c: c.memory.layout == "sharded" and c.cluster.learners == 1,
        ),
        Rule(
            "memory.layout: sharded",
            "with learner.mode=full needs learner.optimizer.kind=adamw or adamw_8bit, and model.reference_dtype=auto: "
            "each rank's rows are float32 masters, and a reference in 8 bits is not divided",
            "set these, or cluster.learners=1 with memory.layout=auto",
            ("learner.optimizer.kind", "model.reference_dtype"),
            lambda c: c.memory.layout == "sharded" and c.learner.mode == "full"
            and (c.learner.optimizer.kind not in ("adamw", "adamw_8bit") or c.model.reference_dtype == "int8"),
        ),
    )  # fmt: skip

    def layouts(self, config: Settings) -> tuple[Layout, ...]:
        return ("separate",) if config.cluster.gpus.own_cards else ("slices",)

    def shards(self, config: Settings) -> int:
        return config.cluster.learners

    def undoes(self, config: Settings) -> bool:
        return False

    def planned(self, layout: Layout) -> Arrangement:
        return self

    def beside(self, found: Plan) -> int:
        return ARRANGEMENTS[found.layout].beside(found)


ARRANGEMENTS: dict[str, Arrangement] = {
    one.name: one for one in (Arrangement(), Separate(), Slices(), Alternating(), Shared(), Sharded())
}
