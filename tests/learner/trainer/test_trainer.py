"""Trainer: its gradient is the textbook's, whatever the split, the loss or the reference."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.files import WriteFailed
from learner.algo.surrogates import LossConfig
from learner.config import ModelConfig
from learner.config.settings import (
    AUTO_TOKEN_BUDGET,
    LearnerConfig,
    LoraConfig,
    OptimizerConfig,
    ScheduleConfig,
    ValueConfig,
)
from learner.trainer.float32_products import library
from learner.trainer.service import Arithmetic
from learner.trainer.step import Learned, Update
from learner.trainer.trainer import MAX_IN_A_ROW, NonFiniteGuard, Trainer, arithmetic_on
from rollout.schema import ragged
from tests.learner import naive
from tests.learner.rollouts import make_group, make_groups, observed, uniform
from tests.learner.trainers import (
    TEMPERATURE,
    adapter_of,
    advantages_by_hand,
    distance,
    gradient,
    groups_near,
    make_trainer,
    masters,
    naive_gradient,
    probe_of,
)


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage"),
    [
        ("dapo", "masked", "batch"),
        ("dapo", "clip", "group"),
        ("dr_grpo", "clip", "none"),
        ("grpo", "truncated", "group"),
        ("grpo", "gspo", "group"),
        ("dapo", "sequence_mask", "batch"),
    ],
)
async def test_gradient_is_the_textbooks(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], kind: Any, ratio: Any, advantage: Any
) -> None:
    bounds: Any = {"epsilon": (0.1, 0.1)} if ratio == "gspo" else {}
    config = LossConfig(kind=kind, ratio=ratio, advantage=advantage, bounds=bounds)
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
    await trainer.save(tmp_path)
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


async def test_bfloat16_gradient_is_near_the_float32_one(
    tiny_path: str, adapter_path: str, groups: list[pa.Table]
) -> None:
    found, wanted = [
        await gradient(make_trainer(tiny_path, adapter=adapter_path, dtype=dtype, token_budget=60), groups)
        for dtype in ("bfloat16", "float32")
    ]
    assert distance(found, wanted) < 0.1


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


# Trainer: what a step leaves behind in weights, versions and files, and what it refuses.


async def test_no_signal_at_all_leaves_the_weights_and_counts_the_version(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path)
    before = masters(trainer)
    # More steps than may be skipped in a row: nothing to learn is no failure.
    metrics = [await trainer.step(make_groups([[1, 1], [None, 0]], uniform)) for _ in range(MAX_IN_A_ROW)][-1]
    assert metrics["loss/trained_tokens"] == 0
    assert metrics["reward/zero_variance_groups"] == 2
    assert metrics["loss/skipped_nonfinite"] == metrics["loss/grad_norm"] == 0
    assert not [name for name in metrics if name.startswith("policy/")]
    assert distance(masters(trainer), before) == 0
    assert (await adapter_of(trainer)).version == MAX_IN_A_ROW


async def test_learning_raises_the_probability_of_the_rewarded(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, learning_rate=0.01)
    good, bad, prompt = [7, 8, 9], [10], [1, 2, 3]

    async def score(completion: list[int]) -> float:
        return float((await probe_of(trainer, prompt + completion))[-len(completion) :].sum())

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
        # On policy it is the mean of -A over four tokens; A = 0.5 / (sqrt(0.5) + 1e-4) and its opposite.
        assert metrics["loss/total"] == pytest.approx(-(3 - 1) / 4 * 0.5 / (0.5**0.5 + 1e-4), rel=1e-4)
        assert 0 < metrics["time/train"] < 60
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
    sent = load_safetensors(bytes((await adapter_of(trainer)).payload))
    wanted = getattr(torch, dtype)
    assert all(torch.equal(sent[name], weight.to(wanted)) for name, weight in after.items())
    assert all(weight.dtype == wanted for weight in sent.values())


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
    with pytest.raises(
        RuntimeError, match=r"the policy's .* 3 steps .*last: step 6, loss/total 0.0, loss/grad_norm nan"
    ):
        await trainer.step(groups)


def test_the_role_that_is_not_finite_is_named() -> None:
    good, bad = Update([], 1.0, done=True), Update([], math.nan, done=False)
    assert Learned([good], [good, bad], {}).failed is None
    metrics = {"loss/total": 1.0, "loss/grad_norm": 1.0, "value/loss": math.nan, "value/grad_norm": 2.0}
    guard, failed = NonFiniteGuard(), Learned([good], [bad], {}).failed
    for step in (1, 2):
        guard.after(failed, metrics, may_overflow=False, step=step)
    with pytest.raises(RuntimeError, match=r"the value's .*value/loss nan, .*norm 2.0.*learner.value.learning_rate"):
        guard.after(failed, metrics, may_overflow=False, step=3)


async def test_steps_that_the_loss_scale_may_have_spoilt_are_no_fault_of_the_run(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, dtype="float16")
    trainer._policy.head[5, 5] = math.nan
    metrics = [await trainer.step(make_groups([[0, 1]], uniform)) for _ in range(4)]
    assert [one["loss/skipped_nonfinite"] for one in metrics] == [1] * 4


async def test_a_step_has_its_own_learning_rate(tiny_path: str) -> None:
    """Of ten steps, the first four warm up: a quarter of the rate in the first, a half in the second."""
    trainer = make_trainer(tiny_path, learning_rate=0.01, schedule=ScheduleConfig(warmup=0.4))
    for wanted in (0.0025, 0.005):
        metrics = await trainer.step(make_groups([[0, 1]], uniform))
        assert metrics["loss/learning_rate"] == pytest.approx(wanted)
        (optimizer,) = trainer._updates.updater.optimizers
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([wanted])


async def test_the_pulse_counts_passes_and_on_a_cpu_seconds_of_computation(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, token_budget="auto")
    await trainer.step(make_groups([[0, 1]], uniform))
    assert trainer._updates.passed == 1
    assert 1 < await trainer.pulse() < 60
    assert trainer._thread.progress(on_cpu=False) == 0
    assert trainer._budget.tokens == AUTO_TOKEN_BUDGET
    await trainer.release_cache()
    _, exported = await trainer.outgoing()
    assert 0 < exported.seconds < 60


async def test_adapter_has_peft_names_and_plain_config(tiny_path: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_path, learning_rate=0.01)
    adapter = await adapter_of(trainer)
    adapter.verify()
    assert adapter.version == 0
    await trainer.step(make_groups([[0, 1]], uniform))
    newer = await adapter_of(trainer)
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
    await trainer.save(tmp_path / "new" / "adapter")
    await assert_same_model(trainer, tiny_path, tmp_path / "new" / "adapter")
    again = make_trainer(tiny_path, adapter=str(tmp_path / "new" / "adapter"))
    assert distance(masters(again), masters(trainer)) == 0


async def assert_same_model(trainer: Trainer, path: str, folder: Path) -> None:
    tokens = list(range(3, 40))
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain = naive.logprobs(base, tokens[:1], tokens[1:], 1.0).detach().numpy()
    model = PeftModel.from_pretrained(base, folder).eval()
    wanted = naive.logprobs(model, tokens[:1], tokens[1:], 1.0).detach().numpy()
    found = await probe_of(trainer, tokens)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-5
    assert np.abs(found - plain).max() > 1e-3  # the adapter does something


async def test_errors_are_sentences(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path)
    with pytest.raises(ValueError, match="token_ids: at least two"):
        await probe_of(trainer, [1])
    with pytest.raises(ValueError, match=r"vocabulary of model.path, 260, got 260"):
        await probe_of(trainer, [1, 260])
    with pytest.raises(ValueError, match=r"vocabulary of model.path, 260, got 999"):
        await trainer.step([make_group([1], [[2], [999]], [0, 1], uniform)])


# A resumed run is the same run, bit for bit; and each part of the saved state is needed for it.

STEPS = 6


def make_resumed_trainer(
    path: str, dtype: Any = "float32", optimizer: Any = "adamw", rank: Any = 8, algorithm: Any = "grpo"
) -> Trainer:
    return Trainer(
        ModelConfig(path=path, dtype=dtype),
        LearnerConfig(
            lora=LoraConfig(rank=rank),
            learning_rate=1e-2,
            schedule=ScheduleConfig(kind="cosine", warmup=0.3),
            optimizer=OptimizerConfig(kind=optimizer, weight_decay=0.01),
            algorithm=algorithm,
            value=ValueConfig(warmup=1, learning_rate=2e-2) if algorithm == "ppo" else ValueConfig(),
        ),
        temperature=1.0,
        max_completion_length=16,
        total_steps=STEPS,
        seed=3,
        device="cpu",
    )


def batch(step: int) -> list[pa.Table]:
    return make_groups([[0, 1, 0], [0, 1, 2]], uniform, seed=step)


async def run(trainer: Trainer, first: int, last: int) -> list[dict[str, float]]:
    volatile = ("time/", "memory/")
    metrics = [await trainer.step(batch(step)) for step in range(first, last)]
    return [{k: v for k, v in one.items() if not k.startswith(volatile)} for one in metrics]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Of all roles that are trained."""
    roles = {"": trainer._policy.masters}
    roles |= {name: role.masters.named for name, role in trainer._policy.scored.items() if role.masters is not None}
    return {role + name: one.detach().clone() for role, own in roles.items() for name, one in own.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Of the three, every pair of values.
@pytest.mark.parametrize(
    ("algorithm", "optimizer", "dtype"),
    [
        ("grpo", "adamw", "float32"), ("grpo", "adamw_8bit", "bfloat16"), ("grpo", "adamw", "float16"),
        ("ppo", "adamw_8bit", "float32"), ("ppo", "adamw", "bfloat16"), ("ppo", "adamw_8bit", "float16"),
    ],
)  # fmt: skip
async def test_resume_is_bitwise(tiny_path: str, tmp_path: Path, algorithm: str, optimizer: str, dtype: str) -> None:
    def make() -> Trainer:
        return make_resumed_trainer(tiny_path, dtype, optimizer, algorithm=algorithm)

    straight = make()
    wanted = await run(straight, 0, STEPS)
    first = make()
    begun = await run(first, 0, 3)
    await first.save(tmp_path / "checkpoint")
    second = make()
    await second.load(tmp_path / "checkpoint")
    found = begun + await run(second, 3, STEPS)
    assert json.dumps(found) == json.dumps(wanted)  # nan, of a float16 overflow, equals itself as text
    assert equal(weights(second), weights(straight))
    assert (await adapter_of(second)).digest == (await adapter_of(straight)).digest
    assert (await adapter_of(second)).version == STEPS


def _spoil_adapter(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def _spoil(key: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        state = torch.load(folder / "trainer.pt", weights_only=True)
        state[key] = change(state[key])
        torch.save(state, folder / "trainer.pt")

    return spoil


def _without_moments(updater: dict[str, Any]) -> dict[str, Any]:
    updater["optimizer"]["state"] = {}
    return updater


async def _resumed(trainers: list[Trainer], folder: Path, spoil: Callable[[Path], None]) -> tuple[Any, Any]:
    """Weights of one that went on from what the other saved, once that was spoiled, and of the other."""
    straight, second = trainers
    await run(straight, 0, 3)
    await straight.save(folder)
    spoil(folder)
    await second.load(folder)
    await run(straight, 3, STEPS)
    await run(second, 3, STEPS)
    return weights(second), weights(straight)


@pytest.mark.parametrize(
    "spoil",
    [_spoil_adapter, _spoil("updater", _without_moments), _spoil("version", lambda version: 0)],
    ids=["adapter", "optimizer", "version, hence schedule"],
)
async def test_each_part_is_needed(tiny_path: str, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    assert not equal(*await _resumed([make_resumed_trainer(tiny_path) for _ in range(2)], tmp_path, spoil))


def _spoil_value(folder: Path) -> None:
    _spoil_adapter(folder / "value")


@pytest.mark.parametrize("spoil", [_spoil_value, _spoil("value", _without_moments)], ids=["value", "its optimizer"])
async def test_each_part_of_the_value_is_needed(tiny_path: str, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    trainers = [make_resumed_trainer(tiny_path, algorithm="ppo") for _ in range(2)]
    assert not equal(*await _resumed(trainers, tmp_path, spoil))


async def test_random_generators_come_back(tiny_path: str, tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    trainer = make_resumed_trainer(tiny_path)
    await trainer.save(tmp_path)
    wanted = draw()
    assert draw() != wanted
    await trainer.load(tmp_path)
    assert draw() == wanted


async def test_building_a_trainer_leaves_the_random_state_alone(tiny_path: str) -> None:
    before = torch.get_rng_state()
    one, other = make_resumed_trainer(tiny_path), make_resumed_trainer(tiny_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(weights(one), weights(other))


async def test_a_state_with_code_in_it_is_not_loaded_and_a_full_disk_is_named(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_resumed_trainer(tiny_path)
    await trainer.save(tmp_path)
    torch.save({"version": _Code()}, tmp_path / "trainer.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        await trainer.load(tmp_path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(WriteFailed) as failed:
        await trainer.save(tmp_path)
    said = f"{tmp_path / 'trainer.pt'} cannot be written (PytorchStreamWriter failed writing file); mend that"
    assert failed.value.sentence() == said


def test_what_a_step_is_computed_with_is_the_processors_name_and_torchs_threads_and_products() -> None:
    found = arithmetic_on(torch.device("cpu"))
    told = re.search(r"(?m)^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text())
    processor = told[1].strip() if told else "CPU"
    assert found == Arithmetic(torch.__version__, processor, torch.get_num_threads(), library())


def full(*_: object) -> None:
    raise RuntimeError("PytorchStreamWriter failed writing file\nand more of it")


@pytest.mark.parametrize("settings", [{}, {"mode": "full", "dtype": "bfloat16"}])
async def test_a_full_disk_says_what_the_checkpoint_takes(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    trainer = make_trainer(tiny_path, **settings)
    await trainer.save(tmp_path)
    size = sum(file.stat().st_size for kind in ("*.safetensors", "*.pt") for file in tmp_path.rglob(kind))
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(WriteFailed) as failed:
        await trainer.save(tmp_path / "again")
    assert failed.value.needed == pytest.approx(size, rel=0.1)


class _Code:
    """Not among what torch.load(weights_only=True) makes."""


async def test_another_rank_is_refused(tiny_path: str, tmp_path: Path) -> None:
    await make_resumed_trainer(tiny_path, rank=16).save(tmp_path)
    with pytest.raises(ValueError, match=r"weights: .* shapes of this model, .* wanted .*8.* got .*16"):
        await make_resumed_trainer(tiny_path).load(tmp_path)
    with pytest.raises(FileNotFoundError):
        await make_resumed_trainer(tiny_path).load(tmp_path / "nowhere")


# The mismatch of each token, against logprobs that are computed one completion at a time.


@pytest.mark.parametrize("updates", [1, 2])
async def test_each_trained_token_has_that_of_the_policy_that_the_batch_began_with(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], updates: int
) -> None:
    given = [observed(groups[0]), *groups[1:]]  # the second group has no signal, the third a row without a reward
    trainer = make_trainer(
        tiny_path, adapter=adapter_path, token_budget=40, updates_per_batch=updates, learning_rate=0.02
    )
    await trainer.step(given)
    found = (await trainer.mismatch()).to_pylist()
    model = naive.load(tiny_path, adapter_path)
    columns = (*(ragged(pa.concat_tables(given), n) for n in ("prompt_ids", "completion_ids", "behavior_logprobs")),)
    masks = [mask for group in given for mask in group.column("loss_mask").to_pylist()]
    for row, (prompt, completion, behavior) in enumerate(zip(*columns, strict=True)):
        if row in (4, 5, 6, 7, 9):
            assert found[row] is None
            continue
        with torch.no_grad():
            own = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE).numpy()
        wanted = own - behavior if masks[row] is None else np.where(masks[row], own - behavior, np.nan)
        np.testing.assert_allclose(np.asarray(found[row], np.float32), wanted, rtol=1e-3, atol=1e-4)
