"""gleaner eval: its numbers by hand and against counting, its generators without Ray, what it refuses. What a person
sees of an evaluation that goes on.
"""

from __future__ import annotations

import io
import json
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.actor import Local, Unusable
from cluster.config import Deadlines
from cluster.errors import WrongInput
from learner.config import RunConfig, roles
from learner.config.arrangement import ARRANGEMENTS
from learner.driver.evaluate import generate
from learner.driver.memory import Budgets
from learner.driver.roles import worker_spec
from learner.model.export import export
from learner.tools.cli import main
from learner.tools.eval_command import EvalProgress
from learner.tools.evaluation import (
    EvaluatedWorker,
    Sampled,
    _alone,
    _asked,
    _without_learner,
    answer_of,
    doubts,
    interval,
    majority,
    metrics_of,
    pass_at_k,
    policy_of,
    powers_to,
    said_in,
    summary,
    truncated_share,
)
from rollout.fakes import FakeEngine, FakeWorker, make_group, make_problem
from rollout.schema import Problem, groups_of
from rollout.types import Adapter, Sampling, Weights
from tests.learner.model import test_experts as experts


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 - C(3, 3) / C(5, 3) = 1 - 1/10
    assert (pass_at_k(5, 0, 5), pass_at_k(5, 1, 5), pass_at_k(5, 3, 3)) == (0.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="got n=5, c=2, k=6"):
        pass_at_k(5, 2, 6)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_one(case: tuple[int, int, int]) -> None:
    n, c, k = case
    chosen = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_the_majority_by_hand() -> None:
    assert majority(Sampled(["4", "4", "5"], [1.0, 1.0, 0.0])) == 1.0
    assert majority(Sampled(["4", "5", "5"], [1.0, 0.0, 0.0])) == 0.0
    assert majority(Sampled(["4", "5"], [1.0, 0.0])) == 0.5  # a tie is drawn
    assert majority(Sampled(["4", "4", "6"], [1.0, 0.5, 0.0])) == 0.75  # the same answer, one of them in bad form
    assert majority(Sampled(["4", "4", "6"], [1.0, None, 0.0])) == 1.0  # a vote needs no score
    assert majority(Sampled(["4", "4", "6"], [None, None, 0.0])) is None


@pytest.mark.parametrize("values", [[0.0, 1.0] * 200, [0.1, 1.3] * 200])  # by Wilson, by the bootstrap
def test_an_interval_is_as_wide_as_the_normal_one_of_a_large_sample(values: list[float]) -> None:
    found = interval(values, seed=0)
    half = 1.96 * np.std(values) / np.sqrt(400)
    assert found.value == pytest.approx(np.mean(values))
    assert found.low is not None
    assert found.high is not None
    assert (found.high - found.value, found.value - found.low) == pytest.approx((half, half), rel=0.1)
    assert found.method == ("wilson" if values[0] == 0 else "bootstrap")
    assert found == interval(values, seed=0)


@pytest.mark.parametrize(
    ("values", "share", "low", "high"),
    [  # the roots p of (mean - p)^2 = z^2 p (1 - p) / n, with z = 1.959964
        ([1.0] * 15, False, 0.79612, 1.0),
        ([0.0] * 6, False, 0.0, 0.39033),
        ([1.0, 1.0, 0.0], False, 0.20766, 0.93851),
        ([1.0], False, 0.20655, 1.0),
        ([0.5] * 40, True, 0.35199, 0.64801),  # pass@k of 40 problems, each half right
        ([0.25, 0.75, 0.5, 0.5], True, 0.15004, 0.84996),  # few
    ],
)
def test_shares_that_a_bootstrap_cannot_judge_have_wilsons_interval(
    values: list[float], share: bool, low: float, high: float
) -> None:
    found = interval(values, seed=0, share=share)
    assert found.method == "wilson"
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-5)


def test_rewards_that_are_all_the_same_other_number_have_no_interval() -> None:
    found = interval([0.25] * 9, seed=0)
    assert tuple(found) == (0.25, None, None, 9, "none")
    assert found.between(" .. ") == "-"
    sampled = [Sampled(["4", "5"], [0.2, 0.2])] * 9
    methods = {name: one.method for name, one in summary([1.0] * 9, sampled, 1.0, seed=0).items()}
    assert methods == {
        "greedy": "wilson", "mean@2": "none", "pass@1": "wilson", "pass@2": "wilson", "majority@2": "none"
    }  # fmt: skip


def test_what_makes_scores_say_little_is_said() -> None:
    def rows(scores: list[float | None], cut: int) -> pa.Table:
        parts = [[("good", score)] for score in scores]
        ends = ["length"] * cut + ["stop"] * (len(scores) - cut)
        groups = [
            make_group(i, rewards=[score], reward_parts=[part], finish_reason=[end], reward_status=["ok"])
            for i, (score, part, end) in enumerate(zip(scores, parts, ends, strict=True))
        ]
        return pa.concat_tables(groups)

    def said(scores: list[float | None], cut: int) -> list[str]:
        return doubts(rows(scores, cut), "good", 1.0, 96)

    cut, zero = said([0.0] * 20, 19)
    assert cut.startswith("19 of 20 completions reached rollout.max_completion_length=96 before they ended")
    assert zero.startswith("reward function good gave 0 to all 20 completions, of which it reads what was cut off: see")
    assert said([0.0] * 20, 3)[0].startswith("reward function good gave 0 to all 20 completions: see what it says")
    assert said([0.5] * 5, 0)[0].startswith("reward function good gave 0.5 to all 5 completions")
    assert said([1.0] * 5, 0) == said([0.0, 0.1, None], 2) == []
    assert said([None] * 3, 0) == ["reward function good scored none of the 3 completions: it gave None for each"]
    assert truncated_share(rows([1.0] * 8, 2)) == 0.25


@pytest.mark.parametrize(
    ("data", "held_out", "named"),
    [
        ({"path": "train.jsonl", "eval": {"path": "test.jsonl"}}, True, ("test.jsonl", "all problems")),
        ({"path": "train.jsonl", "eval": {"path": "test.jsonl"}}, False, ("train.jsonl", "all problems")),
        ({"path": "org/set", "eval": {"split": "test"}}, True, ("org/set", "split test")),
        ({"path": "rg:chain_sum"}, True, ("rg:chain_sum", "held out of training")),
        ({"path": "org/set", "split": "validation"}, False, ("org/set", "split validation")),
    ],
)
def test_the_problems_that_were_asked_are_named(data: dict[str, Any], held_out: bool, named: tuple[str, str]) -> None:
    assert (
        _asked(RunConfig.model_validate({"model": {"path": "m"}, "data": data, "rewards": ["number"]}), held_out)
        == named
    )


def test_all_metrics_of_two_problems() -> None:
    sampled = [Sampled(["4", "4", "5"], [1.0, 1.0, 0.0]), Sampled(["1", "1", "2"], [0.0, 0.0, 1.0])]
    found = {name: one.value for name, one in summary([1.0, 0.0], sampled, 1.0, seed=0).items()}
    assert found == pytest.approx(
        {"greedy": 0.5, "mean@3": 0.5, "pass@1": 0.5, "pass@2": (1 + 2 / 3) / 2, "pass@3": 1.0, "majority@3": 0.5}
    )
    assert [powers_to(n) for n in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]


def test_a_score_of_the_threshold_is_enough_as_rollouts_keep_it() -> None:
    kept = make_group(0, rewards=[0.9, 0.7]).column("reward").to_pylist()
    assert summary([], [Sampled(["a", "b"], kept)], 0.9, seed=0)["pass@1"].value == 0.5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 1,234.50 </answer>", "1234.5"),
        ("so 3 + 4 is 7.0.", "7"),
        ("7", "7"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("<answer>Paris 2</answer> 9", "Paris 2"),
        ("no idea", "no idea"),
        ("", ""),
        (r"\boxed{12", "12"),
        ("9" * 40, "9" * 40),
        ("<answer>-0.00</answer>", "0"),
        ("<answer>100</answer>", "100"),
        ("<answer>.00000000</answer> 5", "0"),
        ("<answer>1e999999999</answer>", "1e999999999"),
    ],
)
def test_what_a_completion_answers(text: str, answer: str) -> None:
    assert answer_of(text) == answer


def test_what_has_no_score_counts_nowhere_and_what_failed_is_wrong() -> None:
    def group(position: int, parts: list[float | None], **how: Any) -> pa.Table:
        rows = [[] if value is None else [("good", value)] for value in parts]
        status = ["error" if value != value else "ok" for value in parts]
        return make_group(position, rewards=[0.0] * len(parts), reward_parts=rows, reward_status=status, **how)

    greedy = [group(i, [score]) for i, score in enumerate((1.0, float("nan"), None, 1.0))]
    scores: list[list[float | None]] = [[1.0, 0.0], [1.0, None], [0.0, 0.0], [None, None]]
    sampled = [group(i, own, attempt=1, completion=["4", "5"]) for i, own in enumerate(scores)]
    found, unscored = metrics_of([greedy, sampled], "good", threshold=1.0, seed=0)
    assert unscored == 3
    assert {name: (one.value, one.problems) for name, one in found.items()} == {
        "greedy": (pytest.approx(2 / 3), 3), "mean@2": (0.5, 3), "pass@1": (0.5, 3), "pass@2": (0.5, 2),
        "majority@2": (0.25, 2),
    }  # fmt: skip


def test_an_answer_is_the_policys_own_and_not_the_environments() -> None:
    turns = [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 7."}]
    rows = make_group(0, completion=["42 It is 7. 42", "5"], messages=[json.dumps(turns), None])
    assert [answer_of(text) for text in said_in(rows)] == ["7", "5"]


class LostOnce(FakeWorker):
    """Its first process ends with its second group."""

    lives = 0

    def __init__(self) -> None:
        super().__init__(FakeEngine(8))
        type(self).lives += 1
        self._life, self._groups = type(self).lives, 0

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        self._groups += 1
        if (self._life, self._groups) == (1, 2):
            raise Unusable("lost")
        return await super().rollout(problem, sampling, attempt)


async def test_a_lost_generator_comes_back_with_the_policy_and_no_group_is_missing() -> None:
    config = RunConfig.model_validate({"model": {"path": "x"}, "data": {"path": "x"}, "rewards": [{"use": "format"}]})
    worker = EvaluatedWorker(Local("generator-0", LostOnce, []), Weights.unchanged(0), Deadlines())
    await worker.begin()
    problems = [make_problem(position) for position in range(5)]
    tables = await generate([worker], problems, config, lambda i: Sampling(n=3, max_tokens=4, seed=10 * i), attempt=1)
    groups = [group for table in tables for group in groups_of(table)]
    assert LostOnce.lives == 2
    assert [table.column("position")[0].as_py() for table in groups] == [0, 1, 2, 3, 4]
    assert [table.num_rows for table in groups] == [3] * 5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--run", "nowhere"], "--run: must be a run folder such as runs/demo-seed0, got nowhere; check the path"),
        (["--run", "here", "--config", "x"], "--run: does not go with --config"),
        (["--run", "here", "--split", "test"], "--split: is of --data; name the source with --data"),
        (["--model", "{model}", "--data", "rg:chain_sum"], "--reward: required where no configuration names it"),
        (["--model", "{model}", "--data", "rg:chain_sum", "--limit", "2", "--reward", "format", "--adapter", "{model}"],
         "--adapter: must be a folder with an adapter_config.json"),
        (["--model", "{model}", "--data", "rg:chain_sum", "--reward", "formt"], "did you mean 'format'?"),
        (["--model", "{model}", "--data", "absent.jsonl", "--reward", "format"], "absent.jsonl"),
        (["--model", "{model}", "--data", "rg:chain_sum", "--reward", "format", "--save", "no/such/file.parquet"],
         "--save: must be a file in a folder that is there and writable, got no/such/file.parquet"),
        (["--model", "{model}", "--data", "rg:chain_sum", "--reward", "format", "--save", "rows.csv"],
         "--save: writes Parquet, got rows.csv; give a name that ends in .parquet"),
        (["--model", "{model}", "--data", "rg:chain_sum", "--reward", "format", "--threshold", "nan"],
         "--threshold: must be a number, got nan"),
        (["--reward", "format"], "--model, --data: required where no configuration names it; give one"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(Path(__file__).parents[3] / "examples" / "tiny-arithmetic")
    assert main(["eval", *(word.format(model=model) for word in words)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", [["eval"], ["rewards", "try"]])
def test_how_a_configuration_reads_its_own_data_says_nothing_of_other_data(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    config = Path(__file__).parents[3] / "configs" / "local_cpu.yaml"  # a task of reasoning_gym, with arguments
    assert main([*command, "--config", str(config), "--data", str(tmp_path / "empty.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "data.path: must hold at least one problem" in said
    assert "data.args" not in said


def test_an_evaluation_asks_for_no_card_of_the_learner_or_of_reward_processes() -> None:
    """Its generators score what they sample, and there is no learner."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"}, "data": {"path": "d"}, "rewards": ["number"],
            "cluster": {"gpus": {"learner": 1}, "rewards": {"processes": 2, "gpus": 1}},
        }
    )  # fmt: skip
    assert [role.gpus for role in roles(config)] == [0, 1, 1, 1]
    assert [role.gpus for role in roles(_without_learner(config))] == [0, 0]


# What a person sees of an evaluation that goes on.


def test_without_a_terminal_a_line_every_ten_seconds_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = io.StringIO()
    with EvalProgress(Console(file=said, width=200)) as progress:
        progress.note("problems: 100")
        for second, more in ((100, 0), (104, 50), (110, 50), (112, 20), (125, 280)):
            monkeypatch.setattr(time, "monotonic", lambda second=second: float(second))
            progress.done(more, 400)
    assert said.getvalue().splitlines() == [
        "problems: 100",
        "completions 100 of 400, 30 s left",  # after 10 s
        "completions 400 of 400, 0 s left",
    ]


def test_on_a_terminal_it_is_a_bar_that_goes_away() -> None:
    said = io.StringIO()
    with EvalProgress(Console(file=said, width=200, force_terminal=True)) as progress:
        progress.done(0, 40)
        progress.done(10, 40)
        progress.note("generator-0: a fresh process")
    text = said.getvalue()
    assert "10/40" in text
    assert "generator-0: a fresh process" in text
    assert text.rpartition("\n")[2].endswith("\x1b[2K")  # the line of the bar is empty again


def test_an_evaluation_that_fails_before_it_begins_has_no_bar() -> None:
    said = io.StringIO()
    with pytest.raises(ValueError, match="no room"), EvalProgress(Console(file=said, force_terminal=True)):
        raise ValueError("no room")
    assert said.getvalue() == ""


def test_adapted_experts_are_evaluated_merged_or_on_a_card(tmp_path: Path) -> None:
    path = experts.saved("qwen3_moe", tmp_path / "model")
    export(experts.policy_of(path), tmp_path / "adapter", path)
    with pytest.raises(WrongInput, match=r"^--adapter: must leave the experts as they are, .* merge it "):
        policy_of(str(tmp_path / "adapter"), path)
    on_card = policy_of(str(tmp_path / "adapter"), path, on_card=True)
    assert isinstance(on_card, Adapter)
    config = RunConfig.model_validate({"model": {"path": path}, "data": {"path": "x"}, "rewards": ["format"]})
    budgets = Budgets(config.learner, 12345, 11, None, 0, ARRANGEMENTS["separate"], None, "")
    spec = _alone(worker_spec(config, 0, budgets), on_card)
    assert spec.engine.lora_targets == ("experts", "k_proj", "o_proj", "q_proj", "v_proj")
