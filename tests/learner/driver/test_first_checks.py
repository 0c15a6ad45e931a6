"""Mistakes that cost nothing to find are told together, before any code of the model is loaded."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow.parquet import write_table

from cluster.errors import WrongInput
from learner.config.load import WrongSettings, load_config
from learner.driver import checkpoint, preflight
from learner.driver.memory import cards_of
from learner.main import main
from rollout.data import files, sources

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples/tiny-arithmetic"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that is in order, in a working directory of its own; each call of its reward leaves a mark."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from pathlib import Path\n"
        "def seen(completions, answer, **columns):\n"
        "    with Path('calls').open('a') as calls:\n"
        "        calls.write(type(completions[0]).__name__ + '\\n')\n"
        "    return [float(answer[0]), 0.0]\n"
        "def halves(completions, half, **columns):\n    return half\n"
    )
    Path("data.csv").write_text("question,answer\n" + "".join(f"{i} + 1,{i + 1}\n" for i in range(30)))
    config: dict[str, Any] = {
        "model": {"path": str(TINY), "dtype": "float32"},
        "data": {"path": "data.csv"},
        "rewards": ["mine.py:seen"],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


TOGETHER = {
    "files of every section": (
        ["data.eval.path=held.csv", "rewards=[mine.py:seen,yours.py:seen]", "model.adapter=nowhere"],
        ["error: model.adapter: .*nowhere", "error: data.eval.path: .*held.csv.*data.csv", "error: reward .*yours.py"],
    ),
    "columns, and rewards that ask for others": (
        ["data.eval.path=data.csv", "data.eval.split=test", "rewards=[mine.py:halves,mine.py:quarters]"],
        ["error: data.eval.split: .*got 'test'", "error: reward 'halves'.*half", "error: reward 'quarters'.*halves"],
    ),
    "keys, and what other keys name": (
        ["rollout.max_promt_length=64", "rewards=[mine.py:halves]"],
        ["config: rollout.max_promt_length: .*max_prompt_length", "error: reward 'halves'.*half"],
    ),
    "a rule between settings, and a column": (
        ["steps=3", "epochs=1", "data.prompt=query"],
        ["config: steps: does not go with epochs", "error: data.prompt: .*'query'; columns are question, answer"],
    ),
    "a wrong key of a section hides no missing file of it": (
        ["data.shufle=false", "data.path=dada.csv", "rewards.0.weight=much"],
        ["config: rewards.0.weight", "config: data.shufle: .*shuffle", "error: data.path: .*dada.csv.*data.csv"],
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_mistakes_of_all_sections_are_told_together(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, patterns = TOGETHER[case]
    assert main(["--config", "config.yaml", *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(patterns), lines
    for pattern in patterns:
        assert any(re.match(pattern, line) for line in lines), (pattern, lines)
    assert not Path("runs").exists()


@pytest.mark.parametrize("more", [["data.path=dada.csv"], ["rewards=[mine.py:halves]", "lerner.mode=full"]])
def test_they_are_told_without_the_code_of_a_model(more: list[str]) -> None:
    code = (
        "import sys; from learner.main import main\n"
        f"code = main({['--config', 'config.yaml', *more]!r})\n"
        "print(code, sorted({'torch', 'transformers', 'datasets', 'ray', 'vllm'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["2 []"], done.stdout + done.stderr


@pytest.mark.parametrize(("template", "given"), [("auto", "list"), ("none", "str")])
def test_a_function_is_tried_once_before_a_run(template: str, given: str) -> None:
    Path("calls").touch()
    preflight.prepare(load_config("config.yaml", [f"data.chat_template={template}"]))
    assert Path("calls").read_text().split() == [given]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", b"a,b\n1,00\n2,00\n3,00\nx,01\n"),  # a column of texts, by its last row
        ("rows.tsv", b"a\tb\n1\t2\n"),
        ("rows.jsonl", b'{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a": 4, "b": 5}\n'),
        ("rows.json", b'[{"a": 1}, {"a": 2}]'),
    ],
)
def test_the_first_rows_are_as_in_a_run_or_said_not_to_be(
    name: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(name).write_bytes(content)
    whole = list(sources.read(name, None, {}, None, 0))[:3]
    assert sources.first_rows(name, None, {}, None) == (whole, True)
    assert sources.first_rows(name, None, {}, 1) == (list(sources.read(name, None, {}, 1, 0)), True)
    monkeypatch.setattr(files, "SMALL", 5)
    begun = sources.first_rows(name, None, {}, None)
    assert not begun.whole
    assert [*map(list, begun.rows)] == ([] if "json" in name else [*map(list, whole)])


def test_of_parquet_the_columns_are_known_and_what_is_in_them_is_the_librarys_to_say() -> None:
    write_table(pa.table({"a": [[1.5], None] * 9, "b": ["x", "y"] * 9}), "rows.parquet")
    rows, whole = sources.first_rows("rows.parquet", "train[5:]", {}, None)
    assert (list(rows[0]), whole) == (["a", "b"], False)
    begun = preflight.look(load_config("config.yaml", ["data.path=rows.parquet", "data.prompt=b"]))
    assert (begun.wrong, begun.group) == ((), None)
    begun = preflight.look(load_config("config.yaml", ["data.path=rows.parquet", "data.prompt=c"]))
    assert "there is no column 'c'; columns are a, b" in begun.wrong[0]
    Path("rows.parquet").write_bytes(b"PAR1")
    assert sources.first_rows("rows.parquet", None, {}, None) == ((), False)  # `read` says why


def test_cells_of_a_large_csv_are_not_judged_by_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SMALL", 5)
    Path("data.csv").write_text("question,answer\n1984,a\n2024,b\n7,c\nWhen?,d\n")
    assert preflight.look(load_config("config.yaml", [])).wrong == ()


@pytest.mark.parametrize(("more", "tried"), [({}, True), ({"env": ["OPENAI_API_KEY"]}, False)])
def test_functions_that_may_ask_somebody_are_not_tried_for_a_mistyped_key(more: dict[str, Any], tried: bool) -> None:
    reward = json.dumps({"use": "mine.py:seen", **more})
    assert main(["--config", "config.yaml", f"rewards=[{reward}]", "steps=0"]) == 2
    assert Path("calls").exists() == tried


def test_a_run_that_goes_on_needs_room_for_one_more_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        "config.yaml", ["learner.mode=full", "learner.optimizer.kind=adamw", "learner.learning_rate=1e-6"]
    )
    monkeypatch.setattr(preflight, "free_disk", lambda _: 10_000)
    (told,) = preflight.look(config).wrong
    assert "output_dir: must have room for 2 checkpoints, " in told
    monkeypatch.setattr(checkpoint, "listing", lambda folder: [folder / "step-000001"])
    (told,) = preflight.look(config).wrong
    assert "room for 1 checkpoint, " in told
    assert preflight.look(config, cards_of("h100")).wrong == ()  # of another machine
    monkeypatch.setattr(preflight, "free_disk", lambda _: 2**40)
    assert preflight.look(config).wrong == ()


@pytest.mark.parametrize("tree", [{"data": 3}, {"model": {}}, {"rewards": "x"}, {"data": {"path": ["a"]}}])
def test_what_leaves_no_configuration_is_told_by_itself(tree: dict[str, Any]) -> None:
    Path("config.yaml").write_text(yaml.safe_dump({**yaml.safe_load(Path("config.yaml").read_text()), **tree}))
    with pytest.raises(WrongInput) as caught:
        load_config("config.yaml", [])
    assert isinstance(caught.value, WrongSettings)
    others = caught.value.others()
    assert others is None or next(iter(tree)) not in others[1]
