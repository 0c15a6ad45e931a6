"""A run in one process, without a model: the real Loop, Producers and pipes, a fake engine and a fake trainer."""

import asyncio
import io
import json
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from cluster.actor import Local
from cluster.buffer import BACKUP_AFTER, Buffer
from cluster.files import Digest, digests_in
from cluster.policy_slot import PolicySlot
from cluster.telemetry import Metrics, Timeline
from learner.config import RunConfig
from learner.driver.console import Progress
from learner.driver.fingerprints import Fingerprints
from learner.driver.loop import Loop
from learner.driver.run_checkpoints import RunCheckpoints
from learner.driver.step_metrics import Sinks
from rollout import ledger
from rollout.data.cursor import Cursor
from rollout.fake_engine import FakeEngine
from rollout.partial import Begun, Sampler
from rollout.producer import Pipes, Producer, group_seed
from rollout.schema import Problem, group_position
from rollout.types import Adapter, Completion, Sampling
from rollout.weight_sync import Answer, Receipt
from tests.groups import make_group, make_problem

VOCAB = 8
PER_STEP = 3
PROBLEMS = 31  # of an epoch
PROMPT = 4  # tokens


class Paced(FakeEngine):
    """Groups of every fourth position take longer than the others, as long as nothing of them is there."""

    def __init__(self, pace_s: float, drop_adapter_at: int | None) -> None:
        super().__init__(VOCAB, drop_adapter_at=drop_adapter_at)
        self.pace_s = pace_s

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, until: asyncio.Future[None] | None = None
    ) -> list[Completion]:
        self._delay_s = self.pace_s * (40 if prompt_ids[0] % 4 == 0 and len(prompt_ids) == PROMPT else 1)
        return await super().generate(prompt_ids, sampling, until)


class Worker:
    """A RolloutWorker without tokenizer and reward functions."""

    def __init__(self, pace_s: float, drop_adapter_at: int | None) -> None:
        self.engine = Paced(pace_s, drop_adapter_at)
        self.sampler = Sampler(self.engine)
        self.sleep, self.wake, self.stop = self.engine.sleep, self.engine.wake, self.sampler.stop

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int, begun: Begun) -> pa.Table | None:
        completions = await self.sampler.sample(problem.group_id(attempt), problem.prompt_ids, sampling, begun)
        if completions is None:
            return None
        rewards = [float(len(c.token_ids) % 2) for c in completions]
        return make_group(problem.position, attempt=attempt, completions=completions, rewards=rewards)

    async def take_policy(self, adapter: Adapter) -> Receipt:
        return Receipt(await self.engine.load_adapter(adapter), 2.0, 1.0)

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        return Answer(await self.engine.probe(token_ids), await self.engine.held(), 3.0)


class Trainer:
    """Learns nothing; its policy is the fake engine's of the same version."""

    def __init__(self, pace_s: float, mismatch_k3: float) -> None:
        self.version, self.pace_s, self.mismatch_k3 = 0, pace_s, mismatch_k3
        self.learned: list[list[pa.Table]] = []
        self.oldest: list[int] = []  # version of which tokens are trained on
        self.holds_the_card: Callable[[], bool] = lambda: True
        self.cached = 0

    async def step(self, groups: list[pa.Table], oldest_version: int) -> dict[str, float]:
        assert self.holds_the_card()
        self.cached = 1
        self.learned.append(groups)
        self.oldest.append(oldest_version)
        await asyncio.sleep(self.pace_s)
        self.version += 1
        return {"loss/total": float(self.version), "policy/mismatch_k3": self.mismatch_k3 * (self.version > 3)}

    async def policy(self) -> tuple[Adapter, float]:
        return Adapter.build(self.version, b"weights %d" % self.version, {}), 4.0

    async def probe(self, token_ids: list[int]) -> Answer:
        adapter, _ = await self.policy()
        engine = FakeEngine(VOCAB)
        await engine.load_adapter(adapter)
        return Answer(await engine.probe(token_ids), await engine.held(), 5.0)

    async def release_cache(self) -> None:
        assert self.holds_the_card()
        self.cached = 0

    async def sees(self, file: Path) -> bool:
        return file.exists()

    async def save(self, folder: Path) -> dict[str, Digest]:
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(str(self.version))
        return digests_in(folder)

    async def load(self, folder: Path) -> None:
        self.version = int((folder / "adapter_model.safetensors").read_text())


class Stream:
    def __len__(self) -> int:
        return PROBLEMS

    def at(self, position: int) -> Problem:
        return make_problem(position, prompt_ids=(position % VOCAB, 1, 5, 2))


def configure(**changed: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": {"path": "fake", "dtype": "float32"},
        "data": {"path": "fake", "eval": {"every": 2}},
        "rewards": [{"use": "vowels"}],
        "learner": {"groups_per_step": PER_STEP},
        "checkpoint": {"every": 2, "keep": 9},
        "trackers": [],
    }
    return RunConfig.model_validate(given | changed)


def build(
    folder: Path,
    config: RunConfig,
    total_steps: int,
    *,
    resume_step: int = 0,
    workers: Sequence[Local] | None = None,
    pace_s: float = 0.0,
    trainer_s: float = 0.0,
    mismatch_k3: float = 0.0,
    alternating: bool = False,
) -> Loop:
    """A run in one process."""
    if workers is None:
        workers = [Local(f"generator-{rank}", Worker, [pace_s, None]) for rank in range(2)]
    cursor, timeline = Cursor(), Timeline(folder / "timeline.json")
    oversample = config.rollout.oversample
    buffer = Buffer(
        PER_STEP,
        config.max_staleness,
        2**20,
        lambda g: cursor.again(*group_position(g)),
        oversample,
        inf if alternating else BACKUP_AFTER,
    )
    pipes = Pipes(Stream(), cursor, buffer, PolicySlot(), timeline)

    def sampling(position: int, attempt: int) -> Sampling:
        return Sampling(n=2, max_tokens=6, seed=group_seed(0, position, attempt))

    producers = [Producer(worker, pipes, sampling, config.cluster.deadlines) for worker in workers]
    progress = Progress(total_steps, Console(file=io.StringIO()))
    sinks = Sinks(folder, Metrics(folder, [], resume_step), timeline, progress)
    heldout = [make_problem(position) for position in (1000, 1001)]
    trainer = Local("learner", Trainer, [trainer_s, mismatch_k3])
    checkpoints = RunCheckpoints(config, Fingerprints({}, {}, {}), trainer, pipes, sinks)
    return Loop(config, total_steps, trainer, producers, pipes, sinks, heldout, checkpoints, alternating)


async def finish(loop: Loop, resume_from: Path | None = None) -> None:
    try:
        await loop.run(resume_from)
    finally:
        loop.sinks.metrics.close()
        loop.sinks.timeline.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def consumed(folder: Path) -> list[list[int]]:
    """Positions by step, as they lie in the ledger."""
    steps = [ledger.read(path).column("position").to_pylist() for path in ledger.steps(folder / "rollouts")]
    return [list(dict.fromkeys(step)) for step in steps]


def first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
