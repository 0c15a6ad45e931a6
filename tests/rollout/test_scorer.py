"""Which reward process is asked, and what comes back from it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from cluster.actor import Actor, Local
from rewards.base import RewardFailed
from rewards.call import Group
from rewards.pool import RewardService, Scores
from rollout.scorer import RewardProcesses, SharedScorer

GROUP = Group(["2 + 2 ="] * 2, ["4", "5"], [[1], [2]], {"gold": [4, 4]})


class Held:
    """Scores a group when it is let go on; knows what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Group] = []
        self.free = asyncio.Event()

    async def score(self, group: Group) -> Scores | str:
        self.asked.append(group)
        await self.free.wait()
        if group.completions == ["bad"]:
            return "reward 'a': error: it must not fail"
        return Scores([1.0, 0.0], {"a": [1.0, 0.0]}, ["ok", "ok"], -1.0, (), [None, None])


def shared(*held: Held) -> RewardProcesses:
    actors = [Local(f"rewards-{i}", lambda one=one: one, ()) for i, one in enumerate(held)]
    return RewardProcesses(tuple(cast(Actor[RewardService], one) for one in actors), 5.0)


async def test_each_group_goes_to_the_process_with_the_least_to_do_and_comes_back_whole() -> None:
    held = Held(), Held(), Held()
    scorer = SharedScorer(shared(*held), first=4)  # of the generator number 4: it begins with the second
    asked = [asyncio.create_task(scorer.score(GROUP)) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert [len(one.asked) for one in held] == [1, 2, 2]
    assert held[1].asked[0] == GROUP
    held[1].free.set()
    first = await asked[0]
    assert (first.reward, first.parts, first.status) == ([1.0, 0.0], {"a": [1.0, 0.0]}, ["ok", "ok"])
    await asyncio.sleep(0.05)
    last = [asyncio.create_task(scorer.score(GROUP)) for _ in range(3)]  # the second has nothing to do, the first one
    await asyncio.sleep(0.05)
    assert [len(one.asked) for one in held] == [1, 5, 2]
    for one in held:
        one.free.set()
    await asyncio.gather(*asked, *last)


async def test_a_function_that_must_not_fail_fails_here_as_it_would_beside_the_engine() -> None:
    held = Held()
    held.free.set()
    scorer = SharedScorer(shared(held), first=0)
    with pytest.raises(RewardFailed, match="^reward 'a': error: it must not fail$"):
        await scorer.score(Group(["p"], ["bad"], [[1]], {}))
    scorer.close()


async def test_the_time_of_a_score_is_that_of_the_way_there_and_back() -> None:
    held = Held()

    async def answers() -> None:
        while not held.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        held.free.set()

    scores, _ = await asyncio.gather(SharedScorer(shared(held), first=0).score(GROUP), answers())
    assert 49 <= scores.ms < 5000
