"""Code under its unit tests: what passes, what does not, and what may not be claimed. Answers that attack who scores
them: each costs its own reward, with a reason, and nobody else's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewards.built_in.unit_tests import late, unit_tests
from rewards.call import Group, score
from rewards.config import RewardConfig
from rewards.loader import load
from rewards.pool import RewardPool
from tests.cluster.contexts import CONTEXTS, ENTER, skip_unless_possible

TESTS = ["assert sq(2) == 4", "assert sq(3) == 9"]
RIGHT = "def sq(x):\n    return x * x"
NEXT = "\n"
INDENTED = "   def sq(x):\n       return x * x"
FENCE = '"""\n```\nno code\n```\n"""'  # in a text of the code
CASES = {
    "fenced": (f"Text ```sq``` first.\n```python\nno code\n```\n```py\n{RIGHT}\n```\nand after", 1.0),
    "fenced within tags": (f"<answer>\n```python\n{RIGHT}\n\n```\n</answer>", 1.0),
    "fenced, behind another language": (f"```bash\npip install x\n```\nThen:\n```python3\n{RIGHT}\n```", 1.0),
    "fenced, with what it prints": (f"```python\n{RIGHT}\n```\nIt prints:\n```\n4\n```", 1.0),
    "fenced without a language": (f"Hence\n```\n{RIGHT}\n```", 1.0),
    "fenced, and never closed": (f"So:\n```python\n{RIGHT}", 1.0),
    "fenced in an item of a list": (f"1. First:\n\n   ```python\n{INDENTED}\n   ```\n2. Done.", 1.0),
    "fenced behind the marker of an item": (
        f"- a\n  - ```python\n    {RIGHT.replace(NEXT, NEXT + '    ')}\n    ```",
        1.0,
    ),
    "fenced by tabs": (f"10. So:\n\t```python\n\t{RIGHT.replace(NEXT, NEXT + chr(9))}\n\t```\nand after", 1.0),
    "fenced, closed further in": (f"```python\n{RIGHT}\n  ```\nand after", 1.0),
    "fenced, all of it indented": (f"```python\n{INDENTED}\n```", 1.0),
    "fenced as py3": (f"```py3\n{RIGHT}\n```\n```\nno\n```", 1.0),
    "fenced as an attribute": (f"```{{.python .numberLines}}\n{RIGHT}\n```\n```{{r}}\nno\n```", 1.0),
    "fenced by four, with three in it": (f"````python\n{FENCE}\n{RIGHT}\n````\nand after", 1.0),
    "fenced by tildes": (f"~~~python\n{FENCE}\n{RIGHT}\n~~~~\nand after", 1.0),
    "fenced, with a deeper fence in its text": (
        f"```py\n{RIGHT}\ndef f():\n    {FENCE.replace(NEXT, NEXT + '    ')}\n```",
        1.0,
    ),
    "fenced, with carriage returns": (f"```python\n{RIGHT}\n```\nand after".replace("\n", "\r\n"), 1.0),
    "plain, with a fence in its text": (f"{RIGHT}\ndef f():\n    {FENCE.replace(NEXT, NEXT + '    ')}", 1.0),
    "plain": (RIGHT, 1.0),
    "a dataclass that names itself": (
        f"from dataclasses import dataclass\n@dataclass\nclass Node:\n    next: 'Node' = None\n{RIGHT}",
        1.0,
    ),
    "prints": (f"print('x' * 100_000)\n{RIGHT}\nprint('y' * 100_000)", 1.0),
    "half": ("def sq(x):\n    return 4", 0.5),
    "exits": ("import sys\nsys.exit(0)", 0.0),
    "exits in a test": (f"{RIGHT}\nimport os\nsq = lambda x: os._exit(0)", 0.0),
    "says itself that it passed": ("import sys\nprint('\\n' + '0' * 32, 2, flush=True)\nsys.exit()", 0.0),
    "says that more passed than there are": ("import __main__\n__main__.passed = 7", 0.0),
    "replaces what runs the tests": ("import builtins\nbuiltins.exec = builtins.compile = lambda *_: 'pass'", 0.0),
    "a quote that would swallow the tests": (f"{RIGHT}\n'''", 0.0),
    "late": ("while True: pass", 0.0),
    "large": (f"{RIGHT}\nx = bytearray(10**9)", 0.0),
    "asserts nothing": (f"{RIGHT}\nimport builtins, sys\nsys.stdout = None", 1.0),
    "empty": ("", 0.0),
}


def test_all_tests_or_a_share_of_them() -> None:
    texts, shares = zip(*CASES.values(), strict=True)
    function: Any = load("unit_tests")
    columns = {"test_list": [TESTS] * len(texts)}
    limits = {"seconds": 3, "memory": 0.25}
    found = asyncio.run(function(completions=texts, share=True, **limits, **columns))
    assert dict(zip(CASES, found, strict=True)) == dict(zip(CASES, shares, strict=True))
    some = [CASES[name][0] for name in ("plain", "prints", "half", "exits")]
    assert asyncio.run(function(completions=some, test_list=[TESTS] * 4)) == [1.0, 1.0, 0.0, 0.0]


def test_the_columns_of_humaneval_and_of_setup_code() -> None:
    rows: dict[str, list[Any]] = {
        "test": ["def check(candidate):\n    assert candidate(4.0) == PI * 16"] * 2, "entry_point": ["area"] * 2,
        "before": [["import math", "PI = math.pi"]] * 2,
    }  # fmt: skip
    texts = ["def area(r):\n    return PI * r * r", "def area(r):\n    return r"]
    args = {"column": "test", "entry_column": "entry_point", "setup_column": "before"}
    verdict = score(load("unit_tests"), Group(["p"] * 2, texts, [[0]] * 2, rows), args, built_in=True)
    assert (verdict.status, verdict.values) == ("ok", [1.0, 0.0])


def test_a_setup_may_need_the_answer_or_the_answer_the_setup() -> None:
    setups = ["import math\nroot = Node(math.pi)", "from math import pi", "root = Node(1) +", "root = Tree(1)"]
    node = "class Node:\n    def __init__(self, value):\n        self.value = value\n"
    texts = [node, f"{node}root = Node(pi)", f"{node}root = Node(3.2)", f"{node}root = Node(3.2)"]
    columns: dict[str, list[Any]] = {"test_list": [["assert root.value > 3"]] * 4, "before": setups}
    group = Group(["p"] * 4, texts, [[0]] * 4, columns)
    verdict = score(load("unit_tests"), group, {"setup_column": "before"}, built_in=True)
    assert (verdict.status, verdict.values) == ("ok", [1.0, 1.0, 0.0, 0.0])


def test_a_setup_that_ran_before_the_answer_does_not_run_again() -> None:
    columns: dict[str, list[Any]] = {"test_list": [["assert f() == 1"]], "before": ["def f(): return 0"]}
    group = Group(["p"], ["def f(): return 1"], [[0]], columns)
    assert score(load("unit_tests"), group, {"setup_column": "before"}, built_in=True).values == [1.0]


def test_an_empty_test_is_none() -> None:
    texts, tests = ["x = 1", RIGHT], [[TESTS[0], None], ["", " ", TESTS[0]]]
    group = Group(["p"] * 2, texts, [[0]] * 2, {"test_list": tests})
    assert score(load("unit_tests"), group, {"share": True}, built_in=True).values == [0.0, 1.0]
    group = Group(["p"], [RIGHT], [[0]], {"test_list": [[TESTS[0], {"input": 2}]]})
    verdict = score(load("unit_tests"), group, {"share": True}, built_in=True)
    assert "a test must be a text, got {'input': 2}" in verdict.problem


@pytest.mark.parametrize("same_process", [False, True])
def test_tests_may_do_with_an_answer_what_they_like(same_process: bool) -> None:
    """Change what they hand over, call back, raise, iterate, await, print, derive values of every kind."""
    answer, tests = (Path(__file__).with_name(f"idioms_{name}.txt").read_text() for name in ("answer", "tests"))
    columns = {"test_list": [tests.split("\n===\n")]}
    function: Any = load("unit_tests")
    found = asyncio.run(function([answer], share=True, seconds=30, same_process=same_process, **columns))
    assert (found, found.why) == ([1.0], {})


BESIDE = {
    "their equality": ("class P:\n def __init__(s, x): s.x = x\n def __eq__(s, o): return s.x == o.x",
                       "assert P(1) == P(1)", "what __eq__ of the answer's own class says"),
    "a class of theirs": ("class P:\n def one(s): return 1", "class Q(P): pass\nassert Q().one() == 1",
                          "cannot be derived from one of the answer's"),
    "a module of the test": ("def name(m): return m.__name__", "import json\nassert name(json) == 'json'",
                             "a module of the test cannot be handed to the answer"),
    "an assert that they should catch": ("def f(g):\n try: g()\n except AssertionError: return 1",
                                         "def g(): assert False\nassert f(g) == 1",
                                         "an AssertionError of a test ended within the answer"),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_what_only_one_process_can_do_is_told_and_has_an_arg(case: str) -> None:
    answer, test, reason = BESIDE[case]
    function: Any = load("unit_tests")
    apart = asyncio.run(function([answer], test_list=[[test]]))
    assert (apart, list(apart.why)) == ([0.0], [0])
    assert reason in apart.why[0]
    assert "args.same_process runs such tests beside the answer" in apart.why[0]
    assert asyncio.run(function([answer], test_list=[[test]], same_process=True)) == [1.0]


def test_names_of_python_and_of_the_setup_are_not_the_answers_unless_they_are_what_is_tested() -> None:
    cheat = "abs = close = lambda *a: 0\nsum = sorted = lambda *a: 6\ndef f(x): return 5"
    setup = "def close(a, b): return abs(a - b) < 1"
    cases = {  # setup, test -> what it says of the cheat
        ("", "assert abs(f(1) - 9) == 0"): 0.0,
        ("", "assert sum(10, 15) == 6"): 1.0,  # MBPP's 126: a function of that name is the task
        ("", "assert sorted([3, 1]) == 6"): 1.0,
        ("", "assert sum([f(1), 1]) == 6"): 1.0,
        ("", "assert sum([f(1), 1]) == 7"): 0.0,
        (setup, "assert close(f(1), 5)"): 1.0,
        (setup, "assert close(f(1), 9)"): 0.0,
        ("import math", "assert math.isclose(f(1), 5)"): 1.0,
        ("", "assert math.isclose(f(1), 9)"): 0.0,
    }
    columns = {"test_list": [[test] for _, test in cases], "setup": [setup for setup, _ in cases]}
    function: Any = load("unit_tests")
    found = asyncio.run(function([cheat] * len(cases), setup_column="setup", **columns))
    assert dict(zip(cases, found, strict=True)) == cases


def test_an_answer_that_makes_a_test_compute_for_ever_costs_itself() -> None:
    answers = ["def f(x): return 10**18", "def f(x): return 3", "def f(x): return 'a' * 40 + '!'"]
    tests = ["import re\nassert not re.match('(a+)+$', str(f(1)))", "assert sum(range(f(3))) == 3"]
    function: Any = load("unit_tests")
    found = asyncio.run(function(answers, test_list=[tests] * 3, seconds=1.5))
    assert found == [0.0, 1.0, 0.0]
    assert found.why[0].startswith(("stopped after", "the process died"))  # by a signal: what is in C hears no other
    assert found.why[2] == "stopped after 1.5 s"


def test_a_process_that_cannot_be_started_is_no_answers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = tempfile.mkdtemp, itertools.count()

    def full(*args: Any, **named: Any) -> str:
        if next(made) == 1:
            raise OSError(28, "No space left on device", "/tmp/x")
        return str(real(*args, **named))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    group = Group(["p"] * 3, [RIGHT] * 3, [[0]] * 3, {"test_list": [TESTS] * 3})
    verdict = score(load("unit_tests"), group, {"parallel": 1}, built_in=True)
    assert (verdict.status, verdict.values[0], verdict.values[2]) == ("nan", 1.0, 1.0)
    assert "first sample 1: it was not run: [Errno 28] No space left on device" in verdict.problem
    monkeypatch.setattr("rewards.built_in.unit_tests._PROGRAM", "rewards.no_such_program")
    verdict = score(load("unit_tests"), group, {}, built_in=True)
    assert "it was not run: the process of the tests failed: " in verdict.problem
    assert "No module named 'rewards.no_such_program'" in verdict.problem


@pytest.mark.parametrize("tests", [None, "", [], [" "], [None, ""]])
def test_a_problem_without_a_test_is_no_score(tests: Any) -> None:
    group = Group(["p"], [RIGHT], [[0]], {"test_list": [tests]})
    verdict = score(load("unit_tests"), group, {}, built_in=True)
    assert verdict.status == "error"
    assert "each problem must have a test" in verdict.problem


IDLE = [
    "def test_one():\n    assert sq(2) == 4",
    "async def test_one():\n    assert sq(2) == 4",
    "import unittest\nclass T(unittest.TestCase):\n    n = -4\n    def test_one(self): self.assertEqual(sq(2), 4)",
    "if __name__ == '__main__':\n    assert sq(2) == 4",
    "if '__main__' == __name__:\n    assert sq(2) == 4\nelse:\n    pass",
    "# assert sq(2) == 4",
    '"""sq(2) is 4."""\nimport math\nfrom math import pi\nINPUTS: list = [(2, 4)]',
]


@pytest.mark.parametrize("test", IDLE)
def test_a_test_that_only_defines_is_no_test(test: str) -> None:
    group = Group(["p"], ["no code"], [[0]], {"test_list": [[TESTS[0], test]], "entry": ["sq"]})
    verdict = score(load("unit_tests"), group, {}, built_in=True)
    assert verdict.status == "error"
    assert "a test must assert or call something when it runs" in verdict.problem
    assert repr(test)[1:14] in verdict.problem
    assert score(load("unit_tests"), group, {"entry_column": "entry"}, built_in=True).values == [0.0]


@pytest.mark.parametrize(
    "test",
    [
        f"{IDLE[0]}\ntest_one()",
        "class T:\n    assert sq(2) == 4",
        "if __name__ != '__main__':\n    assert sq(2) == 4",
        "@sq\ndef x(): pass",
        "@sq\nclass X: pass",
        "root = sq",
        "assert ",
    ],
)
def test_a_test_that_does_something_is_one(test: str) -> None:
    assert score(
        load("unit_tests"), Group(["p"], ["f = 1"], [[0]], {"test_list": [test]}), {}, built_in=True
    ).values == [0.0]


def test_a_deadline_without_room_for_a_group_that_is_late_is_told() -> None:
    assert late({}, 8, 10.0) == late({"seconds": 1, "parallel": 16}, 160, 10.5) == late({"seconds": "x"}, 8, 1.0) == ""
    assert late({}, 9, 10.0).startswith("timeout_s: must be above 12.0 s, which 9 completions take that are all late")
    assert late({"seconds": 10**400}, 1, 10.0)


# Answers that attack who scores them: each costs its own reward, with a reason, and nobody else's.

ROOT = Path(__file__).parents[2]
HOSTILE_CODE_TESTS = [
    "assert sq(2) == 4",
    "assert abs(sq(3) - 9) < 1e-6",
    "import math\nassert math.isclose(sq(1.5), 2.25)",
    "assert sq(2) in (4, 5) and {4: 1}[sq(2)] == 1",
    "assert 3 < sq(2) < 5",
]


def read(name: str) -> dict[str, tuple[str, str]]:
    """Name -> code, and what is said of it, from a file beside this one."""
    sections = Path(__file__).with_name(name).read_text().split("\n=== ")[1:]
    heads = [section.partition("\n") for section in sections]
    return {head.partition(" | ")[0]: (code, head.partition(" | ")[2]) for head, _, code in heads}


FORGERIES = {name: code for name, (code, _) in read("forgeries.txt").items()}
ATTACKS = read("attacks.txt")
FOR_A_TEST = read("forgeries_of_a_test.txt")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert [*tmp_path.glob("python-tool-*")] == []
    assert not Path("/dev/shm/gleaner-hostile").exists()


def test_what_forges_passes_nothing_and_what_is_not_trusted_is_named() -> None:
    answers = [RIGHT, *FORGERIES.values(), RIGHT]
    found: Any = asyncio.run(
        unit_tests(answers, test_list=[HOSTILE_CODE_TESTS] * len(answers), share=True, memory=0.25, seconds=30)
    )
    assert dict(zip(["right", *FORGERIES, "too"], found, strict=True)) == (
        {"right": 1.0} | dict.fromkeys(FORGERIES, 0.0) | {"too": 1.0}
    )
    named = {
        name for i, name in enumerate(["right", *FORGERIES]) if "of the answer's own class says" in found.why.get(i, "")
    }
    own = {name for name, code in FORGERIES.items() if "class" in code and "AssertionError" not in code}
    assert named >= own | {"the library's own", "a mock"}
    assert "__eq__" in found.why[1]
    assert "args.same_process" in found.why[1]


@pytest.mark.parametrize("forgery", FOR_A_TEST)
def test_what_a_test_finds_out_is_not_for_the_answer_to_say(forgery: str) -> None:
    code, _, test = FOR_A_TEST[forgery][0].partition("---\n")
    assert asyncio.run(unit_tests([code], test_list=[[test]])) == [0.0]


def test_one_completion_costs_itself_and_leaves_the_others_of_its_group() -> None:
    answers = [RIGHT, *(code for code, _ in ATTACKS.values()), RIGHT, "def sq(x): return 4"]
    args = {"seconds": 4, "memory": 0.25, "share": True, "parallel": 12}  # so that those that are late are so at once

    async def main() -> Any:
        async with RewardPool([RewardConfig(use="unit_tests", timeout_s=60, args=args)]) as pool:
            columns = {"test_list": [HOSTILE_CODE_TESTS] * len(answers)}
            return await pool.score(Group(["p"] * len(answers), answers, [[1]] * len(answers), columns))

    scores = asyncio.run(main())
    names = ["right", *ATTACKS, "too", "some"]
    assert dict(zip(names, scores.reward, strict=True)) == (
        {"right": 1.0} | dict.fromkeys(ATTACKS, 0.0) | {"too": 1.0, "some": 0.6}
    )
    assert set(scores.status) == {"ok"}
    assert scores.failures == ()
    for name, error in zip(names, scores.errors, strict=True):
        wanted = ATTACKS.get(name, ("", ""))[1]
        if wanted:
            assert error is not None, name
            assert error.startswith("reward 'unit_tests': 0: ")
            assert wanted in error, name
    assert scores.errors[0] is scores.errors[-1] is None
    kinds = [kind.removeprefix("reward 'unit_tests': 0: ").strip() for kind in scores.zeroed]
    assert {"stopped after", "its process has ended"} <= set(kinds)


EVERYWHERE = ("an object that equals all", "frames", "every descriptor", "a module in another's place")
DRIVER = f"""{ENTER}
import asyncio, json, sys
from rewards.code.process import Limits, run
from rewards.built_in.unit_tests import unit_tests
context = json.loads(sys.argv[1])
enter(context["user"], context["namespaces"])
async def main():
    told = [await run(code, Limits(seconds=20)) for code in context["tool"]]
    found = await unit_tests(context["answers"], test_list=[context["tests"]] * len(context["answers"]), seconds=20)
    print(json.dumps([told, found]))
asyncio.run(main())
"""


@pytest.mark.parametrize(("user", "namespaces"), CONTEXTS)
def test_wherever_it_runs(user: int | None, namespaces: bool, tmp_path: Path) -> None:
    """As the attacks on the walls (tests/cluster/test_confinement.py): in each place where it may run."""
    skip_unless_possible(user, starts_python=True)
    secret = tmp_path / "secret"
    secret.write_text("hf_secret")
    swap = "import os\ntry: os.remove('../printed')\nexcept OSError: pass\n"
    context = {
        "user": user, "namespaces": namespaces, "tests": HOSTILE_CODE_TESTS,
        "tool": [
            f"{swap}try: os.symlink({str(secret)!r}, '../printed')\nexcept OSError: print('no')",
            f"{swap}try: os.mkfifo('../printed')\nexcept OSError: print('no')",
            f"print(open('/proc/{os.getpid()}/environ').read())\nprint('through')",
            f"import ctypes\nprint(ctypes.CDLL(None).kill({os.getpid()}, 0))",
            f"print(open({str(secret)!r}).read())",
        ],
        "answers": [
            RIGHT, *(FORGERIES[name] for name in EVERYWHERE), ATTACKS["ends all that it may"][0],
            ATTACKS["stops who scores it"][0], RIGHT,
        ],
    }  # fmt: skip
    command = [sys.executable, "-c", DRIVER, json.dumps(context)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told, scores = json.loads(done.stdout)
    assert told[:2] == ["no", "no"]
    assert "through" not in told[2]
    assert told[3] == "-1"
    assert "hf_secret" not in "".join(told)
    assert scores == [1.0, *[0.0] * (len(EVERYWHERE) + 2), 1.0]
