"""What callers ask of the engine's thread; each command holds the future of its answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollout.types import Weights
from rollout.vllm.adapter_cache import Resident


@dataclass(slots=True)
class Request:
    """generate or probe. read: vLLM's output and the version that the request began with -> the answer."""

    id: str
    prompt_ids: list[int]
    params: Any
    read: Callable[[Any, int], Any]
    answer: Future[Any] = field(default_factory=Future)
    adapter: Resident | None = None


@dataclass(slots=True)
class Load:
    """A new policy."""

    staged: Resident
    weights: Weights | None = None  # an adapter lies in its folder
    answer: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Rest:
    """sleep(), or with asleep=False wake()."""

    asleep: bool
    answer: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Read:
    """held()."""

    answer: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Peak:
    """peak_memory(), of several processes."""

    answer: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Share:
    """share_base()."""

    answer: Future[Any] = field(default_factory=Future)


Command = Request | Load | Read | Peak | Rest | Share
