"""The logprobs that a teacher's engine gives of completions, against Hugging Face. It starts an engine of its own, so
that it comes after the files that share one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.random_model import VOCAB_SIZE, make_tiny_model
from rollout.types import TeacherLogprobs
from rollout.vllm.engine import VllmEngine
from tests.rollout.engine_case import PROMPT, TOLERANCE, run, settings

TOP = 5
STEP = 64  # tokens of an engine step, so that completions are computed in parts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), family="Llama", layers=3, hidden_size=128, heads=4)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEngine]:
    made = VllmEngine(settings(model, max_lora_rank=0, max_num_seqs=8, prompt_logprobs=TOP, step_tokens=STEP))
    yield made
    run(made.close())


def distributions(model: Path, ids: list[int]) -> np.ndarray:
    """[len - 1, vocabulary] logprobs behind each of ids but the last."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return np.asarray(reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1))


def check(told: TeacherLogprobs, every: np.ndarray, completion: list[int]) -> None:
    """every: [T, vocabulary]."""
    assert [str(one.dtype) for one in (told.logprobs, told.top_ids, told.top_logprobs)] == [
        "float32", "int32", "float32"
    ]  # fmt: skip
    assert np.abs(told.logprobs - np.take_along_axis(every, np.array(completion)[:, None], -1)[:, 0]).max() < TOLERANCE
    likeliest = np.sort(every, -1)[:, ::-1][:, :TOP]
    assert told.top_ids.shape == (len(completion), TOP)
    assert np.abs(told.top_logprobs - likeliest).max() < TOLERANCE
    assert np.abs(np.take_along_axis(every, told.top_ids.astype(np.int64), -1) - likeliest).max() < TOLERANCE


def test_a_group_is_told_of_as_hugging_face_computes_it(engine: VllmEngine, model: Path) -> None:
    """Of all lengths, of which some take several steps and some share one; the same prompt again changes nothing."""
    draw = np.random.default_rng(0)
    group = [draw.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 2, 43, 44, 45, 64, 300, 7, 7, 7, 120)]

    async def ask() -> list[TeacherLogprobs]:
        return await asyncio.gather(*(engine.completion_logprobs(PROMPT, one) for one in group))

    for told in (run(ask()), run(ask())):
        for one, completion in zip(told, group, strict=True):
            check(one, distributions(model, PROMPT + completion)[len(PROMPT) - 1 :], completion)


def test_a_completion_behind_one_token_and_one_without_tokens(engine: VllmEngine, model: Path) -> None:
    check(run(engine.completion_logprobs([5], [7, 8])), distributions(model, [5, 7, 8]), [7, 8])
    nothing = run(engine.completion_logprobs(PROMPT, []))
    assert (len(nothing.logprobs), nothing.top_ids.shape, nothing.top_logprobs.shape) == (0, (0, TOP), (0, TOP))


def test_what_does_not_fit_is_refused_and_a_cancelled_call_leaves_nothing(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="must fit in max_model_len=448"):
        run(engine.completion_logprobs(PROMPT, [1] * 428))  # one more is sampled behind them
    with pytest.raises(ValueError, match="token ids must be in"):
        run(engine.completion_logprobs(PROMPT, [VOCAB_SIZE]))

    async def cancelled() -> None:
        asking = asyncio.create_task(engine.completion_logprobs(PROMPT, [1] * 400))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert len((await engine.completion_logprobs(PROMPT, [1, 2])).logprobs) == 2

    run(cancelled())
    assert engine._thread._turns.running == {}
