"""gleaner eval: its numbers by hand and against counting, its generators without Ray, what it refuses."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.actor import Local, Unusable
from cluster.config import DeadlineConfig
from learner.config import RunConfig, roles
from learner.driver.held_out_calls import generate
from learner.tools.cli import main
from learner.tools.eval_answers import answer_of
from learner.tools.eval_generators import EvaluatedWorker
from learner.tools.eval_scores import Sampled, interval, majority, pass_at_k, powers_to, summary
from learner.tools.evaluation import _without_learner, metrics_of, said_in
from rollout.fake_engine import FakeEngine
from rollout.fake_groups import make_group, make_problem
from rollout.fake_worker import FakeWorker
from rollout.schema import Problem, groups_of
from rollout.types import Sampling, Weights


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


def test_an_interval_is_as_wide_as_the_normal_one_of_a_large_sample() -> None:
    assert interval([0.25] * 9, seed=0) == (0.25, 0.25, 0.25, 9)
    found = interval([0.0, 1.0] * 200, seed=0)
    half = 1.96 * np.sqrt(0.25 / 400)
    assert found.value == 0.5
    assert (found.high - found.value, found.value - found.low) == pytest.approx((half, half), rel=0.1)
    assert found == interval([0.0, 1.0] * 200, seed=0)


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
    worker = EvaluatedWorker(Local("generator-0", LostOnce, []), Weights.unchanged(0), DeadlineConfig())
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
