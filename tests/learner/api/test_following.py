"""A run that is watched, stopped, and fails: with a stand-in for its process, which is one all the same."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from learner import InputError, RunFailed, TrainResult, train
from learner.api import calls


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CHILD", "tests.learner.api.stand_in")


def run(folder: Path, **settings: Any) -> TrainResult:
    given = {"output_dir": str(folder), "steps": 500, **settings}
    return train("some/model", ["number"], [{"question": "1?"}], **given)


@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_false_asks_for_a_stop_and_every_step_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    seen: list[Any] = []

    def on_step(metrics: dict[str, Any]) -> Any:
        seen.append(metrics["step"])
        return kind(len(seen) < 3)

    result = run(tmp_path, on_step=on_step)
    assert seen == [row["step"] for row in result.metrics] == list(range(1, len(seen) + 1))
    assert capsys.readouterr().out == "asked 1 times\n"
    assert (result.adapter, result.before, result.after) == (None, {}, {})


def test_what_on_step_raises_is_raised_when_the_run_has_stopped(tmp_path: Path) -> None:
    def on_step(metrics: dict[str, Any]) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        run(tmp_path, on_step=on_step)
    assert caught.value.__notes__ == [
        "on_step raised it; the run has stopped with a checkpoint, from which the same call goes on"
    ]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") < 500


def test_ctrl_c_finishes_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on_step(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 1:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt, match="the run has stopped with a checkpoint"):
        run(tmp_path, on_step=on_step)
    said = "interrupted: finishing the step and writing a checkpoint\nasked 1 times\n"
    assert capsys.readouterr().out == said


def test_a_stop_that_is_asked_for_and_ctrl_c_are_one_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on_step(metrics: dict[str, Any]) -> bool:
        if metrics["step"] == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        return False

    with pytest.raises(KeyboardInterrupt, match="the run has stopped with a checkpoint"):
        run(tmp_path, on_step=on_step)
    assert capsys.readouterr().out.endswith("asked 1 times\n")


def unread() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1)


def closed() -> TextIO:
    stream = unread()
    stream.close()
    return stream


@pytest.mark.parametrize("stdout", [unread, closed, lambda: None])
def test_nobody_has_to_read_what_a_run_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: Callable[[], TextIO | None]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout())
        result = run(tmp_path, on_step=lambda metrics: metrics["step"] < 2)
    assert len(result.metrics) >= 2


def test_a_coroutine_is_no_answer(tmp_path: Path) -> None:
    async def on_step(metrics: dict[str, Any]) -> None: ...

    with pytest.raises(InputError, match="must be a plain"):
        run(tmp_path, on_step=lambda metrics: on_step(metrics))


@pytest.mark.parametrize(
    ("code", "said", "kind", "sentence"),
    [
        (2, "error: before\nx\nerror: one\nconfig: two", InputError, "^one\ntwo$"),
        (1, "Traceback\n  error: boom\nerror: the last", RunFailed, "^the last$"),
        (1, "mute", RunFailed, "^the run ended with exit code 1: mute$"),
    ],
)
def test_a_failure_is_an_exception_with_the_last_words(
    tmp_path: Path, code: int, said: str, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        run(tmp_path / "runs", steps=code, data={"system": said})
    assert list((tmp_path / "runs").iterdir()) == ([] if code == 2 else [tmp_path / "runs" / "run"])
