"""Settles the memory of a run before it starts: finds the cards, translates the settings for the planner
(cluster.memory.search), and makes the budgets that the processes are held to. PlanFile records them with measured
peaks.
"""

import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import WrongInput
from cluster.files import writing
from cluster.machine import Card, main_memory, visible_cards
from cluster.memory import plan as cards
from cluster.memory import shape as units
from cluster.memory.learner import pushed_bytes
from cluster.memory.plan import USABLE, CardKind, Layout, Misfit, Plan, Wish, Workload, gib, kind_of
from cluster.memory.search import cost, fp8_advice, plan
from cluster.memory.seconds import Pace, Rates, duration, generation_seconds, step_seconds, told
from cluster.memory.shape import ALL, Shape
from cluster.memory.teacher import TeacherBudget, teacher_budget
from cluster.placement import pack
from cluster.ray_cluster import joins
from learner.config import RunConfig, generator_roles, roles, teacher_roles
from learner.config.arrangement import Arrangement
from learner.config.settings import AUTO_TOKEN_BUDGET, LearnerConfig
from learner.model.adapter_config import read_scored
from rewards.config import adapters_of
from rollout.architecture import text_of
from rollout.config import DEFAULT_KV, DEFAULT_SEQUENCES, parse_size
from rollout.data.model_files import CONFIG, read_json

# A card as a user writes it: `rtx4090`, `24` (GB as sold), `24GiB` or `24GB`.


EXAMPLES = "24GiB, 24 (GB as cards are sold) or rtx4090"


@dataclass(frozen=True, slots=True)
class CardSize:
    """The size of a card that a user has named. bytes: what a run can have of it. card: its kind, if the user named
    one. note: how the text was understood, where that is not obvious."""

    bytes: int
    card: cards.CardKind | None = None
    note: str | None = None


def card_size(text: str) -> CardSize:
    """The size of the card that the text names. Raises ValueError if it names none, or several."""
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


def card_here() -> CardSize:
    """The size of the visible card with least room. Raises ValueError if there is none."""
    if not (cards_here := visible_cards()):
        raise ValueError(f"no card is visible here; name one, or its size, for example {EXAMPLES}")
    least = min(cards_here, key=lambda card: card.free)
    note = f"{least.name}: {gib(least.free)} of {gib(least.size)} are free"
    return CardSize(least.free, _kind(least), note)


def _kind(card: Card) -> CardKind:
    """The kind of a card that is here; one without known rates if CARDS does not have it."""
    return kind_of(card.name, card.size) or CardKind(card.name, 0, card.size, card.capability)


# The cards that a run is planned for: those of this machine, or with --assume-gpus the cards of another machine on
# which the configuration will run.


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards of one node.

    count: number of cards. size: bytes of each card that a run can have. assumed: whether they come from --assume-gpus.
    note: a line for the user. kind: the kind of card, where it is known.
    """

    count: int
    size: int
    assumed: bool = True
    note: str | None = None
    kind: CardKind | None = None


def cards_of(text: str) -> Cards:
    """The cards that --assume-gpus names, such as `h100`, `80GiB` or `2x24GiB`. Raises WrongInput."""
    match = re.fullmatch(r"(?:([1-9][0-9]{0,2})x)?(.+)", text, flags=re.ASCII | re.DOTALL)
    try:
        if match is None:
            raise ValueError("must be a card or its size, got nothing; write for example h100, 80GiB or 2x24GiB")
        size = card_size(match[2])
        return Cards(int(match[1] or 1), size.bytes, kind=size.card)
    except ValueError as error:
        raise WrongInput(f"--assume-gpus: {error}") from None


def cards_wanted(config: RunConfig) -> int:
    """Number of cards that the run takes."""
    return int(sum(bundle.get("GPU", 0) for bundle in pack(roles(config)).bundles))


def cards_present(config: RunConfig) -> Cards | None:
    """The cards that processes of this machine see; None if there are none. The run gets the first cards, and the size
    is the least that is free on one of these: a display or another process may use the rest."""
    cards = visible_cards()
    if not cards:
        return None
    wanted = cards_wanted(config)
    least = min(cards[: wanted or None], key=lambda card: card.free)
    told = f"cards: {len(cards)} x {least.name}"
    if least.taken:
        told += f", of whose {gib(least.size)} only {gib(least.free)} are free: other processes have the rest"
        if any(card.free > least.free for card in cards[wanted:]):
            told += " (CUDA_VISIBLE_DEVICES can name a freer one)"
    gpus = config.cluster.gpus
    told += f"; cluster.gpus: generator {gpus.generator:g}, learner {gpus.learner:g} (0 and 0: CPUs)"
    if len(cards) > wanted > 0:
        told += f", {wanted} of {len(cards)} cards" + " (more: rollout.workers)" * (config.memory.layout != "shared")
    return Cards(len(cards), least.free, assumed=False, note=told, kind=_kind(least))


def size_for(config: RunConfig, cards: Cards | None) -> int | None:
    """Bytes of the card that the run is planned for, or None unless both roles are on cards.

    Raises WrongInput if memory.device is more than the cards have, if cards are assumed but no role uses a card, or if
    the size is unknown, since the cards of a joined cluster are on other machines.
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


# The settings of a run as the planner's arguments, Workload and Wish of cluster.memory.plan.

MOST_SEQUENCES = 256  # most that a generator decodes at once: vLLM captures CUDA graphs for twice as many, at most 512


def sequence_counts(config: RunConfig) -> list[int]:
    """The values that the plan may choose for rollout.max_num_seqs, the preferred first. Each sequence needs memory for
    the logits of its next token."""
    if config.rollout.max_num_seqs != "auto" or config.cluster.gpus.generator == 0:
        return [config.rollout.sequences]
    most = min(max(config.under_way, DEFAULT_SEQUENCES), MOST_SEQUENCES // config.memory.runs)
    return [most, *(count for count in (128, 64, 32, 16, 8) if count < most)]


def layouts(config: RunConfig) -> tuple[Layout, ...]:
    """The layouts that the run's arrangement leaves to the planner."""
    return config.arrangement.layouts(config)


def workload(config: RunConfig, sequences: int) -> Workload:
    """The workload of the run, or of all that share its processes. sequences: number that a generator decodes at once
    for one run."""
    rollout = config.rollout
    return Workload(
        generations=rollout.num_generations,
        prompt=rollout.max_prompt_length,
        completion=rollout.max_completion_length,
        sequences=sequences * config.memory.runs,
        adapters=(config.max_staleness + 2) * config.memory.runs if rollout.in_flight == "finish" else 1,
        generators=_generators_a_card(config),
        shards=config.cluster.shards,
        learners=config.cluster.learners if config.cluster.gpus.learner == 0 else 1,  # a card holds one
        groups=config.learner.groups_per_step,
        taught=config.data.teacher.longest,
    )


def policy_bytes(config: RunConfig, shape: Shape) -> int:
    """Bytes of a policy on its way to the generators."""
    wish = wish_of(config, layouts(config))
    b = units.DTYPE_BYTES[wish.dtype]
    return pushed_bytes(shape, wish.mode, wish.push, wish.targets, b) or b * shape.lora_params(wish.rank, wish.targets)


def stored_bytes(config: RunConfig, policy: int) -> int:
    """Bytes of the object store that a policy of so many bytes takes, where all processes are on one machine."""
    return 0 if config.weights_stay else policy


def _generators_a_card(config: RunConfig) -> int:
    """The most generators that one card holds; on a CPU, where all share one memory, the number of all generators."""
    if config.cluster.gpus.generator == 0:
        return config.rollout.workers
    bundle_of = pack(roles(config)).bundle_of
    return max(Counter(bundle_of[role.name] for role in generator_roles(config)).values())


def wish_of(config: RunConfig, layouts: tuple[Layout, ...]) -> Wish:
    """The planner's Wish: what the settings fix, and what they leave to the planner. layouts: those to choose from."""
    model, learner, lies, kv = config.model, config.learner, config.arrangement, config.rollout.kv_cache
    targets, cuda = learner.lora.targets, config.cluster.gpus.learner > 0
    return Wish(
        mode=learner.mode,
        push=learner.push,
        rank=learner.lora.rank,
        targets=ALL if targets == "all-linear" else tuple(dict.fromkeys(name.rpartition(".")[2] for name in targets)),
        dtype=model.dtype,
        optimizer=learner.optimizer.kind,
        frozen_ranks=_frozen_ranks(config),
        value_rank=_value_rank(config),
        reference=model.reference_dtype if learner.mode == "full" and _refers(config) else "none",
        top=learner.loss.teacher_top,
        offload=learner.offloads,
        base=model.base,
        exact=config.settled_learner.reduce == "exact",
        undo=lies.undoes(config),
        shared=lies.one_base,
        base_ranks=lies.shards(config),
        checkpointing=None if learner.recomputed == "auto" else learner.recomputed,
        token_budget=None if learner.token_budget == "auto" else learner.token_budget,
        kv_bytes=None if kv == "auto" else kv * config.memory.runs,
        runs=config.memory.runs,
        kv_dtype=config.kv_dtype,
        layouts=layouts,
        cuda=cuda,
    )


def pace_of(config: RunConfig) -> Pace:
    """What the seconds of a step of the run depend on beside its plan, with completions of full length."""
    learner, rollout, taught = config.learner, config.rollout, config.data.teacher.longest
    completions = rollout.num_generations * rollout.max_completion_length
    longer = ((taught or rollout.max_prompt_length) + completions) / (rollout.max_prompt_length + completions)
    return Pace(
        learner.groups_per_step, rollout.max_completion_length, rollout.workers, config.cluster.learners,
        together=config.max_staleness > 0, updates=learner.updates_per_batch,
        further=longer * _refers(config) + 2.0 * (learner.algorithm == "ppo"),
    )  # fmt: skip


def _refers(config: RunConfig) -> bool:
    """Whether the learner computes a reference: model.teacher takes its place, in a process of its own."""
    return config.learner.loss.beta > 0 and config.model.teacher is None


def _frozen_ranks(config: RunConfig) -> tuple[int, ...]:
    """LoRA ranks of the frozen adapters: the reference's, if any, counted as the policy's, and the reward models'."""
    model, lora = config.model, config.learner.mode == "lora"
    reference = lora and (model.adapter is not None or model.reference is not None)
    own = config.learner.lora.rank
    return (*([own] if reference else []), *(_adapter_rank(one.adapter, own) for one in adapters_of(config.rewards)))


def _value_rank(config: RunConfig) -> int:
    """LoRA rank of PPO's value model; 0 without one."""
    learner = config.learner
    return 0 if learner.algorithm != "ppo" else _adapter_rank(learner.value.start, learner.lora.rank)


def _adapter_rank(folder: str | None, own: int) -> int:
    """LoRA rank of the adapter with a scalar head in the folder. Without a folder, or where it cannot be read, which
    learner.driver.preflight reports, the policy's rank `own`."""
    try:
        return own if folder is None else read_scored(folder, "")["r"]
    except WrongInput:
        return own


# The budgets that the processes of a run are held to.
#
# They are settled before any process starts, and a run that cannot fit is refused with what to change. The plan's
# choices do not change what is learned (gradients depend neither on the token budget nor on recomputation), so a run
# may be resumed under another plan.

NO_LIMIT = 2**60
PUSH_RATE = 50e6  # bytes a second, at least, at which a policy is pushed: copied, hashed twice, loaded layer by layer


@dataclass(frozen=True, slots=True)
class Budgets:
    """The settled budgets of a run's processes.

    Attributes:
        learner: the `learner` settings, with the plan's checkpointing and token budget in place of `auto`.
        kv_cache: bytes of each generator's KV cache, for this run.
        sequences: most sequences that a generator decodes at once, of this run.
        learner_bytes: most bytes that the learner's allocator may hold, without the CUDA context; None: no limit.
        policy_bytes: bytes of a policy on its way to the generators, as planned; 0 if no plan was made.
        arrangement: how the roles lie on the hardware, with the plan's choice in place of `auto`.
        plan: planned bytes by role and part; None for an architecture that the memory model does not know.
        note: a line for the user.
        teacher: of the process of model.teacher; None without one.
    """

    learner: LearnerConfig
    kv_cache: int
    sequences: int
    learner_bytes: int | None
    policy_bytes: int
    arrangement: Arrangement
    plan: Plan | None
    note: str
    teacher: TeacherBudget | None = None


def _teacher(config: RunConfig, model: Mapping[str, Any]) -> TeacherBudget | None:
    """The budget of model.teacher; None without one. model: the content of the policy's config.json."""
    if config.model.teacher is None:
        return None
    told, whole = read_json(config.model.teacher, CONFIG, "model.teacher"), workload(config, 1).whole
    rows = tuple(int(text_of(one).get("vocab_size") or 0) for one in (model, told))
    gpus, shards = config.cluster.gpus.teacher, config.cluster.teacher_shards
    return teacher_budget(told, config.model.dtype, whole + 1, rows, cuda=gpus > 0, shards=shards, default=DEFAULT_KV)


def _beside_teacher(config: RunConfig, budget: TeacherBudget, device: int) -> int:
    """What the teacher leaves of a card of `device` bytes, or on a CPU of the memory of all roles."""
    gpus, bundle_of = config.cluster.gpus, pack(roles(config)).bundle_of
    if (gpus.teacher > 0) != (gpus.learner > 0):
        return device
    shares = gpus.learner == 0 or [*bundle_of.values()].count(bundle_of[teacher_roles(config)[0].name]) > 1
    return budget.beside(device, str(config.model.teacher), shares=shares)


def settle(
    config: RunConfig, model: Mapping[str, Any], card: int | None = None, kind: CardKind | None = None
) -> Budgets:
    """The budgets of a run. model: the content of the model's config.json. card: bytes of the card that the run is
    planned for, used where memory.device is null. kind: of that card, where it is known. Raises WrongInput, which names
    the settings to change."""
    device = config.memory.device or card
    if (teacher := _teacher(config, model)) is None:
        return _settled(config, model, device, kind)
    left = None if device is None else _beside_teacher(config, teacher, device)
    found = _settled(config, model, left, kind)
    return replace(found, teacher=teacher, note=f"{found.note}; {teacher.note}")


def _settled(config: RunConfig, model: Mapping[str, Any], device: int | None, kind: CardKind | None) -> Budgets:
    """The budgets of generators and learner on a device of so many bytes; None: no limit."""
    try:
        shape = Shape.from_config(model, config.model.path)
    except ValueError as error:
        return _unplanned(config, str(error))
    if device is None:
        return _unlimited(config, shape)
    best = planned(config, shape, device, kind)
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
    wish = wish_of(config, layouts(config))
    if advice := fp8_advice(found, workload(config, sequences), wish, pace_of(config), kind):
        note += f"; {advice}"
    cap, sent = _learner_cap(config, found), policy_bytes(config, shape)
    lies = config.arrangement.planned(found.layout)
    return Budgets(chosen, found.kv_bytes // config.memory.runs, sequences, cap, sent, lies, found, note)


def planned(config: RunConfig, shape: Shape, device: int, kind: CardKind | None = None) -> tuple[Plan, int] | Misfit:
    """The plan for a card of `device` bytes with the fewest seconds a step, and the number of sequences that a
    generator decodes at once. Misfit if none fits.
    """
    wish, pace = wish_of(config, layouts(config)), pace_of(config)
    works = [workload(config, count) for count in sequence_counts(config)]
    plans = [(plan(shape, device, work, wish, pace, kind), work) for work in works]
    fitting = [(found, work) for found, work in plans if isinstance(found, Plan)]
    if not fitting:
        misfit = plans[-1][0]  # the one with the fewest sequences, which needs least
        assert isinstance(misfit, Misfit)
        return misfit
    # Of plans that take as long, more sequences: completions that end early leave room for others.
    found, work = min(fitting, key=lambda one: (cost(one[0], one[1], wish, pace, kind), -one[1].sequences))
    return found, work.sequences


def _learner(config: RunConfig, found: Plan) -> str:
    ranks = config.cluster.learners
    return f"{'learner' if ranks == 1 else f'each of {ranks} learner ranks'} {gib(found.learner_bytes)}"


def _beyond(config: RunConfig, found: Plan) -> str:
    """A clause for the user if a run on this machine's CPU is planned to take more than its memory, else ''."""
    cluster = config.cluster
    if cluster.gpus.generator > 0 or cluster.gpus.learner > 0 or joins(cluster.address):
        return ""
    planned, there = cluster.learners * found.learner_bytes + found.generators * found.generator_bytes, main_memory()
    return "" if planned <= there else f"; together {gib(planned)}, and this machine has {gib(there)}"


def _waiting(cached: int, asked: int) -> str:
    """A clause for the user if the KV cache holds fewer sequences than are asked for at once, so that some wait."""
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
    """The budgets where no size is known to plan for: the settings stand, and no limit is applied. What they will take
    is planned all the same, for comparison with what is measured."""
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
    own = found.kv_bytes // config.memory.runs
    return Budgets(learner, own, sequences, None, policy_bytes(config, shape), lies, found, note)


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
    """Most bytes that the learner's allocator may hold: all that the generators leave, since only the learner's need
    grows with the batch."""
    others = config.arrangement.planned(found.layout).beside(found)
    return (round(USABLE * found.device_bytes) - others) // found.learners - found.learner["context"]


def settled(config: RunConfig, budgets: Budgets) -> RunConfig:
    """The configuration with the plan's rollout.max_num_seqs, which generators and evaluation follow, and with a
    deadline for pushes that grows with the bytes of a policy."""
    deadlines = config.cluster.deadlines
    patient = deadlines.model_copy(update={"push": deadlines.push + budgets.policy_bytes / PUSH_RATE})
    updates = {
        "rollout": config.rollout.model_copy(update={"max_num_seqs": budgets.sequences}),
        "cluster": config.cluster.waiting(patient),
    }
    return config.model_copy(update=updates)


# plan.json of a run: planned bytes beside measured ones.

log = logging.getLogger("learner")

WARN_AT = 0.9  # share of a generator's room
NOT_COUNTED = ("context", "fragmentation")  # parts that a generator's peak on a card leaves out: it counts tensors only
METRICS = {"learner": "memory/learner_peak", "generator": "memory/generator_peak"}


class PlanFile:
    """plan.json of a run: the plan, and the measured peak of each role. The file is rewritten when a peak grows."""

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
            os.replace(partial, self._file)  # atomic, since other processes may be reading the file


# How long the run will take.


def hours(config: RunConfig, budgets: Budgets, cards: Cards | None, steps: int, held_out: int) -> tuple[str, ...]:
    """A line for the user about the seconds of a step and the duration of the run, where the card's rates are known.
    held_out: problems of an evaluation."""
    found, work = budgets.plan, workload(config, budgets.sequences)
    on_cards = min(config.cluster.gpus.generator, config.cluster.gpus.learner) > 0
    if found is None or cards is None or not on_cards or config.model.dtype == "float32":
        return ()
    wish, pace = wish_of(config, layouts(config)), pace_of(config)
    line = told(cards.kind, cards.size, partial(step_seconds, found, wish, work, pace), steps)
    if line is None:
        return ()
    every, more = config.data.eval.every, ""
    if every and held_out and cards.kind is not None:
        rates = Rates(cards.kind.flops, cards.kind.bandwidth)
        asked = generation_seconds(found, wish, replace(work, generations=1), replace(pace, groups=held_out), rates)
        more = f"; {1 + math.ceil(steps / every)} evaluations of {duration(asked.whole)} each"
    return (f"{line}, if all completions have {pace.length:.0f} tokens{more}",)
