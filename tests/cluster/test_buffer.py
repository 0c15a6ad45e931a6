"""The pipe of samples, case by case: slots and bytes, overtaking, useless groups, stragglers."""

import asyncio

import pyarrow as pa
import pytest

from cluster.buffer import MAX_REFILLS, Buffer, GroupSlot
from tests.cluster.buffers import group, position, settle, taking

pytestmark = pytest.mark.timeout(20)  # seconds; what waits for ever shall be seen soon (make mutants)


async def test_an_admission_that_is_given_up_takes_no_slot() -> None:
    """Neither while it waits nor in the moment in which its turn comes; the next in line gets what it leaves."""
    buffer = Buffer(1, 0, 2**20, print)
    held = await buffer.admit()
    for when in ("waiting", "just before", "just after"):
        waiting = asyncio.create_task(buffer.admit())
        await settle()
        if when == "just after":
            buffer.give_up(held)
        waiting.cancel()
        if when == "just before":
            buffer.give_up(held)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert buffer.in_use == (when == "waiting")
        held = held if when == "waiting" else await asyncio.wait_for(buffer.admit(), 10)
        assert buffer.in_use == 1


async def test_a_group_that_is_put_cannot_be_given_up() -> None:
    buffer = Buffer(2, 0, 2**20, print)
    slots = [await buffer.admit() for _ in range(2)]
    for number, slot in enumerate(slots):
        await buffer.put(slot, group(number))
    buffer.give_up(slots[0])
    assert list(map(position, await taking(buffer, 2, 0))) == [0, 1]
    buffer.give_up(slots[1])
    assert buffer.in_use == 2


async def test_the_bytes_bound_may_be_reached() -> None:
    buffer = Buffer(3, 0, max_bytes=32, on_drop=print)
    for number in range(2):
        await asyncio.wait_for(buffer.put(await buffer.admit(), group(number)), 10)
    third = asyncio.create_task(buffer.put(await buffer.admit(), group(2)))
    await settle()
    assert (third.done(), buffer.bytes) == (False, 32)
    third.cancel()


async def test_a_slot_names_the_policy_that_every_producer_holds() -> None:
    buffer = Buffer(2, 1, 2**20, print)
    versions = []
    for number in range(6):
        slot = await asyncio.wait_for(buffer.admit(), 10)
        versions.append(slot.version)
        await buffer.put(slot, group(number))
        await taking(buffer, 1, 0)
        buffer.release(1)
    assert versions == [0, 0, 1, 1, 2, 2]


async def test_put_waits_for_the_bytes_bound_and_a_giant_still_passes_alone() -> None:
    buffer = Buffer(3, 0, max_bytes=20, on_drop=print)
    slots = [await buffer.admit() for _ in range(3)]
    await buffer.put(slots[0], group(0))
    second = asyncio.create_task(buffer.put(slots[1], group(1)))
    await settle()
    assert not second.done()  # 16 + 16 > 20
    assert list(map(position, await taking(buffer, 1, 0))) == [0]
    await second
    giant = asyncio.create_task(buffer.put(slots[2], pa.concat_tables([group(2)] * 5)))
    await settle()
    assert not giant.done()
    assert list(map(position, await taking(buffer, 2, 0))) == [1, 2]
    await giant


async def test_a_cancelled_take_gives_back_what_it_held() -> None:
    buffer = Buffer(3, 0, max_bytes=2**20, on_drop=print)
    for number in range(2):
        await buffer.put(await buffer.admit(), group(number))
    waiting = asyncio.create_task(taking(buffer, 3, 0))
    await settle()
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (len(buffer), buffer.bytes, buffer.in_use) == (2, 32, 2)
    assert list(map(position, await taking(buffer, 2, 0))) == [0, 1]


async def test_a_stale_group_frees_its_slot_for_its_second_attempt() -> None:
    dropped: list[pa.Table] = []
    buffer = Buffer(1, 0, max_bytes=2**20, on_drop=dropped.append)
    await buffer.put(await buffer.admit(), group(7, version=3))
    take = asyncio.create_task(taking(buffer, 1, oldest_version=4))
    slot = await buffer.admit()  # would wait for ever if the slot of the dropped group were kept
    await buffer.put(slot, group(7, version=4))
    assert list(map(position, await take)) == [7]
    assert (list(map(position, dropped)), buffer.dropped_stale) == ([7], 1)


async def test_a_slow_group_is_waited_for_when_it_is_due_and_overtaken_before() -> None:
    """Two groups a step, staleness 1. The very first group takes as long as three steps would."""
    buffer = Buffer(2, 1, max_bytes=33, on_drop=print)
    slow, *quick = [await buffer.admit() for _ in range(4)]
    for number, slot in enumerate(quick[:2], start=1):
        await buffer.put(slot, group(number))
    assert list(map(position, await taking(buffer, 2, oldest_version=-1))) == [1, 2]  # it is overtaken
    buffer.release(2)
    await buffer.put(quick[2], group(3))
    for number in (4, 5):
        late = asyncio.create_task(buffer.put(await buffer.admit(), group(number, version=1)))
    take = asyncio.create_task(taking(buffer, 2, oldest_version=0))
    await settle()
    assert not take.done()  # three others are there, but at the next step the slow one would be too old
    assert late.done()  # and the bytes bound does not stand between the consumer and what it waits for
    await buffer.put(slow, group(0))
    assert sorted(map(position, await take)) == [0, 3]
    assert buffer.dropped_stale == 0


async def started(buffer: Buffer) -> list[GroupSlot]:
    """Six groups of version 0, of which two were taken: in its order, one under way, three that may end, two new."""
    first, *quick = [await buffer.admit() for _ in range(6)]
    for number, slot in enumerate(quick[:2]):
        await buffer.put(slot, group(number))
    await taking(buffer, 2, 0)
    buffer.release(2)
    return [first, *quick[2:], await buffer.admit(), await buffer.admit()]


async def test_a_batch_that_is_partly_taken_is_the_one_that_waiting_groups_can_be_in() -> None:
    """Two groups a step, staleness 2. Two of version 0 are waited for; this batch lacks one, and the next is theirs."""
    buffer = Buffer(2, 2, 2**20, print)
    _, _, gone, quick, young, _ = await started(buffer)
    await buffer.put(quick, group(2))
    assert list(map(position, await taking(buffer, 1, 0))) == [2]
    buffer.give_up(gone)
    await buffer.put(young, group(3, version=1))
    assert list(map(position, await asyncio.wait_for(taking(buffer, 1, 0), 10))) == [3]


async def test_a_resumed_run_counts_policy_versions_on_from_its_checkpoint() -> None:
    """A step after version 7, staleness 1: of three groups of version 7 one is left, and batch 8 waits for it."""
    buffer = Buffer(2, 1, 2**20, print)
    buffer.resume(7)
    slow, *quick = [await asyncio.wait_for(buffer.admit(), 10) for _ in range(4)]
    assert {slot.version for slot in (slow, *quick)} == {7}
    for number, slot in enumerate(quick[:2]):
        await buffer.put(slot, group(number, version=7))
    await taking(buffer, 2, 0)
    buffer.release(2)
    await buffer.put(quick[2], group(2, version=7))
    young = await buffer.admit()
    assert young.version == 8
    await buffer.put(young, group(3, version=8))
    batch = asyncio.create_task(taking(buffer, 2, 0))
    await settle()
    assert not batch.done()
    await buffer.put(slow, group(4, version=7))
    assert sorted(map(position, await asyncio.wait_for(batch, 10))) == [2, 4]


async def test_groups_of_several_ages_that_wait_count_together() -> None:
    """Two groups a step, staleness 2. One of version 0 and three of version 1 fill this batch and the next one."""
    buffer = Buffer(2, 2, 2**20, print)
    oldest, gone, *quick, older, _ = await started(buffer)
    buffer.give_up(gone)
    assert (await buffer.admit()).version == 1
    for number, slot in enumerate(quick, start=2):
        await buffer.put(slot, group(number))
    assert list(map(position, await taking(buffer, 2, 0))) == [2, 3]
    buffer.release(2)
    await buffer.put(await buffer.admit(), group(4, version=2))
    take = asyncio.create_task(taking(buffer, 2, 0))
    await settle()
    assert len(buffer) == 1
    await buffer.put(oldest, group(5))
    await settle()
    assert not take.done()  # the three could not all be in the next batch
    take.cancel()
    await settle()
    assert (len(buffer), buffer.bytes) == (2, 32)  # what it had taken is back
    take = asyncio.create_task(taking(buffer, 2, 0))
    await settle()
    await buffer.put(older, group(6, version=1))
    assert list(map(position, await take)) == [5, 6]


@pytest.mark.parametrize("wrong", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_sizes_that_hold_nothing_are_refused(wrong: tuple[int, int, int]) -> None:
    per_step, max_staleness, max_bytes = wrong
    with pytest.raises(ValueError, match="buffer: groups_per_step and max_bytes must be >= 1"):
        Buffer(per_step, max_staleness, max_bytes, print)
    Buffer(max(per_step, 1), max(max_staleness, 0), max(max_bytes, 1), print)


async def test_what_can_never_be_satisfied_is_refused() -> None:
    buffer = Buffer(2, 0, max_bytes=1, on_drop=print)
    with pytest.raises(ValueError, match="1 to 2 groups"):
        await buffer.take(3, 0)
    with pytest.raises(ValueError, match="1 to 2 groups"):
        await buffer.take(0, 0)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot release 1 slots, 0 taken ones are in use"):
            buffer.release(1)
        await buffer.put(await buffer.admit(), group(0))
        await taking(buffer, 1, 0)
        buffer.release(1)


async def test_a_group_goes_as_too_old_for_its_oldest_token() -> None:
    dropped: list[pa.Table] = []
    buffer = Buffer(4, 0, 2**20, dropped.append)
    for number, oldest in enumerate([(2, 2), (1, 2), (3, 2), (2, 3)]):
        rows = pa.table({"position": [number] * 2, "policy_version_min": oldest})
        await buffer.put(await buffer.admit(), rows)
    assert list(map(position, await taking(buffer, 3, 2))) == [0, 2, 3]
    assert (list(map(position, dropped)), buffer.dropped_stale) == ([1], 1)


async def test_useless_groups_are_replaced_and_a_stream_of_nothing_else_still_ends() -> None:
    buffer = Buffer(2, 0, 2**20, on_drop=print)

    async def produce() -> None:
        number = 0
        while True:
            await buffer.put(await buffer.admit(), group(number))
            number += 1

    producer = asyncio.create_task(produce())
    odd = await buffer.take(2, 0, lambda g: position(g) % 2 == 1)
    assert (list(map(position, odd.groups)), list(map(position, odd.useless))) == ([1, 3], [0, 2])
    assert buffer.in_use == 2  # only what was taken holds a slot
    buffer.release(2)
    none = await buffer.take(2, 0, lambda g: False)
    assert (len(none.groups), len(none.useless)) == (2, 2 * MAX_REFILLS)
    producer.cancel()
