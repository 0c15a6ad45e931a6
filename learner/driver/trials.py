"""Checks that need torch or vLLM, each in a process of its own with a deadline: --dry-run itself loads neither."""

import json
import logging
import os
import subprocess
import sys
import time

from cluster import own_path
from cluster.deadline import LOOK_S, Awake
from learner.config import RunConfig
from learner.driver.findings import PreflightError
from learner.model.trial_note import told

LEARNER, ENGINE, LOSS = "learner.model.model_trial", "rollout.vllm.trial", "learner.trainer.loss_trial"
GRAMMAR = "rollout.vllm.structured.grammar"
TOOL_PARSER = "rollout.vllm.parser_trial"
SHARED_BASE = "learner.model.shared_base_trial"

log = logging.getLogger("learner")


class Trial:
    """`python -m <module>`, which reads a configuration as JSON and prints a list of what is wrong as its last line."""

    def __init__(self, module: str, config: RunConfig, key: str = "model.path", what: str = "model") -> None:
        self._module, self._deadline = module, config.cluster.deadlines.start
        self._key, self._what = key, what  # setting that is tried, and what it names
        self._begin = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **own_path.environment()},
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(config.model_dump_json())
        self._process.stdin.close()
        self._process.stdin = None  # communicate() would flush it

    def finish(self) -> None:
        """Waits for the verdict, and passes notes on to the log. Raises PreflightError with one line for each thing
        that is wrong."""
        try:
            out, err = self._said()
        except subprocess.TimeoutExpired:
            self.close()
            raise PreflightError(
                f"{self._key}: {self._module} did not come to an end within {self._deadline:g} s "
                f"(cluster.deadlines.start); give another {self._what}, or a longer deadline"
            ) from None
        try:
            wrong = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            last = next(reversed(err.strip().splitlines()), f"exit code {self._process.returncode}")
            raise PreflightError(f"{self._key}: {self._module} could not try the {self._what}: {last[:300]}") from None
        for note in told(err):
            log.warning(note)
        if wrong:
            raise PreflightError("\n".join(" ".join(line.split()) for line in wrong))

    def _said(self) -> tuple[str, str]:
        """What it has printed, at its end. Raises TimeoutExpired."""
        clock = Awake(max(self._deadline - (time.monotonic() - self._begin), 0.1))
        while True:
            try:
                return self._process.communicate(timeout=min(clock.left(), LOOK_S))
            except subprocess.TimeoutExpired:
                if clock.left() <= 0:
                    raise

    def close(self) -> None:
        """Ends it, whatever it does; may be called after finish()."""
        self._process.kill()
        self._process.communicate()


def tried(module: str, config: RunConfig, key: str, what: str) -> None:
    """One trial, from its begin to its end. Raises as Trial.finish."""
    trial = Trial(module, config, key, what)
    try:
        trial.finish()
    finally:
        trial.close()
