"""One rule between settings: what it says, and when it is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting that needs others, or does not go with them."""

    setting: str  # as one writes it
    rule: str  # and why
    mend: str  # the next step
    got: tuple[str, ...]  # the keys whose values decide
    broken: Callable[[Settings], bool]

    def sentence(self, config: Settings) -> str:
        """Field, rule, next step, values."""
        values = ", ".join(f"{key}={_written(config, key)}" for key in self.got)
        return f"{self.setting} {self.rule}; {self.mend} (got {values})"


def _written(config: Settings, key: str) -> str:
    """The value of a dotted key, as it is written in a file."""
    value: Any = reduce(getattr, key.split("."), config)
    return value if isinstance(value, str) else json.dumps(value, default=str)
