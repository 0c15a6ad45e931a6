"""Answers that attack who scores them: each costs its own reward, with a reason, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewards.built_in.unit_tests import unit_tests
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.pool import RewardPool
from tests.cluster.contexts import CONTEXTS, ENTER, skip_unless_possible

ROOT = Path(__file__).parents[2]
TESTS = [
    "assert sq(2) == 4",
    "assert abs(sq(3) - 9) < 1e-6",
    "import math\nassert math.isclose(sq(1.5), 2.25)",
    "assert sq(2) in (4, 5) and {4: 1}[sq(2)] == 1",
    "assert 3 < sq(2) < 5",
]
RIGHT = "def sq(x):\n    return x * x"


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
    found: Any = asyncio.run(unit_tests(answers, test_list=[TESTS] * len(answers), share=True, memory=0.25, seconds=30))
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
            columns = {"test_list": [TESTS] * len(answers)}
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
        "user": user, "namespaces": namespaces, "tests": TESTS,
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
