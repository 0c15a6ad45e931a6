"""A whole run in which environments raise, die, hang and flood: no trajectory is lost, and none that failed is trained
on."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout import ledger
from rollout.env.trajectory import FAULTS
from tests.flow.run import Run

MODEL = Path(__file__).parents[2] / "examples" / "tiny-arithmetic"
WILD = f"{Path(__file__).with_name('wild_environment.py')}:Wild"
GROUPS, SIZE, STEPS = 3, 4, 3


@pytest.mark.long
@pytest.mark.timeout(400)
def test_three_steps_with_environments_that_break(tmp_path: Path) -> None:
    run = Run(
        tmp_path, MODEL, steps=STEPS, rewards=[],
        env={"use": WILD, "step_timeout_s": 3, "args": {"begun": str(tmp_path / "begun")}},
        rollout={"num_generations": SIZE, "max_prompt_length": 96, "max_completion_length": 96, "kv_cache": "32MiB"},
    )  # fmt: skip
    run.finish()
    lines = [line for line in run.metrics() if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    faults = 0
    for line in lines:
        rows: list[dict[str, Any]] = ledger.read(
            run.folder / "rollouts" / f"step-{line['step']:06d}.parquet"
        ).to_pylist()
        assert sorted((row["position"], row["sample"]) for row in rows) == [
            (position, sample) for position in sorted({row["position"] for row in rows}) for sample in range(SIZE)
        ]
        assert len(rows) == GROUPS * SIZE
        lost = [row for row in rows if row["finish_reason"] in FAULTS]
        assert [row["reward"] for row in lost] == [None] * len(lost)
        assert line["env/errors"] == pytest.approx(len(lost) / len(rows))
        faults += len(lost)
        for row in rows:
            check(row)
        # The sampler's logprobs are the learner's: what was answered stood in the same places for both.
        assert line["policy/mismatch_max_current"] < 1e-3
    assert faults > 0


def check(row: dict[str, Any]) -> None:
    """Turns tile what is masked in, observations what is not."""
    sampled = [any(turn["start"] <= i < turn["stop"] for turn in row["turns"]) for i in range(len(row["loss_mask"]))]
    assert row["loss_mask"] == sampled
    assert len(row["completion_ids"]) == len(row["behavior_logprobs"]) == len(row["token_versions"]) == len(sampled)
    assert all((logprob == 0) or own for own, logprob in zip(sampled, row["behavior_logprobs"], strict=True))
    roles = [message["role"] for message in json.loads(row["messages"])]
    assert roles == (["assistant", "user"] * len(roles))[: len(roles)]
