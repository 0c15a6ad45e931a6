"""in_flight: continue, where running completions go on under a newer policy, against Hugging Face + PEFT.

What finish does is in test_vllm_engine.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from examples.random_model import make_adapter, make_tiny_model
from rollout.engine import AdapterRefused
from rollout.types import Adapter, Completion, Sampling
from rollout.vllm.engine import VllmEngine
from tests.rollout.engine_case import (
    TOLERANCE,
    EngineCase,
    run,
    settings,
)

LONG = [i % 250 for i in range(300)]  # several full KV blocks, so the prefix cache has something to leak


async def generate_with_a_swap(case: EngineCase) -> tuple[list[Completion], list[Completion], np.ndarray]:
    """Completions begun under the newest policy, some begun after the next one was loaded amid them, and a probe."""
    loop, sampled_some = asyncio.get_running_loop(), asyncio.Event()
    vllm = case.engine._thread._turns.engine
    step, steps = vllm.step, iter(range(10_000))

    def counted_step() -> list[object]:
        if next(steps) == 20:
            loop.call_soon_threadsafe(sampled_some.set)
        outputs: list[object] = step()
        return outputs

    vllm.step = counted_step
    before = asyncio.create_task(case.engine.generate(LONG, Sampling(n=16, max_tokens=140, seed=0)))
    await sampled_some.wait()
    await case.push()
    answer, after = await asyncio.gather(
        case.engine.probe(LONG), case.engine.generate(LONG, Sampling(n=2, max_tokens=12, seed=99))
    )
    assert not before.done(), "the load and what came after it must not have waited for running completions"
    vllm.step = step
    return await before, after, answer


@pytest.mark.parametrize(("family", "rank"), [("Llama", 8), ("Qwen2", 0)], ids=["adapter", "merged"])
def test_running_completions_go_on_under_the_newer_policy(tmp_path: Path, family: str, rank: int) -> None:
    path = make_tiny_model(tmp_path, family=family)
    case = EngineCase(path, max_lora_rank=rank, in_flight="continue", adapter_window=1)
    try:
        run(case.push())
        before, after, answer = run(generate_with_a_swap(case))
        switched = [c for c in before if c.versions[-1] == 1]
        assert len(switched) >= 4
        for completion in before:
            versions, ids = completion.versions, LONG + completion.token_ids.tolist()
            assert versions.dtype == np.int32
            old = int((versions == 0).sum())
            assert versions.tolist() == [0] * old + [1] * (len(versions) - old)
            assert min(len(versions), 20) <= old
            # The version that samples a token is the one that reads the token before it.
            readers = [0] * (len(LONG) - 1) + versions.tolist()
            sampled_from = case.mixed_logprobs(readers, ids)[len(LONG) - 1 :]
            assert np.abs(completion.logprobs - sampled_from).max() < TOLERANCE
        late = switched[0].versions == 1
        as_if_old = case.logprobs(0, LONG + switched[0].token_ids.tolist())[len(LONG) - 1 :]
        assert np.abs(switched[0].logprobs - as_if_old)[~late].max() < TOLERANCE
        assert np.abs(switched[0].logprobs - as_if_old)[late].max() > 0.1
        for completion in after:
            case.check(completion, LONG, 1)
        assert np.abs(answer - case.logprobs(1, LONG)).max() < TOLERANCE
        if rank:
            check_one_adapter_stays(case)
    finally:
        run(case.engine.close())


def check_one_adapter_stays(case: EngineCase) -> None:
    """One slot and one folder, and an adapter that is refused leaves the one there in force."""
    window = case.engine._thread.window
    assert case.engine._thread._turns.engine.list_loras() == {1}
    with pytest.raises(AdapterRefused, match="rank 16"):
        run(case.engine.load_adapter(Adapter.build(2, *make_adapter(case.model, seed=1, rank=16))))
    assert [folder.name.split("-")[0] for folder in Path(window._root.name).iterdir()] == ["v1"]
    assert np.abs(run(case.engine.probe(LONG)) - case.logprobs(1, LONG)).max() < TOLERANCE


def test_a_vllm_that_labels_no_tokens_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.31, which takes a version and do not say it of the tokens."""
    from vllm import outputs
    from vllm.v1.engine.llm_engine import LLMEngine

    @dataclasses.dataclass
    class CompletionOutput:
        token_ids: list[int]

    assert hasattr(LLMEngine, "set_weight_version")
    monkeypatch.setattr(outputs, "CompletionOutput", CompletionOutput)
    with pytest.raises(ValueError, match="in_flight=continue needs a vLLM that labels tokens"):
        VllmEngine(settings(Path("/nowhere"), in_flight="continue", adapter_window=1))
