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


class Generating(Ahead):
    """A vLLM on a device of this kind that generates requests until `end` is called."""

    def __init__(self, device: str) -> None:
        super().__init__([])
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
        self.began: list[str] = []

    def add_request(self, name: str, *_: object, **__: object) -> None:
        self.began.append(name)


class Runs:
    """Three runs on one such engine, whose requests are named by their run: a1 is run 0's first."""

    def __init__(self, device: str) -> None:
        self.engine: Any = Generating(device)
        self.turns = EngineSteps(
            self.engine, settings(Path("/nowhere")), [AdapterWindow(2, run, 3) for run in range(3)]
        )
        for run, policies in enumerate(self.turns._of_run):
            policies._window.add(Resident(0, "v0", Path(), frozenset(), 8, run + 1, run=run))

    def ask(self, *names: str) -> list[str]:
        """Returns the requests that begin once these have arrived; one whose name ends in p is a probe."""
        for name in names:
            asked = Request(name, [1], None, lambda output, version: version, run="abc".index(name[0]))
            asked.in_turn = not name.endswith("p")
            self.turns.backlog.append(asked)
        before = len(self.engine.began)
        self.turns.turn()
        return list(self.engine.began[before:])

    def end(self, *names: str) -> list[str]:
        """Returns the requests that begin once these have ended."""
        for name in names:
            self.turns._finish(SimpleNamespace(request_id=name, finished=True))
        return self.ask()


def test_on_a_cpu_the_runs_of_an_engine_generate_in_turns() -> None:
    runs = Runs("cpu")
    assert runs.ask("a1", "a2") == ["a1", "a2"]
    assert runs.ask("a3", "b1", "a4", "c1", "b2") == ["a3"], "a4 came after a request of another run"
    assert runs.ask("bp") == ["bp"], "a probe, which proves a policy, waits for no completions"
    assert runs.end("a1", "a2") == []
    assert runs.end("a3") == ["b1", "b2"], "all of the run's that have arrived, whatever came between them"
    assert runs.end("bp", "b1") == []
    assert runs.end("b2") == ["a4"]
    assert runs.ask("a5") == [], "c1 is older"
    assert runs.end("a4") == ["c1"]
    assert runs.end("c1") == ["a5"]
    assert runs.end("a5") == []
    assert not runs.turns.backlog


def test_a_turn_passes_on_when_its_requests_are_cancelled() -> None:
    runs = Runs("cpu")
    assert runs.ask("a1", "b1", "c1") == ["a1"]
    waiting = next(one for one in runs.turns.backlog if isinstance(one, Request) and one.id == "b1")
    waiting.answer.cancel()
    runs.end("a1")
    assert runs.ask() == ["c1"]


def test_on_a_card_the_runs_of_an_engine_generate_together() -> None:
    assert Runs("cuda").ask("a1", "b1", "a2", "c1") == ["a1", "b1", "a2", "c1"]
