"""Does the code that was written pass its unit tests? Code and tests run in a process each
(rewards.code.tests_child)."""

import ast
import asyncio
import json
import logging
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markdown_it import MarkdownIt

from rewards.base import Zeroed, column_of, text_of
from rewards.code.process import Limits, outcome_of
from rewards.limits import LONGEST

# The fenced blocks of a Markdown text, as CommonMark has them.


_LANGUAGE = re.compile(r"[{.]*([\w+#-]+)")  # `python`, `{python}`, `{.python .numberLines}`, `python:file.py`
_MARKDOWN = MarkdownIt("commonmark")
_MARKDOWN.core.ruler.disable("inline")  # no block begins within a line
_MARKDOWN.block.ruler.disable("html_block")  # which <answer> or </think> alone on a line would begin


def fenced(text: str) -> Iterator[tuple[str, str]]:
    """(language in lower case, '' without one; content) of each block; one that nothing closes goes on to the end of
    the text, or of the list item that it stands in."""
    for token in _MARKDOWN.parse(text):
        if token.type == "fence":
            info = token.info.strip()
            language = _LANGUAGE.match(info)
            yield (language[1] if language else info).lower(), _to_the_margin(token.content)


def _to_the_margin(block: str) -> str:
    """Dedented if its first line is indented: dedent also empties lines of spaces, which texts in the code may have."""
    return textwrap.dedent(block) if block.lstrip("\n")[:1] in (" ", "\t") else block


log = logging.getLogger("rewards")

SECONDS, PARALLEL = 4.0, 4
_START_S = 10.0  # for the process of the tests, which keeps the deadline itself, to start on a busy machine
_PROGRAM = "rewards.code.tests_child"
_PYTHON = ("py", "py3", "python", "python3")
_CONSTANT = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator,
             ast.expr_context)  # fmt: skip
_told: set[str] = set()  # by this process


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
    same_process: bool = False,
    **columns: Sequence[Any],
) -> list[float]:
    """1.0 if the completion's Python code passes all unit tests of its problem, else 0.0; with `share` their share.

    The code is the last block that is fenced as Python; if there is none the last fenced
    without a language, else the whole text. Code that raises, is late, ends its process or takes too much memory passes
    no test, and costs no other completion anything. Tests run in another process than the code, with Python's own
    built-ins and modules, and of what the code returns they get the plain value: it does not know what is expected.
    What an operator of its own class says of a value of the test (`==`, or `-` as a number) is not trusted: such a test
    does not pass.

    Args:
        column: of the tests: a text, or a list of them, each run by itself, as in MBPP; empty ones are left out.
        setup_column: of code that runs before the answer, and again after it if it raised: a text, or a list of lines.
        entry_column: of the name of the function under test, where the tests define `check(candidate)`, as in
            HumanEval.
        seconds: of wall and CPU time, and memory: in GiB, that one completion's code and tests may take.
        parallel: completions at once; timeout_s must have room for a group of which all are late.
        same_process: runs the tests in the process of the code, which can then forge what they say: for tests that need
            its objects themselves (their `==`, classes derived from its own, data frames).

    A completion for which no process can be started has no score, nan.
    Raises ValueError if a column is missing, a problem has no tests, or one of them tests nothing: it only defines.
    """
    size = len(completions)
    tests = [_tests(value) for value in column_of(columns, column)]
    names = column_of(columns, entry_column) if entry_column is not None else None
    if names is not None:
        tests = [["\n".join([*one, f"check({name})"])] for one, name in zip(tests, names, strict=True)]
    else:
        _check_that_they_test(tests)
    before = [_joined(value) for value in column_of(columns, setup_column)] if setup_column is not None else [""] * size
    limits = Limits(seconds=seconds, memory_bytes=round(memory * 2**30))
    places = asyncio.Semaphore(parallel)

    async def passed(i: int) -> tuple[float, str]:
        entry = str(names[i]) if names is not None else None
        code = _code(text_of(completions[i]))
        task = {"code": code, "setup": before[i], "tests": tests[i], "entry": entry, "seconds": seconds}
        async with places:
            try:
                return await _passed(task | {"same_process": same_process}, limits)
            except (OSError, RuntimeError) as error:  # no fault of the answer's: it has no score
                return math.nan, f"it was not run: {error}"

    found = await asyncio.gather(*map(passed, range(size)))
    values = [value if share or math.isnan(value) else float(value == 1.0) for value, _ in found]
    return Zeroed(values, {i: why for i, (_, why) in enumerate(found) if why})


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


async def _passed(task: Mapping[str, Any], limits: Limits) -> tuple[float, str]:
    """The share of the tests that pass, and why the answer has none where that is no matter of right and wrong."""
    outcome = await outcome_of(_PROGRAM, json.dumps(task).encode(), limits, start_s=_START_S)
    begun, _, said = outcome.printed.partition("\n")
    try:
        _tell_once(json.loads(begun))
    except ValueError:  # before the answer began
        raise RuntimeError(f"the process of the tests failed: {outcome.printed[-LONGEST:]} {outcome.ended}") from None
    if outcome.ended:
        return 0.0, outcome.ended
    try:
        told = json.loads(said)
    except ValueError:
        return 0.0, _shown(f"the process of its tests ended: {said[-LONGEST:]}")
    return told["passed"] / len(task["tests"]), _shown(told["why"])


def _shown(why: str) -> str:
    """Without what a hostile name could do to a terminal."""
    return "".join(one if one.isprintable() else " " for one in why)[:LONGEST]


def _tell_once(missed: Sequence[str]) -> None:
    """Who trusts the walls around code had better know which are not here."""
    for one in missed:
        if one not in _told:
            _told.add(one)
            log.warning("reward unit_tests: the code of completions is not kept in on this kernel; %s", one)


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


def _check_that_they_test(tests: Sequence[Sequence[str]]) -> None:
    if idle := next((test for one in tests for test in one if _only_defines(test)), None):
        raise ValueError(
            "args.column: a test must assert or call something when it runs, else every answer passes it, got "
            f"{idle[:LONGEST]!r}, which only defines; call what it defines, or put its assert at the top level; what "
            "other tests need belongs into args.setup_column"
        )


def _only_defines(test: str) -> bool:
    """Whether nothing happens where it runs. What is no Python fails there, for every answer."""
    try:
        return _are_idle(ast.parse(test).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _are_idle(statements: Sequence[ast.stmt]) -> bool:
    return all(map(_is_idle, statements))


def _is_idle(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return statement.value is None or all(isinstance(node, _CONSTANT) for node in ast.walk(statement.value))
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return not statement.decorator_list
    if isinstance(statement, ast.ClassDef):
        return not statement.decorator_list and _are_idle(statement.body)
    if isinstance(statement, ast.If) and ast.unparse(statement.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    ):
        return _are_idle(statement.orelse)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass)
