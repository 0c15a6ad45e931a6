"""--assume-gpus: cards that this machine does not have, for checking a configuration elsewhere than it will run."""

import re
from dataclasses import dataclass

from learner.config import RunConfig
from learner.driver.findings import PreflightError
from rollout.config import parse_size


@dataclass(frozen=True, slots=True)
class Cards:
    """`count` cards of `size` bytes each, on one node."""

    count: int
    size: int


def parse(text: str) -> Cards:
    """`80GiB` or `2x24GiB`. Raises PreflightError."""
    match = re.fullmatch(r"(?:([1-9][0-9]{0,2})x)?(.+)", text, flags=re.ASCII | re.DOTALL)
    try:
        if match is None:
            raise ValueError("must be a size, got nothing; write for example 80GiB or 2x24GiB")
        return Cards(int(match[1] or 1), parse_size(match[2]))
    except ValueError as error:
        raise PreflightError(f"--assume-gpus: {error}") from None


def planned_for(config: RunConfig, cards: Cards) -> RunConfig:
    """The configuration with the cards' size as memory.device, where both roles are on cards.

    Raises PreflightError if none is, or if more is given to the plan than a card has.
    """
    gpus = config.cluster.gpus
    if gpus.generator == 0 and gpus.learner == 0:
        raise PreflightError(
            "--assume-gpus: this configuration runs on CPUs alone; set cluster.gpus.generator and .learner (0.5 each: "
            "two slices of one card), or leave it out"
        )
    device = config.memory.device
    if device is not None and device > cards.size:
        raise PreflightError(
            f"memory.device: must be at most the {cards.size} bytes of the assumed cards, got {device}; lower it, or "
            "assume larger cards"
        )
    if device is not None or gpus.generator == 0 or gpus.learner == 0:
        return config
    return config.model_copy(update={"memory": config.memory.model_copy(update={"device": cards.size})})
