"""Python code that a policy wrote, run in a process of its own: as a tool's call, or under unit tests.

**These are limits, and no security boundary**: they keep a policy's mistakes small, not an attacker out. Code sees the
files that this user may read. Give a container to what you do not trust.
"""

import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.deadline import within

_CHILD = Path(__file__).with_name("code_child.py")
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one call.

    Attributes:
        seconds: of wall time, and of CPU time; less than the time-out of whoever waits (PythonTools, a reward
            function), which would show nothing of what was printed.
        memory_bytes: that the process may write to (RLIMIT_DATA).
        file_bytes: of any file that it writes, and of what it prints.
        characters: of what it printed that are shown.
    """

    seconds: float = 8.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    characters: int = 4000


async def run(code: str, limits: Limits) -> str:
    """What `code` prints to stdout and stderr, cut in the middle where it is too long, then how it ended if not well.

    It starts in an empty folder that is wiped afterwards, with no variables of ours in its environment. Python's own
    ways to a network and to other processes are refused, as an error that the code sees; pairs of Unix sockets are not,
    which asyncio needs. Below Python it has no network, being in a network namespace of its own, unless the kernel
    refuses that (many containers do), and starts no processes, by RLIMIT_NPROC, unless it runs as root, whom the kernel
    does not hold to that. There code that looks for a way around Python (ctypes, say) finds one.
    """
    with tempfile.TemporaryDirectory(prefix="python-tool-", ignore_cleanup_errors=True) as folder:
        printed, home = Path(folder) / "printed", Path(folder) / "home"
        home.mkdir()
        with printed.open("wb") as output:
            ended = await _ended(code, limits, home, output.fileno())
        text = _shown(printed, limits.characters)
    return "\n".join(part for part in (text.rstrip("\n"), ended) if part) or "(the code printed nothing)"


async def _ended(code: str, limits: Limits, home: Path, output: int) -> str:
    """Runs it to its end; '' if all was well or it said itself what was not."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-u", "-X", "utf8", str(_CHILD),
        str(math.ceil(limits.seconds)), str(limits.memory_bytes), str(limits.file_bytes),
        stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, cwd=home,
        env=_ENVIRONMENT | {"HOME": str(home), "TMPDIR": str(home)}, start_new_session=True,
    )  # fmt: skip
    try:
        async with within(limits.seconds):
            await process.communicate(code.encode("utf-8", "replace"))
    except TimeoutError:
        return f"error: stopped after {limits.seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it may have started, too
        await process.wait()
    if process.returncode is None or process.returncode >= 0:
        return ""
    if process.returncode == -signal.SIGXCPU:
        return f"error: stopped after {limits.seconds:g} s"
    return f"error: the process died ({signal.Signals(-process.returncode).name})"


def _shown(file: Path, most: int) -> str:
    """Its beginning and its end, which has the error; read no further than needed."""
    size = file.stat().st_size
    with file.open("rb") as printed:
        if size <= most:
            return printed.read().decode("utf-8", "replace")
        half = most // 2
        begin = printed.read(half)
        printed.seek(size - half)
        end = printed.read()
    cut = size - len(begin) - len(end)
    return f"{begin.decode('utf-8', 'replace')}\n[... {cut} bytes left out ...]\n{end.decode('utf-8', 'replace')}"
