"""gleaner init: what it writes is a run that can start, and it overwrites nothing."""

from pathlib import Path

import pytest

from learner.config.load import load_config
from learner.tools.cli import main


def test_what_it_writes_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That such a run starts and learns shows tests/documented, by the commands of docs/quickstart.md."""
    folder = tmp_path / "new"
    assert main(["init", str(folder)]) == 0
    assert f"cd {folder} && gleaner train --config config.yaml --dry-run" in capsys.readouterr().out
    assert load_config(str(folder / "config.yaml"), []).data.path.endswith("data.jsonl")
    assert len((folder / "data.jsonl").read_text().splitlines()) == 8


def test_a_model_of_one_s_own(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path), "--model", "org/name: it"]) == 0
    config = load_config(str(tmp_path / "config.yaml"), [])
    assert (config.model.path, config.model.dtype) == ("org/name: it", "bfloat16")


def test_a_model_s_folder_is_found_from_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/q").mkdir(parents=True)
    assert main(["init", "new", "--model", "models/q"]) == 0
    assert load_config("new/config.yaml", []).model.path == str(tmp_path / "models" / "q")


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.jsonl").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "holds data.jsonl; give another folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["data.jsonl"]
    assert main(["init", str(tmp_path / "data.jsonl" / "below")]) == 2
    assert capsys.readouterr().err.startswith("error: FOLDER: ")
