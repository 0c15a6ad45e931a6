"""What VllmEngine samples, and under which adapter, against Hugging Face + PEFT."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.random_model import EOS_IDS, VOCAB_SIZE, make_adapter, make_tiny_model
from rollout.engine import EngineDied, NoAdapter
from rollout.types import Adapter, AdapterCorrupt, Completion, EngineError, Sampling, Weights
from rollout.vllm.engine import PATIENCE_S, Load, VllmEngine, wait_for_room
from rollout.weights import Source, WeightsFile, WeightsReader
from tests.rollout.engine_case import PROMPT, TOLERANCE, EngineCase, run, settings


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(case: EngineCase, temperature: float) -> None:
    completions = run(case.engine.generate(PROMPT, Sampling(n=4, max_tokens=48, temperature=temperature)))
    assert len(completions) == 4
    assert len({tuple(c.token_ids) for c in completions}) == 4
    for completion in completions:
        assert (str(completion.token_ids.dtype), str(completion.logprobs.dtype)) == ("int32", "float32")
        case.check(completion, PROMPT, case.newest, temperature)


def test_greedy_takes_the_likeliest_token(case: EngineCase) -> None:
    (completion,) = run(case.engine.generate(PROMPT, Sampling(n=1, max_tokens=8, temperature=0.0)))
    case.check(completion, PROMPT, case.newest)
    best = max(float(run(case.engine.probe([*PROMPT, token]))[-1]) for token in range(0, VOCAB_SIZE, 5))
    assert completion.logprobs[0] >= best - TOLERANCE


def test_probe_equals_the_reference(case: EngineCase) -> None:
    ids = [*PROMPT, *range(100, 160)]
    found = run(case.engine.probe(ids))
    assert (found.shape, str(found.dtype)) == ((len(ids) - 1,), "float32")
    assert np.abs(found - case.logprobs(case.newest, ids)).max() < TOLERANCE


def test_a_probe_in_the_midst_of_completions_disturbs_neither(case: EngineCase) -> None:
    """As in asynchronous training, where each push is probed while groups are under way."""
    ids = [*PROMPT, *range(100, 160)]

    async def ask() -> tuple[list[Completion], np.ndarray]:
        generating = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=16, max_tokens=400, seed=0)))
        await asyncio.sleep(0.05)
        answer = await case.engine.probe(ids)
        assert not generating.done(), "the probe must have shared its step with completions"
        return await generating, answer

    completions, found = run(ask())
    assert np.abs(found - case.logprobs(case.newest, ids)).max() < TOLERANCE
    for completion in completions:
        case.check(completion, PROMPT, case.newest)


def test_both_end_tokens_end_a_completion(case: EngineCase) -> None:
    completions = run(case.engine.generate(PROMPT, Sampling(n=48, max_tokens=400, seed=0)))
    last = {int(c.token_ids[-1]) for c in completions if c.finish_reason == "stop"}
    assert last == set(EOS_IDS)
    for c in completions:
        assert not set(c.token_ids[:-1].tolist()) & set(EOS_IDS)
        assert (c.finish_reason == "stop") == (int(c.token_ids[-1]) in EOS_IDS)


def test_seeds_decide_the_tokens(case: EngineCase) -> None:
    def tokens(seed: int) -> list[list[int]]:
        return [
            c.token_ids.tolist() for c in run(case.engine.generate(PROMPT, Sampling(n=4, max_tokens=24, seed=seed)))
        ]

    once = tokens(1000)
    assert tokens(1000) == once
    assert tokens(2000) != once
    assert tokens(1001)[:3] == once[1:], "completion j is sampled with seed + j, so callers keep a stride of n"


def test_forty_seeded_prompts_at_once(case: EngineCase) -> None:
    """Their prefill exceeds one step's token budget: splitting a seeded one kills vLLM on CPU."""

    async def ask() -> list[list[Completion]]:
        prompts = [[i, *range(250), *range(100)] for i in range(40)]
        sampling = [Sampling(n=2, max_tokens=4, seed=10 * i) for i in range(40)]
        return await asyncio.gather(*map(case.engine.generate, prompts, sampling))

    groups = run(ask())
    assert [len(group) for group in groups] == [2] * 40
    case.check(groups[7][1], [7, *range(250), *range(100)], case.newest)


def test_a_new_adapter_governs_the_next_call_despite_the_prefix_cache(case: EngineCase) -> None:
    prompt = [i % 256 for i in range(300)]  # several full KV blocks, so the cache really has something to leak
    (old,) = run(case.engine.generate(prompt, Sampling(n=1, max_tokens=24, seed=5)))
    case.check(old, prompt, case.newest)
    run(case.engine.load_adapter(case.next_adapter()))
    (new,) = run(case.engine.generate(prompt, Sampling(n=1, max_tokens=24, seed=5)))
    case.check(new, prompt, case.newest)
    assert np.abs(case.logprobs(case.newest, prompt) - case.logprobs(case.newest - 1, prompt)).max() > 0.1


def test_calls_in_flight_finish_on_the_version_they_began_with(case: EngineCase) -> None:
    async def swap() -> tuple[list[Completion], list[Completion]]:
        adapter = case.next_adapter()  # made beforehand: it takes as long as a short generation
        before = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=16, max_tokens=400, seed=0)))
        await asyncio.sleep(0.05)
        await case.engine.load_adapter(adapter)
        assert not before.done(), "the swap must happen while the first call runs"
        after = await case.engine.generate(PROMPT, Sampling(n=4, max_tokens=12))
        assert not before.done(), "both versions must have been decoded in the same steps"
        return await before, after

    before, after = run(swap())
    for completion in before:
        case.check(completion, PROMPT, case.newest - 1)
    for completion in after:
        case.check(completion, PROMPT, case.newest)


# The life of a VllmEngine: its adapter window, what it refuses, cancellation, death and close.


def versions(case: EngineCase) -> list[int]:
    return [resident.version for resident in case.engine._thread.windows[0].residents]


def test_the_window_drops_the_oldest_unused_version(case: EngineCase) -> None:
    async def fill() -> None:
        adapters = [case.next_adapter() for _ in range(4)]
        used = adapters[0].version
        await case.engine.load_adapter(adapters[0])
        oldest = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=16, max_tokens=400, seed=0)))
        await asyncio.sleep(0.02)
        for adapter in adapters[1:]:  # a window of 3: the version in use stays, the one after it goes
            await case.engine.load_adapter(adapter)
        assert not oldest.done()
        assert versions(case) == [used, used + 2, used + 3]
        case.check((await oldest)[0], PROMPT, used)
        await case.engine.load_adapter(case.next_adapter())

    run(fill())
    kept = [case.newest - 2, case.newest - 1, case.newest]
    assert versions(case) == kept
    assert case.engine._thread._turns.engine.list_loras() == {version + 1 for version in kept}
    folders = Path(case.engine._thread.windows[0]._root.name).iterdir()
    assert sorted(folder.name.split("-")[0] for folder in folders) == sorted(f"v{version}" for version in kept)


def test_loading_waits_while_every_version_is_in_use(case: EngineCase) -> None:
    async def overfill() -> None:
        adapters = [case.next_adapter() for _ in range(4)]
        calls = []
        for adapter in adapters[:3]:
            await case.engine.load_adapter(adapter)
            calls.append(asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=8, max_tokens=200, seed=0))))
            await asyncio.sleep(0.02)
        assert not any(call.done() for call in calls)
        await case.engine.load_adapter(adapters[3])
        assert any(call.done() for call in calls[:2]), "only a version that nobody uses may make room"
        for adapter, call in zip(adapters, calls, strict=False):
            case.check((await call)[0], PROMPT, adapter.version)

    run(overfill())


def test_bad_adapters_are_refused_and_change_nothing(case: EngineCase) -> None:
    version = case.newest + 1
    payload, config = make_adapter(case.model, seed=99)
    before = run(case.engine.probe(PROMPT))

    torn = dataclasses.replace(Adapter.build(version, payload, config), payload=payload[:-1] + b"?")
    with pytest.raises(AdapterCorrupt, match=f"v{version}"):
        run(case.engine.load_adapter(torn))
    with pytest.raises(EngineError, match="must be safetensors"):
        run(case.engine.load_adapter(Adapter.build(version, b"rubbish", config)))
    with pytest.raises(EngineError, match="missing"):
        run(case.engine.load_adapter(Adapter.build(version, _without_gate(payload), config)))
    with pytest.raises(EngineError, match="rank 16"):
        run(case.engine.load_adapter(Adapter.build(version, *make_adapter(case.model, seed=1, rank=16))))
    with pytest.raises(EngineError, match="must be above"):
        run(case.engine.load_adapter(Adapter.build(case.newest, payload, config)))

    assert np.array_equal(run(case.engine.probe(PROMPT)), before)
    again = case.adapters[-1]
    assert run(case.engine.load_adapter(again)) == again.digest, "sending the newest once more is harmless"


def _without_gate(payload: bytes) -> bytes:
    from safetensors.torch import load, save

    return save({name: weight for name, weight in load(payload).items() if "gate_proj" not in name})


def test_only_an_engine_that_was_started_for_it_shares_its_base(case: EngineCase) -> None:
    with pytest.raises(EngineError, match="share_base: the engine must be started with shares_base=True"):
        run(case.engine.share_base())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [([], 4, "at least 1 token"), (PROMPT, 448, "max_model_len=448"), ([VOCAB_SIZE], 4, "token ids must be in")],
)
def test_bad_prompts_fail_their_own_call_only(
    case: EngineCase, prompt: list[int], max_tokens: int, message: str
) -> None:
    async def ask() -> list[Completion]:
        good = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=2, max_tokens=16)))
        with pytest.raises(ValueError, match=message):
            await case.engine.generate(prompt, Sampling(n=1, max_tokens=max_tokens))
        return await good

    assert len(run(ask())) == 2


def test_a_cancelled_call_leaves_the_engine(case: EngineCase) -> None:
    async def cancel() -> None:
        call = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=16, max_tokens=400)))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await case.engine.probe(PROMPT)
        assert not case.engine._thread._turns.running
        assert not case.engine._thread._turns.engine.has_unfinished_requests()
        assert not case.engine._thread._turns.engine.output_processor.parent_requests

    run(cancel())


def test_an_error_in_the_engine_thread_reaches_every_caller(
    case: EngineCase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = VllmEngine(settings(case.model))
    folder = Path(engine._thread.windows[0]._root.name)
    vllm, steps = engine._thread._turns.engine, iter(range(1000))
    step = vllm.step

    def failing_step() -> Any:
        if next(steps) >= 5:
            raise RuntimeError("the card fell off the bus")
        return step()

    monkeypatch.setattr(vllm, "step", failing_step)

    async def ask() -> None:
        await engine.load_adapter(case.adapters[0])
        calls = [engine.generate(PROMPT, Sampling(n=2, max_tokens=50)) for _ in range(3)]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, EngineDied)
            assert "fell off the bus" in str(answer)
        with pytest.raises(EngineDied, match="restart its worker"):
            await engine.probe(PROMPT)
        await engine.close()

    run(ask())
    assert not folder.exists()


def test_close_fails_what_is_running_and_deletes_the_files(case: EngineCase) -> None:
    engine = VllmEngine(settings(case.model))
    folder = Path(engine._thread.windows[0]._root.name)

    async def ask() -> None:
        await engine.load_adapter(case.adapters[0])
        call = asyncio.create_task(engine.generate(PROMPT, Sampling(n=4, max_tokens=400)))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineError):
            await call
        with pytest.raises(EngineError):
            await engine.generate(PROMPT, Sampling(n=1, max_tokens=4))
        await engine.close()

    run(ask())
    assert not folder.exists()


def test_the_environment_is_checked_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    with pytest.raises(EngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING must be '0'"):
        VllmEngine(settings(Path("/nowhere")))


# in_flight: continue, where running completions go on under a newer policy, against Hugging Face + PEFT.
#
# What finish does is in test_vllm_engine.py.

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


class NoStream:
    """In place of torch.cuda's streams and events, on a CPU, where each operation has ended when it returns."""

    def __init__(self, **_: object) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, stream: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def schedule_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process schedule asynchronously, as they do on CUDA: vLLM turns that off on a CPU, where it gains
    nothing, and its code for it is the same but for CUDA's streams."""
    from vllm.platforms.cpu import CpuPlatform

    settle: Any = CpuPlatform.check_and_update_config

    def ahead(config: Any) -> None:
        settle(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(ahead))
    for name in ("Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "a step ahead"])
@pytest.mark.parametrize(("family", "rank"), [("Llama", 8), ("Qwen2", 0)], ids=["adapter", "merged"])
def test_running_completions_go_on_under_the_newer_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, rank: int, ahead: bool
) -> None:
    if ahead:
        schedule_ahead(monkeypatch)
    path = make_tiny_model(tmp_path, family=family)
    case = EngineCase(path, max_lora_rank=rank, in_flight="continue", adapter_window=1)
    try:
        assert (case.engine._thread._turns.engine.engine_core.engine_core.batch_queue is not None) == ahead
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
    window = case.engine._thread.windows[0]
    assert case.engine._thread._turns.engine.list_loras() == {1}
    with pytest.raises(EngineError, match="rank 16"):
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


# Whole weights into a running vLLM: equal to the model loaded afresh, tied or not, and never mixed with the old; and
# weights merged with an adapter: equal to the adapter.

WEIGHTS = "model.safetensors"
IDS = list(range(40, 80))


def weights_of(model: Path, version: int) -> Weights:
    return Weights.build(version, (model / WEIGHTS).read_bytes())


def logprobs(model: Path, ids: list[int]) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([ids])
    with torch.no_grad():
        rows = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[0, :-1].log_softmax(-1)
    return np.asarray(rows.gather(-1, tokens[0, 1:, None])[:, 0])


def off(model: Path, prompt: list[int], completion: Completion) -> float:
    expected = logprobs(model, prompt + completion.token_ids.tolist())[len(prompt) - 1 :]
    return float(np.abs(completion.logprobs - expected).max())


def test_new_weights_replace_the_model_between_requests(tmp_path: Path) -> None:
    """Its embeddings are tied; weights that are not are read back in test_held.py."""
    models = [make_tiny_model(tmp_path / str(seed), seed=seed, tied=True) for seed in range(3)]
    engine = VllmEngine(settings(models[0], max_lora_rank=0))
    sampling = Sampling(n=2, max_tokens=40, seed=1)

    async def story() -> tuple[list[Completion], list[Completion]]:
        with pytest.raises(NoAdapter):
            await engine.probe(IDS)
        for version in (0, 1):
            weights = weights_of(models[version], version) if version else Weights.unchanged(version)
            assert await engine.load_weights(weights) == weights.digest
            assert await engine.load_weights(weights) == weights.digest  # again: nothing happens
            assert np.abs(await engine.probe(IDS) - logprobs(models[version], IDS)).max() < TOLERANCE
        before = asyncio.create_task(engine.generate(LONG, sampling))
        await asyncio.sleep(0)
        loading = asyncio.create_task(engine.load_weights(weights_of(models[2], 2)))
        backlog = engine._thread._turns.backlog
        while not (any(isinstance(command, Load) for command in backlog) or loading.done()):  # staged, and waiting
            await asyncio.sleep(0.001)
        after = await engine.generate(LONG, sampling)
        await loading
        return await before, after

    try:
        before, after = run(story())
        assert [set(c.versions) for c in before] == [{1}, {1}]
        assert [set(c.versions) for c in after] == [{2}, {2}]
        assert max(off(models[1], LONG, c) for c in before) < TOLERANCE
        assert max(off(models[2], LONG, c) for c in after) < TOLERANCE  # and the cached prefix of before is not used
        good = weights_of(models[0], 3)
        with pytest.raises(AdapterCorrupt, match="weights v3: the digest"):
            run(engine.load_weights(dataclasses.replace(good, payload=bytes(good.payload[:-1]) + b"x")))
        with pytest.raises(EngineError, match="its version must be above"):
            run(engine.load_weights(weights_of(models[0], 1)))
        from rollout.types import Adapter

        with pytest.raises(EngineError, match="takes whole weights only"):
            run(engine.load_adapter(Adapter.build(4, *make_adapter(models[0], seed=1))))
        assert np.abs(run(engine.probe(IDS)) - logprobs(models[2], IDS)).max() < TOLERANCE
        _the_engine_keeps_nothing_of_the_memory_that_it_was_loaded_from(engine, models[0])
    finally:
        run(engine.close())


def _the_engine_keeps_nothing_of_the_memory_that_it_was_loaded_from(engine: VllmEngine, model: Path) -> None:
    file, sources = WeightsFile(), {name: Source.of(value) for name, value in load_file(model / WEIGHTS).items()}
    place = file.pack(5, sources, torch.float32)
    assert run(WeightsReader().load(place, engine.load_weights)) == place.digest
    zeros = {name: Source.of(torch.zeros(source.shape)) for name, source in sources.items()}
    for version in (6, 7):
        file.pack(version, zeros, torch.float32)
    assert np.abs(run(engine.probe(IDS)) - logprobs(model, IDS)).max() < TOLERANCE
    assert "gleaner-weights" not in Path("/proc/self/maps").read_text()
    file.close()


IN_PART = ["q_proj", "v_proj", "up_proj"]  # of layers that vLLM fuses


@pytest.mark.parametrize("rank", [0, pytest.param(8, marks=pytest.mark.long)])
def test_an_adapter_is_in_force_merged_or_not(tmp_path: Path, rank: int) -> None:
    """Twice, as the second is merged into the base and not into the first."""
    path = make_tiny_model(tmp_path, family="Qwen2", tied=True)
    case = EngineCase(path, targets=IN_PART, max_lora_rank=rank)
    answers = []
    try:
        for version in (0, 1):
            run(case.push())
            answers.append(run(case.engine.probe(IDS)))
            assert np.abs(answers[-1] - case.logprobs(version, IDS)).max() < 1e-5
    finally:
        run(case.engine.close())
    assert np.abs(answers[1] - answers[0]).max() > 0.1


# A generator loads no model before the card has room for it.

MIB = 2**20


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_it_waits_until_the_bytes_of_the_one_before_are_free() -> None:
    clock = Clock()
    wait_for_room(100 * MIB, lambda: (100 if clock.seconds > 20 else 99) * MIB, clock.now, clock.sleep)
    assert 20 < clock.seconds < 21


def test_it_does_not_wait_for_ever() -> None:
    clock = Clock()
    with pytest.raises(EngineError, match="need 100 MiB of the card, and after 60 s 99 MiB are free"):
        wait_for_room(100 * MIB, lambda: 99 * MIB, clock.now, clock.sleep)
    assert clock.seconds < PATIENCE_S + 1
