"""`gleaner report --terminal` by textual's own pilot: what is shown, the keys, a run that goes on, hostile text."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable

from learner.tools.cli import main
from learner.tools.terminal import STEPS, Curves, RunApp
from rollout import ledger
from rollout.fakes import make_group

HOSTILE = "[red]x[/] [@click=app.quit]y[/]\x1b]0;owned\x07\u202e\x00 \u05d0"
SHOWN = r"[red]x[/] [@click=app.quit]y[/]\x1b]0;owned\x07\u202e\x00"
FAILED = "reward 'tail': error: ValueError: [b]no[/b]\x1b[2J"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of two groups, all of it by somebody who wants to be obeyed; problem 3's second completion failed."""
    folder = tmp_path / "[red]run"
    folder.mkdir()
    for step in (1, 2):
        add(folder, step)
    (folder / "config.yaml").write_text("steps: 9\n")
    return folder


def add(folder: Path, step: int) -> None:
    line = {"step": step, "at": 0.0, "reward/mean": step / 4, "reward/[b]own": 1.0, "policy/entropy": None}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    problem = json.dumps({"messages": f"{HOSTILE} question", "columns": {"answer": "[i]4"}})
    groups = []
    for position in (2 * step - 2, 2 * step - 1):
        failed = position == 3
        groups.append(
            make_group(
                position, rewards=[position / 4, None if failed else 0.0], completion=[HOSTILE, "4"],
                problem=[problem] * 2, reward_error=[None, FAILED if failed else None],
            )
        )  # fmt: skip
    ledger.write(folder / "rollouts", step, groups)


def screen(app: RunApp) -> str:
    """Its text, a run of one style after the other."""
    parts = re.findall(r"<text[^>]*>([^<]*)</text>", app.export_screenshot())
    return html.unescape(" ".join(parts)).replace("\xa0", " ")


def cells(app: RunApp, table: str) -> list[list[str]]:
    found: DataTable[Any] = app.screen.query_one(f"#{table}", DataTable)
    return [[str(cell) for cell in found.get_row_at(i)] for i in range(found.row_count)]


async def test_a_run_is_read_by_keys_alone(run: Path) -> None:
    (run / "phases.jsonl").write_text('{"at": 9.0, "wall": 1.5, "Ray": 0.5, "end": 1.0}\n')
    app = RunApp(run)
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause()
        assert app.screen.query_one(Curves).shown == ["reward/mean", "policy/entropy", "reward/[b]own"]
        assert "step 2: 2 of 2 groups, as trained" in screen(app)
        assert "The run ended at step 2 of 9: it failed or was stopped" in screen(app)  # beside it, not in its place
        assert "no step  1.5 s: start-up 0.5 (preflight 0.0, Ray 0.5, processes 0.0), end 1.0" in screen(app)
        assert [row[:2] for row in cells(app, "steps")] == [["2", "0.5"], ["1", "0.25"]]
        assert [row[0] for row in cells(app, "groups")] == ["train-2", "train-3"]
        assert cells(app, "groups")[1][1:5] == ["0.75", "0.75", "0.75", "1"]
        await pilot.press("down")
        await pilot.pause()
        assert [row[0] for row in cells(app, "groups")] == ["train-0", "train-1"]
        await pilot.press("up", "enter", "o", "o")  # lowest, then highest reward
        assert [row[0] for row in cells(app, "groups")] == ["train-3", "train-2"]
        await pilot.press("f")
        assert [row[0] for row in cells(app, "groups")] == ["train-3"]
        await pilot.press("f", "slash", *"in-2", "enter")
        assert [row[0] for row in cells(app, "groups")] == ["train-2"]
        await pilot.press("slash", *["backspace"] * 4, "escape", "enter")
        assert "problem train-3  1 of 2" in screen(app)
        await pilot.press("n", "n")
        assert "problem train-2  2 of 2" in screen(app)
        await pilot.press("escape", "enter")
        assert "problem train-2  2 of 2" in screen(app)  # the list stands where one left


async def test_what_a_model_wrote_is_shown_and_not_obeyed(run: Path) -> None:
    app = RunApp(run)
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause()
        assert "[red]run  step 2 of 9" in screen(app)
        assert SHOWN in cells(app, "groups")[0][5]
        await pilot.press("enter", "down", "enter")
        seen = screen(app)
        assert seen.count(SHOWN) == 2  # prompt and completion
        for said in ("[i]4", r"ValueError: [b]no[/b]\x1b[2J"):
            assert said in seen
        assert not re.search("[\x00\x07\x1b\u202e]", seen)


async def test_a_run_that_is_being_written_is_followed(run: Path) -> None:
    app = RunApp(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        add(run, 3)
        (run / "rollouts" / "step-000004.parquet").write_bytes(b"PAR1")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "reward/me')
        await app.look()
        await pilot.pause()
        assert [row[0] for row in cells(app, "steps")] == ["4", "3", "2", "1"]
        assert cells(app, "groups") == []
        await pilot.press("down")
        await pilot.pause()
        assert [row[0] for row in cells(app, "groups")] == ["train-4", "train-5"]
        add(run, 4)
        await app.look()
        await pilot.pause()
        assert [row[0] for row in cells(app, "groups")] == ["train-4", "train-5"]  # what is looked at stays


async def test_the_numbers_of_a_step_come_after_its_rollouts(run: Path) -> None:
    app = RunApp(run)
    async with app.run_test(size=(120, 40)) as pilot:
        ledger.write(run / "rollouts", 3, [make_group(6)])
        await app.look()
        await pilot.pause()
        assert cells(app, "steps")[0] == ["3", *[""] * len(STEPS)]
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "reward/mean": 0.75}\n')
        await app.look()
        await pilot.pause()
        assert "0.75" in cells(app, "steps")[0]


def test_what_is_not_there_is_said_before(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", str(tmp_path / "absent"), "--terminal"]) == 2
    assert "must be a run folder such as runs/demo-seed0" in capsys.readouterr().err
    assert main(["report", str(run), "--terminal", "--live"]) == 2
    assert "--live: is of the page, and does not go with --terminal" in capsys.readouterr().err
    assert main(["report", str(run), "--terminal"]) == 1
    assert "must be a terminal, and the output goes elsewhere" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith(("textual", "learner.tools.terminal"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    assert main(["report", str(run), "--terminal"]) == 1
    assert capsys.readouterr().err == "error: --terminal needs textual: pip install 'gleaner-rl[terminal]'\n"
