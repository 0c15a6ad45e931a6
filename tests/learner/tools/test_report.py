"""`gleaner report`: whole and broken run folders, and what a page holds."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster import files as run_lock
from learner.driver import record
from learner.tools.cli import main
from learner.tools.report.page import Words, bytes_of, read_step, spread, unpacked
from learner.tools.report.write import report
from rollout import ledger
from rollout.env.play import Played
from rollout.fakes import make_group
from tests.learner.tools.reports import HOSTILE, MODEL, blocks, report_run

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
    other = make_group(0).replace_schema_metadata({"gleaner.schema": "5"})
    pq.write_table(other, run / "rollouts" / "step-000004.parquet")
    head = blocks(page_of(run))["head"]
    assert head["runs"][0]["steps"] == [1, 2]
    said = "\n".join([*head["runs"][0]["remarks"], head["colours"]])
    for sentence in (
        "metrics.jsonl: 1 of 3 lines hold no whole step (first: line 3)",
        "plan.json cannot be read; it may be half written",
        "config.yaml is missing",
        "step-000003.parquet cannot be read",
        "step-000004.parquet cannot be read: rollout table: schema version must be 4, got 5",
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
