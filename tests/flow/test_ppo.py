"""The shipped recipe of PPO's four roles on one base, in the real system, on a model that fits a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from learner.tools.cli import main
from rollout.data.model_files import header
from tests.flow.run import Run

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-gsm8k"
# What a model of 2 MB on two cores asks for, and data that is there; all else is the recipe's.
SMALLER = (
    f"model.path={MODEL}", "data.path=examples/gsm8k/train-sample.jsonl", "data.prompt=question", "data.split=train",
    "data.overlong=drop", "rollout.max_prompt_length=256", "rollout.max_completion_length=24",
    "rollout.kv_cache=64MiB", "learner.groups_per_step=4", "learner.updates_per_batch=2", "learner.value.warmup=1",
    "learner.learning_rate=1e-3", "cluster.gpus.generator=0", "cluster.gpus.learner=0", "checkpoint.every=1",
    "learner.loss.mask_truncated=false",  # of 24 tokens at most, which cut many
)  # fmt: skip


def reward_model(folder: Path) -> Path:
    """Of nothing in particular, on the model's base."""
    torch.manual_seed(0)
    base: Any = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="SEQ_CLS")
    model = peft.get_peft_model(base, config)
    torch.nn.init.normal_(base.score.weight, std=0.1)
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.long
@pytest.mark.timeout(400)
def test_four_roles_on_one_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    scored = reward_model(tmp_path / "reward")
    run = Run(tmp_path, MODEL)
    run.config = ROOT / "configs" / "ppo_qwen2.5-7b_1x80gb.yaml"
    run.folder = tmp_path / "runs" / "ppo-qwen2.5-7b"
    given = (
        *SMALLER, f"output_dir={tmp_path / 'runs'}", f"learner.value.start={scored}",
        f"rewards=[{{use: 'adapter:{scored}', weight: 1.0, name: helpful}}]",
    )  # fmt: skip
    run.finish(*given, "steps=4")
    first, *others = [line for line in run.metrics() if line["step"] > 0]
    assert [line["step"] for line in others] == [2, 3, 4]
    assert first["loss/trained_tokens"] == 0  # the value's warm-up
    assert "policy/kl" not in first
    for line in (first, *others):
        assert line["value/loss"] > 0
        assert line["value/explained_variance"] < 1
        assert line["reward/helpful"] == pytest.approx(line["reward/mean"])
        assert line["loss/skipped_nonfinite"] == 0
    for line in others:
        assert line["loss/trained_tokens"] == line["rollout/tokens"]
        assert line["policy/mismatch_k3"] < 1e-2
    assert others[0]["policy/kl"] < 1e-3 < others[-1]["policy/kl"]
    newest = run.folder / "checkpoints" / "step-000004" / "trainer" / "value"
    assert {file.name for file in newest.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert not (run.folder / "adapter" / "value").exists()
    assert main(["export", str(run.folder), str(tmp_path / "out")]) == 0  # the policy alone
    names = {Path(name).name for name in header(tmp_path / "out" / "model.safetensors", "OUT")}
    assert names == {Path(name).name for name in header(MODEL / "model.safetensors", "MODEL")}
