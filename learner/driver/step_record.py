"""What each step of a run leaves behind: its rollouts and the digest of its policy, so that it can be taken again, and
the mismatch of its tokens for people."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from cluster.actor import Actor
from cluster.files import writing
from cluster.reading import MIB, json_value, lines
from learner.driver import mismatch_files
from learner.trainer.service import Arithmetic, TrainerService
from rollout import ledger
from rollout.types import PolicyId

POLICIES = "policies.jsonl"
LONGEST = MIB  # bytes of a line


class PolicyLine(NamedTuple):
    """One line of policies.jsonl: a policy version.

    step: after which it came; 0: what the run began with. sha256: of the bytes that were sent to the generators.
    total_steps: for which the learning-rate schedule was made. arithmetic: of the learner that made it.
    """

    step: int
    sha256: str
    total_steps: int
    arithmetic: Arithmetic


class StepRecord:
    """Waits for: the learner.

    folder: of the run. total_steps: of the learning-rate schedule. deadline_s: for the learner's answer.
    """

    def __init__(self, folder: Path, total_steps: int, trainer: Actor[TrainerService], deadline_s: float) -> None:
        self._folder, self._total_steps = folder, total_steps
        self._rollouts, self._policies = folder / "rollouts", folder / POLICIES
        self._trainer, self._deadline_s = trainer, deadline_s
        self._arithmetic: Arithmetic | None = None
        self._known = -1  # newest version that has its line

    async def begin(self, step: int) -> None:
        """The run goes on from that step: what is left of later ones is deleted, since those will be taken again."""
        ledger.forget_after(self._rollouts, step)
        mismatch_files.forget_after(self._folder, step)
        kept = [line for line in read_policies(self._policies.parent) if line.step <= step and step > 0]
        partial = self._policies.with_suffix(".partial")
        with writing(partial):
            partial.write_text("".join(map(_written, kept)))
            os.replace(partial, self._policies)
        self._known = max((line.step for line in kept), default=-1)
        self._arithmetic = await self._trainer.call(TrainerService.arithmetic, self._deadline_s)

    def rollouts(self, step: int, groups: Sequence[pa.Table]) -> None:
        """Those that the step consumes."""
        ledger.write(self._rollouts, step, groups)

    async def mismatch(self) -> pa.Array:
        """That of the newest step's tokens, from the learner."""
        return await self._trainer.call(TrainerService.mismatch, self._deadline_s)

    def keep_mismatch(self, step: int, groups: Sequence[pa.Table], mismatch: pa.Array) -> None:
        """groups: those that the step trained on."""
        mismatch_files.write(self._folder, step, groups, mismatch)

    def policy(self, sent: PolicyId) -> None:
        """The policy after a step; one that a resumed run began with has its line already."""
        assert self._arithmetic is not None, "begin() comes first"
        if sent.version <= self._known:
            return
        line = PolicyLine(sent.version, sent.digest, self._total_steps, self._arithmetic)
        with writing(self._policies), self._policies.open("a") as file:
            file.write(_written(line))
        self._known = sent.version


def read_policies(run_dir: Path) -> list[PolicyLine]:
    """Of a run's folder, oldest first; none where a version of gleaner wrote it that kept none. A line that a kill cut
    short is left out. Raises Unreadable."""
    try:
        return [line for _, text in lines(run_dir / POLICIES, LONGEST) if (line := _read(text)) is not None]
    except FileNotFoundError:
        return []


def _written(line: PolicyLine) -> str:
    return json.dumps(line._asdict() | {"arithmetic": line.arithmetic._asdict()}) + "\n"


def _read(text: bytes) -> PolicyLine | None:
    try:
        found = json_value(text, "line")
        line = PolicyLine(**found | {"arithmetic": Arithmetic(**found["arithmetic"])})
    except (ValueError, TypeError, KeyError):
        return None
    return line if type(line.step) is int and isinstance(line.sha256, str) else None
