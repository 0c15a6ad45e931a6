"""Code in its own process: what it may do, what it may not, and that the answer is always text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rewards.code_process import Limits, run
from rollout.env.protocol import ToolCall, Turn
from rollout.env.tools.python_code import python
from rollout.env.tools.python_tools import PythonTools

TIGHT = Limits(seconds=20, memory_bytes=256 << 20, file_bytes=1 << 20, characters=300)
MULTIPROCESSING = "import multiprocessing; multiprocessing"
UNIX = "import socket; socket.socket(socket.AF_UNIX)"


async def test_what_is_printed_is_the_answer() -> None:
    assert await python("for i in range(3):\n    print(i * i)") == "0\n1\n4"
    assert await python("x = 1") == "(the code printed nothing)"


async def test_an_event_loop_runs_in_it() -> None:
    code = "import asyncio\nasync def one():\n    await asyncio.sleep(0)\n    return 1\nprint(asyncio.run(one()))"
    assert await python(code) == "1"


async def test_an_error_is_told_with_its_line_and_without_ours() -> None:
    told = await python("print('first')\nx = 1 / 0")
    assert told.startswith('first\nTraceback (most recent call last):\n  File "<code>", line 2, in <module>\n    x = 1')
    assert told.endswith("ZeroDivisionError: division by zero")
    assert (await python("def f(:")).endswith("SyntaxError: invalid syntax")


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("x = bytearray(10**9)", "MemoryError"),
        ("open('f', 'w').write('x' * 10**7)", "File too large"),
        ("import os; os.fork()", "PermissionError: code may start no processes here"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError: code may start no processes here"),
        (
            f"{MULTIPROCESSING}.get_context('spawn').Process().start()",
            "PermissionError: code may start no processes here",
        ),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "PermissionError: code may start no processes here"),
        ("import socket; socket.socket()", "PermissionError: code has no network here"),
        (f"{UNIX}.connect('/run/x')", "PermissionError: code has no network here"),
        (f"{UNIX}.bind('x')", "PermissionError: code has no network here"),
        (f"{UNIX}.sendmsg([b'x'], [], 0, '/run/x')", "PermissionError: code has no network here"),
        (f"{UNIX}.sendto(b'x', '/run/x')", "PermissionError: code has no network here"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "error: the process died (SIGSEGV)"),
        ("print(input())", "EOFError: EOF when reading a line"),
        ("import sys\nprint(1)\nsys.exit('no solution')", "1\nno solution"),
    ],
)
async def test_a_limit_that_was_met_is_an_answer(code: str, end: str) -> None:
    assert (await run(code, TIGHT)).endswith(end)


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
async def test_code_that_does_not_end_is_stopped(code: str) -> None:
    assert await run(f"print('begun')\n{code}", Limits(seconds=0.5)) == "begun\nerror: stopped after 0.5 s"


async def test_output_without_end_is_cut_and_its_end_is_kept() -> None:
    told = await run("print('a' * 1000)\nraise SystemError('the end')", TIGHT)
    assert told.startswith("a" * 150 + "\n[... ")
    assert told.endswith("SystemError: the end")
    assert len(told) < 350


async def test_it_sees_no_secret_and_an_empty_folder_that_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hf_secret")
    told = await python(
        "import os\nopen('left', 'w').close()\nprint('SOME_TOKEN' in os.environ, os.listdir('.'), os.getcwd())"
    )
    assert told.startswith("False ['left'] ")
    assert not Path(told.rpartition(" ")[2]).exists()


def unshares() -> bool:
    """Whether the kernel gives a process a network of its own here."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x50000000) != 0)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not unshares(), reason="the kernel refuses namespaces here, and the docstring says what that means")
async def test_its_network_is_its_own_even_below_python() -> None:
    devices = await python("print(*[line.split(':')[0].strip() for line in open('/proc/net/dev')][2:])")
    assert devices == "lo"
    environ = await python(f"print(open('/proc/{os.getpid()}/environ').read())")
    assert environ.endswith(f"Permission denied: '/proc/{os.getpid()}/environ'")


async def test_a_long_answer_of_the_tool_keeps_its_end_among_tools() -> None:
    tool = PythonTools([python])
    step = await tool.step(Turn("", (), (ToolCall("python", {"code": "print('x' * 6000)\n1 / 0"}),)))
    assert step.messages[0]["content"].endswith("ZeroDivisionError: division by zero")
    assert step.metrics["cut_answers"] == 0
