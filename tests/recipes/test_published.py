"""The published recipe as it is shipped: its configuration and reward functions, on a model that fits a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout import ledger
from tests.flow.run import Run

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-gsm8k"
# What a model of 2 MB on two cores asks for, and data that is there; all else is the recipe's.
SMALLER = (
    f"model.path={MODEL}", "data.path=examples/gsm8k/train-sample.jsonl", "data.args={}", "epochs=null", "steps=3",
    "data.eval={every: 0}", "rollout.max_completion_length=48", "rollout.kv_cache=64MiB", "cluster.gpus.generator=0",
    "cluster.gpus.learner=0",
)  # fmt: skip
REWARDS = ("xmlcount", "soft_format", "strict_format", "int", "correctness")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_three_steps_of_the_published_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full fine-tuning with KL, in bfloat16: trained, pushed and proven, saved as a model."""
    monkeypatch.chdir(ROOT)
    run = Run(tmp_path, MODEL)
    run.config = ROOT / "configs" / "gsm8k_published_full.yaml"
    run.folder = tmp_path / "runs" / "gsm8k-published-full"
    run.finish(*SMALLER, f"output_dir={tmp_path / 'runs'}")
    lines = [line for line in run.metrics() if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert all(f"reward/{name}_reward_func" in line for name in REWARDS)
        assert line["reward/failed"] == line["loss/skipped_nonfinite"] == 0
        assert line["loss/grad_norm"] > 0
        # Of every completion, those of groups without signal, too: they have a KL.
        assert line["loss/trained_tokens"] == line["rollout/tokens"]
    assert [line["loss/learning_rate"] for line in lines] == pytest.approx([5e-6, 5e-6, 2.5e-6])  # warm-up, cosine
    assert lines[0]["policy/kl"] < 1e-6 < lines[2]["policy/kl"]  # at first the policy is its own reference
    rows: list[dict[str, Any]] = ledger.read(run.folder / "rollouts" / "step-000001.parquet").to_pylist()
    assert len(rows) == 64
    for row in rows:
        published = [part["value"] for part in row["reward_parts"] if part["name"] != "number"]  # which weighs nothing
        assert row["reward"] == pytest.approx(sum(published))
    assert json.loads((run.folder / "model" / "config.json").read_text())["model_type"] == "llama"
