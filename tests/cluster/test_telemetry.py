"""What a run says about itself: each step once, JSON that is JSON, and seconds that add up."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.telemetry import Metrics, Timeline, overlap, seconds


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def record(folder: Path, resume_step: int, numbers: range) -> None:
    metrics = Metrics(folder, [], resume_step)
    for number in numbers:
        metrics.log(number, {"reward/mean": 1.0})
    metrics.close()


def test_each_step_stands_in_metrics_once_whatever_was_undone(tmp_path: Path) -> None:
    record(tmp_path, 0, range(5))
    record(tmp_path, 2, range(3, 5))
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    record(tmp_path, 0, range(2))  # died before its first checkpoint: step 0 is taken again, too
    assert steps(tmp_path) == [0, 1]


def test_lines_that_are_none_cost_nothing_but_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(tmp_path, 0, range(3))
    path, bad = tmp_path / "metrics.jsonl", [b"\xff\x00}", b"", b"[2]", b'{"step": "x"}', b"{}", b'{"a": 1}{"step": 1}']
    path.write_bytes(b"\n".join([*bad, path.read_bytes() + b'{"step": 3, "reward/me']))
    record(tmp_path, 2, range(3, 4))
    assert steps(tmp_path) == [0, 1, 2, 3]
    (warning,) = caplog.records
    assert warning.getMessage() == f"{path}: dropped 7 lines that are none of a step (first: line 1)"


def test_a_run_folder_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    metrics = Metrics(tmp_path / "run", [], 0)
    metrics.log(0, {})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"run: the run folder was deleted .*\(step 1\)"):
        metrics.log(1, {})
    (tmp_path / "run").mkdir()  # as the next writer of rollouts does
    with pytest.raises(FileNotFoundError, match="deleted or replaced"):
        metrics.log(2, {})
    metrics.close()


def test_a_full_disk_has_a_path(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").symlink_to("/dev/full")
    timeline = Timeline(tmp_path / "timeline.json")
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*/timeline.json'"):
        timeline.forget_before(0.0)


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, [], 0)
    metrics.log(1, {"b": float("nan"), "a": 0.5, "c": float("inf")})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line.pop("at") > 0
    assert line == {"step": 1, "a": 0.5, "b": None, "c": None}
    metrics.close()


def trace(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "timeline.json").read_text().rstrip()
    events: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
    return events


def fixed_clock(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    monkeypatch.setattr("cluster.telemetry.time.perf_counter", lambda: now[0])


def test_busy_is_the_union_of_spans_open_ones_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    fixed_clock(monkeypatch, now)
    timeline = Timeline(tmp_path / "timeline.json")
    names = ("gen-a", "gen-b", "gen-c", "gen-d", "tra-a")
    spans = {name: timeline.span(name[:3], "role " + name[-1]) for name in names}
    for at, act, name in [
        (1, "in", "gen-a"), (2, "in", "gen-b"), (3, "out", "gen-a"), (5, "out", "gen-b"),  # 1..5 together
        (6, "in", "tra-a"), (7, "in", "gen-c"), (8, "out", "gen-c"),  # 7..8
        (9, "in", "gen-d"), (10, "out", "tra-a"),  # from 9, not over at 10
    ]:  # fmt: skip
        now[0] = float(at)
        spans[name].__enter__() if act == "in" else spans[name].__exit__(None, None, None)
    generate, train = timeline.busy("gen", 2.0, 10.0), timeline.busy("tra", 2.0, 10.0)
    assert generate == [(2.0, 5.0), (7.0, 8.0), (9.0, 10.0)]
    assert train == [(6.0, 10.0)]
    alone = {"role a": [(2.0, 3.0)], "role b": [(2.0, 5.0)], "role c": [(7.0, 8.0)], "role d": [(9.0, 10.0)]}
    assert timeline.busy_by_role("gen", 2.0, 10.0) == alone
    assert (seconds(generate), overlap(generate, train)) == (5.0, 2.0)
    timeline.forget_before(6.0)
    assert timeline.busy("gen", 0.0, 10.0) == [(7.0, 8.0), (9.0, 10.0)]
    spans["gen-d"].__exit__(None, None, None)
    timeline.close()


def test_the_trace_of_a_killed_run_is_a_chrome_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [2.0]
    fixed_clock(monkeypatch, now)
    timeline = Timeline(tmp_path / "timeline.json")
    with timeline.span("generate", "generator-0", concurrent=True):
        with contextlib.suppress(KeyError), timeline.span("train", "learner", step=3):
            now[0] = 2.5
            raise KeyError
        now[0] = 3.0
    timeline.forget_before(3.0)
    events = trace(tmp_path)  # not closed
    zero, number = events[0]["ts"], events[1].pop("id")
    assert events[2].pop("id") == number
    assert events == [
        {"name": "train", "cat": "train", "pid": 0, "tid": "learner", "args": {"step": 3}, "ph": "X"}
        | {"ts": zero, "dur": 500000},
        *(
            {"name": "generate", "cat": "generate", "pid": 0, "tid": "generator-0", "args": {}}
            | {"ph": phase, "ts": zero + ts}
            for phase, ts in (("b", 0), ("e", 1000000))
        ),
    ]
    with (tmp_path / "timeline.json").open("a") as file:
        file.write('{"name": "tra')  # cut short by a kill
    resumed = Timeline(tmp_path / "timeline.json", resume_step=3)
    with resumed.span("train", "learner", step=4):
        pass
    resumed.close()
    assert [event["args"].get("step") for event in trace(tmp_path) if event["ph"] == "X"] == [3, 4]
    again = Timeline(tmp_path / "timeline.json", resume_step=4)  # of a trace that has an end
    with again.span("train", "learner", step=5):
        pass
    again.close()
    assert [event["args"].get("step") for event in trace(tmp_path) if event["ph"] == "X"] == [3, 4, 5]


def test_more_of_the_newest_step_goes_into_its_line(tmp_path: Path) -> None:
    record(tmp_path, 0, range(3))
    metrics = Metrics(tmp_path, [], 2)
    metrics.amend(2, {"eval/accuracy": 0.5, "eval/odd": float("nan")})
    metrics.log(3, {})
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {key: value for key, value in lines[2].items() if key != "at"} == {
        "step": 2, "reward/mean": 1.0, "eval/accuracy": 0.5, "eval/odd": None,
    }  # fmt: skip
