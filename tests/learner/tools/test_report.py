"""`gleaner report`: whole and broken run folders, what a page holds, and who is served."""

import base64
import hashlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learner.driver import mismatch_files, run_lock
from learner.tools.cli import main
from learner.tools.report.completions import read_step
from learner.tools.report.live import LiveServer, Watched
from learner.tools.report.packing import unpacked
from learner.tools.report.sample import spread
from learner.tools.report.token_bytes import bytes_of
from learner.tools.report.words import Words
from learner.tools.report.write import report
from rollout import ledger
from rollout.fake_groups import make_group

MODEL = Path(__file__).parents[3] / "examples" / "tiny-arithmetic"
PHASES = """{"at": 2.0, "wall": 2.0, "Ray": 1.5, "training": 0.5}
{"at": 4.0, "wall": 1.5, "Ray": 0.5, "end": 1.0}
{"at": 5.0, "wa"""
REWARDS = "rewards: [{use: format, weight: 0.2, args: {tags: [answer]}, name: null, env: []}, {use: 'r.py:own'}]\n"
HOSTILE = "</script><script>alert(1)</script>\x00\u202e<img src=x onerror=alert(2)>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of two groups, with the loss that divides by nothing."""
    folder = tmp_path / "a<b>run"
    folder.mkdir()
    scores = {"reward/ms": 3.0, "env/turns": 2.0, "eval/turns": 2.0, "eval/vowels": 0.5}
    lines = [{"step": s, "at": s + 0.5, "reward/mean": s / 4, "time/step": 2.0} | scores for s in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(
        f"steps: 9\nmodel: {{path: {MODEL}}}\nlearner: {{algorithm: grpo, loss: {{advantage: none}}}}\n"
    )
    (folder / "plan.json").write_text('{"learner": {"planned": 200, "measured": 150, "parts": {"weights": 200}}}')
    for step in (1, 2):
        ledger.write(folder / "rollouts", step, [make_group(2 * step + i, completion=[HOSTILE, "4"]) for i in (0, 1)])
    return folder


def blocks(text: str) -> dict[str, Any]:
    found = re.findall(r'<script type="text/plain" id="block-([^"]+)">([^<]*)</script>', text)
    return {name: unpacked(block) for name, block in found}


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
    mismatch_files.write(run, 2, groups, kept)
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
    (run / run_lock.NAME).touch()
    (run / "rollouts" / "step-000003.parquet").write_bytes(b"PAR1")
    other = make_group(0).replace_schema_metadata({"gleaner.schema": "4"})
    pq.write_table(other, run / "rollouts" / "step-000004.parquet")
    head = blocks(page_of(run))["head"]
    assert head["runs"][0]["steps"] == [1, 2]
    said = "\n".join([*head["runs"][0]["remarks"], head["colours"]])
    for sentence in (
        "metrics.jsonl: 1 of 3 lines hold no whole step (first: line 3)",
        "plan.json cannot be read; it may be half written",
        "config.yaml is missing",
        "step-000003.parquet cannot be read",
        "step-000004.parquet cannot be read: rollout table: schema version must be 3, got 4",
        "Tokens are not coloured: tokenizer.json of the model is not on this machine",
    ):
        assert sentence in said


def test_a_run_that_was_killed_has_ended_though_its_lock_file_is_there(run: Path) -> None:
    with run_lock.held(run):
        assert not blocks(page_of(run))["head"]["runs"][0]["remarks"]
        left = (run / run_lock.NAME).read_text()
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    (run / run_lock.NAME).write_text(left.replace(f'"pid": {os.getpid()}', f'"pid": {dead}'))
    assert blocks(page_of(run))["head"]["runs"][0]["remarks"][0].startswith("The run ended at step 2 of 9")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "must be a run folder such as runs/demo-seed0" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "has neither metrics.jsonl nor rollouts/" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--limit", "many"]) == 2
    assert capsys.readouterr().err.startswith("error: --limit: ")


def test_live_waits_for_the_first_step_of_a_run_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / run_lock.NAME).touch()
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


def test_steps_are_taken_from_coarse_to_fine() -> None:
    assert list(spread(5)) == [0, 4, 2, 1, 3]
    for count in range(40):
        assert sorted(spread(count)) == list(range(count))


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


def test_the_mismatch_of_a_step_is_shown_once_it_was_trained(run: Path, served: LiveServer) -> None:
    def shown() -> bool:
        asked(served, f"/{served.key}/head")
        (group, _) = unpacked(asked(served, f"/{served.key}/step-1")[1])
        return "mismatch" in group["completions"][0]

    groups = [make_group(2 + i, completion=[HOSTILE, "4"]) for i in (0, 1)]
    assert not shown()
    mismatch_files.write(run, 1, groups, pa.array([[0.5, 0.25]] * 4, pa.list_(pa.float16())))
    assert shown()


def test_only_who_has_the_key_and_the_right_host_is_served(served: LiveServer) -> None:
    assert asked(served, "/")[0] == 404
    assert asked(served, "*")[0] == 404
    assert asked(served, "/wrong/head")[0] == 404
    assert asked(served, f"/{served.key}/../head")[0] == 404
    assert asked(served, f"/{served.key}/head", host="rebound.example")[0] == 403
