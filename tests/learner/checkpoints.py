"""Checkpoints of small files, committed as a run commits its own."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from cluster.files import Digest
from learner.driver import checkpoint


def commit(
    root: Path, step: int, files: Mapping[str, str], keep: int = 9, written: Mapping[str, Digest] | None = None
) -> Path:
    """`files`: text by path in the checkpoint. Returns its folder."""

    async def write() -> None:
        async with checkpoint.commit(root, step, keep, written) as folder:
            for name, text in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)

    asyncio.run(write())
    return root / checkpoint.name_of(step)
