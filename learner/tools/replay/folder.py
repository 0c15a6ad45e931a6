"""The folder of a replay, which gleaner report, gleaner eval and gleaner rollouts show read as that of a run."""

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from cluster.telemetry import Metrics
from learner.config import RunConfig
from learner.config.load import to_yaml
from learner.config.settings import NAME
from learner.driver import record
from learner.driver.checkpoint import ADAPTER_FILES
from learner.model.adapter_config import MODEL
from learner.tools.replay.recorded import ReplayError
from learner.tools.replay.taking import Learner, Taken
from learner.tools.report.run_folder import REPLAY
from rollout import ledger


class ReplayFolder:
    """path: a new folder, or an empty one. facts: for replay.json. rescored: whether the groups have other rewards than
    the recorded ones; else the run's own files are linked to. Raises ReplayError where it cannot be written."""

    def __init__(self, path: Path, config: RunConfig, facts: dict[str, Any], *, rescored: bool) -> None:
        self.path, self._rescored, self._steps = path, rescored, 0
        self._whole = config.learner.mode == "full"
        rollouts = path / "rollouts"
        try:
            rollouts.mkdir(parents=True)
            (path / "config.yaml").write_text(to_yaml(config))
            (path / REPLAY).write_text(json.dumps(facts, indent=1))
        except OSError as error:
            raise ReplayError(f"--output: {path} cannot be written ({error.strerror}); give another folder") from error
        self._rollouts, self._metrics = rollouts, Metrics(path, [], 0)

    def add(self, taken: Taken) -> None:
        """A step: its metrics, its rollouts, and the mismatch of their tokens with this learner."""
        step = taken.step
        if self._rescored:
            ledger.write(self._rollouts, step.number, taken.groups)
        else:
            link = self._rollouts / step.file.name
            link.symlink_to(os.path.relpath(step.file.resolve(), self._rollouts.resolve()))
        record.write_mismatch(self.path, step.number, taken.groups[: taken.trained], taken.mismatch)
        self._metrics.log(step.number, taken.metrics)
        self._steps += 1

    async def finish(self, learner: Learner) -> None:
        """What was learned, in the form in which a run publishes it."""
        with tempfile.TemporaryDirectory(dir=self.path) as saved:
            await learner.save(Path(saved))
            if self._whole:
                shutil.move(Path(saved) / MODEL, self.path / MODEL)
                return
            for name in ADAPTER_FILES:
                if (source := Path(saved) / name).exists():
                    target = self.path / "adapter" / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._metrics.close()
        if kind is None:
            return
        if self._steps == 0:
            shutil.rmtree(self.path)
        else:
            print(
                f"unfinished {self.path} has {self._steps} steps and not what was learned; for another try delete it, "
                "or give another --output",
                file=sys.stderr,
            )


def place_for(run: Path, output: Path | None) -> Path:
    """The folder that is asked for, or the first that is free beside the run. Raises ReplayError if it holds
    something."""
    if output is None:
        beside = run.resolve()
        own = re.sub(r"[^A-Za-z0-9._-]", "-", beside.name)  # a run's name has no others
        names = (f"{own}-replay{'' if number == 1 else f'-{number}'}" for number in range(1, 10**6))
        return next(place for name in names if not (place := beside.with_name(name)).exists())
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ReplayError(f"--output: must be a new folder or an empty one, got {output}; give another")
    if not re.fullmatch(NAME, output.absolute().name):
        raise ReplayError(
            f"--output: its last part names a run, so it must be of letters, digits, dots, dashes and _, got {output}"
        )
    return output.absolute()
