"""Scores of reasoning_gym's tasks: of answers that are code, of odd ones, and of every task's own gold answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import psutil
import pytest

from rewards.config import RewardConfig
from rewards.pool import RewardPool
from rollout.data import sources
from tests.rewards.pool_case import score

gym = pytest.importorskip("reasoning_gym")

from rewards.built_in import reasoning_gym as forked  # noqa: E402
from rewards.built_in.reasoning_gym import EVALUATED, is_code, reasoning_gym  # noqa: E402

EVALUATES = {"eval", "exec", "compile", "__import__", "parse_expr", "sympify", "S", "lambdify", "parse_latex"}


def scores_of(task: str, *said: str, strict: bool = True, **changed: Any) -> list[float]:
    row = sources.read(f"rg:{task}", None, {}, 1, 5)[0] | changed
    texts = [f"<answer>{text}</answer>" for text in said]
    columns: dict[str, Any] = {name: [row[name]] * len(said) for name in ("answer", "metadata")}
    return reasoning_gym(texts, **columns, strict=strict)


def gold_of(task: str) -> str:
    return str(sources.read(f"rg:{task}", None, {}, 1, 5)[0]["answer"])


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)


def is_theirs(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("reasoning_gym")


def evaluates(data_set: type[Any]) -> bool:
    """Whether score_answer, or what it may call in the package, names something that evaluates text."""
    seen: set[FunctionType] = set()
    left: list[Any] = [data_set.score_answer]
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or not is_theirs(function) or function in seen:
            continue
        seen.add(function)
        for name in names_in(function.__code__):
            named = function.__globals__.get(name)
            if name in EVALUATES and not is_theirs(named):
                return True
            left += [named, getattr(data_set, name, None)]
            left += vars(named).values() if isinstance(named, type) and is_theirs(named) else []
    return False


def test_every_task_whose_scorer_evaluates_text_is_known() -> None:
    _ = gym.create_dataset  # with every family
    found = {task for task, (data_set, _) in gym.factory.DATASETS.items() if evaluates(data_set)}
    assert found == EVALUATED


HOSTILE = {
    "makes a file": "open('pwned', 'w')",
    "makes a file by its number": "__import__('os').open('pwned', 66)",
    "makes a file in C": "__import__('ctypes').CDLL(None).creat(b'pwned', 511)",
    "starts a process": "__import__('os').system('touch pwned')",
    "forks": "__import__('os').fork()",
    "removes a file": "__import__('os').remove('precious')",
    "empties a file": "open('precious', 'r+').truncate()",
    "ends whom it serves": "__import__('os').kill(__import__('os').getppid(), 9)",
    "exits": "exit()",
    "exits at once": "__import__('os')._exit(0)",
    "opens the network": "__import__('socket').socket()",
    "takes memory": "'a' * 10**9",
    "answers in pieces": "__import__('os').write(3, b'[1.0')",
    "answers what is no number": "__import__('os').write(3, b'1e999')",
}


def test_an_answer_that_is_code_changes_nothing_even_where_it_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("precious").write_text("here")
    before, had = sorted(os.listdir("/proc/self/fd")), children()
    codes = [*HOSTILE.values(), "print('noise')"]
    assert scores_of("countdown", *codes, gold_of("countdown")) == [0.0] * len(codes) + [1.0]
    assert {scored.score for scored in forked.forked_scores([partial(eval, code) for code in codes])} == {0.0}
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("precious", "here")]
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert capfd.readouterr() == ("", "")
    assert children() == had


FORGED = (
    "__import__('os').write(3, b'1.0') and __import__('os')._exit(0)",
    "(lambda: __import__('sys')._getframe(3).f_locals)()!",
    "[o for o in ().__class__.__base__.__subclasses__()]",
    "eval(chr(49))",
    "\uff45\uff56\uff41\uff4c('1')",  # eval, in letters that Python takes for the same
)


@pytest.mark.parametrize("task", ["countdown", "puzzle24", "polynomial_multiplication", "string_insertion"])
def test_an_answer_that_is_code_is_not_evaluated_and_named(task: str) -> None:
    row = sources.read(f"rg:{task}", None, {}, 1, 5)[0]
    texts = [f"<answer>{text}</answer>" for text in (*FORGED, row["answer"])]
    columns: dict[str, Any] = {name: [row[name]] * len(texts) for name in ("answer", "metadata")}
    found: Any = reasoning_gym(texts, **columns)
    gold = 1.0 if row["answer"] is not None else 0.0  # which puzzle24 has none of
    assert found == [0.0] * len(FORGED) + [gold]
    assert found.why == dict.fromkeys(range(len(FORGED)), "the answer is code, and no formula or literal")


@pytest.mark.parametrize(
    "formula",
    ["(3 + 4) * 5", "3!", "-2*x**2 + C", "exp(2*x)/2 - log(abs(x)) + sqrt(2)", "['a', 'b']", "[[0, 1], [2.5, -3]]",
     "x^2", "0x1F", "Rational(1, 2)*x", "1 2 3", "_ Q _ _\nQ _ _ _", "2x", "forty two", ""],
)  # fmt: skip
def test_a_formula_or_a_literal_is_no_code(formula: str) -> None:
    assert not is_code(formula)


@pytest.mark.parametrize(
    "code",
    ["x.subs(x, 1)", "print(1)", "'a' + str(1)", "f'{x}'", "[x for x in (1,)]", "a[0]", "1 if x else 2", "(x := 1)",
     "x == 1", "__name__", "f(*x)", "f(x=1)", "lambda: 1", "sympify('1')", "{**x}", "open", "(yield)"],
)  # fmt: skip
def test_what_does_more_is_code(code: str) -> None:
    assert is_code(code)


def test_only_what_the_scorer_says_counts_of_a_confined_call() -> None:
    def writes(*parts: bytes) -> float:
        for part in parts:
            os.write(3, part)
        return 0.5

    def ends() -> float:
        os.write(3, b'["", 1.0, "", ""]')
        os._exit(0)

    def raises() -> float:
        raise ValueError("of the row")

    def refuses() -> forked.Scored:
        return forked.Scored(0.0, why="no")

    def late() -> float:
        time.sleep(60)
        return 1.0

    died = forked.Scored(0.0, why="its process ended without a score")
    calls: list[Callable[[], float | forked.Scored]] = [
        lambda: 0.25, lambda: writes(b"1.0"), lambda: writes(b'["", 1.0, "", ""]', b"\n"), ends, raises, refuses,
        lambda: writes(bytes(1 << 20)), late,
    ]  # fmt: skip
    assert forked.forked_scores(calls) == [
        forked.Scored(0.25), died, died, died, forked.Scored(0.0, "ValueError: of the row"),
        forked.Scored(0.0, why="no"), died, forked.Scored(0.0, why="not evaluated within 2 s"),
    ]  # fmt: skip


@pytest.mark.parametrize("task", ["binary_matrix", "spiral_matrix", "intermediate_integration"])
def test_an_answer_that_is_late_costs_seconds_and_its_own_score(task: str) -> None:
    gold = gold_of(task)
    begin = time.monotonic()
    assert scores_of(task, "__import__('time').sleep(60)", "9**9**9**9", gold) == [0.0, 0.0, 1.0]
    assert time.monotonic() - begin < 2 * forked.SECONDS + 10  # the task's own imports, too


async def test_in_a_reward_process_such_answers_cost_a_group_nothing_else(tmp_path: Path) -> None:
    row = sources.read("rg:countdown", None, {}, 1, 5)[0]
    mark = tmp_path / "pwned"
    said = [f"__import__('os').system('touch {mark}')", "9**9**9**9", row["answer"]]
    columns = {name: [row[name]] * len(said) for name in ("answer", "metadata")}
    async with RewardPool([RewardConfig(use="reasoning_gym", timeout_s=30)]) as pool:
        scores = await score(pool, [f"<answer>{text}</answer>" for text in said], **columns)
    assert (scores.reward, scores.failures) == ([0.0, 0.0, 1.0], ())
    assert not mark.exists()


def test_other_tasks_are_scored_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise AssertionError("a process for what is not evaluated")

    monkeypatch.setattr(os, "fork", none)
    assert scores_of("chain_sum", gold_of("chain_sum"), "eval('1')") == [1.0, 0.0]
    with pytest.raises(AssertionError, match="a process for"):
        scores_of("countdown", "1")


@pytest.mark.parametrize(
    ("task", "odd"), [("prime_factorization", "2*3"), ("coin_flip", "1e999"), ("game_of_life", "{}")]
)
def test_an_answer_of_which_the_scorer_raises_costs_its_own_score_alone(task: str, odd: str) -> None:
    assert scores_of(task, odd, gold_of(task)) == [0.0, 1.0]


def test_such_an_answer_to_a_task_without_a_gold_answer() -> None:
    assert scores_of("boxnet", "5", "nothing") == [0.0, 0.0]
    with pytest.raises(ValueError, match="column 'metadata': lacks column_num, difficulty, initial_state, row_num"):
        scores_of("boxnet", "{}", metadata='{"source_dataset": "boxnet"}')


def test_a_wrong_row_is_told() -> None:
    with pytest.raises(KeyError, match="solution"):
        scores_of("mini_sudoku", "1 2", metadata='{"source_dataset": "mini_sudoku"}')
    with pytest.raises(TypeError):
        scores_of("chain_sum", "5", answer=5)
    with pytest.raises(ValueError, match="column 'answer': must have the gold answer, got None"):
        scores_of("chain_sum", "5", answer=None)
    with pytest.raises(ValueError, match="KeyError: 'valid_answers'"):  # in the confined process
        scores_of("n_queens", "1", metadata='{"source_dataset": "n_queens"}')


@pytest.mark.parametrize("said", ["nan", "NaN", "nan + nanj", "nan i", "inf", "-Infinity", "1e999", "1e999 + 1e999i"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_number_that_is_none_is_no_complex_number(said: str, strict: bool) -> None:
    assert scores_of("complex_arithmetic", said, gold_of("complex_arithmetic"), strict=strict) == [0.0, 1.0]


@pytest.mark.long
def test_the_gold_answer_of_every_task_scores_as_the_task_says() -> None:
    _ = gym.create_dataset
    wrong = {}
    for task in sorted(set(gym.factory.DATASETS) - {"composite"}):  # which is made of others that are named
        made = gym.create_dataset(task, size=1, seed=5)
        row, entry = sources.read(f"rg:{task}", None, {}, 1, 5)[0], made[0]
        if entry["answer"] is None:
            continue
        own = made.score_answer(answer=entry["answer"], entry=entry)
        text = f"<answer>{row['answer']}</answer>"
        (ours,) = reasoning_gym([text], answer=[row["answer"]], metadata=[row["metadata"]], strict=False)
        if ours != pytest.approx(own):
            wrong[task] = (ours, own)
    assert wrong == {}


def test_a_grid_in_json_is_compared_with_the_answers() -> None:
    for task in ("arc_agi", "rearc"):
        gold = gold_of(task)
        metadata = json.loads(sources.read(f"rg:{task}", None, {}, 1, 5)[0]["metadata"])
        assert scores_of(task, gold, "0", metadata=metadata) == [1.0, 0.0]
        assert isinstance(metadata["output"], list)
