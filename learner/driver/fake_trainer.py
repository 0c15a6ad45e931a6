"""A trainer that learns nothing: its policy is the fake engine's of the same version. For learner.driver.local_run."""

import asyncio
from pathlib import Path

import pyarrow as pa

from cluster.actor import Shared
from cluster.files import Digest, digests_in, writing
from learner.trainer.service import Arithmetic, Exported, TrainerService
from rollout.fake_engine import FakeEngine
from rollout.shared_base.manifest import Manifest
from rollout.types import Adapter, SentPolicy, WeightsInFile
from rollout.weight_sync import Answer

VERSION_FILE = "adapter_model.safetensors"  # what is published must have the name that users load


class FakeTrainer(TrainerService):
    """seconds: that a step takes."""

    def __init__(self, vocab_size: int, seconds: float = 0.0) -> None:
        self.version, self.seconds, self._vocab_size = 0, seconds, vocab_size
        self._rows = 0  # of the newest step

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        await asyncio.sleep(self.seconds)
        self.version += 1
        self._rows = sum(map(len, groups))
        return {"loss/total": float(self.version)}

    async def mismatch(self) -> pa.Array:
        """It computes no logprobs."""
        return pa.nulls(self._rows, pa.list_(pa.float16()))

    async def score(self, groups: list[pa.Table]) -> list[list[float]]:
        """Of one reward model, which counts tokens."""
        return [[float(len(ids)) for group in groups for ids in group.column("completion_ids").to_pylist()]]

    async def rehearse(self, prompt_length: int) -> dict[str, float]:
        return {"memory/learner_peak": 0.0}

    async def outgoing(self, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        adapter = self.adapter()
        return Shared(adapter), Exported(adapter.policy_id, 4.0)

    async def empty_weights(self) -> WeightsInFile:
        return WeightsInFile(0, "", "nowhere", "", 0, 0, 0)

    def adapter(self) -> Adapter:
        return Adapter.build(self.version, b"weights %d" % self.version, {})

    async def probe(self, token_ids: list[int]) -> Answer:
        engine = FakeEngine(self._vocab_size)
        await engine.load_adapter(self.adapter())
        return Answer(await engine.probe(token_ids), await engine.held(), 5.0)

    async def arithmetic(self) -> Arithmetic:
        return Arithmetic("none", "none", 1, "default")

    async def detach_base(self) -> None:
        """It has none."""

    async def attach_base(self, manifest: Manifest) -> None:
        """It needs none."""

    async def release_cache(self) -> None:
        """It has none."""

    async def pulse(self) -> float:
        return float(self.version)

    async def sees(self, file: Path) -> bool:
        return file.exists()

    async def save(self, folder: Path) -> dict[str, Digest]:
        with writing(folder):
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            (folder / VERSION_FILE).write_text(str(self.version))
        return digests_in(folder)

    async def load(self, folder: Path) -> None:
        self.version = int((folder / VERSION_FILE).read_text())
