"""The pipe of policies: newest wins, and who is late has a name."""

import asyncio

import pytest

from cluster.policy_slot import Latest


async def test_newest_wins_and_versions_in_between_are_skipped() -> None:
    latest: Latest[str] = Latest()
    reader = asyncio.create_task(latest.wait_newer(-1))
    await asyncio.sleep(0)
    assert not reader.done()
    await latest.publish(0, "v0")
    assert await reader == "v0"
    await latest.publish(1, "v1")
    await latest.publish(5, "v5")
    assert await latest.wait_newer(0) == "v5"
    with pytest.raises(ValueError, match="must grow, got 5 after 5"):
        await latest.publish(5, "again")
    assert latest.get() == "v5"


async def test_acknowledged_waits_for_all_and_takes_newer_for_granted() -> None:
    latest: Latest[str] = Latest()
    waiting = asyncio.create_task(latest.acknowledged(3, ["generator-0", "generator-1"], deadline_s=30))
    await latest.acknowledge("generator-0", 3)
    await asyncio.sleep(0)
    await latest.acknowledge("generator-1", 2)
    await asyncio.sleep(0)
    assert not waiting.done()
    await latest.acknowledge("generator-1", 4)
    await waiting


async def test_who_is_late_is_named_with_what_it_holds() -> None:
    latest: Latest[str] = Latest()
    await latest.acknowledge("generator-0", 7)
    await latest.acknowledge("generator-1", 6)
    late = r"v7 not acknowledged .* by generator-1 \(holds v6\), generator-2 \(holds v-1\);"
    with pytest.raises(TimeoutError, match=late):
        await latest.acknowledged(7, ["generator-0", "generator-1", "generator-2"], deadline_s=0.01)
