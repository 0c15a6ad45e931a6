"""A group as the Buffer sees it, and small acts of tests with one."""

import asyncio

import pyarrow as pa

from cluster.buffer import Buffer


def group(position: int, version: int = 0) -> pa.Table:
    """A group as the buffer sees it: 16 bytes."""
    return pa.table({"position": [position], "policy_version_min": [version]})


def position(table: pa.Table) -> int:
    return int(table.column("position")[0].as_py())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def taking(buffer: Buffer, count: int, oldest_version: int) -> list[pa.Table]:
    return (await buffer.take(count, oldest_version)).groups
