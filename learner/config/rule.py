"""A rule between settings: what it says, and when a configuration breaks it. RULES in learner.config.run lists all."""

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
    """A setting that needs certain values of other settings, or excludes them."""

    setting: str  # the setting as a user writes it
    rule: str  # what it needs, and why
    mend: str  # what the user does next
    got: tuple[str, ...]  # the keys whose values decide; the error shows them
    broken: Callable[[Settings], bool]

    def sentence(self, config: Settings) -> str:
        """The error's text: setting, rule, next step, and the values of the keys that decide."""
        values = ", ".join(f"{key}={_written(config, key)}" for key in self.got)
        return f"{self.setting} {self.rule}; {self.mend} (got {values})"


def _written(config: Settings, key: str) -> str:
    """The value of a dotted key, as it is written in a file."""
    value: Any = reduce(getattr, key.split("."), config)
    return value if isinstance(value, str) else json.dumps(value, default=str)
