"""`gleaner report --live`: a run that is served while it goes on, and to whom."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cluster import files as run_lock
from learner.driver import record
from learner.tools.cli import main
from learner.tools.report import write
from learner.tools.report.page import Step, read_step, unpacked
from learner.tools.report.write import LiveServer, Watched
from rollout import ledger
from rollout.fakes import make_group
from tests.learner.tools.reports import HOSTILE, PHASES, blocks, report_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return report_run(tmp_path)


@pytest.fixture
def served(run: Path) -> Iterator[LiveServer]:
    with LiveServer(Watched(run, None, 2**20)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: LiveServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_a_run_is_served_while_it_goes_on(run: Path, served: LiveServer) -> None:
    status, text = asked(served, f"/{served.key}/")
    assert (status, blocks(text)) == (200, {})
    assert "connect-src 'self'" in text
    assert unpacked(asked(served, f"/{served.key}/head")[1])["runs"][0]["done"] == 2
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "at": 3.5, "reward/mean": 1.0}\n')
    ledger.write(run / "rollouts", 3, [make_group(9)])
    (run / "phases.jsonl").write_text(PHASES)
    (one,) = unpacked(asked(served, f"/{served.key}/head")[1])["runs"]
    assert one["done"] == 3
    assert one["starts"] == [
        {"steps": "step 1", "phases": {"Ray": 1.5, "training": 0.5}},
        {"steps": "steps 2 to 3", "phases": {"Ray": 0.5, "end": 1.0}},
    ]
    assert unpacked(asked(served, f"/{served.key}/index")[1])["step"] == [1, 1, 2, 2, 3]
    assert unpacked(asked(served, f"/{served.key}/step-3")[1])[0]["problem"] == "train-9"
    assert asked(served, f"/{served.key}/step-4")[0] == 404
    assert asked(served, f"/{served.key}/{'9' * 5000}")[0] == 404


def test_the_mismatch_of_a_step_is_shown_once_it_was_trained(run: Path, served: LiveServer) -> None:
    def shown() -> bool:
        asked(served, f"/{served.key}/head")
        (group, _) = unpacked(asked(served, f"/{served.key}/step-1")[1])
        return "mismatch" in group["completions"][0]

    groups = [make_group(2 + i, completion=[HOSTILE, "4"]) for i in (0, 1)]
    assert not shown()
    record.write_mismatch(run, 1, groups, pa.array([[0.5, 0.25]] * 4, pa.list_(pa.float16())))
    assert shown()


def test_past_the_limit_a_new_step_is_all_that_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(file: Path, *rest: Any, **more: Any) -> Step:
        read.append(file.stem)
        return read_step(file, *rest, **more)

    monkeypatch.setattr("learner.tools.report.write.read_step", counted)
    files = [ledger.write(run / "rollouts", step, [make_group(0)]) for step in (1, 2)]
    watched = Watched(run, None, 9 * len(read_step(files[0], advantage="none", tokens=True).block))
    for step in range(3, 60):
        ledger.write(run / "rollouts", step, [make_group(0)])
        watched.block("head")
    assert len(unpacked(str(watched.block("index")))["step"]) == 9
    assert sorted({*read}) == sorted(read)


def test_only_who_has_the_key_and_the_right_host_is_served(served: LiveServer) -> None:
    assert asked(served, "/")[0] == 404
    assert asked(served, "*")[0] == 404
    assert asked(served, "/wrong/head")[0] == 404
    assert asked(served, f"/{served.key}/../head")[0] == 404
    assert asked(served, f"/{served.key}/head", host="rebound.example")[0] == 403


def test_connections_that_ask_nothing_are_few_and_end(served: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write._Handler, "timeout", 30.0)
    threads = threading.active_count()
    where = "127.0.0.1", served.server_port
    waiting = [socket.create_connection(where) for _ in range(write.MOST)]
    for one in waiting:
        one.sendall(b"GET / HTTP/1.1\r\nHost: ")  # and no more
    more = [socket.create_connection(where) for _ in range(5)]
    assert [one.recv(1) for one in more] == [b""] * 5
    assert threading.active_count() <= threads + write.MOST
    for one in (*waiting, *more):
        one.close()
    monkeypatch.setattr(write._Handler, "timeout", 0.05)
    status = 0
    while status != 404:  # once the threads have seen it
        with suppress(ConnectionError, RemoteDisconnected):
            status, _ = asked(served, "/")
    with socket.create_connection(where) as silent:
        assert silent.recv(1) == b""


def test_live_waits_for_the_first_step_of_a_run_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / run_lock.LOCK_FILE).touch()
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')

    def asked(server: LiveServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("learner.tools.report.write.time.sleep", look)
    monkeypatch.setattr(LiveServer, "serve_forever", asked)
    assert main(["report", str(tmp_path), "--live"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"waiting for the first step of {tmp_path}; Ctrl-C ends the waiting, and not the run"
    assert second.startswith("report   http://127.0.0.1:")
    assert len(looks) == 2
