"""`gleaner report`: whole and broken run folders, and what a page holds. `gleaner report --live`: a run that is
served while it goes on, and to whom.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster import files as run_lock
from learner.driver import record
from learner.tools.cli import main
from learner.tools.report import write
from learner.tools.report.page import Step, Words, bytes_of, read_step, spread, unpacked
from learner.tools.report.write import LiveServer, Watched, report
from rollout import ledger
from rollout.env.trajectory import Played
from rollout.fakes import make_group
from tests.learner.tools.reports import HOSTILE, MODEL, PHASES, blocks, report_run

REWARDS = "rewards: [{use: format, weight: 0.2, args: {tags: [answer]}, name: null, env: []}, {use: 'r.py:own'}]\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return report_run(tmp_path)


def page_of(run: Path, *arguments: str) -> str:
    assert main(["report", str(run), *arguments]) == 0
    return (run / "report.html").read_text()


def test_a_page_holds_the_run(run: Path) -> None:
    found = blocks(page_of(run))
    assert list(found) == ["head", "index", "pieces", "step-1", "step-2"]
    (one,) = found["head"]["runs"]
    assert (one["done"], one["of"], one["steps"], one["metrics"]["reward/mean"]) == (2, 9, [1, 2], [0.25, 0.5])
    assert one["changes"] == [{"label": "reward", "first": 1, "before": 0.25, "last": 2, "after": 0.5}]
    assert one["starts"] == []  # not at its end
    assert one["remarks"][0].startswith("The run ended at step 2 of 9: it failed or was stopped")
    assert one["memory"][0] == {"role": "learner", "planned": 200, "measured": 150, "parts": {"weights": 200}}
    assert [figure["metrics"] for figure in found["head"]["figures"]] == [
        ["eval/vowels"], ["reward/mean"], ["time/step"], ["env/turns"],
    ]  # fmt: skip
    assert found["index"]["step"] == [1, 1, 2, 2]
    assert found["index"]["rewards"][0] == [1.0, 0.0]
    first, second = found["step-2"][1]["completions"]
    assert (first["text"], first["advantage"], second["advantage"]) == (HOSTILE, 0.5, -0.5)
    assert (second["ids"], second["logprobs"]) == ([0, 1], [-50, -50])


def test_what_failed_and_how_far_learner_and_sampler_are_apart_is_shown_where_it_was_kept(run: Path) -> None:
    said = "reward 'tail': error: TypeError: <b>boom"
    groups = [
        make_group(4, rewards=[1.0, None], reward_error=[None, said]),
        make_group(5, rewards=[None, None], reward_error=[said, said]),
    ]
    ledger.write(run / "rollouts", 2, groups)
    kept = pa.array([[0.5], [-3e-6, float("nan")], [0.0], None], pa.list_(pa.float16()))
    record.write_mismatch(run, 2, groups, kept)
    found = blocks(page_of(run))
    assert [one.get("mismatch") for one in found["step-1"][0]["completions"]] == [None, None]
    shown = [one.get("mismatch") for group in found["step-2"] for one in group["completions"]]
    assert shown == [[0.5], [-3e-6, None], [0.0], None]
    assert found["step-2"][0]["completions"][1]["error"] == said
    assert found["index"]["errors"] == [[said, 3, 2, 2]]
    (run / "mismatch" / "step-000002.parquet").write_bytes(b"PAR1")  # being written
    assert "mismatch" not in blocks(page_of(run))["step-2"][0]["completions"][0]


def test_nothing_but_the_page_s_own_script_may_run(run: Path) -> None:
    text = page_of(run)
    assert "alert(" not in text
    assert "a<b>run" not in text
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in policy
    assert not re.search(
        r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://(?!www\.w3\.org/2000/svg)", text
    )


def test_a_run_that_is_being_written_is_read_as_far_as_it_goes(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    (run / "plan.json").write_text('{"learner": ')
    (run / "config.yaml").unlink()
    (run / run_lock.LOCK_FILE).touch()
    (run / "rollouts" / "step-000003.parquet").write_bytes(b"PAR1")
    other = make_group(0).replace_schema_metadata({"gleaner.schema": "8"})
    pq.write_table(other, run / "rollouts" / "step-000004.parquet")
    head = blocks(page_of(run))["head"]
    assert head["runs"][0]["steps"] == [1, 2]
    said = "\n".join([*head["runs"][0]["remarks"], head["colours"]])
    for sentence in (
        "metrics.jsonl: 1 of 3 lines hold no whole step (first: line 3)",
        "plan.json cannot be read; it may be half written",
        "config.yaml is missing",
        "step-000003.parquet cannot be read",
        "step-000004.parquet cannot be read: rollout table: schema version must be 7, got 8",
        "Tokens are not coloured: tokenizer.json of the model is not on this machine",
    ):
        assert sentence in said


def test_a_run_that_was_killed_has_ended_though_its_lock_file_is_there(run: Path) -> None:
    with run_lock.lock_held(run):
        assert not blocks(page_of(run))["head"]["runs"][0]["remarks"]
        left = (run / run_lock.LOCK_FILE).read_text()
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    (run / run_lock.LOCK_FILE).write_text(left.replace(f'"pid": {os.getpid()}', f'"pid": {dead}'))
    assert blocks(page_of(run))["head"]["runs"][0]["remarks"][0].startswith("The run ended at step 2 of 9")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "must be a run folder such as runs/demo-seed0" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "has neither metrics.jsonl nor rollouts/" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--limit", "many"]) == 2
    assert capsys.readouterr().err.startswith("error: --limit: ")


def test_two_runs_stand_beside_each_other(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.75}\n')
    (other / "config.yaml").write_text("steps: 9\nmodel: {path: /m}\nlearner: {algorithm: ppo}\n" + REWARDS)
    head = blocks(page_of(run, "--against", str(other)))["head"]
    assert head["title"] == "a<b>run against other"
    assert [one["metrics"]["reward/mean"] for one in head["runs"]] == [[0.25, 0.5], [0.75]]
    assert head["differences"] == [
        ["learner.algorithm", "grpo", "ppo"],
        ["learner.loss.advantage", "none", "—"],
        ["model.path", str(MODEL), "/m"],
        ["rewards.format", "—", 'use format, weight 0.2, args.tags ["answer"]'],
        ["rewards.own", "—", "use r.py:own"],
    ]


def test_two_runs_of_one_name_are_told_apart_by_the_folders_above_them(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "b" / "x" / run.name)
    shutil.copytree(run, tmp_path / "a" / "x" / run.name)
    head = blocks(page_of(tmp_path / "a" / "x" / run.name, "--against", str(other)))["head"]
    assert head["title"] == "a/x/a<b>run against b/x/a<b>run"
    assert [one["name"] for one in head["runs"]] == ["a/x/a<b>run", "b/x/a<b>run"]


def test_the_page_of_a_replay_says_so_and_takes_its_end(run: Path, tmp_path: Path) -> None:
    replay = shutil.copytree(run, tmp_path / "other")
    (replay / "plan.json").unlink()
    facts = {"of": str(run), "from": 0, "to": 2, "changed": {}}
    (replay / "replay.json").write_text(json.dumps(facts))
    for folder in (run, replay):
        with (folder / "config.yaml").open("a") as file:
            file.write(f"name: {folder.name}\noutput_dir: {folder.parent}/{folder.name[0]}\n")
    head = blocks(page_of(replay, "--against", str(run)))["head"]
    assert (head["runs"][0]["of"], head["differences"]) == (2, [])
    said = f"This is a replay of {run}, at step 2 of 2. The completions are that run's."
    assert head["runs"][0]["remarks"] == [said]


def test_a_page_with_a_limit_keeps_steps_that_lie_evenly(run: Path) -> None:
    files = [ledger.write(run / "rollouts", step, [make_group(step)]) for step in range(1, 6)]
    one = len(read_step(files[0], advantage="none", tokens=True).block)
    report(run, None, None, 3 * one + one // 2)
    found = blocks((run / "report.html").read_text())
    assert [name for name in found if name.startswith("step-")] == ["step-1", "step-3", "step-5"]
    assert "Completions of 3 of 5 steps are shown" in found["head"]["runs"][0]["remarks"][-1]
    assert found["index"]["step"] == [1, 3, 5]
    many = ledger.write(run / "rollouts", 1, [make_group(i, completion=[f"{i**9}", "4"]) for i in range(8)])
    half = len(read_step(many, 4, advantage="none", tokens=True).block)
    report(run, None, None, half)
    found = blocks((run / "report.html").read_text())
    assert [(name, len(groups)) for name, groups in found.items() if name.startswith("step-")] == [("step-1", 4)]


def test_advantages_are_those_of_the_groups_that_were_trained_on(tmp_path: Path) -> None:
    """The others, which dynamic sampling replaced, stand behind them in the step's file."""
    groups = [make_group(0, rewards=[0.0, 4.0]), make_group(1, rewards=[2.0, 2.0])]
    used = read_step(ledger.write(tmp_path, 1, groups), advantage="batch", trained=1, tokens=False)
    trained, replaced = (group["completions"] for group in unpacked(used.block))
    assert [one["advantage"] for one in trained] == pytest.approx([-0.707, 0.707], abs=1e-3)  # 2 / sqrt(8)
    assert not any("advantage" in one for one in replaced)


def test_steps_are_taken_from_coarse_to_fine_and_stay_as_the_run_goes_on() -> None:
    assert spread(range(1, 6)) == [1, 5, 3, 2, 4]
    before: list[int] = []
    for last in range(40):
        steps = spread(range(last))
        assert sorted(steps) == list(range(last))
        assert all({*steps[:most]} <= {*before[:most], last - 1} for most in range(2, 40))
        before = steps


def test_a_token_s_place_in_a_turn_is_exact(tmp_path: Path) -> None:
    turn = Played(104321, 104322, generate_ms=1234.567).as_row()
    group = make_group(0, turns=[[turn], []])
    step = read_step(ledger.write(tmp_path, 1, [group]), advantage="none", tokens=False)
    (shown,) = unpacked(step.block)[0]["completions"][0]["turns"]
    assert (shown["start"], shown["stop"], shown["generate_ms"]) == (104321, 104322, 1234.6)


def test_pieces_of_tokens_make_the_text() -> None:
    from tokenizers import Tokenizer

    words = Words(str(MODEL))
    text = "<reasoning> 5+2=7 </reasoning><answer>é שלום 👩 \u00ad\x00</answer><|end|>"
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    pieces = words.pieces({*ids, 10**6})
    assert pieces[ids[0]] == "<reasoning>"
    parts = [pieces[i] for i in ids]  # a part of a character is bytes
    assert b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in parts).decode() == text
    assert (bytes_of("<0xE2>"), bytes_of("▁a")) == ([0xE2], None)
    assert pieces[10**6] == "<1000000>"
    assert "of org/absent is not on this machine" in Words("org/absent").missing


# `gleaner report --live`: a run that is served while it goes on, and to whom.


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
