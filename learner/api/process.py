"""Runs a training or an evaluation in a child process: prints its output, passes Ctrl-C on to it, turns its failure
into an exception, and ends it when the caller ends."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence

from cluster import own_path

# The exceptions. InputError is exit code 2 of the command line, RunFailed is exit code 1.


class TrainError(Exception):
    """A call of `train`, `evaluate` or `plan` failed. The text is that of the command line."""


class InputError(TrainError, ValueError):
    """The settings or inputs are wrong, and nothing was trained. The text has a line for each mistake."""


class RunFailed(TrainError, RuntimeError):
    """The run failed after it had begun. The same call of `train` continues from its last checkpoint."""


CLOSE_S = 60.0  # seconds in which a run that is to end at once must end its processes
LOOK_S = 0.2  # seconds between two looks at the child's output
KILL_AT = 3  # number of Ctrl-C that kill the child; Ray's processes end when they notice that the driver is gone
TAIL = 2**16  # number of last characters of the output in which the error is looked for
SAID = ("error: ", "config: ")
# The child prints lines and no live table, though notebooks set FORCE_COLOR: rich would take the file for a terminal.
PLAIN = {"TTY_COMPATIBLE": "0", "RAY_COLOR_PREFIX": "0"}


class RunProcess:
    """A child process: a context manager, at whose end the process has ended.

    Its output goes to a file and not to a pipe, so that a run whose parent has died can still write, and finish its
    step. It has a session of its own, so that a terminal's Ctrl-C reaches only the parent, which passes it on.
    """

    def __init__(self, module: str, arguments: Sequence[str], given: str) -> None:
        """Starts the process. given: its standard input; no file is used, since a configuration may hold secrets."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._read, self._tail, self._interrupted = 0, "", 0
        command = [sys.executable, "-P", "-u", "-m", module, str(os.getpid()), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **PLAIN, **own_path.environment()},  # sys.path may have been changed in this process
        )  # fmt: skip
        assert self._process.stdin is not None
        # If the child has died already, `failure` says why.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stream:
            stream.write(given.encode())

    def __enter__(self) -> "RunProcess":
        return self

    def __exit__(self, *_: object) -> None:
        # The second SIGINT ends the child at once, but cleanly.
        for number, patience in ((signal.SIGINT, 1.0), (signal.SIGINT, CLOSE_S), (signal.SIGKILL, CLOSE_S)):
            if not self.wait(0):
                self._process.send_signal(number)
                self.wait(patience)
        self._file.close()

    def follow(self, look: Callable[[], None], words: tuple[str, str]) -> int:
        """Waits for the child's end; meanwhile prints its output, and calls `look` again and again. Returns how often
        Ctrl-C was pressed: the first two are passed on, each with one of `words` printed; the third kills it."""
        interrupts, ended = 0, False
        while not ended:
            try:
                ended = self.wait(LOOK_S)
                self.relay()
                look()
            except KeyboardInterrupt:
                interrupts += 1
                self._say(f"{words[interrupts - 1] if interrupts < KILL_AT else 'killed'}\n")
                self.interrupt(interrupts) if interrupts < KILL_AT else self._process.kill()
        return interrupts

    def wait(self, seconds: float) -> bool:
        """Waits for the child's end, at most so many seconds. Returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def interrupt(self, times: int) -> None:
        """Interrupts the child until it has been interrupted so many times in all. Once: it finishes the step, writes a
        checkpoint and ends. Twice: it ends at once. So `on_step` and one Ctrl-C together still count as once."""
        while self._interrupted < times:
            self._interrupted += 1
            self._process.send_signal(signal.SIGINT)

    def relay(self) -> None:
        """Prints the child's output since the last call."""
        while new := os.pread(self._file.fileno(), TAIL, self._read):
            self._read += len(new)
            text = self._decoder.decode(new)
            self._tail = (self._tail + text)[-TAIL:]
            self._say(text)

    def _say(self, text: str) -> None:
        """Prints the text. The run goes on if standard output is closed or nobody reads it."""
        if sys.stdout is not None and not sys.stdout.closed:
            with contextlib.suppress(OSError):
                sys.stdout.write(text)
                sys.stdout.flush()

    def failure(self) -> TrainError | None:
        """The failure, with the command line's text; None for a run that is done or was stopped with a checkpoint."""
        code = self._process.returncode
        if code == 0:
            return None
        if code < 0:
            name = signal.Signals(-code).name
            return RunFailed(f"the run's process was ended by {name}; the same call goes on from its last checkpoint")
        lines = self._tail.splitlines()
        said = _last_words(lines) or [f"the run ended with exit code {code}: {lines[-1] if lines else 'no output'}"]
        return InputError("\n".join(said)) if code == 2 else RunFailed(said[-1])


def _last_words(lines: list[str]) -> list[str]:
    """The last block of lines that begin with a prefix of SAID, without these prefixes."""
    found: list[str] = []
    for line in reversed(lines):
        begins = next((word for word in SAID if line.startswith(word)), None)
        if begins is not None:
            found.insert(0, line.removeprefix(begins))
        elif found:
            break
    return found
