"""A penalty for completions that are too long."""

from collections.abc import Sequence
from typing import Any

from rewards.base import text_of


def length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    target: int,
    kind: str = "linear",
    unit: str = "tokens",
    **columns: Sequence[Any],
) -> list[float]:
    """0.0 up to `target`; beyond it a penalty down to -1.0.

    kind: `linear` falls evenly and reaches -1.0 at twice the target; `step` is -1.0 at once.
    unit: `tokens` (of completion_ids, which with tools or an environment hold its answers, too) or `characters` (of the
    policy's own text).
    Raises ValueError if an argument is out of its range.
    """
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise ValueError(f"args.target: must be a whole number of {unit} >= 1, got {target!r}")
    if kind not in ("linear", "step"):
        raise ValueError(f"args.kind: must be linear or step, got {kind!r}")
    if unit not in ("tokens", "characters"):
        raise ValueError(f"args.unit: must be tokens or characters, got {unit!r}")
    sizes = [len(ids) for ids in completion_ids] if unit == "tokens" else [len(text_of(c)) for c in completions]
    if kind == "step":
        return [-float(size > target) for size in sizes]
    return [-min(max(size - target, 0) / target, 1.0) for size in sizes]
