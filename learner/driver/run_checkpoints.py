"""The checkpoints of one run: what is in them, when they are committed, and what is published from them.

A checkpoint is one folder: the learner's part (weights, optimizer, random state), the place in the problem stream, the
evaluations so far, and what the run was made from (configuration and fingerprints of its inputs).
"""

import json
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster.actor import Actor
from cluster.files import Digest, writing
from learner.config import RunConfig
from learner.driver import checkpoint
from learner.driver.evaluate import Evaluation
from learner.driver.fingerprints import FILE, Fingerprints
from learner.driver.publishing import TRAINER, publish
from learner.driver.step_metrics import Sinks
from learner.trainer.service import TrainerService
from rollout import ledger
from rollout.producer import Pipes

SEEN = ".seen-"


class RunCheckpoints:
    """Saves and restores the learner and the pipes. Waits for the learner, by its deadline for a step.

    total_steps: that the run is planned for.
    """

    def __init__(
        self,
        config: RunConfig,
        total_steps: int,
        fingerprints: Fingerprints,
        trainer: Actor[TrainerService],
        pipes: Pipes,
        sinks: Sinks,
    ) -> None:
        self._config, self._total_steps, self._fingerprints = config, total_steps, fingerprints
        self._trainer, self._pipes, self._sinks = trainer, pipes, sinks
        self.deadline_s = config.cluster.deadlines.step
        self.saved: int | None = None  # step of the newest checkpoint

    async def check_shared(self) -> None:
        """Raises CheckpointError if the learner's process does not see the run folder: better now than at the first
        checkpoint."""
        for left in self._sinks.folder.glob(f"{SEEN}*"):  # by a start that was killed
            left.unlink()
        mark = self._sinks.folder / f"{SEEN}{uuid.uuid4().hex[:8]}"
        with writing(mark):
            mark.touch()
        try:
            seen = await self._trainer.call(TrainerService.sees, self._config.cluster.deadlines.push, mark)
        finally:
            mark.unlink()
        if not seen:
            raise checkpoint.CheckpointError(
                "output_dir: must be a folder that the learner's node and the driver's share, and the learner does not "
                f"see what the driver writes in {self._sinks.folder}; put output_dir on a shared file system, or both "
                "on one node"
            )

    async def save(self, step: int, evaluations: Sequence[Evaluation], spared: int | None = None) -> None:
        """Commits a checkpoint, then publishes its adapter or model; killed between the two, the next start does.

        spared: a step whose checkpoint stays, however many are newer.
        """
        with self._sinks.timeline.span("checkpoint", "loop", step=step):
            await self._commit(step, evaluations, spared)
            self.saved = step
            folder = self._root / checkpoint.name_of(step)
            whole = self._config.learner.mode == "full"
            await checkpoint.to_its_end(partial(publish, folder, self._sinks.folder, whole_model=whole))
        self._sinks.progress.note(f"checkpoint of step {step}")

    async def _commit(self, step: int, evaluations: Sequence[Evaluation], spared: int | None) -> None:
        written: dict[str, Digest] = {}
        await checkpoint.to_its_end(ledger.settle, self._sinks.folder / "rollouts", self.saved or 0)
        async with checkpoint.commit(self._root, step, self._config.checkpoint.keep, written, spared) as folder:
            theirs = await self._trainer.call(TrainerService.save, self.deadline_s, folder / TRAINER)
            written |= {f"{TRAINER}/{name}": digest for name, digest in theirs.items()}
            state = {
                "step": step,
                "total_steps": self._total_steps,
                "problems": len(self._pipes.problems),
                "cursor": self._pipes.cursor.state(),
                "dropped_stale": self._pipes.buffer.dropped_stale,
                "evaluations": [e.to_dict() for e in evaluations],
            }
            with writing(folder):
                (folder / checkpoint.STATE).write_text(json.dumps(state))
                (folder / "config.json").write_text(self._config.model_dump_json())
                (folder / FILE).write_text(self._fingerprints.to_json())

    async def load(self, folder: Path) -> tuple[int, list[Evaluation]]:
        """Restores learner and pipes; returns the step and the evaluations up to it. Before the first step (nothing
        but batches without a reward came before) there are none: as from the start, that step is evaluated anew."""
        state = checkpoint.read_state(folder)
        await self._trainer.call(TrainerService.load, self.deadline_s, folder / TRAINER)
        self._pipes.cursor.restore(state.cursor.low, state.cursor.done)
        self._pipes.buffer.dropped_stale = state.dropped_stale
        self.saved = checkpoint.step_of(folder) if state.step is None else state.step
        self._pipes.buffer.resume(self.saved)
        self._sinks.progress.note(f"resumed at step {self.saved} from {folder}")
        return self.saved, [Evaluation(**dict(e)) for e in state.evaluations if self.saved > 0]

    @property
    def _root(self) -> Path:
        return self._sinks.folder / "checkpoints"
