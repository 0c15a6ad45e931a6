"""The reward that math-verify grades, against cases worked out by hand."""

import importlib
import time
from math import isnan
from typing import Any

import pytest

from rewards.built_in.math import math, written


def test_math_compares_by_meaning() -> None:
    cases = [
        (r"<answer>\frac{1}{2}</answer>", "0.5", 1.0),
        ("<answer>0.5</answer>", r"\frac{1}{2}", 1.0),
        (r"Hence $\boxed{x^2+2x+1}$", "$(x+1)^2$", 1.0),
        ("<answer>3</answer>", "#### 4", 0.0),
        (r"<answer>\$32,348</answer>", "32348", 1.0),  # a dollar sign in a text of LaTeX, which delimits nothing
        ("<answer>36</answer>", r"\$36", 1.0),
        (r"<answer>\[\frac{1}{2}\]</answer>", "0.5", 1.0),
        (r"<answer>\left[0,1\right]</answer>", r"\left[0,1\right]", 1.0),
        ("<answer>0.00005</answer>", 5e-05, 1.0),  # a column of numbers, which Python writes with e
        ("<answer></answer>", "4", 0.0),
        ("I do not know", "4", 0.0),
    ]
    texts, golds, scores = map(list, zip(*cases, strict=True))
    assert math([[{"role": "assistant", "content": text}] for text in texts], answer=golds) == scores


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        (r"So \boxed{1}. Wait, no. So \boxed{2}", "2", 1.0),
        (r"So \boxed{1}. Wait, no. So \boxed{2}", "1", 0.0),
        (r"So \boxed{1}. Wait, no. So \boxed{\frac{1}{2}}, not \boxed{}", "0.5", 1.0),
        (r"So \boxed{1}. No: \boxed{2} and \boxed{3}", r"\{2, 3\}", 1.0),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2", 1.0),
        (r"\(\boxed{1}\) and \(\boxed{2}\)", "1, 2", 1.0),
        (r"$x_1=\boxed{1},\quad x_2=\boxed{2}$", "1, 2", 1.0),
        (r"$\boxed{1} \text{ or } \boxed{2}$", "1, 2", 1.0),
        (r"\boxed{1}; \boxed{2}", "1, 2", 1.0),
        (r"So \boxed{3}. No: $(\boxed{1}, \boxed{2})$", "(1, 2)", 1.0),
        (r"<answer>2</answer>", r"Not \boxed{1} but \boxed{2}", 1.0),
        ("<answer>**7**</answer>", "7", 1.0),
        ("<answer>`7`</answer>", "7", 1.0),
        (r"<answer>**$\frac{1}{2}$**</answer>", "0.5", 1.0),
        ("<answer>`7` or `8`</answer>", "8", 0.0),
        ("<answer>pi/2</answer>", r"\frac{\pi}{2}", 1.0),
        ("<answer>√2</answer>", r"\sqrt{2}", 1.0),
        ("<answer>1½</answer>", "1.5", 1.0),
        ("<answer>x**12</answer>", "x^{12}", 1.0),
        ("It is $x**2$.", "x**2", 1.0),
        ("It is $pi$.", "pi", 1.0),  # whatever it is, it is what gold is
        ("<answer>48 24</answer>", "72", 0.0),
        ("<answer>71 72 73</answer>", "216", 0.0),
        (r"<answer>$48\ 24$</answer>", "72", 0.0),
        (r"\boxed{48 24}", "72", 0.0),
        ("<answer>48 24/1</answer>", "72", 0.0),
        (r"<answer>\frac 1 2</answer>", "0.5", 1.0),
        ("<answer>1, 2, 3</answer>", "1,2,3", 1.0),
        ("<answer>7/4</answer>", "1 3/4", 1.0),
        ("<answer>1</answer>", "1 3/4", 0.0),
        ("<answer>-1 3/4</answer>", "-1.75", 1.0),
        ("<answer>10 000</answer>", "10000", 1.0),
        ("<answer>10000.5</answer>", "10 000.5", 1.0),
        (r"\boxed{10\,000}", "10000", 1.0),
        (r"<answer>\ne 5</answer>", "5", 0.0),
        (r"<answer>$\geq 5$</answer>", "5", 0.0),
        (r"\boxed{> 5}", "5", 0.0),
        ("<answer>= 5</answer>", "5", 1.0),
        (r"<answer>\left(1, 2\right)</answer>", "(1, 2)", 1.0),
        ("<answer>x > 5</answer>", "x>5", 1.0),
        (r"<answer>\ge 5</answer>", r"\geq 5", 1.0),
    ],
)
def test_math_reads_what_is_written(text: str, gold: str, score: float) -> None:
    assert math([text], answer=[gold]) == [score]


def test_math_gives_no_score_where_it_runs_out_of_time_and_refuses_to_where_nothing_is_right() -> None:
    with pytest.raises(ValueError, match="cannot read the gold answer None"):
        math(["<answer>4</answer>"], answer=[None])
    with pytest.raises(ValueError, match="cannot read the gold answer '48 24'"):
        math(["<answer>72</answer>"], answer=["48 24"])
    (score,) = math(["<answer>9^{9^{9^{9}}}</answer>"], answer=["4"], seconds=1)
    assert isnan(score) or score == 0.0  # a failure with a name; None would say that it does not score it


def test_late_completions_cost_a_group_no_more_than_its_deadline_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    verify: Any = importlib.import_module("math_verify")
    parse = verify.parse

    def slow(text: str, **args: Any) -> Any:
        if "slow" in text:
            while True:  # it computes: that is what counts
                pass
        return parse(text, **args)

    monkeypatch.setattr(verify, "parse", slow)
    begin = time.process_time()
    scores = math([*["<answer>slow</answer>"] * 8, "<answer>4</answer>"], answer=["4"] * 9, seconds=1)
    assert [isnan(score) for score in scores] == [True] * 8 + [False]
    assert scores[-1] == 1.0
    assert time.process_time() - begin < 5  # 2 x 1 s and 6 x 1/8 s


def test_a_busy_machine_makes_no_completion_late(monkeypatch: pytest.MonkeyPatch) -> None:
    verify: Any = importlib.import_module("math_verify")
    parse = verify.parse

    def waits(text: str, **args: Any) -> Any:
        time.sleep(0.3)  # as a process does that others keep from the processors
        return parse(text, **args)

    monkeypatch.setattr(verify, "parse", waits)
    assert math(["<answer>4</answer>"], answer=["4"], seconds=0.2) == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        "1 2" + " " * 9000 + "!",
        "$" + " " * 9000 + "x",
        "1 2 " + "abc " * 3000 + "!",
        r"\boxed{" * 3000,
        r"\boxed{1}," * 5000,
        r"\boxed{1}" + r"\\" * 20000 + r"x\boxed{2}",
        "1 1/" + "9" * 6000,
    ],
)
def test_a_text_that_goes_on_and_on_is_prepared_at_once(text: str) -> None:
    begin = time.perf_counter()
    written(text, prose=False)
    assert time.perf_counter() - begin < 1
