"""The program that runs the policy's Python code in a fresh interpreter, after confining itself.

rewards.code.process starts it with the code on its standard input. It imports as little as possible, since a trajectory
waits for it.
"""

from __future__ import annotations

import os
import sys

from cluster.confinement import confine


def main(seconds: str, memory_bytes: str, file_bytes: str) -> None:
    """Runs the code and exits: with status 0 if the code ended without an exception or by sys.exit(0), else with 1. The
    arguments are those of `confine`."""
    text = sys.stdin.read()
    confine(int(seconds), int(memory_bytes), int(file_bytes))
    program = type(sys)("__main__")
    sys.modules["__main__"] = program
    if "traceback" in text or "logging" in text:
        _remember(text)
    status = _run(text, vars(program))
    try:
        sys.stdout.flush()
    except Exception:  # the code has closed or replaced stdout
        status = status or 1
    os._exit(status)  # does not wait for threads of the code


def _remember(code: str) -> None:
    """Stores the code's lines for tracebacks. It is called only if needed, since loading linecache takes as long as the
    rest of the start."""
    import linecache

    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")


def _run(code: str, names: dict[str, object]) -> int:
    """Runs the code with the global names `names` and returns its exit status. An exception is printed as Python prints
    it, without the frames of this module."""
    try:
        exec(compile(code, "<code>", "exec", dont_inherit=True), names)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            sys.stdout.flush()
            print(ended.code, file=sys.stderr)
        return 0 if ended.code in (None, 0) else 1
    except BaseException as error:
        import traceback

        _remember(code)
        mine = error.__traceback__
        sys.stdout.flush()
        traceback.print_exception(type(error), error, mine.tb_next if mine is not None else None)
        return 1
    return 0
