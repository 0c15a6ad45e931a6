"""A batch in several updates: decoupled PPO, against the textbook taken one update after the other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from learner.algo.loss import most_uncertain, value_loss
from learner.algo.surrogates import LossConfig
from learner.algo.targets import targets_of
from learner.batch.micro_batch import read
from learner.config.settings import LearnerConfig
from learner.trainer.step import Learned, Update
from learner.trainer.trainer import Trainer
from rollout.schema import SCHEMA, masks_of, ragged
from tests.learner import naive, trainers
from tests.learner.adapters import written_adapter
from tests.learner.rollouts import make_group, make_groups, observed, taught, uniform
from tests.learner.trainers import (
    MAX_LENGTH,
    TEMPERATURE,
    adapter_of,
    advantages_by_hand,
    distance,
    gradient,
    groups_near,
    make_trainer,
    masters,
)
from tests.peak import peak_bytes

RATE = 0.02
SPLIT: dict[str, Any] = {"loss": LossConfig(ratio="clip"), "updates_per_batch": 2, "learning_rate": RATE}


def naive_updates(model: Any, groups: list[pa.Table], advantages: list[list[float]], *, near: str) -> dict[str, Tensor]:
    """The gradient of the last update, after AdamW took those before it. `near`: what PPO's clip holds it near to."""
    weights = {n.replace(".default.", "."): w for n, w in model.named_parameters() if w.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    batch = [
        list(zip(*(ragged(g, n) for n in ("prompt_ids", "completion_ids", "behavior_logprobs")), strict=True))
        for g in groups
    ]
    with torch.no_grad():
        prox = [[naive.logprobs(model, p.tolist(), c.tolist(), TEMPERATURE) for p, c, _ in group] for group in batch]
    for own in ([0, 1], [2]):  # three groups in two updates
        rows = [
            (*row, a, old) for g in own for row, a, old in zip(batch[g], advantages[g], prox[g], strict=True) if a == a
        ]
        total = sum(len(row[1]) for row in rows)
        optimizer.zero_grad()
        for prompt, completion, behavior, advantage, old in rows:
            lp, mu = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE), torch.tensor(behavior)
            stale = (old - mu).exp().clamp(max=2) if near == "prox" else torch.ones(len(lp))
            moved = (lp - (old if near == "prox" else mu)).exp()
            value = stale * torch.min(moved.clamp(max=4) * advantage, moved.clamp(0.8, 1.28) * advantage)
            (-value.sum() / total).backward()
        if own == [0, 1]:
            optimizer.step()
    return {name: weight.grad for name, weight in weights.items()}


@pytest.mark.parametrize("budget", [40, 1000])
async def test_a_teacher_alone_gives_the_textbooks_gradient(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], tmp_path: Path, budget: int
) -> None:
    """learner.algorithm: distill, of a teacher that is another adapter on the same base. A completion without a reward
    is trained on, and the rewards change nothing."""
    teacher, loss = written_adapter(tiny_path, tmp_path, seed=2), LossConfig(beta=1)
    taught: dict[str, Any] = {"adapter": adapter_path, "algorithm": "distill", "loss": loss, "token_budget": budget}
    trainer = make_trainer(tiny_path, model={"reference": teacher}, **taught)
    found = await gradient(trainer, groups)
    wanted = trainers.naive_gradient(
        naive.load(tiny_path, adapter_path), naive.load(tiny_path, teacher), groups, loss, [[0.0] * 4] * 3
    )
    assert distance(found, wanted) < 5e-5
    same = [
        group.set_column(group.column_names.index("reward"), "reward", pa.array([1.0] * 4, pa.float32()))
        for group in groups
    ]
    metrics = await make_trainer(tiny_path, model={"reference": teacher}, **taught).step(same)
    assert metrics["loss/grad_norm"] == pytest.approx(float(torch.cat([g.flatten() for g in found.values()]).norm()))
    assert "reward/zero_variance_groups" not in metrics
    assert metrics["policy/kl"] > 0.01


@pytest.mark.parametrize("budget", [40, 1000])
@pytest.mark.parametrize("algorithm", ["distill", "grpo"])
async def test_a_teacher_that_reads_more_gives_the_textbooks_gradient(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], algorithm: str, budget: int
) -> None:
    """data.teacher: what the policy began as is the teacher, behind a prompt of its own for each group, longer or
    shorter than the policy's. The textbook computes in float64, one completion at a time."""
    groups = [observed(groups[0]), *groups[1:]]
    others = [list(range(40, 70)), [7], ragged(groups[2], "prompt_ids")[0].tolist()]
    loss = LossConfig(beta=1, ratio="truncated") if algorithm == "grpo" else LossConfig(beta=1)
    settings: dict[str, Any] = {
        "adapter": adapter_path, "algorithm": algorithm, "loss": loss, "token_budget": budget,
    }  # fmt: skip
    shown = [taught(group, other) for group, other in zip(groups, others, strict=True)]
    advantages = [[0.0] * 4] * 3 if algorithm == "distill" else advantages_by_hand("batch")
    wanted, plain = (
        naive_teaching(naive.load(tiny_path, adapter_path).double(), groups, given, advantages)
        for given in (others, [None] * 3)
    )
    found = await gradient(make_trainer(tiny_path, **settings), shown)
    assert distance(found, wanted) < 4e-6  # the learner computes in float32
    assert distance(plain, wanted) > 0.1  # so the test can tell
    metrics = await make_trainer(tiny_path, **settings).step(groups)
    assert metrics["policy/kl"] < 1e-6  # behind the same prompt it is what it was


def naive_teaching(
    model: Any, groups: list[pa.Table], prompts: list[Any], advantages: list[list[float]]
) -> dict[str, Tensor]:
    """The gradient by these advantages and, with weight 1, a teacher that is the model itself. prompts: what it reads
    of each group; None: what the policy reads."""
    names = ("prompt_ids", "completion_ids", "behavior_logprobs")
    total, loss = 0, torch.zeros((), dtype=torch.float64)
    for group, other, own in zip(groups, prompts, advantages, strict=True):
        rows = zip(*(ragged(group, name) for name in names), masks_of(group), own, strict=True)
        for prompt, completion, behavior, mask, advantage in rows:
            if math.isnan(advantage):
                continue
            lp = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE)
            read = prompt.tolist() if other is None else other
            with torch.no_grad():
                teacher = naive.logprobs(model, read, completion.tolist(), TEMPERATURE)
            ratio = (lp.detach() - torch.tensor(behavior)).exp().clamp(max=2)
            token = ratio * ((lp.detach() - teacher) - advantage) * lp
            loss = loss + token[torch.tensor(mask)].sum()
            total += int(mask.sum())
    (loss / total).backward()
    return {n.replace(".default.", "."): w.grad for n, w in model.named_parameters() if w.requires_grad}


async def test_a_step_of_which_some_rows_lack_the_teachers_prompt_is_refused(
    tiny_path: str, groups: list[pa.Table]
) -> None:
    trainer = make_trainer(tiny_path, algorithm="distill", loss=LossConfig(beta=1))
    with pytest.raises(ValueError, match="teacher_prompt_ids: all rows of a step must have one"):
        await trainer.step([taught(groups[0], [1, 2]), *groups[1:]])
    with pytest.raises(ValueError, match="teacher_prompt_ids: .* not empty"):
        await trainer.step([taught(group, []) for group in groups])
    with pytest.raises(ValueError, match="vocab"):
        await trainer.step([taught(group, [10**6]) for group in groups])


@pytest.mark.parametrize("budget", [40, 1000])
async def test_two_updates_are_the_textbooks(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], budget: int
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path, token_budget=budget, **SPLIT)
    found = await gradient(trainer, groups)
    wanted, other = (
        naive_updates(naive.load(tiny_path, adapter_path), groups, advantages_by_hand("batch"), near=near)
        for near in ("prox", "sampler")
    )
    assert distance(found, wanted) < 1e-3
    assert distance(found, other) > 0.05  # so the test can tell
    assert (await adapter_of(trainer)).version == 1


async def test_memory_that_runs_out_in_the_second_update_repeats_that_one_alone(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, calm = (make_trainer(tiny_path, adapter=adapter_path, token_budget=200, **SPLIT) for _ in range(2))
    plain, steps = trainer._updates.updater.step, []

    def step(rate: float, *, loss_is_finite: bool) -> tuple[float, bool]:
        steps.append(rate)
        return plain(rate, loss_is_finite=loss_is_finite)

    def predicting(batch: Any) -> Tensor:
        if len(steps) == 1 and batch.ids.numel() > 30:
            raise torch.OutOfMemoryError("no more")
        return type(trainer._policy).predicting(trainer._policy, batch)

    monkeypatch.setattr(trainer._updates.updater, "step", step)
    monkeypatch.setattr(trainer._policy, "predicting", predicting)
    metrics, wanted = await trainer.step(groups), await calm.step(groups)
    assert metrics["memory/oom_retries"] >= 1
    assert steps == [RATE, RATE]
    assert metrics["loss/trained_tokens"] == wanted["loss/trained_tokens"]
    assert distance(masters(trainer), masters(calm)) < 1e-4


async def test_metrics_of_a_split_batch(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mismatch is that of the policy that sampled, not of what the first update made of it; and an update without
    signal is none."""
    whole = await make_trainer(tiny_path, adapter=adapter_path, learning_rate=RATE).step(groups)
    split, updates = make_trainer(tiny_path, adapter=adapter_path, **SPLIT), list[Any]()
    learn = split._updates.learn

    def seen(*args: Any) -> Any:
        learned = learn(*args)
        updates.extend(learned.policy)
        return learned

    monkeypatch.setattr(split._updates, "learn", seen)
    parts = await split.step(groups)
    losses = [sum(float(part["loss"]) for part in update.parts) for update in updates]
    assert len(losses) == 2
    assert parts["loss/total"] == pytest.approx(sum(losses) / 2)
    for name in ("policy/mismatch_k3", "policy/mismatch_max", "policy/mismatch_max_current", "loss/learning_rate"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-3)
    assert parts["loss/trained_tokens"] == whole["loss/trained_tokens"]
    half = make_trainer(tiny_path, adapter=adapter_path, **SPLIT)
    before = masters(half)
    metrics = await half.step(make_groups([[1, 1], [0, 1]], uniform))
    assert metrics["loss/grad_norm"] > 0
    assert distance(masters(half), before) > 0


def test_groups_are_split_evenly_and_each_update_has_its_own_denominators() -> None:
    groups = make_groups([[0, 1], [1, 0, 1], [0, None], [1, 0], [0, 1]], uniform)
    rows = read(groups)
    config = LearnerConfig(updates_per_batch=2, loss=LossConfig(ratio="clip"))
    found, whole = targets_of(rows, config, MAX_LENGTH), targets_of(rows, LearnerConfig(), MAX_LENGTH)
    assert found.update.tolist() == [0] * 7 + [1] * 4
    scored = np.array([True] * 6 + [False] + [True] * 4)
    for number in (0, 1):
        own = scored & (found.update == number)
        assert found.coefficients[own] == pytest.approx(1 / rows.lengths[own].sum())
    assert found.coefficients[6] == 0
    assert found.advantages.tolist() == whole.advantages.tolist()
    assert (whole.update == 0).all()
    assert targets_of(rows, LearnerConfig(updates_per_batch=5, loss=LossConfig(ratio="clip")), 16).update.tolist() == [
        0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4,
    ]  # fmt: skip


def test_a_batchs_metrics_are_of_all_its_updates() -> None:
    part = value_loss(torch.zeros(1, requires_grad=True), torch.ones(1), torch.zeros(1), weight=1.0, clip=None)[1]
    told = Learned([Update([], 1.0, True), Update([], 3.0, True)], [Update([part], math.nan, False)], {}).metrics()
    assert told["loss/grad_norm"] == 2
    assert told["loss/skipped_nonfinite"] == 1


# learner.loss.top_entropy: the objective is of the least certain tokens of the batch alone, however it is split.

Row = tuple[list[int], list[int], list[float], float]


def rows_of(groups: list[pa.Table], *, every: bool) -> list[Row]:
    """Prompt, completion, sampler's logprobs and advantage; every: of groups without signal, too."""
    names = ("prompt_ids", "completion_ids", "behavior_logprobs")
    rows = [
        (*(values.tolist() for values in row), advantage)
        for group, own in zip(groups, advantages_by_hand("batch"), strict=True)
        for row, advantage in zip(zip(*(ragged(group, name) for name in names), strict=True), own, strict=True)
    ]
    return [row for row in rows if not math.isnan(row[3]) and (every or row[3] != 0)]


def entropies(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    logs = (model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0] / TEMPERATURE).log_softmax(-1)
    found: Tensor = -(logs.exp() * logs).sum(-1)[len(prompt) - 1 : -1].detach()
    return found


def naive_gradient(
    model: Any, reference: Any, groups: list[pa.Table], config: LossConfig, share: float
) -> dict[str, Tensor]:
    rows = rows_of(groups, every=config.beta > 0)
    total = sum(len(row[1]) for row in rows_of(groups, every=True))
    known = [entropies(model, row[0], row[1]) for row in rows]
    counted = [own for own, row in zip(known, rows, strict=True) if row[3] != 0]
    ordered = torch.cat(counted).sort(descending=True).values
    least = ordered[math.ceil(share * len(ordered)) - 1]
    for (prompt, completion, behavior, advantage), own in zip(rows, known, strict=True):
        lp = naive.logprobs(model, prompt, completion, TEMPERATURE)
        objective = naive.loss(lp, torch.tensor(behavior), advantage, None, config) * (own >= least)
        if config.beta > 0:
            with torch.no_grad():
                ref = naive.logprobs(reference, prompt, completion, TEMPERATURE)
            ratio, d = (lp - torch.tensor(behavior)).exp(), ref - lp
            objective = objective + config.beta * ratio * (d.exp() - d - 1)
        (objective.sum() / total).backward()
    return {
        name.replace(".default.", "."): weight.grad for name, weight in model.named_parameters() if weight.requires_grad
    }


@pytest.mark.parametrize("budget", [30, 1000])
@pytest.mark.parametrize(("share", "beta"), [(0.25, 0.0), (0.6, 0.2)])
async def test_its_gradient_is_the_textbooks(
    tiny_path: str, adapter_path: str, share: float, beta: float, budget: int
) -> None:
    config = LossConfig(ratio="clip", beta=beta, top_entropy=share)
    model = naive.load(tiny_path, adapter_path)
    near = groups_near(model)
    trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=budget)
    found = await gradient(trainer, near)
    wanted = naive_gradient(model, naive.load(tiny_path, adapter_path), near, config, share)
    assert distance(found, wanted) < 5e-5
    every = await gradient(
        make_trainer(tiny_path, adapter=adapter_path, loss=LossConfig(ratio="clip", beta=beta)), near
    )
    assert distance(found, every) > 0.1


async def test_the_updates_of_a_batch_have_the_tokens_of_its_first_policy(
    tiny_path: str, adapter_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = groups_near(naive.load(tiny_path, adapter_path))
    loss = LossConfig(ratio="clip", top_entropy=0.3)
    trainer = make_trainer(
        tiny_path, adapter=adapter_path, loss=loss, updates_per_batch=2, learning_rate=0.05, groups_per_step=3
    )
    seen: list[Tensor] = []
    learn = trainer._updates._passes.learn

    def noted(batches: Any, **how: Any) -> Any:
        seen.append(how["learned"])
        return learn(batches, **how)

    monkeypatch.setattr(trainer._updates._passes, "learn", noted)
    metrics = await trainer.step(near)
    assert len(seen) == 2
    assert seen[0] is seen[1]
    tokens = sum(len(row[1]) for row in rows_of(near, every=False))
    assert int(seen[0].sum()) == math.ceil(0.3 * tokens)
    assert 0 < metrics["policy/top_entropy"] < math.log(1000)
    assert metrics["policy/masked_fraction"] < 0.3  # the tokens that are left out are not lost to a ratio


def test_the_share_is_of_the_tokens_that_are_known() -> None:
    nan = math.nan
    entropies = torch.tensor([0.5, nan, 2.0, 1.0, nan, 1.0, 0.0])
    alone = most_uncertain(entropies, 0.2)
    assert alone is not None
    assert (alone.tokens.nonzero().tolist(), alone.least) == ([[2]], 2.0)
    found = most_uncertain(entropies, 0.21)  # two of five, and the one that is equal to the second
    assert found is not None
    assert found.tokens.tolist() == [False, False, True, True, False, True, False]
    whole = most_uncertain(entropies, 0.999)
    assert whole is not None
    assert int(whole.tokens.sum()) == 5
    assert most_uncertain(torch.tensor([nan, nan]), 0.5) is None


# What an environment said is read by the policy and never learned.

RATIOS = ["masked", "clip", "gspo", "sequence_mask", "cispo"]


def textbook(model: Any, groups: list[pa.Table], config: LossConfig) -> tuple[dict[str, Any], list[Any]]:
    """Gradient of the adapter, and of each completion's logprobs, observations among them: the loss is of all tokens,
    times the mask."""
    advantages = advantages_by_hand(config.advantage)
    total = sum(int(np.concatenate(masks_of(group)).sum()) for group in groups)
    total -= int(masks_of(groups[2])[1].sum())  # one has no reward
    slopes = []
    for group, own in zip(groups, advantages, strict=True):
        columns = [ragged(group, name) for name in ("prompt_ids", "completion_ids", "behavior_logprobs")]
        for prompt, completion, behavior, mask, advantage in zip(*columns, masks_of(group), own, strict=True):
            if advantage != advantage:
                continue
            lp = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE)
            lp.retain_grad()
            kept = torch.from_numpy(mask)
            (naive.loss(lp[kept], torch.tensor(behavior)[kept], advantage, None, config).sum() / total).backward()
            slopes.append((lp.grad, mask))
    weights = {n.replace(".default.", "."): w.grad for n, w in model.named_parameters() if w.requires_grad}
    return weights, slopes


@pytest.mark.parametrize("ratio", RATIOS)
async def test_the_gradient_is_that_of_the_sampled_tokens_alone(tiny_path: str, adapter_path: str, ratio: Any) -> None:
    model = naive.load(tiny_path, adapter_path)
    groups = [observed(group) for group in groups_near(model)]
    config = LossConfig(ratio=ratio, bounds={"epsilon": (0.1, 0.1)} if ratio == "gspo" else {})
    found = await gradient(make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=60), groups)
    wanted, slopes = textbook(model, groups, config)
    assert distance(found, wanted) < 2e-5
    seen = [slope[~torch.from_numpy(mask)] for slope, mask in slopes]
    assert sum(len(one) for one in seen) > 20
    assert all(not one.count_nonzero() for one in seen)


@pytest.mark.parametrize(("ratio", "algorithm"), [*((ratio, "grpo") for ratio in RATIOS), ("clip", "ppo")])
async def test_nothing_of_an_observation_but_its_tokens_counts_to_the_bit(
    tiny_path: str, adapter_path: str, ratio: Any, algorithm: Any
) -> None:
    """Its logprob is a placeholder: whatever stands there, updates and metrics are the same."""
    groups = groups_near(naive.load(tiny_path, adapter_path))
    config = LossConfig(ratio=ratio, bounds={"epsilon": (0.1, 0.1)} if ratio == "gspo" else {})
    after, metrics = [], []
    for changed in (0.0, -30.0):
        trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, algorithm=algorithm)
        found = await trainer.step([observed(group, changed) for group in groups])
        after.append(all_masters(trainer))
        metrics.append({key: value for key, value in found.items() if key.startswith(("loss/", "policy/", "value/"))})
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])
    assert metrics[0] == metrics[1]


def all_masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the policy and, with PPO, of the value."""
    scored = trainer._policy.scored.values()
    values = {f"value {name}": weight for role in scored if role.masters for name, weight in role.masters.named.items()}
    return masters(trainer) | values


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
async def test_the_state_before_an_observation_has_no_gradient_to_the_bit(
    tiny_path: str, adapter_path: str, algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the policy and of PPO's value. A last state is read by its head alone."""
    groups = [observed(group) for group in groups_near(naive.load(tiny_path, adapter_path))]
    trainer = make_trainer(tiny_path, adapter=adapter_path, algorithm=algorithm, token_budget=1)  # each row alone
    seen: list[tuple[list[int], torch.Tensor]] = []
    plain = trainer._policy.hidden

    def hidden(ids: torch.Tensor, *layout: Any) -> torch.Tensor:
        states = plain(ids, *layout)
        if states.requires_grad:
            states.retain_grad()
            seen.append((ids[0].tolist(), states))
        return states

    monkeypatch.setattr(trainer._policy, "hidden", hidden)
    if algorithm == "ppo":
        torch.nn.init.normal_(trainer._policy.scored["value"].head.weight)
    await trainer.step(groups)
    rows = {
        (*prompt.tolist(), *completion[:-1].tolist()): [False] * (len(prompt) - 1) + mask.tolist()
        for group in groups
        for prompt, completion, mask in zip(
            ragged(group, "prompt_ids"), ragged(group, "completion_ids"), masks_of(group), strict=True
        )
    }
    passes = {"grpo": 7, "ppo": 22}[algorithm]  # eleven completions have a reward; GRPO learns from those of two groups
    assert len(seen) == passes
    for ids, states in seen:
        assert states.grad is not None
        assert (states.grad != 0).any(1).tolist() == rows[tuple(ids)]


async def test_other_observations_are_another_conversation(tiny_path: str, adapter_path: str) -> None:
    groups = [observed(group) for group in groups_near(naive.load(tiny_path, adapter_path))]
    place = SCHEMA.get_field_index("completion_ids")
    others = []
    for group in groups:
        masks, rows = masks_of(group), ragged(group, "completion_ids")
        ids = [np.where(mask, row, (row + 1) % 250).astype(np.int32) for mask, row in zip(masks, rows, strict=True)]
        others.append(group.set_column(place, SCHEMA.field(place), pa.array(ids, SCHEMA.field(place).type)))
    digests = []
    for some in (groups, others):
        trainer = make_trainer(tiny_path, adapter=adapter_path, learning_rate=0.01)
        await trainer.step(some)
        digests.append((await adapter_of(trainer)).digest)
    assert digests[0] != digests[1]


# What a whole optimizer step takes, at a vocabulary of 128k: a matter of the token budget alone.

VOCAB, PROMPT, COMPLETION, BUDGET = 128_000, 24, 33, 24 + 4 * 32


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def step_peak(path: str, generations: int, algorithm: str = "grpo") -> int:
    """Of the second step, with the optimizer's states there."""
    trainer = make_trainer(path, token_budget=BUDGET, algorithm=algorithm)
    prompt = [7] * PROMPT

    def step(count: int) -> None:
        completions = [[100 + i] * COMPLETION for i in range(count)]
        trainer._step([make_group(prompt, completions, [float(i) for i in range(count)], uniform)])

    step(2)
    return peak_bytes(lambda: step(generations))


def naive_peak(path: str, generations: int) -> int:
    """The usual way: padded prompts and completions, whole logits, log_softmax; the base alone, nothing trained but
    the norms, so that hardly anything but activations and logits counts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" in name)
    ids = torch.randint(0, VOCAB, (generations, PROMPT + COMPLETION))

    def work() -> None:
        logits = model(input_ids=ids, logits_to_keep=COMPLETION + 1, use_cache=False).logits[:, :-1]
        logs = logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None])
        torch.autograd.backward(logs.mean())

    return peak_bytes(work)


def test_peak_does_not_grow_with_the_generations_and_is_an_eighth_of_the_usual(wide_path: str) -> None:
    four, many = step_peak(wide_path, 4), step_peak(wide_path, 64)
    assert many <= 1.05 * four
    assert step_peak(wide_path, 16) <= naive_peak(wide_path, 16) / 8


def test_the_values_pass_fits_into_the_room_of_the_policys(wide_path: str) -> None:
    """Its gradients, which stay, are less than a hundredth of it."""
    assert step_peak(wide_path, 16, "ppo") <= 1.05 * step_peak(wide_path, 16)
