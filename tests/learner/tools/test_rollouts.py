"""gleaner rollouts show: what is chosen, and that nothing a model wrote reaches the terminal as a command. gleaner
init: what it writes is a run that can start, and it overwrites nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import machine
from cluster.machine import Card
from learner.config.load import load_config
from learner.driver.console import escaped
from learner.tools.cli import main
from rollout import ledger
from rollout.fakes import make_group

HOSTILE = "\x1b]0;pwned\x07[red]bold[/red]\u202egnihtemos\x9b31m\rover"
TURNS = [{"role": "assistant", "content": "low"}, {"role": "user", "content": "higher"}]


@pytest.fixture
def run(tmp_path: Path) -> str:
    folder = tmp_path / "run" / "rollouts"
    ledger.write(folder, 1, [make_group(1, rewards=[0.0, 1.0], completion=["first", HOSTILE])])
    groups = [make_group(position, rewards=[position / 8, None], completion=["x", "y"]) for position in (2, 3)]
    groups.append(make_group(4, messages=[json.dumps(TURNS), None]))
    ledger.write(folder, 2, groups)
    return str(folder.parent)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["rollouts", "show", *words, "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_a_choice_is_that_choice(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(row["problem_id"], row["sample"]) for row in shown(capsys, run, "--problem", "train-3")] == [
        ("train-3", 0),
        ("train-3", 1),
    ]
    (best,), (worst,) = (shown(capsys, run, which) for which in ("--best", "--worst"))
    assert (best["problem_id"], best["reward"]) == ("train-4", 1.0)
    assert (worst["problem_id"], worst["reward"]) == ("train-4", 0.0)
    assert [row["reward"] for row in shown(capsys, run, "--sample", "0")] == [0.25, 0.375, 1.0]
    (one,) = shown(capsys, f"{run}/rollouts", "--step", "1", "--sample", "1")
    assert (one["completion"], one["parts"], one["tokens"], one["answer"]) == (HOSTILE, {"vowels": 1.0}, 2, "4")


def test_the_terminal_gets_no_command_of_a_model_s(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "show", run, "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert not set(out) & set("\x1b\x07\x9b\r\u202e")
    flat = "".join(line.strip("│ ") for line in out.splitlines())
    assert r"\x1b]0;pwned\x07[red]bold[/red]\u202egnihtemos\x9b31m\rover" in flat
    assert "question 1" in out
    assert "vowels 1" in out
    assert escaped("a\tb\n日本 é") == "a\\tb\n日本 é"


def test_nothing_is_left_out_of_completions_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # two beside each other
    words = ["<reasoning>8-5=3+1=4</reasoning><answer>4</answer>ab", "short"]
    ledger.write(tmp_path, 1, [make_group(1, completion=words)])
    assert main(["rollouts", "show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    left = [line[1:].partition("│")[0].strip() for line in out.splitlines() if line.startswith("│")]
    assert "".join(left) == words[0]


def test_turns_and_failures_are_told(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "show", run, "--problem", "train-4"]) == 0
    out = capsys.readouterr().out
    assert "assistant  low" in out
    assert "user  higher" in out
    assert main(["rollouts", "show", run, "--groups", "2"]) == 0
    out = capsys.readouterr().out
    assert ("train-2" in out, "train-3" in out, "train-4" in out) == (True, True, False)
    assert "reward error" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--step", "7"], "--step: must be one from 1 to 2 that is there, got 7"),
        (["--problem", "nope"], "--problem: must be one of this step, train-2, train-3, train-4, got nope"),
        (["--sample", "9"], "--sample: must be at most 1, got 9"),
        (["--best", "--worst"], "--best: does not go with --worst"),
    ],
)
def test_what_is_not_there_is_said(run: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "show", run, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_without_rollouts_and_a_file_that_is_cut(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "show", "nowhere"]) == 2
    assert "nowhere holds no step-*.parquet" in capsys.readouterr().err
    Path(run, "rollouts", "step-000003.parquet").write_bytes(b"PAR1 cut short")
    assert main(["rollouts", "show", run]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-000003.parquet cannot be read" in line


# gleaner init: what it writes is a run that can start, and it overwrites nothing.


def test_what_it_writes_is_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That such a run starts and learns shows tests/documented, by the commands of docs/quickstart.md."""
    folder = tmp_path / "new"
    assert main(["init", str(folder)]) == 0
    assert f"cd {folder} && gleaner train --config config.yaml --dry-run" in capsys.readouterr().out
    assert load_config(str(folder / "config.yaml"), []).data.path.endswith("data.jsonl")
    assert len((folder / "data.jsonl").read_text().splitlines()) == 100


@pytest.mark.parametrize(
    ("capability", "flags", "dtype"),
    [
        ((9, 0), "avx2", "bfloat16"), ((7, 5), "avx512_bf16", "float16"), (None, "avx2 amx_bf16", "bfloat16"),
        (None, "avx2", "float32"),
    ],
)  # fmt: skip
def test_a_model_of_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, flags: str, dtype: str
) -> None:
    """It is asked for what the rewards check, in the type that the machine computes in."""
    cards = [] if capability is None else [Card("card", "a", 2**34, 2**34, capability)]
    monkeypatch.setattr(machine, "usable_cards", lambda: cards)
    monkeypatch.setattr(machine, "processor", {"flags": flags}.get)
    assert main(["init", str(tmp_path), "--model", "org/name: it"]) == 0
    config = load_config(str(tmp_path / "config.yaml"), [], len(cards))
    assert (config.model.path, config.model.dtype) == ("org/name: it", dtype)
    assert "format" in [reward.use for reward in config.rewards]
    assert "<reasoning>" in str(config.data.system)
    assert (config.cluster.gpus.generator > 0) == bool(cards)


@pytest.mark.parametrize(("card", "dtype"), [("t4", "float16"), ("rtx4090", "bfloat16"), ("24GiB", "bfloat16")])
def test_a_model_for_a_card_of_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], card: str, dtype: str
) -> None:
    assert main(["init", str(tmp_path), "--model", "org/name", "--gpu", card]) == 0
    assert load_config(str(tmp_path / "config.yaml"), []).model.dtype == dtype
    capsys.readouterr()
    assert main(["init", str(tmp_path / "other"), "--model", "org/name", "--gpu", "rtx490"]) == 2
    assert capsys.readouterr().err.startswith("error: --gpu: must be a card or its size")
    assert main(["init", str(tmp_path / "other"), "--gpu", "t4"]) == 2
    assert "--gpu: goes with --model" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


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
