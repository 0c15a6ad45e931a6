"""gleaner init: what it writes is a run that can start, and it overwrites nothing."""

from pathlib import Path

import pytest

from learner.tools.cli import main


def test_what_it_writes_passes_every_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "new"]) == 0
    assert "cd new && gleaner train --config config.yaml --dry-run" in capsys.readouterr().out
    monkeypatch.chdir("new")
    assert main(["train", "--config", "config.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "problems     7 to train on, 1 held out" in out
    assert "model, data and rewards are in order" in out


def test_a_model_of_one_s_own(tmp_path: Path) -> None:
    from learner.driver.config_io import load

    assert main(["init", str(tmp_path), "--model", "org/name: it"]) == 0
    config = load(str(tmp_path / "config.yaml"), [])
    assert (config.model.path, config.model.dtype) == ("org/name: it", "bfloat16")


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.jsonl").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "holds data.jsonl; give another folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["data.jsonl"]
    assert main(["init", str(tmp_path / "data.jsonl" / "below")]) == 2
    assert capsys.readouterr().err.startswith("error: FOLDER: ")
