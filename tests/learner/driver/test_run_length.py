"""How many steps a run has that goes on with other settings, by hand."""

import json
from pathlib import Path

from learner.config import RunConfig
from learner.driver.preflight import total_steps
from tests.learner.loops import configure

PROBLEMS = 100  # of an epoch


def config(epochs: float, groups_per_step: int) -> RunConfig:
    return configure(epochs=epochs, learner={"groups_per_step": groups_per_step})


def checkpoint(folder: Path, step: int, consumed: int, then: RunConfig, total: int) -> Path:
    saved = folder / f"step-{step:06d}"
    saved.mkdir()
    state = {"cursor": {"low": consumed, "done": []}, "total_steps": total, "problems": PROBLEMS}
    (saved / "state.json").write_text(json.dumps(state))
    (saved / "config.json").write_text(then.model_dump_json())
    return saved


def test_batches_then_epochs_change(tmp_path: Path) -> None:
    """Each time the rest is divided: steps of the first batch size count as they were."""
    assert total_steps(config(1, 8), PROBLEMS, None) == 13
    first = checkpoint(tmp_path, 5, 40, config(1, 8), 13)
    assert total_steps(config(1, 4), PROBLEMS, first) == 5 + 15  # 60 are left
    second = checkpoint(tmp_path, 10, 60, config(1, 4), 20)
    assert total_steps(config(1, 4), PROBLEMS, second) == 20
    assert total_steps(config(2, 4), PROBLEMS, second) == 10 + 35  # 140 are left
