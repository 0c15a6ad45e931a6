"""What EngineSteps does with steps that vLLM has begun when a policy arrives; with real ones: test_engine.py."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.types import EngineError
from rollout.vllm.convert import AdapterWindow, Resident
from rollout.vllm.engine import EngineSteps, Load, Request
from tests.rollout.engine_case import settings


class Ahead:
    """What EngineSteps sees of a vLLM that has begun steps: each call of `step` ends the oldest."""

    def __init__(self, steps: list[Any]) -> None:
        self.batch_queue, self.called = list(steps), list[str]()
        self.engine_core = self

    def sleep(self, *, level: int, mode: str) -> None:
        self.called.append(f"sleep {level} {mode}")

    def wake_up(self, *, tags: list[str]) -> None:
        self.called.append(f"wake {tags[0]}")

    def has_unfinished_requests(self) -> bool:
        return False

    def step(self) -> list[Any]:
        self.called.append("step")
        outputs = self.batch_queue.pop(0)
        if isinstance(outputs, Exception):
            raise outputs
        return list(outputs)


@pytest.mark.parametrize("refused", [False, True])
def test_steps_that_have_begun_are_taken_before_a_policy_is_loaded(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """A request that ends in one of them has the version that it began with; the scheduler goes on in any case."""
    engine: Any = Ahead([[], [SimpleNamespace(request_id="a", finished=True)]])
    turns = EngineSteps(engine, settings(Path("/nowhere"), in_flight="continue", adapter_window=1), [AdapterWindow(1)])

    def load(*_: object, **__: object) -> bool:
        engine.called.append("load")
        if refused:
            raise EngineError("no")
        return True

    monkeypatch.setattr(turns._policies, "load", load)
    old, new = (Resident(version, f"v{version}", Path(), frozenset(), 8, 1, users=1) for version in (3, 4))
    request = Request("a", [1], None, lambda output, version: version)
    request.adapter, turns.running["a"] = old, request
    turns.backlog.append(command := Load(new))
    turns.turn()
    assert engine.called == ["sleep 0 keep", "step", "step", "load", "wake scheduling"]
    assert (request.answer.result(), old.users, turns.backlog) == (3, 0, deque())
    assert isinstance(command.answer.exception(), EngineError) if refused else command.answer.result() == "v4"


def test_a_fault_in_such_a_step_ends_the_engine_and_is_no_answer_to_the_load() -> None:
    """Else the scheduler would stay paused, and every caller wait."""
    engine: Any = Ahead([ValueError("a fault of vLLM's")])
    turns = EngineSteps(engine, settings(Path("/nowhere"), in_flight="continue", adapter_window=1), [AdapterWindow(1)])
    turns.backlog.append(command := Load(Resident(4, "v4", Path(), frozenset(), 8, 1)))
    with pytest.raises(ValueError, match="a fault of vLLM's"):
        turns.turn()
    assert not command.answer.done()
    assert list(turns.unanswered()) == [command]
    assert engine.called[-1] == "wake scheduling"
