"""How long a group may take that waits behind others, and who waits as long as that."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.system.local_run import VOCAB
from cluster.actor import Local
from cluster.buffer import MAX_REFILLS, Batch, Buffer
from cluster.telemetry import Timeline
from learner.config import RunConfig
from learner.driver.loop import Batches
from rollout.fakes import FakeEngine, FakeWorker
from rollout.types import Completion, Sampling
from tests.learner.loops import build, configure, finish, waiting

GROUP_S = 0.02


class Queued(FakeEngine):
    """An engine with room for one group: the others wait in its queue."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self._room = asyncio.Semaphore(1)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        async with self._room:
            await asyncio.sleep(GROUP_S)
            return await super().generate(prompt_ids, sampling)


class Worker(FakeWorker):
    def __init__(self) -> None:
        super().__init__(Queued())


async def test_groups_that_wait_for_room_in_the_engine_are_not_taken_for_hung(tmp_path: Path) -> None:
    """32 are asked for at once, of which the last is there after three times the deadline of one."""
    config = configure(
        max_staleness=3, data={"path": "fake", "eval": {"every": 0}}, learner={"groups_per_step": 8},
        rollout={"max_num_seqs": 2},
    )  # fmt: skip
    config = waiting(config, group=10 * GROUP_S)
    run = build(tmp_path, config, 4, workers=[Local("generator-0", Worker, [])])
    await finish(run)
    assert [producer.worker.restarts for producer in run.loop.producers] == [0]


@pytest.mark.parametrize(
    ("changed", "rounds"),
    [
        ({}, 1),  # 6 completions of 128
        ({"rollout": {"max_num_seqs": 5}}, 2),
        ({"rollout": {"max_num_seqs": 4, "workers": 2}}, 1),  # two of the three groups
        ({"rollout": {"max_num_seqs": 3, "workers": 2}, "max_staleness": 2}, 4),  # five of nine
        ({"rollout": {"max_num_seqs": 1}, "env": {"use": "number_guessing"}}, 3),  # two are played meanwhile
        ({"rollout": {"max_num_seqs": 2}, "env": {"use": "number_guessing", "concurrency": 1}}, 6),
    ],
)
def test_the_deadline_counts_once_for_each_round(changed: dict[str, object], rounds: int) -> None:
    assert configure(**changed).group_deadline_s == 900.0 * rounds


def config_of(**changed: object) -> RunConfig:
    return waiting(configure(**changed), start=0.05, group=0.02)


@pytest.mark.parametrize(
    ("rollout", "groups"),
    [({}, 1), ({"max_num_seqs": 2}, 3), ({"dynamic_sampling": True}, 1 + MAX_REFILLS)],
)
async def test_a_batch_is_waited_for_as_long_as_its_groups_may_take(
    tmp_path: Path, rollout: dict[str, object], groups: int
) -> None:
    waited = 0.05 + groups * 0.02
    timeline = Timeline(tmp_path / "timeline.json")
    with pytest.raises(TimeoutError, match=f"waited {waited:g} s for 3 groups"):
        await Batches(config_of(rollout=rollout), Buffer(3, 0, 2**20, print), timeline).take(0)
    timeline.close()


async def test_a_batch_holds_nothing_older_than_max_staleness(tmp_path: Path) -> None:
    asked: list[int] = []

    class Noting(Buffer):
        async def take(self, count: int, oldest_version: int, useful: object = None) -> Batch:
            asked.append(oldest_version)
            return Batch([], [pa.table({})])

    timeline = Timeline(tmp_path / "timeline.json")
    await Batches(config_of(max_staleness=2), Noting(3, 2, 2**20, print), timeline).take(7)
    assert asked == [5]
    timeline.close()
