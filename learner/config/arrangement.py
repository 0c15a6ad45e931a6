"""How the roles of a run lie on its hardware: a class for each value of memory.layout.

An arrangement holds the rules between its settings, and its part of the memory plan: the layouts that the planner may
choose from, and the memory that the generators keep from the learner. learner.driver.arrangement has what the driver
does for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cluster.memory.generator import asleep
from cluster.memory.plan import Layout, Plan
from cluster.memory.shape import total
from learner.config.rule import Rule

if TYPE_CHECKING:
    from learner.config.settings import Settings

GPUS = ("cluster.gpus.generator", "cluster.gpus.learner")

# The cards of a run whose settings name none.


def with_cards(tree: Mapping[str, Any], count: Callable[[], int]) -> dict[str, Any]:
    """The settings `tree`, with `cluster.gpus` for this machine's cards if they say nothing of it.

    Each process of a role has a card of its own where there are enough of them, or where the settings want it so;
    otherwise the roles are equal slices of one card. A teacher has one of its own if there are two. The roles stay on
    CPUs, as is their default, where the cards are too few, and in float32, which vLLM's kernels for adapters on a card
    do not take. count: tells the number of cards; it is asked only where the answer matters.
    """
    cluster, model = tree.get("cluster", {}), tree.get("model")
    float32 = isinstance(model, Mapping) and model.get("dtype") == "float32"
    if not isinstance(cluster, Mapping) or "gpus" in cluster or float32 or (cards := count()) == 0:
        return dict(tree)
    generators, learners = _number(tree, "rollout", "workers"), _number(tree, "cluster", "learners")
    shards = _number(tree, "cluster", "tensor_parallel")
    left = cards - _number(cluster, "rewards", "processes", 0) * _number(cluster, "rewards", "gpus", 0)
    taught = isinstance(model, Mapping) and model.get("teacher") is not None
    alone = taught and left > 1  # whether the teacher has a card of its own
    left -= alone
    memory = tree.get("memory")
    layout = memory.get("layout", "auto") if isinstance(memory, Mapping) else "auto"
    own = shards > 1 or learners > 1 or layout in ("separate", "sharded")
    share = 100 // (generators + 1 + (taught and not alone)) / 100
    if left >= generators * shards + learners and (own or layout == "auto"):
        gpus = {"generator": float(shards), "learner": 1.0}
    elif left >= 1 and share > 0 and not own:
        gpus = {"generator": share, "learner": share}
    else:
        return dict(tree)
    return {**tree, "cluster": {**cluster, "gpus": gpus | ({"teacher": 1.0 if alone else share} if taught else {})}}


def _number(tree: Mapping[str, Any], section: str, key: str, default: int = 1) -> int:
    """A whole number of the settings; the default where there is none, or a wrong value, which validation reports."""
    group = tree.get(section)
    value = group.get(key) if isinstance(group, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


class Arrangement:
    """An arrangement of the roles; by itself that of `auto`. With more than one card in `cluster.gpus` each role
    has its own. With both roles on one card and max_staleness 0 the memory plan chooses whether the generators stay
    awake or alternate with the learner. Otherwise, as on a CPU, they stay awake."""

    name: ClassVar[str] = "auto"
    rules: ClassVar[tuple[Rule, ...]] = ()
    one_base: ClassVar[bool] = False  # whether the learner maps the generator's base
    one_learner: ClassVar[bool] = False  # whether the learner must be a single process
    in_turns: ClassVar[bool] = False  # whether the generators sleep while the learner trains
    in_shards: ClassVar[bool] = False  # whether the learner's ranks divide the model

    def layouts(self, config: Settings) -> tuple[Layout, ...]:
        """The layouts that the planner may choose from."""
        if config.cluster.gpus.own_cards:
            return ("separate",)
        return ("slices", "alternating") if config.cluster.gpus.one_card and config.max_staleness == 0 else ("slices",)

    def shards(self, config: Settings) -> int:
        """Number of ranks over which the learner's model is divided."""
        return 1

    def undoes(self, config: Settings) -> bool:
        """Whether the ranks keep the state before each step, so that a lost rank is replaced and the step repeated."""
        return config.cluster.learners > 1

    def planned(self, layout: Layout) -> Arrangement:
        """The arrangement once the memory plan has chosen this layout."""
        return ARRANGEMENTS[layout]

    def beside(self, found: Plan) -> int:
        """Bytes of the card that the generators occupy while the learner trains."""
        return 0

    def room(self, found: Plan) -> int:
        """Bytes of the card that must be free before a generator is replaced: the learner may still hold its base."""
        return 0


class _Chosen(Arrangement):
    """An arrangement of one layout, which the memory plan does not change: the user has named it, or the plan has
    chosen it for `auto`."""

    layout: ClassVar[Layout]

    def layouts(self, config: Settings) -> tuple[Layout, ...]:
        return (self.layout,)

    def planned(self, layout: Layout) -> Arrangement:
        return self


class Separate(_Chosen):
    """Each role has a card of its own."""

    name, layout = "separate", "separate"
    rules = (
        Rule(
            "memory.layout: separate", "needs a card for each role",
            "set cluster.gpus.generator=1 and cluster.gpus.learner=1", GPUS,
            lambda c: c.memory.layout == "separate" and not c.cluster.gpus.own_cards,
        ),
    )  # fmt: skip


class Slices(_Chosen):
    """Both roles are on one card, or one or both on a CPU, and keep their memory all the time."""

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
    """Both roles are on one card; the generators sleep while the learner trains."""

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
    """Both roles are on one card, or on a CPU, with one base, which the generator owns and the learner maps."""

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
    """The learner's ranks divide the model among them. `cluster.gpus` decides where the generators are."""

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
