"""One call: which arguments a reward function gets, and what its return value means. Functions that were written for
verl, OpenRLHF and ms-swift, or for one completion at a time, used as they are.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rewards.base import NAMES, Reward
from rewards.built_in.number import number
from rewards.call import Group, Verdict, failed, score
from rewards.config import RewardConfig
from rewards.loader import load
from rewards.pool import RewardPool

GROUP = Group(
    ["p", "p"], ["a", "b"], [[1], [2, 3]], {"answer": ["x", "y"], "tag": ["t", "t"], "prompt": ["raw", "raw"]}
)
NAN = float("nan")


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def mute(completions: Sequence[str]) -> NoReturn:
    raise Mute


def broken_text(completions: Sequence[str]) -> NoReturn:
    raise ValueError("bad \ud83d")  # half of a surrogate pair, as of a text that was cut


def punishment(longest: int) -> Callable[..., list[float]]:
    return lambda completion_ids: [float(len(ids) > longest) for ids in completion_ids]


def call(reward: Reward, args: Mapping[str, Any] | None = None, built_in: bool = False) -> Verdict:
    return score(reward, GROUP, args or {}, built_in=built_in)


def returning(value: Any) -> Reward:
    return lambda completions: value


def test_a_trl_function_gets_every_column() -> None:
    seen: dict[str, Any] = {}

    def trl_style(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: str, **kwargs: Any
    ) -> list[float]:
        seen.update(kwargs, prompts=prompts, ids=completion_ids, answer=answer)
        return [float(len(c)) for c in completions]

    assert call(trl_style, {"answer": "arg wins"}).values == [1.0, 1.0]
    assert [seen.pop(name) for name in NAMES]  # as TRL gives them to **kwargs, too
    assert seen == {"prompts": ["p", "p"], "ids": [[1], [2, 3]], "answer": "arg wins", "tag": ["t", "t"]}


def test_a_plain_function_gets_what_it_names() -> None:
    assert call(lambda answer: [len(answer), 0]).values == [2.0, 0.0]


@pytest.mark.parametrize(
    ("value", "values", "status"),
    [
        ([True, 2], [1.0, 2.0], "ok"),
        ((None, 1.0), [None, 1.0], "ok"),
        ([None, None], [None, None], "ok"),
        ([None, NAN], [None, NAN], "nan"),
        ([NAN, float("-inf")], [NAN, NAN], "nan"),
        ([1.0, 10**400], [1.0, NAN], "nan"),
        ([2.0, "1.0"], [2.0, NAN], "error"),
        ([{"reward": 1.0}, 1.0], [NAN, 1.0], "error"),
        ([1e30, -1e39], [1e30, NAN], "nan"),  # float32 holds no sum of more of them
        ({"x": 1.0, "y": 0.5}.values(), [1.0, 0.5], "ok"),
        (range(2), [0.0, 1.0], "ok"),
        ({0.5, 1.0}, [NAN, NAN], "error"),  # in no order
        ({0.5: "x", 1.0: "y"}, [NAN, NAN], "error"),
        (b"ab", [NAN, NAN], "error"),
        ([1.0], [NAN, NAN], "error"),
        (1.0, [NAN, NAN], "error"),
        ("ab", [NAN, NAN], "error"),
        (None, [NAN, NAN], "error"),
    ],
)
def test_return_values(value: Any, values: list[float | None], status: str) -> None:
    verdict = call(returning(value))
    assert verdict.values == pytest.approx(values, nan_ok=True)
    assert verdict.status == status
    assert bool(verdict.problem) == (status != "ok")


def test_numpy_values_count_and_an_array_is_a_list() -> None:
    np = pytest.importorskip("numpy")
    assert call(returning(np.array([0.5, 1.0]))).values == [0.5, 1.0]
    assert call(returning([np.float32(0.5), np.bool_(True)])).values == [0.5, 1.0]
    assert call(returning(np.array(1.0))).status == "error"


def test_what_is_read_once_is_a_list() -> None:
    assert call(lambda completions: map(len, completions)).values == [1.0, 1.0]
    assert call(lambda completions: (float(text == "b") for text in completions)).values == [0.0, 1.0]


def test_async_functions_are_awaited() -> None:
    async def slow(completions: Sequence[str]) -> list[float]:
        return [0.25] * len(completions)

    assert call(slow).values == [0.25, 0.25]


def test_what_a_module_holds_for_its_async_functions_serves_every_call() -> None:
    """A lock or an HTTP client belongs to the event loop that first waited for it."""
    places = asyncio.Semaphore(1)

    async def limited(completions: Sequence[str]) -> list[float]:
        async def one(text: str) -> float:
            async with places:
                await asyncio.sleep(0)
                return float(len(text))

        return await asyncio.gather(*map(one, completions))

    assert [call(limited).status for _ in range(3)] == ["ok"] * 3


def test_what_a_call_leaves_behind_ends_with_it() -> None:
    ended: list[str] = []

    async def on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def forgets(completions: Sequence[str]) -> list[float]:
        task = asyncio.ensure_future(on())
        await asyncio.sleep(0)
        return [float(not task.done())] * len(completions)

    assert call(forgets).values == [1.0, 1.0]
    assert ended == ["cancelled"]


@pytest.mark.parametrize(
    ("reward", "args", "built_in", "sentence"),
    [
        (lambda gold: [], {}, False, "asks for gold, but the data has the columns answer, prompt, tag"),
        (lambda completions, environments: [], {}, False, "asks for environments, which only TRL's trainer provides"),
        (
            lambda completions, log_extra: log_extra("a", [1]),
            {},
            False,
            "log_extra: a must have one value for",
        ),
        (lambda completions, log_metric: log_metric("a", "b"), {}, False, "log_metric: a must be a number, got str"),
        (
            lambda trainer_state: trainer_state.total_flos,
            {},
            False,
            "total_flos: here it has global_step",
        ),
        (lambda completions: [], {"targt": 1}, False, "args: unknown targt; this reward takes none"),
        (number, {"colum": "x"}, True, "args: unknown colum; this reward takes column, tag"),
        (returning([1.0]), {}, False, "returned 1 values for 2 completions"),
        (returning(itertools.count()), {}, False, "returned more than 2 values for 2 completions"),
        (lambda completions: (1 / 0 for _ in completions), {}, False, "ZeroDivisionError"),
        (returning(len), {}, False, "makes a function (a factory): call it in your file and name its result"),
        (punishment, {}, False, "makes a function (a factory)"),
        (punishment, {"longest": 3}, False, "then use: file.py:reward"),
        (lambda completions: 1 / 0, {}, False, "ZeroDivisionError: division by zero (test_call.py, line "),
        (lambda completions: exit(), {}, False, "SystemExit"),
        (broken_text, {}, False, r"ValueError: bad \ud83d (test_call.py"),
        (
            mute,
            {},
            False,
            "Mute: its text cannot be read, since its __str__ raises KeyboardInterrupt (test_call.py",
        ),
    ],
)
def test_problems_are_told(reward: Reward, args: dict[str, Any], built_in: bool, sentence: str) -> None:
    verdict = call(reward, args, built_in)
    assert verdict.status == "error"
    assert verdict.values == pytest.approx([NAN, NAN], nan_ok=True)
    assert sentence in verdict.problem
    assert verdict.problem.encode()  # a column of Arrow takes it


def test_a_sentence_from_elsewhere_is_text() -> None:
    """Such as what a judge's server has answered."""
    assert failed("error", 1, "no \ud83d").problem == r"no \ud83d"


@pytest.mark.parametrize("column", ["prompt", "completion", "completion[0][value]"])
def test_a_built_in_reads_a_column_whose_name_others_do_not_get(column: str) -> None:
    gold: Any = "1" if "[" not in column else [{"value": "1"}]
    group = Group(["p"] * 2, ["1", "2"], [[], []], {column.partition("[")[0]: [gold] * 2})
    assert score(number, group, {"column": column}, built_in=True).values == [1.0, 0.0]


@pytest.mark.parametrize("column", ["tag", "completions", "prompts", "completion_ids[0]"])
def test_a_column_that_a_built_in_cannot_be_given_is_told(column: str) -> None:
    name = column.partition("[")[0]
    group = Group(["p"], ["1"], [[]], {name: ["1"]})
    problem = score(number, group, {"column": column}, built_in=True).problem
    assert problem == f"args.column: cannot be {name!r}, which is no column to this reward; rename the column"


def test_a_column_is_no_setting_of_a_built_in() -> None:
    group = Group([""], ["<answer>1</answer>"], [[]], {"answer": ["1"], "tag": ["nonsense"]})
    assert score(number, group, {}, built_in=True).values == [1.0]


def talk(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("use", "args", "prefilled", "texts", "values"),
    [
        ("format", {"tags": ["think", "answer"]}, "<think>\n",
         ["2\n</think><answer>4</answer>", "<think>2</think><answer>4</answer>", "<answer>4"], [1.0, 0.0, 0.0]),
        ("format", {}, "<reasoning>", ["a</reasoning><answer>4</answer>", "<answer>4</answer>"], [1.0, 0.0]),
        ("format", {}, "<think>", ["<reasoning>a</reasoning><answer>4</answer>", "a"], [1.0, 0.0]),  # none of its tags
        ("number", {}, "<answer> ", ["4</answer>, not 5", "5</answer>4"], [1.0, 0.0]),
        ("number", {"tag": "out"}, "<answer>", ["4</answer>", "5"], [1.0, 0.0]),
        ("number", {}, "<step4>", ["no number", "4"], [0.0, 1.0]),  # the tag is no answer
        ("json_match", {"tag": "json"}, "<json>\n", ["4\n</json>", "4"], [1.0, 0.0]),
        ("regex", {"pattern": "^4"}, "<answer>", ["4", "<answer>4"], [1.0, 0.0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chat", [True, False])
def test_a_tag_that_the_prompt_ends_in_is_in_front_for_built_ins_that_look_for_it(
    use: str, args: dict[str, Any], prefilled: str, texts: list[str], values: list[float], chat: bool
) -> None:
    said: list[Any] = talk(*texts) if chat else texts
    many = len(texts)
    group = Group(["p"] * many, said, [[]] * many, {"answer": [4] * many}, prefilled)
    assert score(load(use), group, args, built_in=True).values == values
    assert score(load("length"), group, {"unit": "characters", "target": 1, "window": 1}, built_in=True) == score(
        load("length"), Group(["p"] * many, said, [[]] * many, {}), {"unit": "characters", "target": 1, "window": 1},
        built_in=True,
    )  # fmt: skip


def test_a_function_of_the_users_gets_it_where_it_asks_for_it() -> None:
    group = Group(["p"] * 2, ["a", "b"], [[]] * 2, {"answer": [4] * 2}, "<think>\n")
    asks: Reward = lambda completions, prefilled: [float(one == "<think>\n") for one in prefilled]  # noqa: E731
    assert score(asks, group, {}, built_in=False).values == [1.0, 1.0]
    takes_all: Reward = lambda completions, **columns: [float("prefilled" in columns)] * 2  # noqa: E731
    assert score(takes_all, group, {}, built_in=False).values == [0.0, 0.0]
    column = Group(["p"] * 2, ["a", "b"], [[]] * 2, {"prefilled": ["<think>\n", "mine"]})
    assert score(asks, column, {}, built_in=False).values == [1.0, 0.0]
    assert "unknown prefilled" in score(number, group, {"prefilled": "<a>"}, built_in=True).problem


# Functions that were written for verl, OpenRLHF and ms-swift, or for one completion at a time, used as they are.

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
