"""The cards that a run is planned for: those that this machine has, or with --assume-gpus others, for checking a
configuration elsewhere than it will run."""

import re
from dataclasses import dataclass

from cluster.memory.cards import CardKind
from cluster.memory.plan import gib
from cluster.nvml import visible_cards
from cluster.placement import pack
from cluster.ray_cluster import joins
from learner.config import RunConfig, roles
from learner.driver import card_size
from learner.driver.findings import PreflightError


@dataclass(frozen=True, slots=True)
class Cards:
    """`count` cards on one node, of `size` bytes each that a run can have; `note`: what a user should know of them;
    `kind`: of those that are assumed by their name."""

    count: int
    size: int
    assumed: bool = True
    note: str | None = None
    kind: CardKind | None = None


def parse(text: str) -> Cards:
    """`h100`, `80GiB` or `2x24GiB`. Raises PreflightError."""
    match = re.fullmatch(r"(?:([1-9][0-9]{0,2})x)?(.+)", text, flags=re.ASCII | re.DOTALL)
    try:
        if match is None:
            raise ValueError("must be a card or its size, got nothing; write for example h100, 80GiB or 2x24GiB")
        size = card_size.parse(match[2])
        return Cards(int(match[1] or 1), size.bytes, kind=size.card)
    except ValueError as error:
        raise PreflightError(f"--assume-gpus: {error}") from None


def wanted(config: RunConfig) -> int:
    """How many cards the run takes, together."""
    return int(sum(bundle.get("GPU", 0) for bundle in pack(roles(config)).bundles))


def present(config: RunConfig) -> Cards | None:
    """The cards that processes of this machine see; None without one. Their size is what is free on the one that has
    least of those that the run gets, which are the first: a display or another process may have the rest."""
    cards = visible_cards()
    if not cards:
        return None
    least = min(cards[: wanted(config) or None], key=lambda card: card.free)
    told = f"cards: {len(cards)} x {least.name}"
    if least.taken:
        told += f", of whose {gib(least.size)} only {gib(least.free)} are free: other processes have the rest"
    return Cards(len(cards), least.free, assumed=False, note=told)


def size_for(config: RunConfig, cards: Cards | None) -> int | None:
    """Bytes of the card that the run is planned for, where both roles are on cards; else None.

    Raises PreflightError if memory.device is more than the cards have; if no role is on the cards that are assumed; or
    if the size is not known, since the cards of a cluster that is joined are on other machines.
    """
    gpus, device = config.cluster.gpus, config.memory.device
    if cards is not None and cards.assumed and gpus.generator == 0 and gpus.learner == 0:
        raise PreflightError(
            "--assume-gpus: this configuration runs on CPUs alone; set cluster.gpus.generator and .learner (0.5 each: "
            "two slices of one card), or leave it out"
        )
    if gpus.generator == 0 or gpus.learner == 0:
        return None
    if cards is None and device is None and joins(config.cluster.address):
        raise PreflightError(
            "memory.device: no card is visible where the run was started, so its size is not known; set it to the "
            "memory of one card of the cluster, for example 80GiB"
        )
    if cards is not None and device is not None and device > cards.size:
        raise PreflightError(
            f"memory.device: must be at most the {gib(cards.size)} "
            f"{'of the assumed cards' if cards.assumed else 'that are free on a card here'}, got {gib(device)}; lower "
            "it, or take larger cards"
        )
    return None if cards is None else cards.size
