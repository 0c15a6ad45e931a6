"""What a call is given -> the files of its run; what is wrong with it, before any process starts."""

import datetime
import inspect
import json
import os
import re
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml

from learner import InputError, TrainError, TrainResult, evaluate, plan, train
from learner.api.calls import MetricsLines
from learner.api.settings import ARGUMENTS, Inputs, checked, tree_of
from learner.tools.evaluation import Estimate
from rewards.loader import load
from rollout import ledger
from rollout.data import files
from rollout.fakes import make_group

ROWS = [{"question": f"{a}?", "answer": a, "meta": {"tags": ["x", "y"], "deep": {"n": [a]}}} for a in range(3)]


def accuracy(completions: Any, **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def written(folder: Path, **given: Any) -> dict[str, Any]:
    """The configuration that the run is started with."""
    inputs = Inputs()
    datasets_of = {"dataset": given.pop("dataset", ROWS), "eval_dataset": given.pop("eval_dataset", None)}
    rewards = given.pop("rewards", [accuracy])
    tree = tree_of(given.pop("config", None), given.pop("model", "some/model"), rewards, datasets_of, given, inputs)
    checked(tree)
    return inputs.write(folder, tree)


def test_a_call_is_a_configuration_with_its_inputs_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("steps: 7\nlearner: {learning_rate: 1.0e-4, lora: {rank: 8}}")
    found = written(
        tmp_path / "inputs",
        config=tmp_path / "base.yaml",
        rewards=["format", {"use": accuracy, "weight": np.float32(0.5)}, lambda completions: [0.0]],
        rollout={"num_generations": np.int64(4)},
        env={"use": "tools", "args": {"functions": [accuracy]}},
        **{"learner.lora.rank": 16, "rollout.stop": ("</a>",)},
    )
    assert (found["steps"], found["learner"]) == (7, {"learning_rate": 1e-4, "lora": {"rank": 16}})
    assert found["rollout"] == {"num_generations": 4, "stop": ["</a>"]}
    assert [one.get("weight") for one in found["rewards"]] == [None, 0.5, None]
    assert found["rewards"][1]["use"] == found["env"]["args"]["functions"][0]
    assert load(found["rewards"][1]["use"])(completions=[1, 2]) == [1.0, 1.0]
    assert found["rewards"][2]["use"].endswith("/lambda.pickle:lambda")


def test_dotted_settings_reach_into_what_the_arguments_give(tmp_path: Path) -> None:
    dotted = {"model.dtype": "float32", "rewards.1.weight": 5.0, "data.size": 2, "data.eval": {"every": 0}}
    found = written(tmp_path / "inputs", model={"path": "some/model"}, rewards=[accuracy, "number"], **dotted)
    assert found["model"] == {"path": "some/model", "dtype": "float32"}
    assert found["rewards"][1] == {"use": "number", "weight": 5.0}
    assert (found["data"]["size"], found["data"]["eval"]) == (2, {"every": 0})
    assert found["data"]["path"].endswith("train.jsonl")


class Label(StrEnum):
    YES = "yes"


def test_a_text_of_an_enum_is_its_value(tmp_path: Path) -> None:
    rows = [{"question": "?", "answer": Label.YES}]
    found = written(tmp_path / "inputs", dataset=rows)
    assert json.loads(Path(found["data"]["path"]).read_text())["answer"] == "yes"


def test_how_a_files_own_data_is_read_says_nothing_of_other_data(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {path: rg:leg_counting, split: test, args: {max_animals: 3}, size: 9}")
    found = written(tmp_path / "inputs", config=tmp_path / "base.yaml")
    assert found["data"].keys() == {"path", "size"}
    found = written(tmp_path / "more", config=tmp_path / "base.yaml", **{"data.split": "train[:2]"})
    assert found["data"]["split"] == "train[:2]"
    assert written(tmp_path / "own", config=tmp_path / "base.yaml", dataset=None)["data"]["args"] == {"max_animals": 3}


@pytest.mark.parametrize("given", [{}, {"eval_dataset": ROWS[:1]}, {"dataset": None, "eval_dataset": ROWS[:1]}])
def test_a_files_held_out_problems_are_not_those_of_other_data(tmp_path: Path, given: dict[str, Any]) -> None:
    (tmp_path / "base.yaml").write_text(
        "data: {path: org/d, args: {name: main}, eval: {path: org/e, split: test, size: 9}}"
    )
    found = written(tmp_path / "inputs", config=tmp_path / "base.yaml", **given)["data"]["eval"]
    assert found.keys() == ({"size", "path"} if given else {"size"})
    assert "org" not in str(found)


@pytest.mark.parametrize("made", [list, datasets.Dataset.from_list])
def test_rows_are_read_as_they_were_given(tmp_path: Path, made: Any) -> None:
    for number in range(2):  # the same call: the same files
        found = written(tmp_path, dataset=made(ROWS), eval_dataset=made(ROWS[:1]))
        assert len(list(tmp_path.glob("*/*"))) == 3, number
    file = Path(found["data"]["path"])
    assert [*files.read_files([file], "train", {}, None, files.DATA)] == ROWS
    assert Path(found["data"]["eval"]["path"]).stem == "eval"


IN_A_CELL: dict[str, Any] = {"__name__": "__main__"}
STREAM = datasets.IterableDataset.from_generator(ROWS.__iter__)
exec("import threading\nLOCK = threading.Lock()\ndef logs(completions): return LOCK", IN_A_CELL)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"stepz": 3}, "^stepz: unknown key; did you mean steps?"),
        ({"on_stpe": print}, "^on_stpe: unknown key; did you mean on_step?"),
        ({"eval_datset": ROWS}, "^eval_datset: unknown key; did you mean eval_dataset?"),
        ({"learner.lora.ranc": 3, "steps": 0}, "(?s)steps: .*equal to 1.*\nlearner.lora.ranc: unknown key"),
        (
            {"train_dataset": datasets.Dataset.from_list(ROWS), "peft_config": object()},
            "(?s)^train_dataset: unknown key; docs/trl.md says of TRL's: dataset; .*\npeft_config: .* learner.lora",
        ),
        ({"rollout": {"top_p": 0.9, "temperature": 0.7}}, "structured_outputs: need rollout.temperature=1"),
        ({"learner": {"learning_rate": np.zeros(2)}}, "^learner.learning_rate: must be what .* got ndarray"),
        ({"model": object()}, "^model: must be a hub name or a folder, got object; .* save_pretrained"),
        ({"rewards": accuracy}, r"^rewards: must be a list, got function; write rewards=\[...\]"),
        ({"rewards": [IN_A_CELL["logs"]]}, "^rewards.0.use: logs cannot be sent .*: its variable LOCK is a lock"),
        ({"dataset": None}, "^data: required, but not given"),
        ({"dataset": STREAM}, "^dataset: must be a path, .* got IterableDataset; .* datasets.Dataset.from_gen"),
        ({"eval_dataset": STREAM}, "^eval_dataset: must be a path, a hub name, .* got IterableDataset; convert it"),
        ({"eval_dataset": {"first": ROWS, "second": ROWS}}, "^eval_dataset: must be a path, a hub name, .* got dict"),
        ({"dataset": {"train": ROWS}}, "^dataset: must be a path, a hub name, .* got dict"),
        ({"dataset": datasets.DatasetDict(train=datasets.Dataset.from_list([]))}, r"^dataset: .* dataset\['train'\]"),
        ({"eval_dataset": [{"at": datetime.date.min}]}, "^eval_dataset.0.at: must be what JSON holds .*, got date"),
        ({"dataset": [{"meta": {1: 2}}]}, "^dataset.0.meta: keys must be text, got 1; write '1'"),
        ({"config": "gone.yaml"}, "^--config gone.yaml: No such file"),
        ({"config": {"steps": 1}}, "^config: must be the path of a YAML file, got dict; give keys as arguments"),
        ({"data": {"system": accuracy}}, "^data.system: takes no function, got function; functions stand in rewards"),
        ({"rewards": [(accuracy, 2.0)]}, "^rewards.0.use.0: takes no function"),
        (
            {"dataset": datasets.Dataset.from_list(ROWS).with_transform(dict)},
            r"^dataset: has a transform \(set_transform\), which is not written; give dataset.map",
        ),
        ({"output_dir": "/dev/null/x"}, "^output_dir: /dev/null/x/run cannot be written"),
        ({"on_step": 3}, "^on_step: must be a plain function"),
        ({"data.path": "other.jsonl"}, "^data.path: is what the argument dataset gives as well; leave one of them out"),
        ({"rewards": [{"use": "number", "args": {"f": [accuracy]}}]}, "^rewards.0.args.f.0: args are values .* f=..."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=sentence) as caught:
        train(**{"model": "some/model", "rewards": ["number"], "dataset": ROWS, **given})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TrainError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("document", ["python.md", "trl.md"])
def test_the_examples_of_the_documents_are_calls_that_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    text = (Path(__file__).parents[3] / "docs" / document).read_text()
    (tmp_path / "train.jsonl").write_text('{"prompt": [{"role": "user", "content": "1?"}], "answer": "1"}\n')
    monkeypatch.chdir(tmp_path)
    calls = []

    def accepts(*given: Any, **settings: Any) -> Any:
        first = dict(zip(("model", "rewards", "dataset"), given, strict=False))
        calls.append(written(tmp_path / "inputs", **first, **settings))
        return TrainResult(tmp_path, None, None, [])

    monkeypatch.setattr("learner.api.calls.train", accepts)
    monkeypatch.setattr("learner.api.calls.evaluate", lambda *_, **__: Found())
    names = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if not block.startswith("# TRL"):
            exec(block, names)
    assert len(calls) == 1


class Found:
    """Any score."""

    metrics = dict.fromkeys(("greedy", "mean@4", "pass@4"), Estimate(0.5, 0.0, 1.0, 4))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"samples": -1}, "^samples: must be a whole number from 0, got -1"),
        ({"smaples": 2}, "^smaples: unknown key; did you mean samples?"),
        ({"limit": 0}, "^limit: must be a whole number from 1, or None for all, got 0"),
        ({"threshold": "1"}, "^threshold: must be a number, got '1'"),
        ({"threshold": float("nan")}, "^threshold: must be a number, got nan"),
        ({"run": 3}, "^run: must be a folder, got int"),
        ({"adapter": object()}, "^adapter: must be a folder, got object"),
        ({"run": "gone"}, "^run: must be what train returned, or a run folder .*, got gone"),
        ({"run": "gone", "config": "my.yaml"}, "^run: does not go with config"),
        ({"rewards": ["number"], "dataset": ROWS}, "^model: required, but not given"),
    ],
)
def test_what_is_wrong_with_an_evaluation_is_said(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        evaluate(**given)


def test_a_run_is_scored_as_it_was_learned_or_with_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("learner.api.calls._evaluated", lambda folder, asked: given.append(asked))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written(tmp_path / "inputs")))
    with pytest.raises(InputError, match="has neither adapter/ nor model/, so it has no checkpoint yet"):
        evaluate(run=tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    evaluate(run=tmp_path)
    evaluate("its/base", run=tmp_path)
    tree = yaml.safe_load((tmp_path / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree | {"model": {"path": "some/model", "revision": "v1"}}))
    evaluate(tmp_path, run=tmp_path)
    own: dict[str, Any] = {"model.revision": "v2"}
    evaluate("its/base", run=tmp_path, **own)
    evaluate("some/model", run=tmp_path)
    assert [one["adapter"] for one in given] == [str(tmp_path / "adapter"), None, None, None, None]
    models = [one["config"]["model"] for one in given]
    assert [model["path"] for model in models] == ["some/model", "its/base", str(tmp_path), "its/base", "some/model"]
    assert [model.get("revision") for model in models[2:]] == [None, "v2", "v1"]


def test_lines_of_metrics_come_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    row = {step: json.dumps({"step": step, "at": time.monotonic()}) + "\n" for step in (1, 2, 3)}
    file.write_text(row[1])
    lines = MetricsLines(file)
    assert lines.new() == []  # of the run before
    with file.open("a") as stream:
        stream.write(row[2] + row[3][:5])
    assert [line["step"] for line in lines.new()] == [2]
    (tmp_path / "new").write_text(row[1] + row[3])  # a learner was lost: the steps after the checkpoint are repeated
    os.replace(tmp_path / "new", file)
    assert [line["step"] for line in lines.new()] == [3]
    assert lines.new() == []


def test_a_plan_is_rows() -> None:
    rows = plan("Llama-3.2-1B", gpu=24, **{"learner.lora.rank": 64})
    by_method = {row["method"]: row for row in rows}
    assert rows[0]["method"] == "chosen"
    assert rows[0]["fits"] is True
    assert by_method["QLoRA"]["device_peak"] < by_method["LoRA"]["device_peak"] < by_method["full"]["device_peak"]
    size: Any = np.float32(24)
    with_value = plan("Llama-3.2-1B", gpu=size, **{"learner.algorithm": "ppo"})
    assert {row["method"] for row in with_value} == {
        "chosen",
        "LoRA",
        "LoRA + ckpt",
        "QLoRA",
        "LoRA, FP8",
        "LoRA, W4A16",
    }
    in_32 = plan("Llama-3.2-1B", gpu="t4", **{"learner.mode": "full"})
    assert {row["method"] for row in in_32}.isdisjoint({"QLoRA", "full, rounded"})
    assert "full, rounded" not in {row["method"] for row in plan("Llama-3.2-1B", gpu="t4")}
    small = plan("Llama-3.1-8B", gpu="4GiB", rollout={"max_num_seqs": 8})[0]
    assert (small["fits"], bool(small["advice"])) == (False, True)
    for given, sentence in (
        ("rtx4099", "^gpu: .* did you mean rtx4090"),
        ("24", "^model.path: nobody/8b is neither a folder"),
    ):
        with pytest.raises(InputError, match=sentence):
            plan("Llama-3.2-1B" if given != "24" else "nobody/8b", gpu=given)


def test_a_mistyped_argument_is_looked_for_among_all_of_them() -> None:
    taken = {name for call in (train, evaluate) for name in inspect.signature(call).parameters} - {"settings"}
    assert taken == {*ARGUMENTS}


@pytest.mark.parametrize(("cut", "advised"), [(1.0, 1), (0.1, 0)])
def test_what_train_gives_back_says_what_the_end_of_the_run_advised(tmp_path: Path, cut: float, advised: int) -> None:
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rewards": ["number"],
        "rollout": {"max_completion_length": 7},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    steps: list[dict[str, float | None]] = [
        {"step": step, "rollout/truncated": cut, "reward/zero_variance_groups": 0.0, "reward/mean": None}
        for step in range(1, 5)
    ]
    result = TrainResult(tmp_path, None, None, [{"step": 0, "eval/accuracy": 0.5}, *steps])
    assert len(result.advice) == advised
    assert all("100% of the completions reached rollout.max_completion_length=7" in told for told in result.advice)
    assert TrainResult(tmp_path / "gone", None, None, [*steps]).advice == []


def test_a_notebook_shows_scores_and_places(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.25, "eval/<b>": None}]
    rows += [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75, "eval/accuracy": 0.5, "eval/<b>": 1.0}]
    shown = TrainResult(tmp_path / "a&b", tmp_path / "adapter", None, rows)._repr_html_()
    assert "a&amp;b: 2 steps" in shown
    assert "<td>reward/mean</td><td>0.500</td><td>0.750</td><td>+0.250</td>" in shown
    assert "<td>eval/accuracy</td><td>0.250</td><td>0.500</td><td>+0.250</td>" in shown
    assert "reward/mean, steps 1 to 2: 0.500 to 0.750" in shown
    assert shown.count("<polyline") == 2
    assert "<b>" not in shown


def test_a_notebook_shows_the_best_completion_of_both_ends(tmp_path: Path) -> None:
    for step, (worse, better) in {1: ("no", "<i>early"), 2: ("not", "middle"), 3: ("nor", "late")}.items():
        group = make_group(step, rewards=[0.25, 1.0], completion=[worse, better])
        ledger.write(tmp_path / "rollouts", step, [group])
    shown = TrainResult(tmp_path, None, None, [])._repr_html_()
    assert all(word in shown for word in ("&lt;i&gt;early", "late", "<td>1</td><td>1</td>", "<td>3</td><td>1</td>"))
    assert not any(word in shown for word in ("middle", "<i>", ">no<", ">nor<"))
    (tmp_path / "rollouts" / "step-000003.parquet").write_bytes(b"cut")
    assert "step-000003.parquet" in TrainResult(tmp_path, None, None, [])._repr_html_()


def test_a_notebook_shows_a_plan_as_a_table() -> None:
    rows = plan("Llama-3.2-1B", gpu="rtx4090")
    assert isinstance(rows, list)
    shown = rows._repr_html_()  # type: ignore[attr-defined]
    assert shown.count("<tr>") == 1 + len(rows)
    assert "<td>chosen</td><td>yes</td>" in shown
    assert f"<td>full</td><td>no</td><td>{rows[1]['device_peak'] / 2**30:.1f}</td>" in shown
