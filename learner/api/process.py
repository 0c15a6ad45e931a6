"""A run in a child process: its output comes out of this one, Ctrl-C goes to it, and it never outlives us."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence

from cluster import own_path

# TrainError, and under it InputError (exit code 2 of the command line) and RunFailed (exit code 1).


class TrainError(Exception):
    """A call of `train`, `evaluate` or `plan` that did not do what it was asked; the text is the command line's."""


class InputError(TrainError, ValueError):
    """The settings or inputs are wrong: one line for each mistake, nothing was trained."""


class RunFailed(TrainError, RuntimeError):
    """The run failed after it had begun; the same call of `train` goes on from its last checkpoint."""


CLOSE_S = 60.0  # for a run that is to end at once: it takes its processes down
LOOK_S = 0.2  # between two looks at what it has written
KILL_AT = 3  # times of Ctrl-C; Ray's processes end when they see that the driver is gone
TAIL = 2**16  # characters of output in which its last words are looked for
SAID = ("error: ", "config: ")
# Lines, not the moving table of a terminal: notebooks set FORCE_COLOR, by which rich would take the file for one.
PLAIN = {"TTY_COMPATIBLE": "0", "RAY_COLOR_PREFIX": "0"}


class RunProcess:
    """Context manager; at its end the process has ended.

    Its output goes to a file and not to a pipe: a run whose parent is gone can still write, and so finish its step. It
    has a session of its own, so that a terminal's Ctrl-C reaches this process alone, which hands it on.
    """

    def __init__(self, module: str, arguments: Sequence[str], given: str) -> None:
        """`given` goes to its standard input and not into a file: a configuration may hold secrets."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._read, self._tail, self._interrupted = 0, "", 0
        command = [sys.executable, "-P", "-u", "-m", module, str(os.getpid()), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **PLAIN, **own_path.environment()},  # sys.path may have been changed in this process
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stream:  # one that died says why
            stream.write(given.encode())

    def __enter__(self) -> "RunProcess":
        return self

    def __exit__(self, *_: object) -> None:
        # The second SIGINT ends it at once and cleanly.
        for number, patience in ((signal.SIGINT, 1.0), (signal.SIGINT, CLOSE_S), (signal.SIGKILL, CLOSE_S)):
            if not self.wait(0):
                self._process.send_signal(number)
                self.wait(patience)
        self._file.close()

    def follow(self, look: Callable[[], None], words: tuple[str, str]) -> int:
        """Waits for its end; meanwhile prints what it writes, and calls `look`. Returns how often Ctrl-C was pressed:
        the first two are handed on, with `words` about them, the third kills it."""
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
        """Whether it has ended, after so many seconds at most."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def interrupt(self, times: int) -> None:
        """Sees to it that it has been interrupted so often. Once: finish the step, write a checkpoint, leave. Twice:
        leave at once, which neither a function of the user's nor one Ctrl-C means, nor both."""
        while self._interrupted < times:
            self._interrupted += 1
            self._process.send_signal(signal.SIGINT)

    def relay(self) -> None:
        """Prints what it has written since the last call."""
        while new := os.pread(self._file.fileno(), TAIL, self._read):
            self._read += len(new)
            text = self._decoder.decode(new)
            self._tail = (self._tail + text)[-TAIL:]
            self._say(text)

    def _say(self, text: str) -> None:
        """Where nobody reads it any more, or it is closed, the run goes on without."""
        if sys.stdout is not None and not sys.stdout.closed:
            with contextlib.suppress(OSError):
                sys.stdout.write(text)
                sys.stdout.flush()

    def failure(self) -> TrainError | None:
        """What the command line would have said; None of a run that is done, or was stopped with a checkpoint."""
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
    """The last block of lines that say what was wrong, without what they begin with."""
    found: list[str] = []
    for line in reversed(lines):
        begins = next((word for word in SAID if line.startswith(word)), None)
        if begins is not None:
            found.insert(0, line.removeprefix(begins))
        elif found:
            break
    return found
