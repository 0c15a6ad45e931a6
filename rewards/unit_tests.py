"""Does the code that was written pass its unit tests? Run in a process of its own (rewards.code_process)."""

import asyncio
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.code_process import Limits, run
from rewards.fenced import fenced
from rewards.text import column_of, text_of

SECONDS, PARALLEL = 4.0, 4
_PYTHON = ("py", "py3", "python", "python3")
# What the process runs. What the model wrote is a text inside it, so that no quote or indentation of it reaches the
# tests; `exit()` in it, or output of its own, leaves the last line unsaid, and built-ins that it replaces are its own.
# Its module is found by its name, by which dataclasses look for it. A setup may need what the answer defines (MBPP's
# 927: `root = Node(1)`), or the answer what the setup imports: one that raises before the answer runs again after it.
_PROGRAM = """\
import sys, types
said, run, read, tell, passed = sys.stdout, exec, compile, print, 0
names = vars(sys.modules.setdefault("answer", types.ModuleType("answer")))
try:
    run(read({setup!r}, "<setup>", "exec"), names)
    again = ""
except Exception:
    again = {setup!r}
run(read({code!r}, "<answer>", "exec"), names)
run(read(again, "<setup>", "exec"), names)
for test in {tests!r}:
    try:
        run(read(test, "<test>", "exec"), names)
        passed += 1
    except Exception:
        pass
tell("\\n{mark}", passed, file=said, flush=True)
"""


async def unit_tests(
    completions: Sequence[Any],
    *,
    column: str = "test_list",
    setup_column: str | None = None,
    entry_column: str | None = None,
    share: bool = False,
    seconds: float = SECONDS,
    memory: float = 0.5,
    parallel: int = PARALLEL,
    **columns: Sequence[Any],
) -> list[float]:
    """1.0 if the completion's Python code passes all unit tests of its problem, else 0.0; with `share` their share.

    The code is the last block that is fenced as Python (rewards.fenced); if there is none the last fenced without a
    language, else the whole text. Code that raises, is late or takes too much memory passes no test. The code could
    cheat a test that runs beside it (by an object that equals everything, say): these are limits on mistakes, no
    defence against a policy that looks for such ways.

    Args:
        column: of the tests: a text, or a list of them, each run by itself, as in MBPP; empty ones are left out.
        setup_column: of code that runs before the answer, and again after it if it raised: a text, or a list of lines.
        entry_column: of the name of the function under test, where the tests define `check(candidate)`, as in
            HumanEval.
        seconds: of wall and CPU time, and memory: in GiB, that one completion's code and tests may take.
        parallel: completions at once; timeout_s must have room for a group of which all are late.

    Raises ValueError if a column is missing, or a problem has no tests.
    """
    size = len(completions)
    tests = [_tests(value) for value in column_of(columns, column)]
    if entry_column is not None:
        names = column_of(columns, entry_column)
        tests = [["\n".join([*one, f"check({name})"])] for one, name in zip(tests, names, strict=True)]
    before = [_joined(value) for value in column_of(columns, setup_column)] if setup_column is not None else [""] * size
    limits = Limits(seconds=seconds, memory_bytes=round(memory * 2**30))
    places = asyncio.Semaphore(parallel)

    async def passed(i: int) -> float:
        async with places:
            return await _passed(_code(text_of(completions[i])), before[i], tests[i], limits)

    found = await asyncio.gather(*map(passed, range(size)))
    return [value if share else float(value == 1.0) for value in found]


def late(args: Mapping[str, Any], size: int, timeout_s: float) -> str:
    """What is wrong with a deadline by which a group of that size may not have ended, where all are late; or ''. Args
    that are wrong themselves are told by the first call."""
    seconds, parallel = args.get("seconds", SECONDS), args.get("parallel", PARALLEL)
    if not isinstance(seconds, int | float) or not isinstance(parallel, int) or parallel < 1:
        return ""
    longest = seconds * math.ceil(size / parallel)
    if longest < timeout_s:
        return ""
    return (
        f"timeout_s: must be above {longest} s, which {size} completions take that are all late ({seconds} s each, "
        f"{parallel} at once), else none of them has its reward, got {timeout_s}; raise it or args.parallel, or lower "
        "args.seconds"
    )


async def _passed(code: str, setup: str, tests: Sequence[str], limits: Limits) -> float:
    """The share of the tests that pass."""
    mark = secrets.token_hex(16)  # the code cannot guess the line that counts
    printed = await run(_PROGRAM.format(setup=setup, code=code, tests=tests, mark=mark), limits)
    told = re.search(rf"^{mark} ([0-9]{{1,9}})$", printed, re.MULTILINE)
    passed = int(told[1]) if told else 0
    return passed / len(tests) if passed <= len(tests) else 0.0  # code that reaches the count may write what it likes


def _code(text: str) -> str:
    blocks = list(fenced(text))
    named = [code for language, code in blocks if language in _PYTHON]
    unnamed = [code for language, code in blocks if not language]
    return [text, *unnamed, *named][-1]


def _tests(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else list(value or ())
    tests = [test for test in found if isinstance(test, str) and test.strip()]
    if not tests:
        raise ValueError(f"args.column: each problem must have a test, got {value!r}; leave such problems out")
    if other := [test for test in found if test is not None and not isinstance(test, str)]:
        raise ValueError(f"args.column: a test must be a text, got {other[0]!r}; leave such problems out")
    return tests


def _joined(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(value or ())
