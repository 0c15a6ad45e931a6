"""Code in its own process: what it may do, what it may not, and that the answer is always text."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rewards.code.process import Limits, run
from rollout.env.protocol import ToolCall, Turn
from rollout.env.tools.python_code import python
from rollout.env.tools.python_tools import PythonTools

TIGHT = Limits(seconds=20, memory_bytes=256 << 20, file_bytes=1 << 20, characters=300)
MULTIPROCESSING = "import multiprocessing; multiprocessing"


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
        ("import os; os.kill(os.getppid(), 9)", "PermissionError: code may send no signals to others here"),
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


LIBRARIES = """
import asyncio, concurrent.futures, ctypes, decimal, hashlib, logging, multiprocessing, shutil, sqlite3, ssl, tempfile
import threading
import numpy, sympy, zoneinfo
from pathlib import Path
threads = [threading.Thread(target=print, args=(i,)) for i in range(2)]
for thread in threads:
    thread.start()
    thread.join()
async def main():
    return await asyncio.gather(asyncio.to_thread(sum, [1, 2]), asyncio.sleep(0, 4))
print(asyncio.run(main()), concurrent.futures.ThreadPoolExecutor(2).submit(pow, 2, 3).result())
print(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x + 1)(1))
print(numpy.linalg.inv(numpy.eye(2) * 2).tolist(), sympy.integrate("x"), zoneinfo.ZoneInfo("Europe/Berlin"))
with tempfile.TemporaryDirectory() as folder:
    database = sqlite3.connect(f"{folder}/one.db")
    database.execute("create table t (a)")
    database.execute("insert into t values (7)")
    database.commit()
    Path("a").write_text("b")
    shutil.copy2("a", "c")
    print(database.execute("select a from t").fetchall(), Path("c").read_text(), hashlib.sha256(b"").hexdigest()[:6])
"""


async def test_threads_event_loops_libraries_and_files_work() -> None:
    told = await run(LIBRARIES, Limits(seconds=60))
    assert told.splitlines() == [
        "0", "1", "[3, 4] 8", "2", "[[0.5, 0.0], [0.0, 0.5]] x**2/2 Europe/Berlin", "[(7,)] b e3b0c4",
    ]  # fmt: skip


# What once led a reader of the output elsewhere, or kept it for ever.
BESIDE = """import os
for name in ('../printed', '../output', '1'):
    try: os.remove(name)
    except OSError: pass
"""
PRINTED = {
    "a link to a secret": f"{BESIDE}    try: os.symlink('{{secret}}', name)\n    except OSError: pass",
    "a FIFO": f"{BESIDE}    try: os.mkfifo(name)\n    except OSError: pass",
    "a folder": f"{BESIDE}    try: os.mkdir(name)\n    except OSError: pass",
    "an endless device": f"{BESIDE}    try: os.symlink('/dev/zero', name)\n    except OSError: pass",
    "another name for its folder": "import os\nos.rename(os.getcwd(), os.getcwd() + '-away')",
    "no folder at all": "import shutil\nshutil.rmtree('..', True)\nshutil.rmtree('.', True)",
    "no output": "import os\nos.closerange(0, 64)",
    "a pipe for output": "import os\nos.dup2(os.pipe()[1], 1)",
    "the secret itself": "print(open('{secret}').read())",
    "the output read back": "import os\nos.lseek(1, 0, 0)\nprint(os.read(1, 99))",
    "an empty output": "print(1)\nimport os\nos.ftruncate(1, 0)",
    "a folder that nobody may enter": "import os\nos.umask(0o777)\nos.mkdir('closed')\nos.mkdir('other')",
}


@pytest.mark.parametrize("what", PRINTED)
async def test_what_is_read_of_the_code_is_what_it_printed_and_nothing_is_left(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, temporary = tmp_path / "secret", tmp_path / "temporary"
    secret.write_text("hf_secret")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = sorted(os.listdir("/proc/self/fd"))
    code = PRINTED[what].replace("{secret}", str(secret))
    assert "hf_secret" not in await run(f"print('said', flush=True)\n{code}", Limits(seconds=20))
    assert list(temporary.iterdir()) == []
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_its_files_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("rewards.code.process.FILES", 20)
    told = await run("i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1", TIGHT)
    assert told == "error: stopped, since its files took more than 4 MiB or were more than 20"
    told = await run("i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(10**6))\n    i += 1", TIGHT)
    assert told.startswith("error: stopped, since its files took more than 4 MiB")
    assert list(tmp_path.iterdir()) == []


async def test_a_long_answer_of_the_tool_keeps_its_end_among_tools() -> None:
    tool = PythonTools([python])
    step = await tool.step(Turn("", (), (ToolCall("python", {"code": "print('x' * 6000)\n1 / 0"}),)))
    assert step.messages[0]["content"].endswith("ZeroDivisionError: division by zero")
    assert step.metrics["cut_answers"] == 0
