"""plan.json of a run: what was planned, and beside it what was measured."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.files import writing
from cluster.memory import units
from cluster.memory.plan import gib
from learner.driver.memory_budget import NO_LIMIT, Budgets

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
