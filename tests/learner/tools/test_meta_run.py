"""The fake run against the allocator: the same step with real weights, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.memory.shape import Shape
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.tools.meta_run import _as_on, footprint
from learner.trainer.trainer import Trainer
from tests.learner.rollouts import make_group, uniform
from tests.peak import peak_bytes

SMALL = Shape("small", "qwen2", 192, 512, 3, 6, 2, 32, 2000, tied=True, attention_bias=True)
WIDE = replace(SMALL, kind="llama", attention_bias=False, tied=False, vocab=20000, layers=2)
NORMED = replace(SMALL, kind="qwen3", attention_bias=False, head_dim=64)
GEMMA = replace(SMALL, kind="gemma3_text", attention_bias=False, head_dim=64)
CAPPED = replace(SMALL, kind="gemma2", attention_bias=False, head_dim=64, softcap=30.0)

CASES: dict[str, tuple[Shape, dict[str, Any], dict[str, Any], list[tuple[int, list[int]]]]] = {
    "nothing twice, split by the budget": (
        SMALL, {}, {"checkpointing": "none", "token_budget": 500, "lora": {"rank": 64}}, [(64, [180] * 8)]),
    "mlp twice, two targets": (
        SMALL, {}, {"checkpointing": "mlp", "lora": {"targets": ["q_proj", "v_proj"]}}, [(64, [200] * 8)]),
    "some layers twice": (NORMED, {}, {"checkpointing": 2}, [(64, [120] * 8)]),
    "layers twice, two groups": (WIDE, {}, {"checkpointing": "full"}, [(100, [200] * 4), (30, [99, 200])]),
    "bfloat16": (SMALL, {"dtype": "bfloat16"}, {"checkpointing": "full"}, [(64, [200] * 6)]),
    "bfloat16, nothing twice": (WIDE, {"dtype": "bfloat16"}, {"checkpointing": "none"}, [(64, [200] * 6)]),
    "reference": (GEMMA, {}, {"checkpointing": "full", "loss": {"beta": 0.1}}, [(64, [200] * 4)]),
    "capped": (CAPPED, {}, {"checkpointing": "full"}, [(64, [200, 300] * 2)]),
}  # fmt: skip


LONG = (
    "mlp twice, two targets",
    "some layers twice",
    "bfloat16",
    "bfloat16, nothing twice",
    "reference",
    "capped",
    "layers twice, two groups",
)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES])
def test_the_fake_peak_is_the_allocators(case: str, tmp_path: Path) -> None:
    shape, model, settings, lengths = CASES[case]
    learner = LearnerConfig.model_validate({"token_budget": 4096, **settings})
    dtype = model.get("dtype", "float32")
    fake = footprint(shape, learner, lengths, dtype=dtype, cuda=False)
    save_random(shape, tmp_path)
    trainer = Trainer(
        ModelConfig(path=str(tmp_path), dtype=dtype), learner,
        temperature=1.0, max_completion_length=512, total_steps=3, seed=0, device="cpu",
    )  # fmt: skip
    groups = [
        make_group(
            [1] * prompt, [[2] * n for n in completions], [float(i % 2) for i in range(len(completions))], uniform
        )
        for prompt, completions in lengths
    ]
    trainer._step(groups)
    trainer._policy.clear_gradients()
    real = peak_bytes(lambda: trainer._step(groups))  # beside the weights and the optimizer's states
    assert fake.dynamic + fake.gradients == pytest.approx(real, rel=0.01)


def test_tensors_without_content_are_on_a_card_inside_of_autograd_functions_too() -> None:
    """Or the head would be counted as on a CPU, with float32 copies of 16-bit weights."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(x.is_cuda)
            return x.clone()

    with _as_on(cuda=True):
        x = torch.empty(1, device="meta")
        Look.apply(x)
        assert [x.is_cuda, *seen] == [True, True]


def save_random(shape: Shape, folder: Path) -> None:
    import transformers

    settings = shape.to_config()
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
