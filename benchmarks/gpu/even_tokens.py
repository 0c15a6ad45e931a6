"""A reward that random weights can move, so that every group trains: the share of even token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def even_share(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
