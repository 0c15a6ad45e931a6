"""Functions that were written for verl, OpenRLHF and ms-swift, or for one completion at a time, used as they are."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from rewards.call import Group, Verdict, score
from rewards.config import RewardConfig
from rewards.loader import load
from rewards.pool import RewardPool

NAN = float("nan")
THEIRS = """
import asyncio, signal

class Tensor:  # as torch's, as far as it is looked at
    def __init__(self, values): self.values = values
    def tolist(self): return self.values

def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1, **kwargs):
    assert not kwargs
    extra_info["seen"] = extra_info.get("seen", 0) + 1  # of this completion alone
    right = solution_str == ground_truth
    return {"score": scale * float(right), "acc": right, "source": data_source, "seen": extra_info["seen"]}

def short_score(solution_str, ground_truth, data_source="own"):
    assert data_source == "own"
    return solution_str.endswith(ground_truth)

def pair(model_output, ground_truth): return model_output == ground_truth, {"note": "of verl's prime_code"}

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": len(text), "of": len(gold)} for text, gold in zip(solution_strs, ground_truths, strict=True)]

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001)
    return float(data_source == "gsm8k" and int(solution_str) == int(ground_truth))

def reward_func(queries, prompts, labels, **kwargs):
    found = Tensor([float(q == p + label) for q, p, label in zip(queries, prompts, labels, strict=True)])
    return {"rewards": found, "scores": found, "extra_logs": {"length": Tensor([len(query) for query in queries])}}

def plain_func(queries, prompts, labels): return map(len, labels)

def graded(completion, prompt, answer, trainer_state, **columns):
    return float(completion == answer) + len(prompt) / 100 + trainer_state.global_step + len(columns["level"])

def divides(completion): return 12 / int(completion)

def loops(completion, answer):
    while completion == "loop": pass
    return 1.0

def alarmed(solution_str, ground_truth):
    signal.signal(signal.SIGALRM, lambda *_: None)  # a module that limits itself, imported within a call
    return 0.5

def lacks(completion): return {"value": 1}
def lacking(queries, prompts, labels): return {"scores": [1.0, 2.0]}
def asks(completion, level): return 1.0

class ORM: ...
class Exact(ORM):
    def __call__(self, completions, solution, **kwargs): return [float(a == b) for a, b in zip(completions, solution)]
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    path = tmp_path_factory.mktemp("theirs") / "theirs.py"
    path.write_text(THEIRS)
    return lambda function: f"{path}:{function}"


def group_of(texts: Sequence[str], chat: bool = True, **columns: Any) -> Group:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}] if chat else "2 + 2?"
    return Group.of(prompt, texts, [[0]] * len(texts), columns)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("function", "args", "texts", "columns", "values", "metrics"),
    [
        ("compute_score", {}, ["4", "5"], {"answer": "4"}, [1.0, 0.0], {"acc": 0.5, "seen": 1.0}),
        ("compute_score", {"scale": 3}, ["4", "5"], {"reward_model": {"ground_truth": "5"}, "answer": "4"}, [0.0, 3.0],
         {"acc": 0.5, "seen": 1.0}),
        ("compute_score", {}, ["7"], {"ground_truth": "7", "extra_info": {"seen": 4}}, [1.0],
         {"acc": 1.0, "seen": 5.0}),
        ("short_score", {}, ["so 12", "1 2"], {"solution": "12"}, [1.0, 0.0], {}),
        ("pair", {}, ["12", "1"], {"answer": "12"}, [1.0, 0.0], {}),
        ("compute_scores", {}, ["a", "abc"], {"target": "ab"}, [1.0, 3.0], {"of": 2.0}),
        ("later", {}, ["4", "x", "5"], {"answer": "4", "data_source": "gsm8k"}, [1.0, NAN, 0.0], {}),
        ("reward_func", {}, ["4", "44"], {"label": "44"}, [0.0, 1.0], {"scores": 0.5}),
        ("plain_func", {}, ["4", "44"], {"labels": "abc", "answer": "4"}, [3.0, 3.0], {}),
        ("divides", {}, ["3", "0", "4"], {}, [4.0, NAN, 3.0], {}),
        ("Exact", {}, ["3", "0"], {"solution": "0"}, [0.0, 1.0], {}),
    ],
)  # fmt: skip
def test_a_function_of_others_is_used_as_it_is(
    theirs: Callable[[str], str], function: str, args: Mapping[str, Any], texts: Sequence[str], columns: Any,
    values: Sequence[float], metrics: Mapping[str, float], chat: bool,
) -> None:  # fmt: skip
    verdict = score(load(theirs(function)), group_of(texts, chat, **deepcopy(columns)), args, built_in=False)
    assert verdict.values == pytest.approx(values, nan_ok=True)
    told = {name: value for name, value in verdict.told.metrics.items() if name != "length"}
    assert told == pytest.approx(metrics)


def test_of_one_completion_prompt_columns_and_hooks_are_as_it_names_them(theirs: Callable[[str], str]) -> None:
    group = group_of(["4", "5"], answer="5", level="ab")
    verdict = score(load(theirs("graded")), group, {}, built_in=False)
    assert verdict.values == pytest.approx([2.17, 3.17])  # "Be brief.\n\n2 + 2?" has 17 characters


@pytest.mark.parametrize(
    ("function", "args", "columns", "sentence"),
    [
        ("compute_score", {}, {"gold": "4"}, "but the data has the columns gold; a right answer is looked for"),
        ("asks", {}, {"answer": "4"}, "asks for level, but the data has the columns answer"),
        ("short_score", {"methd": "x"}, {"answer": "4"}, "args: unknown methd; this reward takes data_source, ground"),
        ("lacks", {}, {}, "returned a dict without score, must have it; it has value"),
        ("lacking", {}, {"answer": "4"}, "returned a dict without rewards, must have it; it has scores"),
        ("divides", {}, {}, "ValueError: invalid literal for int() with base 10: 'a' (theirs.py, line "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(
    theirs: Callable[[str], str], function: str, args: Mapping[str, Any], columns: Any, sentence: str
) -> None:
    verdict = score(load(theirs(function)), group_of(["a", "b"], **columns), args, built_in=False)
    assert verdict.status == "error"
    assert sentence in verdict.problem


def test_the_completion_that_it_raises_on_is_named(theirs: Callable[[str], str]) -> None:
    verdict = score(load(theirs("divides")), group_of(["3", "0"]), {}, built_in=False)
    assert verdict.status == "nan"
    assert "first sample 1: ZeroDivisionError: division by zero (theirs.py, line " in verdict.problem


def verdict_of(use: str, texts: Sequence[str], timeout_s: float) -> Verdict:
    async def asked() -> Verdict:
        async with RewardPool([RewardConfig(use=use, timeout_s=timeout_s)]) as pool:
            return (await pool.verdicts(group_of(texts, answer="4")))[0]

    return asyncio.run(asked())


@pytest.mark.parametrize("texts", [["loop", "a", "b"], ["a", "loop", "loop", "b", "loop"]])
def test_one_completion_that_loops_costs_itself_alone(theirs: Callable[[str], str], texts: Sequence[str]) -> None:
    verdict = verdict_of(theirs("loops"), texts, timeout_s=3.0)
    assert verdict.values == pytest.approx([NAN if text == "loop" else 1.0 for text in texts], nan_ok=True)
    assert "took more than its part of the time that its group has, timeout_s" in verdict.problem


def test_a_handler_of_their_own_stays(theirs: Callable[[str], str], tmp_path: Path) -> None:
    """As of graders that set an alarm for each completion, and their handler once, as they are imported."""
    own = tmp_path / "alarms.py"
    own.write_text(
        "import signal, time\n"
        "class Over(Exception): ...\n"
        "def over(*_): raise Over\n"
        "once = []\n"
        "def limited(completion):\n"
        "    if not once: once.append(signal.signal(signal.SIGALRM, over))\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "    try: time.sleep(1)\n"
        "    except Over: return 0.25\n"
    )
    assert verdict_of(f"{own}:limited", ["a", "b"], timeout_s=5.0).values == [0.25, 0.25]
