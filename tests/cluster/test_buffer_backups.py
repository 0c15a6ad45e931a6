"""Who gets a group that takes long as well, and who gets none beside what it has."""

import asyncio

import pytest

from cluster.buffer import Buffer
from tests.cluster.buffers import group, position, settle, taking, working

pytestmark = pytest.mark.timeout(20)  # seconds; what waits for ever shall be seen soon (make mutants)


async def test_a_group_that_takes_long_goes_to_an_idle_producer_but_never_to_its_own() -> None:
    buffer = Buffer(2, 0, 2**20, print, backup_after=0.0)
    mine, quick = await buffer.admit("a"), await buffer.admit("a")
    own, other = (asyncio.create_task(buffer.admit(name)) for name in "ab")
    take = asyncio.create_task(taking(buffer, 2, 0))
    await settle()
    assert not other.done()  # what a group usually takes is not known yet
    assert await buffer.put(quick, group(0), "a")
    assert await other is mine
    assert not own.done()
    loser = asyncio.create_task(working(mine))
    await settle()
    assert await buffer.put(mine, group(1), "b")
    await asyncio.wait_for(loser, 1)
    assert not await buffer.put(mine, group(1), "a")  # too late
    assert not buffer.give_up(mine, "a")
    assert list(map(position, await take)) == [0, 1]
    assert (buffer.in_use, len(buffer)) == (2, 0)
    own.cancel()


async def test_a_slow_producer_gets_one_group_at_a_time_though_slots_are_free() -> None:
    buffer = Buffer(3, 0, 2**20, print, backup_after=0.0)
    quick, slow = await buffer.admit("a"), await buffer.admit("slow")
    await buffer.put(quick, group(0), "a")
    take = asyncio.create_task(taking(buffer, 3, 0))
    assert await buffer.admit("a") is not slow  # the third slot
    await settle()
    assert await asyncio.wait_for(buffer.admit("a"), 10) is slow
    assert await buffer.put(slow, group(1), "a")
    assert not buffer.give_up(slow, "slow")
    take.cancel()
    await settle()
    assert list(map(position, await taking(buffer, 2, 0))) == [0, 1]
    buffer.release(2)
    mine = await buffer.admit("slow")
    another = asyncio.create_task(buffer.admit("slow"))
    await settle()
    assert not another.done()
    assert await buffer.put(mine, group(2), "slow")
    await another


async def test_a_slow_producer_gets_no_second_group_though_many_slots_come_free_at_once() -> None:
    buffer = Buffer(4, 0, 2**20, print, backup_after=0.0)
    quick, slow = await buffer.admit("a"), await buffer.admit("slow")
    await buffer.put(quick, group(0), "a")
    take = asyncio.create_task(taking(buffer, 2, 0))
    both = [await buffer.admit("a") for _ in range(2)]
    assert await asyncio.wait_for(buffer.admit("a"), 10) is slow
    await buffer.put(slow, group(1), "a")
    await take
    for number, ticket in enumerate(both, start=2):
        await buffer.put(ticket, group(number), "a")
    await taking(buffer, 2, 0)
    turns = [asyncio.create_task(buffer.admit(name)) for name in ("slow", "a", "slow", "a")]
    await settle()
    buffer.release(4)
    await settle()
    assert [turn.done() for turn in turns] == [True, True, False, True]
    turns[2].cancel()


async def test_a_group_that_takes_twice_as_long_as_usual_gets_a_second_producer() -> None:
    buffer = Buffer(2, 0, 2**20, print, backup_after=2.0)
    mine, quick = await buffer.admit("a"), await buffer.admit("a")
    await asyncio.sleep(0.1)
    await buffer.put(quick, group(0), "a")
    other = asyncio.create_task(buffer.admit("b"))
    take = asyncio.create_task(taking(buffer, 2, 0))
    assert await asyncio.wait_for(other, 10) is mine
    assert asyncio.get_running_loop().time() - mine.since >= 0.2
    await buffer.put(mine, group(1), "b")
    await take
    assert (mine.wanted, mine.late) == (False, False)


async def test_a_straggler_goes_to_nobody_else() -> None:
    """Its holder is being restarted, so its slot is not given up yet."""
    buffer = Buffer(1, 0, 2**20, print, oversample=1, backup_after=0.0)
    slow, quick = await buffer.admit("a"), await buffer.admit("a")
    assert await buffer.put(quick, group(0), "a")
    await taking(buffer, 1, 0)
    assert not slow.wanted
    buffer.release(1)
    fresh = await buffer.admit("b")
    idle = asyncio.create_task(buffer.admit("b"))
    take = asyncio.create_task(taking(buffer, 1, 0))
    await settle()
    assert not idle.done()
    assert await buffer.put(fresh, group(1), "b")
    assert list(map(position, await take)) == [1]
    idle.cancel()


async def test_a_slow_producer_helps_with_one_group_at_a_time() -> None:
    buffer = Buffer(6, 0, 2**20, print, backup_after=0.0)
    quick, *begun = [await buffer.admit(name) for name in ("a", "slow", "slower", "a", "a", "a")]
    await buffer.put(quick, group(0), "a")
    take = asyncio.create_task(taking(buffer, 6, 0))
    for number, ticket in enumerate(begun[:2], start=1):
        assert await asyncio.wait_for(buffer.admit("a"), 10) is ticket
        await buffer.put(ticket, group(number), "a")
    turns = [asyncio.create_task(buffer.admit(name)) for name in ("slow", "slow", "slower", "slower")]
    await settle()
    assert [turn.done() for turn in turns] == [True, False, True, False]  # of the three groups that "a" is at
    for task in [*turns, take]:
        task.cancel()
