"""`gleaner rewards try` on data: what reward functions say to reference answers, to nothing, and to what is given.
`gleaner rewards try`: saved rollouts scored with another reward, as training would score them.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from learner.tools import evaluation, reward_trial
from learner.tools.cli import main
from learner.tools.reward_trial import read_completions
from rollout import ledger
from rollout.data.model_files import template_in
from rollout.fakes import make_group
from tests.documented.blocks import ROOT

REWARDS = """
def exact(prompts, completions, answer, **columns):
    return [float(completion[0]["content"] == str(right)) for completion, right in zip(completions, answer)]


def tokens(completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def no_seven(completions, answer, **columns):
    if answer[0] == 7:
        raise ValueError("seven")
    return [None] * len(completions)
"""
Told = dict[str, Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARDS)
    rows = [{"question": f"What is {i} + 4?", "answer": i + 4} for i in range(7)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(ROOT / "examples" / "tiny-arithmetic")},
        "data": {"path": "train.jsonl"},
        "rewards": [{"use": "mine.py:exact", "weight": 2.0}, {"use": "mine.py:tokens", "weight": 0.5}],
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def tried(capsys: pytest.CaptureFixture[str], *words: str) -> Told:
    assert main(["rewards", "try", *words, "--json"]) == 0
    found: Told = json.loads(capsys.readouterr().out)
    return found


def rewards_of(found: Told, kind: str) -> list[float]:
    return [one["reward"] for one in found["completions"] if one["kind"] == kind]


def test_a_run_to_come(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weighted sums; the ids are those of the model's tokenizer, in which <answer> is one token."""
    lines = ['"5"', '["4", "<answer>"]', '{"completion": ""}']
    (here / "said.jsonl").write_text("\n".join(lines))
    found = tried(capsys, "--config", "run.yaml", "--completions", "said.jsonl", "--completion", "6")
    assert [one["id"] for one in found["completions"] if one["kind"] == "empty"] == ["train-0", "train-1", "train-2"]
    assert (rewards_of(found, "reference"), rewards_of(found, "empty")) == ([2.5] * 3, [0.0] * 3)
    assert rewards_of(found, "given") == [0.5, 0.5, 0.5, 0.5, 0.5, 2.5, 0.0]
    assert all(ms > 0 for one in found["functions"].values() for ms in one["ms"])
    alone = tried(capsys, "exact", "--config", "run.yaml", "--samples", "1", "--reference", "a{answer}")
    assert (rewards_of(alone, "reference"), alone["completions"][0]["completion"]) == ([0.0], "a4")
    assert list(alone["functions"]) == ["exact"]


def test_a_watch_is_shown_and_has_no_part_in_the_reward(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(Path("run.yaml").read_text())
    config["rewards"].append({"use": "mine.py:tokens", "watch": True, "name": "brief"})
    Path("watched.yaml").write_text(yaml.safe_dump(config))
    found, watched = (tried(capsys, "--config", f"{name}.yaml", "--completion", "6") for name in ("run", "watched"))
    assert [one["reward"] for one in watched["completions"]] == [one["reward"] for one in found["completions"]]
    assert {one["parts"]["brief"] for one in watched["completions"]} > {0.0}
    assert main(["rewards", "try", "--config", "watched.yaml"]) == 0
    assert "reward 'brief' is a watch: it has no part in the reward" in capsys.readouterr().out


def test_what_a_function_prints_is_not_in_the_json(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "loud.py").write_text(
        "import os\nprint('{')\n"
        "def loud(completions): print('by Python'); os.system('echo by a child'); return [1.0] * len(completions)\n"
    )
    assert main(["rewards", "try", "loud.py:loud", "--data", "train.jsonl", "--samples", "2", "--json"]) == 0
    told = capfd.readouterr()
    assert len(json.loads(told.out)["completions"]) == 4
    assert [told.err.count(line) for line in ("{", "by Python", "by a child")] == [1, 2, 2]


def test_a_line_ends_where_json_lines_say_so(tmp_path: Path) -> None:
    (tmp_path / "said.jsonl").write_text('"a\u2028b\x85c"\r\n\n["d"]\n', encoding="utf-8")
    assert read_completions(tmp_path / "said.jsonl") == [["a\u2028b\x85c"], ["d"]]


def test_one_function_on_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "try", "number", "--data", "train.jsonl", "--reference", "{answer} or 1"]) == 0
    told = capsys.readouterr().out
    assert "train-4  user: What is 4 + 4?\n  reference  number 0       reward 0       8 or 1\n" in told
    assert "number  mean: reference 0  empty 0; a call: " in told
    assert "no reward function tells a reference answer from an empty completion; give it the form" in told
    assert "completion_ids are the bytes of the texts here" in told


def test_what_fails_is_shown_in_its_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "try", "mine.py:no_seven", "--data", "train.jsonl", "--samples", "4"]) == 1
    told = capsys.readouterr().out
    assert "reference  no_seven none    reward none    6" in told
    assert "reference  no_seven failed  reward error   7" in told
    assert told.count("ValueError: seven (mine.py, line 12)") == 1


def test_what_the_model_says_is_tried_too(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generators are those of gleaner eval; here stands what they answer."""
    asked: dict[str, Any] = {}

    class Answered:
        rows = pa.concat_tables(
            make_group(i, rewards=[0.0] * 2, problem_id=[f"train-{i}"] * 2, completion=[said, "x"])
            for i, said in enumerate("45")
        )

    def evaluate(config: Any, **options: Any) -> Answered:
        asked.update(options, size=config.data.size)
        return Answered()

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    found = tried(capsys, "exact", "--config", "run.yaml", "--samples", "2", "--generate", "2")
    assert rewards_of(found, "generated") == [2.0, 0.0, 2.0, 0.0]
    assert (asked["size"], asked["samples"], asked["held_out"]) == (2, 1, False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("number", "--config, --data or --rollouts: one is required"),
        ("--data train.jsonl", "REWARD: required without --config"),
        ("--config run.yaml --timeout 3", "--timeout: is of one function"),
        ("number --data train.jsonl --steps 2", "--steps: goes with --rollouts alone"),
        ("number --rollouts r --data d --samples 3", "--data, --samples: does not go with --rollouts"),
        ("number --data train.jsonl --reference solution", "--reference: must be a column .* no column 'solution'"),
        ("number --data train.jsonl --completions mine.py", "--completions: line 1 of mine.py must be in JSON a text"),
        ("number --data train.jsonl --completions none", "--completions: none cannot be read"),
        ("number --data train.jsonl --generate 2", "--generate: wants --config"),
        ("number --data gone.jsonl", "data.path: file must exist, got gone.jsonl; did you mean train.jsonl"),
        ("nubmer --data train.jsonl", "'nubmer' is no built-in reward; did you mean 'number'"),
        ("number --data train.jsonl --arg x", "--arg: must be written KEY=VALUE, got 'x'"),
        ("number --data train.jsonl --arg seed=99999999999999999999", "--arg: a whole number must lie within 64 bits"),
    ],
)
def test_what_is_wrong_is_said(here: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    assert main(["rewards", "try", *words.split()]) == 2
    told = capsys.readouterr()
    assert re.search(f"^error: .*{sentence}", told.err), told.err
    assert told.out == ""


def test_a_template_that_opens_a_tag_is_told_and_known(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(ROOT / "examples" / "tiny-arithmetic", here / "model")
    file = model / "chat_template.jinja"
    file.write_text(file.read_text() + "{% if add_generation_prompt %}<reasoning>{% endif %}")
    config = yaml.safe_load(Path("run.yaml").read_text())
    config["model"]["path"] = str(model)
    thinks = {"use": "format", "name": "thinks", "args": {"tags": ["think", "answer"]}}
    config["rewards"] = ["format", thinks, {"use": "regex", "args": {"pattern": "(?s)^<reasoning>.*</answer>$"}}]
    Path("opens.yaml").write_text(yaml.safe_dump(config))
    words = ["--config", "opens.yaml", "--samples", "1", "--completion", "4</reasoning><answer>4</answer>"]
    assert main(["rewards", "try", *words]) == 0
    told = capsys.readouterr().out
    assert "data: prompts end with '<reasoning>', so that completions begin inside of that tag" in told
    assert "rewards.1: format wants the tags think, answer and nothing around them, and completions begin" in told
    assert "rewards.0: " not in told
    assert "rewards.2: args.pattern '(?s)^<reasoning>.*</answer>$' is held against completions without" in told
    (given,) = [one for one in tried(capsys, *words)["completions"] if one["kind"] == "given"]
    assert given["parts"] == {"format": 1.0, "thinks": 0.0, "regex": 0.0}
    assert main(["rewards", "try", "--config", "run.yaml", "--samples", "1"]) == 0
    assert "prompts end with" not in capsys.readouterr().out


@pytest.mark.parametrize("what", ["long", "latin-1", "fifo"])
def test_a_chat_template_that_cannot_be_read_is_said(here: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    model = shutil.copytree(ROOT / "examples" / "tiny-arithmetic", here / "model")
    file = model / "chat_template.jinja"
    file.unlink()
    if what == "fifo":
        os.mkfifo(file)
    else:
        file.write_bytes(b"{#" + b"x" * 2**20 + b"#}" if what == "long" else "{# é #}".encode("latin-1"))
    config = yaml.safe_load(Path("run.yaml").read_text())
    config["model"]["path"] = str(model)
    Path("other.yaml").write_text(yaml.safe_dump(config))
    assert main(["rewards", "try", "--config", "other.yaml", "--samples", "1"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert re.fullmatch(f"error: model.path: {re.escape(str(file))} must .*; copy it again", line), line


def test_of_several_templates_the_default_one_counts(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "{# other #}"}, {"name": "default", "template": "{# this #}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert template_in(tmp_path) == "{# this #}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[:1]}))
    assert template_in(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("{# a file #}")
    assert template_in(tmp_path) == "{# a file #}"


@pytest.mark.parametrize(("ms", "text"), [(0.0712, "0.0712 ms"), (999.4, "999 ms"), (45e3, "45 s"), (2.5e6, "2500 s")])
def test_a_time_is_told_in_a_unit_in_which_it_is_short(ms: float, text: str) -> None:
    assert reward_trial.duration(ms) == text


# `gleaner rewards try`: saved rollouts scored with another reward, as training would score them.

REWARD = '''
def by_length(prompts, completions, **columns):
    """Even lengths are good."""
    return [float(len(completion) % 2 == 0) for completion in completions]

def broken(prompts, completions, **columns):
    return [1.0]


calls = []


def broken_later(prompts, completions, **columns):
    calls.append(1)
    return [1.0] * (len(completions) if len(calls) == 1 else 1)
'''


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARD)
    for step in (1, 2):
        groups = [make_group(2 * step + i, rewards=[0.0, 1.0], completion=["xx", "xxx"]) for i in range(2)]
        ledger.write(Path("rollouts"), step, groups)
    return Path("rollouts")


def test_the_distribution_is_shown(rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "try", "mine.py:by_length", "--rollouts", str(rollouts), "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "mine.py:by_length: 4 completions of 2 groups, step-000002.parquet to step-000002.parquet" in printed
    assert "outcomes   ok 4" in printed
    assert "mean 0.5000  std 0.5000  min 0.0000  max 1.0000" in printed
    assert "highest  1.0000  xx\nlowest   0.0000  xxx\n" in printed
    assert "correlation with the recorded reward: -1.000" in printed  # the recorded one likes the longer


def test_what_is_wrong_is_said_rescore(rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "try", "mine.py:broken", "--rollouts", str(rollouts)]) == 2
    assert "returned 1 values for 2 completions" in capsys.readouterr().err
    assert main(["rewards", "try", "mine.py:broken_later", "--rollouts", str(rollouts)]) == 0
    assert "outcomes   error 6, ok 2" in capsys.readouterr().out
    assert main(["rewards", "try", "mine.py:by_length", "--rollouts", "nowhere"]) == 2
    assert "nowhere holds no step-*.parquet" in capsys.readouterr().err
    assert main(["rewards", "try", "mine.py:absent", "--rollouts", str(rollouts)]) == 2
    assert "absent" in capsys.readouterr().err
    assert main(["rewards", "try", "format", "--rollouts", str(rollouts), "--timeout", "0"]) == 2
    assert capsys.readouterr().err == "error: timeout_s: Input should be greater than 0 (got 0.0)\n"
    (rollouts / "step-000002.parquet").write_bytes(b"PAR1 cut short")
    assert main(["rewards", "try", "format", "--rollouts", str(rollouts)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-000002.parquet cannot be read" in line
