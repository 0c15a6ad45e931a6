"""Trainer: its gradient is the textbook's, whatever the split, the loss or the reference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load as load_safetensors
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.config import LearnerConfig, LoraConfig, LossConfig, ModelConfig, OptimizerConfig
from learner.trainer import Trainer
from rollout.schema import ragged
from tests.learner import naive
from tests.learner.rollouts import make_group, make_groups, uniform

TEMPERATURE, MAX_LENGTH = 0.8, 16
REWARDS: list[list[float | None]] = [[0, 1, 1, 0.5], [1, 1, 1, 1], [0, None, 0, 2]]


def make_trainer(path: str, *, adapter: str | None = None, dtype: Any = "float32", **learner: Any) -> Trainer:
    settings = {"lora": LoraConfig(rank=8, alpha=16), "optimizer": OptimizerConfig(max_grad_norm=1e9)} | learner
    return Trainer(
        ModelConfig(path=path, adapter=adapter, dtype=dtype),
        LearnerConfig(**settings),
        temperature=TEMPERATURE,
        max_completion_length=MAX_LENGTH,
        total_steps=10,
        seed=0,
        device="cpu",
    )


def masters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer._policy.masters.items()}


async def gradient(trainer: Trainer, groups: list[pa.Table]) -> dict[str, Tensor]:
    """Of the masters, as the optimizer saw it (the gradient norm is not clipped)."""
    await trainer.step(groups)
    return {name: weight.grad.clone() for name, weight in trainer._policy.masters.items() if weight.grad is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    flat = [torch.cat([one[name].flatten() for name in sorted(one)]) for one in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def groups_near(model: Any) -> list[pa.Table]:
    """The sampler's logprobs lie around the model's, so that some tokens are clipped and no ratio reaches 2."""
    rng = np.random.default_rng(5)

    def behavior(prompt: list[int], completion: list[int]) -> list[float]:
        with torch.no_grad():
            own = naive.logprobs(model, prompt, completion, TEMPERATURE).numpy()
        return [float(x) for x in own + rng.uniform(-0.6, 0.6, len(own))]

    return make_groups(REWARDS, behavior)


@pytest.fixture(scope="session")
def groups(tiny_path: str, adapter_path: str) -> list[pa.Table]:
    return groups_near(naive.load(tiny_path, adapter_path))


def naive_gradient(
    model: Any, reference: Any, groups: list[pa.Table], config: LossConfig, advantages: list[list[float]]
) -> dict[str, Tensor]:
    """Denominators: every judged completion counts, those of the group without signal too."""
    rows = [
        (row, advantage)
        for group, own in zip(groups, advantages, strict=True)
        for row, advantage in zip(
            zip(*(ragged(group, n) for n in ("prompt_ids", "completion_ids", "behavior_logprobs")), strict=True),
            own,
            strict=True,
        )
        if not math.isnan(advantage)
    ]
    total = sum(len(row[1]) for row, _ in rows)
    divisors = {"dapo": lambda n: total, "dr_grpo": lambda n: len(rows) * MAX_LENGTH, "grpo": lambda n: len(rows) * n}
    for (prompt, completion, behavior), advantage in rows:
        lp = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE)
        ref = None
        if config.beta > 0:
            with torch.no_grad():
                ref = naive.logprobs(reference, prompt.tolist(), completion.tolist(), TEMPERATURE)
        tokens = naive.loss(lp, torch.tensor(behavior), advantage, ref, config)
        (tokens.sum() / divisors[config.kind](len(completion))).backward()
    return {
        name.replace(".default.", "."): weight.grad for name, weight in model.named_parameters() if weight.requires_grad
    }


def advantages_by_hand(kind: str) -> list[list[float]]:
    nan = float("nan")
    centred = [[-0.625, 0.375, 0.375, -0.125], [0.0] * 4, [-2 / 3, nan, -2 / 3, 4 / 3]]
    squares = [sum(a * a for a in group if a == a) for group in centred]
    divisor = {
        "none": [1.0] * 3,
        "group": [(squares[0] / 3) ** 0.5 + 1e-4, 1.0, (squares[2] / 2) ** 0.5 + 1e-4],
        "batch": [(sum(squares) / 10) ** 0.5 + 1e-4] * 3,
    }[kind]
    return [[a / d for a in group] for group, d in zip(centred, divisor, strict=True)]


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage"),
    [
        ("dapo", "truncated", "batch"),
        ("dapo", "clip", "group"),
        ("dr_grpo", "clip", "none"),
        ("grpo", "truncated", "group"),
    ],
)
async def test_gradient_is_the_textbooks(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], kind: Any, ratio: Any, advantage: Any
) -> None:
    config = LossConfig(kind=kind, ratio=ratio, advantage=advantage)
    trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=60)
    found = await gradient(trainer, groups)
    model = naive.load(tiny_path, adapter_path)
    wanted = naive_gradient(model, None, groups, config, advantages_by_hand(advantage))
    assert distance(found, wanted) < 2e-5


@pytest.mark.parametrize("reference", ["base", "adapter"])
async def test_kl_to_the_reference_is_the_textbooks(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], reference: str, tmp_path: Path
) -> None:
    """Reference: the base with the adapter off; or, for a run started from an adapter, that adapter."""
    config = LossConfig(beta=0.3, ratio="clip")
    start = adapter_path if reference == "adapter" else None
    trainer = make_trainer(tiny_path, adapter=start, loss=config, learning_rate=0.01)
    await trainer.step(groups)  # away from the reference
    await trainer.export(tmp_path)
    model = naive.load(tiny_path, str(tmp_path))
    near = groups_near(model)
    found = await gradient(trainer, near)
    wanted = naive_gradient(model, naive.load(tiny_path, start), near, config, advantages_by_hand("batch"))
    assert distance(found, wanted) < 5e-5


@pytest.mark.parametrize("budget", [1, 40, 100])
@pytest.mark.parametrize("beta", [0.0, 0.1])
async def test_gradient_does_not_depend_on_the_split(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], budget: int, beta: float
) -> None:
    loss = LossConfig(beta=beta)
    found, whole = [
        await gradient(make_trainer(tiny_path, adapter=adapter_path, token_budget=b, loss=loss), groups)
        for b in (budget, 100_000)
    ]
    assert distance(found, whole) < 1e-5


async def test_skipping_groups_without_signal_changes_nothing(
    tiny_path: str, adapter_path: str, groups: list[pa.Table]
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path)
    # a KL too small to be seen makes the trainer keep every completion
    kept = make_trainer(tiny_path, adapter=adapter_path, loss=LossConfig(beta=1e-30))
    metrics, all_metrics = await trainer.step(groups), await kept.step(groups)
    found, wanted = (
        {name: weight.grad for name, weight in one._policy.masters.items() if weight.grad is not None}
        for one in (trainer, kept)
    )
    assert metrics["reward/zero_variance_groups"] == 1
    skipped = sum(len(c) for c in ragged(groups[1], "completion_ids"))
    assert all_metrics["loss/trained_tokens"] - metrics["loss/trained_tokens"] == skipped
    assert distance(found, wanted) < 1e-6


async def test_full_checkpointing_gives_the_same_gradient(
    tiny_path: str, adapter_path: str, groups: list[pa.Table]
) -> None:
    plain = await gradient(make_trainer(tiny_path, adapter=adapter_path), groups)
    trainer = make_trainer(tiny_path, adapter=adapter_path, checkpointing="full")
    forwards: list[int] = []
    layer = trainer._policy._lm.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: forwards.append(1))
    found = await gradient(trainer, groups)
    assert distance(found, plain) < 1e-6
    assert len(forwards) == 2  # once forwards, once again before the backward pass


async def test_no_signal_at_all_leaves_the_weights_and_counts_the_version(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path)
    before = masters(trainer)
    metrics = await trainer.step(make_groups([[1, 1], [None, 0]], uniform))
    assert metrics["loss/trained_tokens"] == 0
    assert metrics["reward/zero_variance_groups"] == 2
    assert metrics["loss/skipped_nonfinite"] == metrics["loss/grad_norm"] == 0
    assert not [name for name in metrics if name.startswith("policy/")]
    assert distance(masters(trainer), before) == 0
    assert (await trainer.adapter()).version == 1


async def test_learning_raises_the_probability_of_the_rewarded(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, learning_rate=0.01)
    good, bad, prompt = [7, 8, 9], [10, 11, 12], [1, 2, 3]

    async def score(completion: list[int]) -> float:
        return float((await trainer.probe(prompt + completion))[-3:].sum())

    before = await score(good) - await score(bad)
    policy = trainer._policy

    def behavior(p: list[int], c: list[int]) -> list[float]:
        with torch.no_grad():
            logs = (policy.hidden(torch.tensor([p + c])) @ policy.head.t() / TEMPERATURE).log_softmax(-1)
        return [float(logs[len(p) - 1 + i, token]) for i, token in enumerate(c)]

    for version in range(5):
        metrics = await trainer.step([make_group(prompt, [good, bad], [1, 0], behavior, version=version)])
        assert metrics["policy/mismatch_max"] == metrics["policy/mismatch_max_current"] < 1e-4
        assert metrics["policy/clip_fraction"] == 0
    assert await score(good) - await score(bad) > before + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
async def test_smoke_of_types_and_optimizers(
    tiny_path: str, groups: list[pa.Table], dtype: Any, optimizer: Any
) -> None:
    trainer = make_trainer(tiny_path, dtype=dtype, optimizer=OptimizerConfig(kind=optimizer), learning_rate=1e-3)
    before = masters(trainer)
    metrics = [await trainer.step(groups) for _ in range(3)][-1]
    assert metrics["loss/skipped_nonfinite"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    after = masters(trainer)
    assert all(weight.dtype == torch.float32 for weight in after.values())
    assert all(not torch.equal(after[name], before[name]) for name in before)
    sent = load_safetensors((await trainer.adapter()).payload)
    wanted = getattr(torch, dtype)
    assert all(torch.equal(sent[name], weight.to(wanted)) for name, weight in after.items())
    assert all(weight.dtype == wanted for weight in sent.values())


async def test_bfloat16_gradient_is_near_the_float32_one(
    tiny_path: str, adapter_path: str, groups: list[pa.Table]
) -> None:
    found, wanted = [
        await gradient(make_trainer(tiny_path, adapter=adapter_path, dtype=dtype, token_budget=60), groups)
        for dtype in ("bfloat16", "float32")
    ]
    assert distance(found, wanted) < 0.1


async def test_nonfinite_updates_are_skipped_and_three_in_a_row_raise(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path)
    groups, head, before = make_groups([[0, 1]], uniform), trainer._policy.head, masters(trainer)
    sound = float(head[5, 5])
    head[5, 5] = math.nan
    metrics = [await trainer.step(groups) for _ in range(2)]
    assert [m["loss/skipped_nonfinite"] for m in metrics] == [1, 1]
    assert distance(masters(trainer), before) == 0
    head[5, 5] = sound
    assert (await trainer.step(groups))["loss/skipped_nonfinite"] == 0  # and the count starts anew
    assert distance(masters(trainer), before) > 0
    head[5, 5] = math.nan
    await trainer.step(groups)
    await trainer.step(groups)
    with pytest.raises(RuntimeError, match="loss/skipped_nonfinite: .* 3 steps in a row"):
        await trainer.step(groups)


async def test_a_step_that_broke_half_way_leaves_no_gradient_behind(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path, dtype="bfloat16", token_budget=60)
    calls = iter(range(100))

    def collect() -> None:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        type(trainer._policy).collect_gradients(trainer._policy)

    monkeypatch.setattr(trainer._policy, "collect_gradients", collect)
    with pytest.raises(RuntimeError, match="out of memory"):
        await trainer.step(groups)
    found = await gradient(trainer, groups)
    fresh = make_trainer(tiny_path, adapter=adapter_path, dtype="bfloat16", token_budget=60)
    assert distance(found, await gradient(fresh, groups)) == 0


async def test_adapter_has_peft_names_and_plain_config(tiny_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_path, learning_rate=0.01)
    adapter = await trainer.adapter()
    adapter.verify()
    assert adapter.version == 0
    await trainer.step(make_groups([[0, 1]], uniform))
    newer = await trainer.adapter()
    assert newer.version == 1
    assert newer.digest != adapter.digest
    assert newer.config["base_model_name_or_path"] == tiny_path
    assert (newer.config["r"], newer.config["lora_alpha"], newer.config["peft_type"]) == (8, 16, "LORA")
    assert json.loads(json.dumps(newer.config)) == newer.config
    (tmp_path / "adapter_model.safetensors").write_bytes(newer.payload)
    (tmp_path / "adapter_config.json").write_text(json.dumps(newer.config))
    await assert_same_model(trainer, tiny_path, tmp_path)


async def test_export_round_trip(tiny_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_path, learning_rate=0.01)
    await trainer.step(make_groups([[0, 1], [0, 2]], uniform))
    await trainer.export(tmp_path / "new" / "adapter")
    await assert_same_model(trainer, tiny_path, tmp_path / "new" / "adapter")
    again = make_trainer(tiny_path, adapter=str(tmp_path / "new" / "adapter"))
    assert distance(masters(again), masters(trainer)) == 0


async def assert_same_model(trainer: Trainer, path: str, folder: Path) -> None:
    tokens = list(range(3, 40))
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain = naive.logprobs(base, tokens[:1], tokens[1:], 1.0).detach().numpy()
    model = PeftModel.from_pretrained(base, folder).eval()
    wanted = naive.logprobs(model, tokens[:1], tokens[1:], 1.0).detach().numpy()
    found = await trainer.probe(tokens)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-5
    assert np.abs(found - plain).max() > 1e-3  # the adapter does something


async def test_errors_are_sentences(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path)
    with pytest.raises(ValueError, match="token_ids: at least two"):
        await trainer.probe([1])
    with pytest.raises(ValueError, match=r"vocabulary of model.path, 260, got 260"):
        await trainer.probe([1, 260])
    with pytest.raises(ValueError, match=r"vocabulary of model.path, 260, got 999"):
        await trainer.step([make_group([1], [[2], [999]], [0, 1], uniform)])
