"""What runs a policy's Python code: a program of its own, in a fresh interpreter that confines itself first.

It is started by rewards.code.process with the code on its standard input, and loads as little as it can, since a
trajectory waits for it.
"""

from __future__ import annotations

import os
import sys

from cluster.confinement import confine


def main(seconds: str, memory_bytes: str, file_bytes: str) -> None:
    """Runs the code and ends the process, with the code's own exit status."""
    text = sys.stdin.read()
    confine(int(seconds), int(memory_bytes), int(file_bytes))
    program = type(sys)("__main__")
    sys.modules["__main__"] = program
    if "traceback" in text or "logging" in text:
        _remember(text)
    status = _run(text, vars(program))
    try:
        sys.stdout.flush()
    except Exception:  # the code has closed it, or put something else in its place
        status = status or 1
    os._exit(status)  # threads that code left behind do not keep it


def _remember(code: str) -> None:
    """Its lines, for tracebacks. What that loads takes as long as all the rest."""
    import linecache

    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")


def _run(code: str, names: dict[str, object]) -> int:
    """What the code raises is told as Python does, less our own lines."""
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
