"""The memory of a run: the cards that it is planned for, what its settings ask of the planner, the budgets that its
processes are held to, and beside them what was measured.
"""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import WrongInput
from cluster.files import writing
from cluster.machine import main_memory, visible_cards
from cluster.memory import plan as cards
from cluster.memory import shape as units
from cluster.memory.learner import pushed_bytes
from cluster.memory.plan import USABLE, CardKind, Layout, Misfit, Plan, Wish, Workload, gib, plan
from cluster.memory.shape import LINEAR, Shape
from cluster.placement import pack
from cluster.ray_cluster import joins
from learner.config import RunConfig, generator_roles, roles
from learner.config.arrangement import Arrangement
from learner.config.settings import AUTO_TOKEN_BUDGET, LearnerConfig
from learner.model.adapter_config import read_scored
from rewards.config import adapters_of
from rollout.config import DEFAULT_KV, DEFAULT_SEQUENCES, parse_size

# A card as a user names it: `rtx4090`, `24` (GB as sold), `24GiB` or `24GB`.


EXAMPLES = "24GiB, 24 (GB as cards are sold) or rtx4090"


@dataclass(frozen=True, slots=True)
class CardSize:
    """Bytes of one card that a run can have; its kind, where that was named; what was understood, where it is not
    plain."""

    bytes: int
    card: cards.CardKind | None = None
    note: str | None = None


def card_size(text: str) -> CardSize:
    """Raises ValueError: it is neither a size nor a known card, or several cards; with what may have been meant."""
    plain = text.strip()
    if sold := cards.sold_as(int(plain)) if plain.isdecimal() and len(plain) < 4 else ():
        least = min(card.free for card in sold)
        names = ", ".join(card.name for card in sold)
        note = f"{plain} GB as sold: {gib(least)}, the least that is free on such a card ({names}); a name is exact"
        return CardSize(least, None, note)
    found = cards.named(plain)
    if len(found) == 1:
        (card,) = found
        return CardSize(card.free, card, f"{card.name}: {gib(card.free)} of {gib(card.bytes)}, the driver has the rest")
    if found:
        raise ValueError(f"{plain} is of several sizes; give one of {', '.join(card.name for card in found)}")
    try:
        return CardSize(parse_size(plain))
    except ValueError:
        known = cards.like(plain) if len(plain) > 2 else []
        meant = f"; did you mean {' or '.join(known)}?" if known else ""
        raise ValueError(f"must be a card or its size, for example {EXAMPLES}, got {plain[:40]!r}{meant}") from None


# The cards that a run is planned for: those that this machine has, or with --assume-gpus others, for checking a
# configuration elsewhere than it will run.


@dataclass(frozen=True, slots=True)
class Cards:
    """`count` cards on one node, of `size` bytes each that a run can have; `note`: what a user should know of them;
    `kind`: of those that are assumed by their name."""

    count: int
    size: int
    assumed: bool = True
    note: str | None = None
    kind: CardKind | None = None


def cards_of(text: str) -> Cards:
    """`h100`, `80GiB` or `2x24GiB`. Raises WrongInput."""
    match = re.fullmatch(r"(?:([1-9][0-9]{0,2})x)?(.+)", text, flags=re.ASCII | re.DOTALL)
    try:
        if match is None:
            raise ValueError("must be a card or its size, got nothing; write for example h100, 80GiB or 2x24GiB")
        size = card_size(match[2])
        return Cards(int(match[1] or 1), size.bytes, kind=size.card)
    except ValueError as error:
        raise WrongInput(f"--assume-gpus: {error}") from None


def cards_wanted(config: RunConfig) -> int:
    """How many cards the run takes, together."""
    return int(sum(bundle.get("GPU", 0) for bundle in pack(roles(config)).bundles))


def cards_present(config: RunConfig) -> Cards | None:
    """The cards that processes of this machine see; None without one. Their size is what is free on the one that has
    least of those that the run gets, which are the first: a display or another process may have the rest."""
    cards = visible_cards()
    if not cards:
        return None
    least = min(cards[: cards_wanted(config) or None], key=lambda card: card.free)
    told = f"cards: {len(cards)} x {least.name}"
    if least.taken:
        told += f", of whose {gib(least.size)} only {gib(least.free)} are free: other processes have the rest"
    return Cards(len(cards), least.free, assumed=False, note=told)


def size_for(config: RunConfig, cards: Cards | None) -> int | None:
    """Bytes of the card that the run is planned for, where both roles are on cards; else None.

    Raises WrongInput if memory.device is more than the cards have; if no role is on the cards that are assumed; or
    if the size is not known, since the cards of a cluster that is joined are on other machines.
    """
    gpus, device = config.cluster.gpus, config.memory.device
    if cards is not None and cards.assumed and gpus.generator == 0 and gpus.learner == 0:
        raise WrongInput(
            "--assume-gpus: this configuration runs on CPUs alone; set cluster.gpus.generator and .learner (0.5 each: "
            "two slices of one card), or leave it out"
        )
    if gpus.generator == 0 or gpus.learner == 0:
        return None
    if cards is None and device is None and joins(config.cluster.address):
        raise WrongInput(
            "memory.device: no card is visible where the run was started, so its size is not known; set it to the "
            "memory of one card of the cluster, for example 80GiB"
        )
    if cards is not None and device is not None and device > cards.size:
        raise WrongInput(
            f"memory.device: must be at most the {gib(cards.size)} "
            f"{'of the assumed cards' if cards.assumed else 'that are free on a card here'}, got {gib(device)}; lower "
            "it, or take larger cards"
        )
    return None if cards is None else cards.size


# What a run's settings ask of the memory planner, as values of cluster.memory.plan.

MOST_SEQUENCES = 256  # decoded at once; vLLM captures CUDA graphs of up to twice as many tokens, at most 512


def sequence_counts(config: RunConfig) -> list[int]:
    """What rollout.max_num_seqs may be, the preferred first: each sequence costs the logits of its next token."""
    if config.rollout.max_num_seqs != "auto" or config.cluster.gpus.generator == 0:
        return [config.rollout.sequences]
    most = min(max(config.under_way, DEFAULT_SEQUENCES), MOST_SEQUENCES)
    return [most, *(count for count in (128, 64, 32, 16, 8) if count < most)]


def layouts(config: RunConfig) -> tuple[Layout, ...]:
    """The layouts that the run's arrangement leaves to the planner, the preferred first."""
    return config.arrangement.layouts(config)


def workload(config: RunConfig, sequences: int) -> Workload:
    """sequences: decoded at once by a generator."""
    rollout = config.rollout
    return Workload(
        generations=rollout.num_generations,
        prompt=rollout.max_prompt_length,
        completion=rollout.max_completion_length,
        sequences=sequences,
        adapters=config.max_staleness + 2 if rollout.in_flight == "finish" else 1,
        generators=_generators_a_card(config),
        shards=config.cluster.shards,
        learners=config.cluster.learners if config.cluster.gpus.learner == 0 else 1,  # as of generators
        groups=config.learner.groups_per_step,
    )


def policy_bytes(config: RunConfig, shape: Shape) -> int:
    """Of a policy on its way to the generators."""
    wish = wish_of(config, layouts(config))
    b = units.DTYPE_BYTES[wish.dtype]
    return pushed_bytes(shape, wish.mode, wish.push, wish.targets, b) or b * shape.lora_params(wish.rank, wish.targets)


def stored_bytes(config: RunConfig, policy: int) -> int:
    """What of a policy of that many bytes lies in the object store, where all processes are on one machine."""
    return 0 if config.weights_stay else policy


def _generators_a_card(config: RunConfig) -> int:
    """The most that one card is to hold; on a CPU, where all share one memory, all of them."""
    if config.cluster.gpus.generator == 0:
        return config.rollout.workers
    bundle_of = pack(roles(config)).bundle_of
    return max(Counter(bundle_of[role.name] for role in generator_roles(config)).values())


def wish_of(config: RunConfig, layouts: tuple[Layout, ...]) -> Wish:
    """What the settings fix, and what they leave to the planner."""
    model, learner, lies, kv = config.model, config.learner, config.arrangement, config.rollout.kv_cache
    targets, cuda = learner.lora.targets, config.cluster.gpus.learner > 0
    names = LINEAR if targets == "all-linear" else {name.rpartition(".")[2] for name in targets}
    known = tuple(name for name in LINEAR if name in names)
    return Wish(
        mode=learner.mode,
        push=learner.push,
        rank=learner.lora.rank,
        targets=known or tuple(LINEAR),
        dtype=model.dtype,
        optimizer=learner.optimizer.kind,
        frozen_ranks=_frozen_ranks(config),
        value_rank=_value_rank(config),
        reference=model.reference_dtype if learner.mode == "full" and learner.loss.beta > 0 else "none",
        offload=learner.offloads,
        base=model.base,
        exact=config.settled_learner.reduce == "exact",
        undo=lies.undoes(config),
        shared=lies.one_base,
        base_ranks=lies.shards(config),
        checkpointing=None if learner.recomputed == "auto" else learner.recomputed,
        token_budget=None if learner.token_budget == "auto" else learner.token_budget,
        kv_bytes=None if kv == "auto" else kv,
        kv_dtype=config.kv_dtype,
        layouts=layouts,
        cuda=cuda,
    )


def _frozen_ranks(config: RunConfig) -> tuple[int, ...]:
    """Of the reference's adapter, where it is not the bare base, counted as the policy's; and of reward models."""
    model, lora = config.model, config.learner.mode == "lora"
    reference = lora and (model.adapter is not None or model.reference is not None)
    own = config.learner.lora.rank
    return (*([own] if reference else []), *(_adapter_rank(one.adapter, own) for one in adapters_of(config.rewards)))


def _value_rank(config: RunConfig) -> int:
    """Of PPO's value."""
    learner = config.learner
    return 0 if learner.algorithm == "grpo" else _adapter_rank(learner.value.start, learner.lora.rank)


def _adapter_rank(folder: str | None, own: int) -> int:
    """Of the adapter with a scalar head in the folder, if that can be read (learner.driver.preflight says what is wrong
    with it); otherwise the policy's own."""
    try:
        return own if folder is None else read_scored(folder, "")["r"]
    except WrongInput:
        return own


# The `memory` settings of a run -> the budgets that its processes are held to, and beside them what was measured.
#
# Settled before any process starts; a run that cannot fit is refused with what to change. The plan's choices do not
# change what is learned (gradients depend neither on the token budget nor on recomputation), so a run may be resumed
# under another plan.

NO_LIMIT = 2**60
PUSH_RATE = 50e6  # bytes a second of a policy that is pushed, at the least: copied, hashed twice, loaded layer by layer


@dataclass(frozen=True, slots=True)
class Budgets:
    """The settled budgets of a run's processes.

    Attributes:
        learner: the configuration with everything settled that the plan settles.
        kv_cache: bytes of each generator.
        sequences: most that a generator decodes at once.
        learner_bytes: most that the learner's allocator may hold, without the CUDA context; None: no limit.
        policy_bytes: of a policy on its way to the generators, as far as that is known before there is one.
        arrangement: how the roles lie on the hardware, `auto` being what the plan has chosen.
        plan: what was planned, by role and part; None for an architecture that the memory model does not know.
        note: one line for the user.
    """

    learner: LearnerConfig
    kv_cache: int
    sequences: int
    learner_bytes: int | None
    policy_bytes: int
    arrangement: Arrangement
    plan: Plan | None
    note: str


def settle(config: RunConfig, model: Mapping[str, Any], card: int | None = None) -> Budgets:
    """The budgets of a run.

    Args:
        model: the content of the model's config.json.
        card: bytes of the card that both roles are on; taken where memory.device is null.

    Raises:
        WrongInput: the message names the settings to change.
    """
    try:
        shape = Shape.from_config(model, config.model.path)
    except ValueError as error:
        return _unplanned(config, str(error))
    device = config.memory.device or card
    if device is None:
        return _unlimited(config, shape)
    best = planned(config, shape, device)
    if isinstance(best, Misfit):
        raise WrongInput(str(best))
    found, sequences = best
    _check_cache(config, found)
    kept = "offloaded" if config.learner.offloads else found.checkpointing
    chosen = config.learner.model_copy(update={"checkpointing": kept, "token_budget": found.token_budget})
    note = (
        f"memory: {found.layout} on {gib(found.device_bytes)}: {_learner(config, found)} (checkpointing "
        f"{found.checkpointing}, {found.token_budget} tokens), generator {gib(found.generator_bytes)} (KV cache "
        f"{gib(found.kv_bytes)}, {found.sequences} sequences of full length)"
    )
    note += _waiting(found.sequences, min(sequences, config.under_way))
    cap, sent = _learner_cap(config, found), policy_bytes(config, shape)
    lies = config.arrangement.planned(found.layout)
    return Budgets(chosen, found.kv_bytes, sequences, cap, sent, lies, found, note)


def planned(config: RunConfig, shape: Shape, device: int) -> tuple[Plan, int] | Misfit:
    """What fits, and the sequences that a generator decodes at once: of those that may be, the number of which most
    find room in the KV cache, and fewer if their logits leave the learner what spares it work.
    """
    wish = wish_of(config, layouts(config))
    best: tuple[Plan, int] | None = None
    for count in sequence_counts(config):
        if best is not None and count <= best[0].sequences:  # no fewer sequences find more room
            break
        found = plan(shape, device, workload(config, count), wish)
        if isinstance(found, Plan) and (best is None or _preference(found) > _preference(best[0])):
            best = found, count
    if best is None:
        assert isinstance(found, Misfit)
        return found
    return best


def _preference(found: Plan) -> tuple[int, int, int]:
    """Sequences that find room; then activations that are kept, and not computed twice; then tokens at once."""
    return found.sequences, found.learner["activations"], found.token_budget


def _learner(config: RunConfig, found: Plan) -> str:
    ranks = config.cluster.learners
    return f"{'learner' if ranks == 1 else f'each of {ranks} learner ranks'} {gib(found.learner_bytes)}"


def _beyond(config: RunConfig, found: Plan) -> str:
    """All roles of a CPU, where they are of one machine, against its memory."""
    cluster = config.cluster
    if cluster.gpus.generator > 0 or cluster.gpus.learner > 0 or joins(cluster.address):
        return ""
    planned, there = cluster.learners * found.learner_bytes + found.generators * found.generator_bytes, main_memory()
    return "" if planned <= there else f"; together {gib(planned)}, and this machine has {gib(there)}"


def _waiting(cached: int, asked: int) -> str:
    """A generator that holds fewer sequences than could be decoded at once is slower than it might be."""
    if cached >= asked:
        return ""
    return f"; {asked} are generated at once: those that find no room wait, unless they end early"


def _unplanned(config: RunConfig, reason: str) -> Budgets:
    if config.memory.device is not None:
        raise WrongInput(f"memory.device: no plan for this model ({reason}); set memory.device=null")
    kv = config.rollout.kv_cache
    kv_bytes = DEFAULT_KV if kv == "auto" else kv
    note = f"memory: no plan ({reason})"
    if kv == "auto" and config.cluster.gpus.generator > 0:
        note += f"; the KV cache has {gib(DEFAULT_KV)}, which is little on a card: set rollout.kv_cache"
    lies = config.arrangement.planned(layouts(config)[0])
    return Budgets(config.learner, kv_bytes, config.rollout.sequences, None, 0, lies, None, note)


def _unlimited(config: RunConfig, shape: Shape) -> Budgets:
    """Without a card that both roles are on: the settings as they stand; what they will take is planned all the same,
    to be compared with."""
    learner, kv = config.learner, config.rollout.kv_cache
    cuda = config.cluster.gpus.learner > 0
    chosen = {
        "checkpointing": ("full" if cuda else "none") if learner.checkpointing == "auto" else learner.checkpointing,
        "token_budget": AUTO_TOKEN_BUDGET if learner.token_budget == "auto" else learner.token_budget,
    }
    fixed = config.model_copy(
        update={
            "learner": learner.model_copy(update=chosen),
            "rollout": config.rollout.model_copy(update={"kv_cache": DEFAULT_KV if kv == "auto" else kv}),
        }
    )
    sequences = config.rollout.sequences
    found = plan(shape, NO_LIMIT, workload(config, sequences), wish_of(fixed, layouts(config)[:1]))
    if isinstance(found, Misfit):
        raise WrongInput(str(found))
    _check_cache(config, found)
    note = (
        f"memory: memory.device is null, so no limit is applied; planned: {_learner(config, found)}, "
        f"generator {gib(found.generator_bytes)}{_beyond(config, found)}"
    )
    lies = config.arrangement.planned(found.layout)
    return Budgets(learner, found.kv_bytes, sequences, None, policy_bytes(config, shape), lies, found, note)


def _check_cache(config: RunConfig, found: Plan) -> None:
    if found.sequences < 1:
        tokens = config.rollout.max_prompt_length + config.rollout.max_completion_length
        raise WrongInput(
            f"rollout.kv_cache: must hold one sequence of {tokens} tokens, {gib(found.kv_bytes)} does not; raise it, "
            "set it to auto with memory.device, or lower rollout.max_prompt_length or max_completion_length"
        )
    heads = found.shape.head_dim
    if config.rollout.kv_cache_dtype == "fp8" and config.cluster.gpus.generator == 0 and heads % 32:
        raise WrongInput(
            f"rollout.kv_cache_dtype: fp8 on a CPU needs heads of a multiple of 32 elements (vLLM), got {heads}; "
            "set it to auto"
        )


def _learner_cap(config: RunConfig, found: Plan) -> int:
    """All that the generators leave, since only the learner's need grows with the batch."""
    others = config.arrangement.planned(found.layout).beside(found)
    return (round(USABLE * found.device_bytes) - others) // found.learners - found.learner["context"]


def settled(config: RunConfig, budgets: Budgets) -> RunConfig:
    """The configuration with the plan's rollout.max_num_seqs, by which generators and evaluation go, and with the
    seconds that the bytes of a policy take on their way."""
    deadlines = config.cluster.deadlines
    patient = deadlines.model_copy(update={"push": deadlines.push + budgets.policy_bytes / PUSH_RATE})
    updates = {
        "rollout": config.rollout.model_copy(update={"max_num_seqs": budgets.sequences}),
        "cluster": config.cluster.waiting(patient),
    }
    return config.model_copy(update=updates)


# plan.json of a run: what was planned, and beside it what was measured.

log = logging.getLogger("learner")

WARN_AT = 0.9  # of a generator's room
NOT_COUNTED = ("context", "fragmentation")  # of a generator on a card: the peak that it tells is of its tensors
METRICS = {"learner": "memory/learner_peak", "generator": "memory/generator_peak"}


class PlanFile:
    """plan.json of a run: the plan, and beside each role's number what was measured. Rewritten as peaks grow."""

    def __init__(self, folder: Path, budgets: Budgets) -> None:
        self._file = folder / "plan.json"
        self._peaks: dict[str, float | None] = dict.fromkeys(METRICS)
        found = budgets.plan
        self._planned = {} if found is None else {"learner": found.learner, "generator": found.generator}
        self._room = 0 if found is None else found.generator_room
        if found is not None and "fragmentation" in found.generator:  # on a card
            self._room -= sum(found.generator[name] for name in NOT_COUNTED)
        self._limited = found is not None and found.device_bytes != NO_LIMIT
        self._settings: dict[str, Any] = {"note": budgets.note, "learner_cap_bytes": budgets.learner_bytes}
        if found is not None:
            self._settings |= {
                "device_bytes": found.device_bytes if self._limited else None, "layout": found.layout,
                "base": found.base, "checkpointing": found.checkpointing, "token_budget": found.token_budget,
                "kv_bytes": found.kv_bytes, "sequences": found.sequences, "generators": found.generators,
                "learners": found.learners, "shards": found.shards,
            }  # fmt: skip
        self._write()

    def measure(self, metrics: Mapping[str, float]) -> None:
        """Takes the peaks (bytes) out of a step's metrics; warns once when a generator comes to 90 % of its room.

        The learner warns by itself (learner.trainer.memory_limit), against what its allocator may hold.
        """
        grown = {
            role: metrics[name] for role, name in METRICS.items() if metrics.get(name, 0) > (self._peaks[role] or 0)
        }
        if not grown:
            return
        before = self._peaks["generator"] or 0
        self._peaks |= grown
        self._write()
        now = self._peaks["generator"] or 0
        if self._limited and before <= WARN_AT * self._room < now:
            share = 100 * now / self._room
            log.warning("memory: a generator's peak of %s is %.0f %% of its %s", gib(now), share, gib(self._room))

    def _write(self) -> None:
        roles = {
            role: {
                "parts": self._planned.get(role),
                "planned": units.total(self._planned[role]) if role in self._planned else None,
                "measured": self._peaks[role],
            }
            for role in METRICS
        }
        partial = self._file.with_suffix(".partial")
        with writing(partial):
            partial.write_text(json.dumps({**self._settings, **roles}, indent=2))
            os.replace(partial, self._file)  # others read it meanwhile
