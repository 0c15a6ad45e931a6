"""Work on a base that may be away: it waits for it, and other work does not wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from examples.random_model import make_tiny_model
from learner.model.shared_base import MappedBase
from learner.trainer import trainer
from learner.trainer.trainer import CHECK_EVERY, BaseThread
from tests.shared_bases import Owner, owner_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", family="Llama")


@pytest.fixture
def owner(path: Path) -> Owner:
    return owner_of(path)


async def test_work_under_way_is_finished_and_later_work_waits(path: Path, owner: Owner) -> None:
    thread = BaseThread(MappedBase(owner.manifest, torch.device("cpu")))
    gate, done = asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def slow() -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
        done.append("under way")

    under_way = asyncio.create_task(thread.compute(slow))
    await asyncio.sleep(0)
    detached = asyncio.create_task(thread.detach())
    await asyncio.sleep(0)
    later = asyncio.create_task(thread.compute(lambda: done.append("later")))
    await asyncio.sleep(0.05)
    assert not detached.done()  # the step comes first
    gate.set()
    await asyncio.gather(under_way, detached)
    await thread.run(lambda: done.append("without the base"))
    before = thread.progress(on_cpu=False)
    await asyncio.sleep(0.05)
    assert thread.progress(on_cpu=False) >= before + 0.04  # whoever waits for the base does not hang
    assert done == ["under way", "without the base"]
    fresh = owner_of(path)
    await thread.attach(fresh.manifest)
    await later
    assert done[-1] == "later"
    stopped = thread.progress(on_cpu=False)
    assert stopped > before  # it does not fall, which would look like no progress
    await asyncio.sleep(0.02)
    assert thread.progress(on_cpu=False) == stopped


async def test_work_that_was_waiting_waits_again_if_the_base_goes_before_its_turn(path: Path, owner: Owner) -> None:
    thread = BaseThread(MappedBase(owner.manifest, torch.device("cpu")))
    await thread.detach()
    done: list[str] = []
    waiting = asyncio.create_task(thread.compute(lambda: done.append("computed")))
    await asyncio.sleep(0)
    thread._there.set()  # attached, and lost again in the same turn of the event loop
    thread._there.clear()
    await asyncio.sleep(0.02)
    assert done == []
    fresh = owner_of(path)
    await thread.attach(fresh.manifest)
    await waiting
    assert done == ["computed"]


def test_the_base_is_looked_at_every_so_many_versions(owner: Owner) -> None:
    thread = BaseThread(MappedBase(owner.manifest, torch.device("cpu")))
    owner.tensors["model.norm.weight"][0] += 1
    thread.check(CHECK_EVERY + 1)
    with pytest.raises(RuntimeError, match="something has written to the shared base"):
        thread.check(2 * CHECK_EVERY)
    trainer.BaseThread(None).check(CHECK_EVERY)  # its own base
