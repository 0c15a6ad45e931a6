"""A card as a user names it: `rtx4090`, `24` (GB as sold), `24GiB` or `24GB`."""

from dataclasses import dataclass

from cluster.memory import cards
from cluster.memory.plan import gib
from rollout.config import parse_size

EXAMPLES = "24GiB, 24 (GB as cards are sold) or rtx4090"


@dataclass(frozen=True, slots=True)
class CardSize:
    """Bytes of one card that a run can have; its kind, where that was named; what was understood, where it is not
    plain."""

    bytes: int
    card: cards.CardKind | None = None
    note: str | None = None


def parse(text: str) -> CardSize:
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
