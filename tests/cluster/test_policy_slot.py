"""The pipe of policies: newest wins, and who is late has a name."""

import asyncio

import pytest

from cluster.buffer import PolicySlot


@pytest.fixture
async def policy_slot() -> PolicySlot[str]:
    """Two generators hold v0, the newest."""
    made: PolicySlot[str] = PolicySlot()
    await made.publish(0, "v0")
    for name in ("generator-0", "generator-1"):
        await made.acknowledge(name, 0)
    return made


async def test_newest_wins_and_versions_in_between_are_skipped() -> None:
    policy_slot: PolicySlot[str] = PolicySlot()
    reader = asyncio.create_task(policy_slot.wait_newer(-1))
    await asyncio.sleep(0)
    assert not reader.done()
    await policy_slot.publish(0, "v0")
    assert await reader == "v0"
    await policy_slot.publish(1, "v1")
    await policy_slot.publish(5, "v5")
    assert await policy_slot.wait_newer(0) == "v5"
    with pytest.raises(ValueError, match="must grow, got 5 after 5"):
        await policy_slot.publish(5, "again")
    assert policy_slot.get() == "v5"


async def test_acknowledged_waits_for_all_and_takes_newer_for_granted() -> None:
    policy_slot: PolicySlot[str] = PolicySlot()
    waiting = asyncio.create_task(policy_slot.acknowledged(3, ["generator-0", "generator-1"], deadline_s=30))
    await policy_slot.acknowledge("generator-0", 3)
    await asyncio.sleep(0)
    await policy_slot.acknowledge("generator-1", 2)
    await asyncio.sleep(0)
    assert not waiting.done()
    await policy_slot.acknowledge("generator-1", 4)
    await waiting


async def test_who_is_late_is_named_with_what_it_holds() -> None:
    policy_slot: PolicySlot[str] = PolicySlot()
    await policy_slot.acknowledge("generator-0", 7)
    await policy_slot.acknowledge("generator-1", 6)
    late = r"v7 not acknowledged .* by generator-1 \(holds v6\), generator-2 \(holds v-1\);"
    with pytest.raises(TimeoutError, match=late):
        await policy_slot.acknowledged(7, ["generator-0", "generator-1", "generator-2"], deadline_s=0.01)


async def test_who_leaves_is_no_longer_waited_for(policy_slot: PolicySlot[str]) -> None:
    waiting = asyncio.create_task(policy_slot.acknowledged(1, ["generator-0", "generator-1"], deadline_s=30))
    await policy_slot.acknowledge("generator-0", 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    await policy_slot.leave("generator-1")
    async with asyncio.timeout(1):
        await waiting
    assert not policy_slot.others("generator-0")


async def test_who_comes_back_is_waited_for_again(policy_slot: PolicySlot[str]) -> None:
    await policy_slot.leave("generator-1")
    policy_slot.back("generator-1")
    assert policy_slot.others("generator-0")
    await policy_slot.publish(1, "v1")
    await policy_slot.acknowledge("generator-0", 1)
    with pytest.raises(TimeoutError, match=r"by generator-1 \(holds v0\);"):
        await policy_slot.acknowledged(1, ["generator-0", "generator-1"], deadline_s=0.01)
