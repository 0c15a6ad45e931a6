"""One prompt on its way from problem to loss: which files of ours have it in hand, against docs/architecture.md."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
from torch import Tensor

from benchmarks.system.local_run import FakeTrainer, local_run
from cluster.actor import Local
from examples.random_model import VOCAB_SIZE, make_tiny_model
from learner.config import RunConfig
from rewards.config import RewardConfig
from rollout.data.chat import Chat
from rollout.data.problems import Item, load
from rollout.engine import EngineSettings
from rollout.fakes import FakeEngine
from rollout.schema import Problem
from rollout.types import Completion
from rollout.worker import RolloutWorker, WorkerSpec
from tests.test_architecture import ROOT, TEXT, WALK

PACKAGES = ("learner", "rollout", "rewards", "cluster")
# Not in this process: vLLM.
ELSEWHERE = {"rollout/vllm/engine.py", "rollout/vllm/convert.py"}
STANDS_IN = {"rollout/fakes.py"}  # for vLLM
BESIDE = set(re.findall(r"`([\w/]+\.py)`", TEXT.partition("hand nothing on:")[2].partition("\n\n")[0]))


class Hands:
    """The files whose functions held the prompt, or what was made of it, in the order of their first time.

    end: the last three tokens of every prompt.
    """

    def __init__(self, end: tuple[int, ...]) -> None:
        from learner.algo.targets import Targets
        from learner.batch.micro_batch import MicroBatch, Rows
        from rewards.call import Group

        self.files: dict[str, None] = {}
        self._end = str(end)  # as text: arrays have no one truth value
        self._kinds = (Item, Problem, Completion, pa.Table, Group, Rows, Targets, MicroBatch)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(f"{ROOT}/"):
            return
        name = file.removeprefix(f"{ROOT}/")
        if not name.startswith(PACKAGES) or name in self.files:
            return
        values = frame.f_locals.values()
        pure = name.startswith(("learner/algo/", "learner/model/"))  # there nearly all is tensors, and made of it
        if any(map(self.carries, values)) or (pure and any(isinstance(value, Tensor) for value in values)):
            self.files[name] = None

    def carries(self, value: Any, depth: int = 0) -> bool:
        """Whether a value is, or holds first, the problem, its tokens or completions, or what was made of them."""
        if isinstance(value, Mapping):
            return "completion_ids" in value
        if isinstance(value, bytes):
            return b"completion_ids" in value
        if isinstance(value, list | tuple) and value and depth < 2:
            return str(tuple(value[-3:])) == self._end or self.carries(value[0], depth + 1)
        return isinstance(value, self._kinds)

    @contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


class RealStep(FakeTrainer):
    """Its policies are the fake engine's; its step is that of the real trainer."""

    def __init__(self, model: str) -> None:
        from tests.learner.trainers import make_trainer

        super().__init__(VOCAB_SIZE)
        self._real = make_trainer(model)

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        self.version += 1
        return await self._real.step(groups)

    async def mismatch(self) -> pa.Array:
        return await self._real.mismatch()


async def test_a_prompt_passes_the_files_of_the_walk_and_no_others(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(f'{{"question": "{i} + 2 =", "answer": "{i + 2}"}}\n' for i in range(8)))
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": str(data), "eval": {"every": 0}},
            "rewards": [{"use": "regex", "args": {"pattern": "[a-m]"}}],
            "rollout": {"num_generations": 4, "max_prompt_length": 64, "max_completion_length": 16},
            "learner": {"groups_per_step": 2},
            "trackers": [],
        }
    )
    chat = Chat.load(str(model))
    problems, _ = load(config.data, chat, 64, seed=0)
    settings = EngineSettings(
        model=str(model), dtype="float32", max_model_len=80, kv_cache_bytes=1 << 20, max_num_seqs=8, max_lora_rank=8,
        adapter_window=2, seed=0,
    )  # fmt: skip
    rewards = tuple(RewardConfig.model_validate(reward.model_dump()) for reward in config.rewards)
    spec = WorkerSpec(0, "run", settings, rewards, 1, 2**30, lambda _: FakeEngine(VOCAB_SIZE))
    generator = Local("generator-0", RolloutWorker, [spec])
    trainer = Local("learner", RealStep, [str(model)])
    run = local_run(tmp_path, config, 1, problems=problems, generators=[generator], trainer=trainer)
    hands = Hands(problems.at(0).prompt_ids[-3:])
    with hands.watching():
        await run.finish()
    assert run.loop.step == 1
    seen = set(hands.files) - STANDS_IN
    assert seen - set(WALK) == BESIDE
    assert set(WALK) - seen == ELSEWHERE
