"""What callers ask of the engine's thread, each with the future that is answered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollout.vllm.adapter_cache import Resident


@dataclass(slots=True)
class Request:
    """generate or probe. read turns vLLM's output and the version that it began with into the answer."""

    id: str
    prompt_ids: list[int]
    params: Any
    read: Callable[[Any, int], Any]
    answer: Future[Any] = field(default_factory=Future)
    stopped: bool = False  # the answer is what there is by now
    adapter: Resident | None = None


@dataclass(slots=True)
class Load:
    """A new policy."""

    staged: Resident
    payload: bytes | memoryview | None = None  # of whole weights; an adapter lies in its folder
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


Command = Request | Load | Read | Rest
