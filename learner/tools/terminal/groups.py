"""The groups of a step: which are listed, and in which order."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from learner.tools.rollouts import rows_of

ORDERS = ("as trained", "lowest reward", "highest reward", "widest spread")


@dataclass(frozen=True, slots=True)
class Listed:
    """A group. rows: its completions (learner.tools.rollouts.rows_of). rewards: of those that have one."""

    rows: list[dict[str, Any]]
    rewards: list[float]

    @property
    def problem(self) -> str:
        """Its id."""
        return str(self.rows[0]["problem_id"])

    @property
    def asked(self) -> str:
        """The last message of the prompt, in one line."""
        content = self.rows[0]["prompt"][-1].get("content") if self.rows[0]["prompt"] else ""
        return " ".join(str(content).split())

    @property
    def failed(self) -> int:
        """Completions that a reward function or the environment failed on."""
        return sum(row["reward_status"] not in ("ok", "none") for row in self.rows)


def groups_of(file: Path) -> list[Listed]:
    """Of a step file, in its order. Raises RolloutsError."""
    groups = [list(rows) for _, rows in groupby(rows_of(file), key=lambda row: row["group_id"])]
    return [Listed(rows, [float(row["reward"]) for row in rows if row["reward"] is not None]) for rows in groups]


def listed(groups: list[Listed], words: str, order: str, *, failed: bool) -> list[Listed]:
    """Those with the words in the problem's id or its prompt. order: one of ORDERS; groups without a reward come last.
    failed: only those with a completion that failed."""
    sought = words.lower().strip()
    found = [one for one in groups if sought in f"{one.problem} {one.asked}".lower() and (one.failed or not failed)]
    keys: dict[str, Callable[[Listed], float]] = {
        "lowest reward": lambda one: fmean(one.rewards),
        "highest reward": lambda one: -fmean(one.rewards),
        "widest spread": lambda one: min(one.rewards) - max(one.rewards),
    }
    if order not in keys:
        return found
    return sorted(found, key=lambda one: keys[order](one) if one.rewards else float("inf"))
