"""One call: which arguments a reward function gets, and what its return value means."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import pytest

from rewards.base import NAMES, Reward
from rewards.built_in.number import number
from rewards.call import Group, Verdict, failed, score
from rewards.loader import load

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
        (lambda completions: 1 / 0, {}, False, "ZeroDivisionError: division by zero (test_reward_call.py, line "),
        (lambda completions: exit(), {}, False, "SystemExit"),
        (broken_text, {}, False, r"ValueError: bad \ud83d (test_reward_call.py"),
        (
            mute,
            {},
            False,
            "Mute: its text cannot be read, since its __str__ raises KeyboardInterrupt (test_reward_call.py",
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
