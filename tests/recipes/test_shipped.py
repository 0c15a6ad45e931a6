"""Every recipe of configs/recipes as it is shipped, from rows in its data set's columns to a step, on a tiny model.

With real vLLM, reward functions and learner, all of them in one process.

GSM8K's takes no step here: data, rewards and sampling are those of the recipe of tests/recipes/test_published.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config import RunConfig
from learner.tools.cli import main as gleaner
from rewards.call import Group, score
from rewards.loader import BUILT_INS, load
from rollout import ledger
from tests.flow.run import environment

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
MODEL = {"tools": ROOT / "examples" / "tiny-tools"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "people": {"type": "integer"}}}

# Rows as the data sets of the hub have them, written for this test.
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Ann has 2 apples and buys 3.", "answer": "She has 2 + 3 = <<2+3=5>>5 apples.\n#### 5"},
    "math": {
        "problem": "What is half of a half?", "level": "Level 1", "type": "Prealgebra",
        "solution": r"Half of $\frac{1}{2}$ is $\frac{1}{2} \cdot \frac{1}{2} = \boxed{\frac{1}{4}}$.",
    },
    "code": {
        "task_id": 1, "text": "Write a function to square a number.", "code": "def sq(x):\n    return x * x",
        "test_list": ["assert sq(2) == 4", "assert math.isclose(sq(3.0), 9)"], "test_setup_code": "import math",
        "challenge_test_list": [],
    },
    "json": {
        "id": "1", "category": "c", "subcategory": "s", "schema": json.dumps(SCHEMA),
        "conversations": [
            {"from": "system", "value": f"Answer in JSON that keeps to <schema>{json.dumps(SCHEMA)}</schema>"},
            {"from": "human", "value": "About 2 million live in Paris."},
            {"from": "gpt", "value": '{"city": "Paris", "people": 2000000}'},
        ],
    },
    "preference": {"prompt": "Say something kind.", "chosen": "You are kind.", "rejected": "No."},
}  # fmt: skip
ROWS["tools"] = ROWS["math"]
# Recipe -> an answer that has all of the reward, one that has not, and words of the prompt.
ANSWERS = {
    "gsm8k": ("<reasoning>\n2+3\n</reasoning>\n<answer>\n5\n</answer>\n", "<answer>5</answer>", "2 apples and buys 3"),
    "math": (r"It is a quarter, so \boxed{0.25}.", r"\boxed{\frac{1}{2}}", "put your final answer within"),
    "code": ("So:\n```python\ndef sq(x):\n    return x ** 2\n```", "def sq(x):\n    return 4", "assert sq(2) == 4"),
    "json": ('{"people": 2000000, "city": "Paris"}', '{"people": "2000000", "city": "Paris"}', "2 million live in Par"),
    "tools": (r"\boxed{1/4}", "1/4 or 1/2", "use the tool"),
    "preference": ("", "", "something kind."),
}
# What a model of 2 MB on two cores asks for; all else is the recipe's.
SMALLER = (
    "epochs=null", "steps=1", "data.split=train", "data.args={}", "data.overlong=fail", "rollout.max_prompt_length=640",
    "rollout.max_completion_length=24", "rollout.num_generations=4", "rollout.kv_cache=64MiB",
    "rollout.max_num_seqs=16", "learner.groups_per_step=2", "learner.loss.mask_truncated=false",
    "cluster.gpus.generator=0", "cluster.gpus.learner=0", "trackers=[]",
)  # fmt: skip


def recipe(name: str) -> RunConfig:
    return RunConfig.model_validate(yaml.safe_load((RECIPES / f"{name}.yaml").read_text()))


def test_every_recipe_is_tried() -> None:
    assert {file.stem for file in RECIPES.glob("*.yaml")} == ROWS.keys() == ANSWERS.keys()


@pytest.mark.parametrize("name", sorted(set(ANSWERS) - {"preference"}))
def test_the_right_answer_has_all_of_the_reward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the recipe's own functions and columns. Of the published five, strict and soft format exclude each other."""
    monkeypatch.chdir(ROOT)
    texts = ANSWERS[name][:2]
    prompt = [{"role": "user", "content": "?"}]
    said = [[{"role": "assistant", "content": text}] for text in texts]
    group = Group([prompt] * 2, said, [[0]] * 2, {key: [value] * 2 for key, value in ROWS[name].items()})
    totals = [0.0, 0.0]
    for reward in recipe(name).rewards:
        verdict = score(load(reward.use), group, reward.args, built_in=reward.use in BUILT_INS)
        assert verdict.status == "ok", verdict.problem
        totals = [total + reward.weight * (value or 0) for total, value in zip(totals, verdict.values, strict=True)]
    most = {"gsm8k": 3.5, "json": 2.0}.get(name, 1.0)
    assert totals[0] == pytest.approx(most)
    assert totals[1] < most


def test_gsm8k_is_the_published_recipe_with_an_adapter() -> None:
    file = ROOT / "configs" / "gsm8k_published_full.yaml"
    own, published = recipe("gsm8k"), RunConfig.model_validate(yaml.safe_load(file.read_text()))
    for section in ("epochs", "model", "data", "rewards", "rollout"):
        assert getattr(own, section) == getattr(published, section), section
    learner = published.learner.model_copy(update={"mode": "lora", "learning_rate": 5e-5})
    assert own.learner == learner


STEPS = sorted(set(ROWS) - {"gsm8k"})


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which each of them has taken a step, in one process."""
    folder = tmp_path_factory.mktemp("recipes")
    jobs = [(str(RECIPES / f"{name}.yaml"), _given(name, folder)) for name in STEPS]
    program = [sys.executable, "-m", "tests.recipes.in_one_process"]
    done = subprocess.run(
        program, input=json.dumps(jobs), capture_output=True, text=True, cwd=ROOT, env=environment("recipes"),
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_the_recipe(name: str, taken: Path) -> None:
    folder, config = taken / "runs" / f"recipe-{name}", recipe(name)
    first, last = (json.loads((folder / "metrics.jsonl").read_text().splitlines()[i]) for i in (0, -1))
    assert last["step"] == 1
    assert last["reward/failed"] == last["loss/skipped_nonfinite"] == 0
    assert {f"reward/{one.name or one.use.rpartition(':')[2]}" for one in config.rewards} <= last.keys()
    assert ("eval/accuracy" in first) == bool(config.data.eval.every)
    rows: list[dict[str, Any]] = ledger.read(folder / "rollouts" / "step-000001.parquet").to_pylist()
    assert len(rows) == 8
    assert ANSWERS[name][2] in json.dumps(json.loads(rows[0]["problem"])["messages"])


def _given(name: str, folder: Path) -> list[str]:
    model, data = MODEL.get(name, ROOT / "examples" / "tiny-gsm8k"), folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in _rows(name)))
    given = [*SMALLER, f"model.path={model}", f"data.path={data}", f"output_dir={folder / 'runs'}"]
    own = recipe(name).data.eval
    if own.every:
        given += ["data.eval.size=2", *(["data.eval.split=null", "data.eval.path=null"] if own.path else [])]
    if name == "preference":
        given += [f"rewards=[{{use: 'adapter:{_reward_model(data, model, folder)}', name: helpful}}]"]
    return given


def _rows(name: str) -> list[dict[str, Any]]:
    """Some of them, of different prompts."""
    text = json.dumps(ROWS[name])
    asked = {"code": "Write a", "json": "About 2", "preference": "Say "}.get(name, "What is ")
    return [json.loads(text.replace(asked, asked.replace(" ", f" {'very ' * i}", 1))) for i in range(24)]


def _reward_model(data: Path, model: Path, folder: Path) -> Path:
    """By the recipe's first command."""
    out = folder / "helpful"
    assert gleaner(["reward-model", "train", str(data), "--model", str(model), "--out", str(out)]) == 0
    return out
