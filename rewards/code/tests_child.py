"""The program that rewards.built_in.unit_tests starts: it runs unit tests in one process, and the answer that they test
(the policy's code) in another.

The first process forks the second before it has read anything. The second runs the answer and never has the tests; it
answers questions about names, calls, attributes and so on (rewards.code.exchange). The first runs the tests, in an
interpreter that never ran a line of the answer, with stand-ins for the answer's objects; it compares, and reports which
tests passed. So an answer decides only what its own calls return, and does not know which results are expected.

Both processes confine themselves. The first reads JSON from its standard input, the fields of `_Task`, and writes two
lines of JSON: before the answer runs, what the answer can do because this kernel lacks a wall
(cluster.confinement.missed); afterwards `passed`, the number of tests that passed, and `why`, what else there is to
report about the answer.
"""

from __future__ import annotations

import _socket
import ast
import builtins
import contextlib
import io
import json
import os
import signal
import sys

from cluster.confinement import confine, missed
from rewards.code.exchange import Gone, Peer
from rewards.code.stand_ins import TESTS, NotHanded, shown_of
from rewards.limits import Late, within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MOST_PRINTED = 1 << 20  # bytes of the answer's output in one call that a test can read
AGAIN_S = 0.1  # between alarms once the time is over, since tests may catch the exception of an alarm
PATIENCE_S = 0.5  # wait for the exit code of a process that has closed its connection
# Names under which tests use modules that only the answer imports.
_ALIASES = {"np": "numpy", "pd": "pandas", "nx": "networkx", "sp": "scipy"}
_ADVICE = "args.same_process runs such tests beside the answer, which can forge them there"
_PRISTINE = dict(vars(builtins))


def main(seconds: str, memory_bytes: str, file_bytes: str) -> None:
    """Runs both processes until they end. The arguments are those of `confine`."""
    limits = int(seconds) + 1, int(memory_bytes), int(file_bytes)  # the deadline comes before SIGXCPU
    here, there = _socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # so that sigtimedwait can wait for it
    child = os.fork()
    if child == 0:
        here.close()
        _close(0, 1, 2)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        confine(*limits)
        _Answer(there).serve()
    there.close()
    told = os.dup(1)
    walls = confine(*limits, child=child)
    task = _Task(**json.loads(sys.stdin.buffer.read()))
    _close(0, 1, 2)  # the output of tests and warnings of libraries are dropped
    os.write(told, json.dumps(missed(walls)).encode() + b"\n")
    try:
        found = _Tests(_Asking(here, _shown, guarded=True), child, task).outcome()
    except BaseException:
        os.dup2(told, 2)  # a bug of gleaner, or no memory left: the traceback takes the place of the result
        raise
    os.write(told, json.dumps(found).encode())
    os._exit(0)


def _close(*standard: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in standard:
        os.dup2(nothing, descriptor)
    os.close(nothing)


class _Answer:
    """Runs the answer in its process, and answers the questions of the tests' process."""

    def __init__(self, connection: _socket.socket) -> None:
        self._peer = Peer(connection, self._serve, guarded=False)
        self._module = type(sys)("answer")  # dataclasses look for their module in sys.modules
        sys.modules["answer"] = self._module
        self._printed = io.BytesIO()
        sys.stdout = io.TextIOWrapper(self._printed, "utf-8", "replace", write_through=True)

    def serve(self) -> NoReturn:
        """Answers questions until the tests' process has ended, then exits."""
        with contextlib.suppress(Gone):
            self._peer.answer()
        os._exit(0)

    def _serve(self, peer: Peer, what: str, of: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        asked: Callable[..., Any] | None = getattr(self, f"_{what}", None)
        return asked(*given) if asked is not None else shown_of(peer.mine[of], what, given, named)

    def _run(self, setup: str, code: str) -> bool:
        """Runs the setup and the answer; returns whether both end without an exception. The setup runs before the
        answer, which may need its imports. If it raises there it runs again afterwards, since it may need what the
        answer defines (MBPP's 927: `root = Node(1)`)."""
        names = vars(self._module)
        try:
            try:
                exec(compile(setup, "<setup>", "exec", dont_inherit=True), names)
                setup = ""
            except Exception:
                pass
            exec(compile(code, "<answer>", "exec", dont_inherit=True), names)
            exec(compile(setup, "<setup>", "exec", dont_inherit=True), names)
        except BaseException:
            return False
        return True

    def _name(self, name: str) -> tuple[str, Any]:
        """A global name of the answer: ("value", value), ("module", name of the module) or ("nothing", None)."""
        if name not in vars(self._module):
            return "nothing", None
        value = vars(self._module)[name]
        return ("module", value.__name__) if isinstance(value, type(sys)) else ("value", value)

    def _test(self, text: str) -> bool:
        """Whether a test passes in the answer's process (same_process), where the answer may have changed anything."""
        names = vars(self._module)
        names["__builtins__"] = dict(_PRISTINE)
        return _passes(text, names)

    def _input(self, text: str) -> None:
        sys.stdin = io.StringIO(text)
        self._said()

    def _said(self) -> str:
        """Returns the output since the last call of this."""
        text = self._printed.getvalue()[:MOST_PRINTED].decode("utf-8", "replace")
        self._printed.seek(0)
        self._printed.truncate()
        return text


def _shown(peer: Peer, what: str, of: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Answers the questions of the answer's process about objects of the tests: calls and public attributes, but no
    frames and no globals."""
    return shown_of(peer.mine[of], what, given, named, guarded=True)


class _Asking(Peer):
    """The tests' side of the exchange. If a test replaces sys.stdin or sys.stdout, the answer's calls read and print
    there."""

    def called(self, number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls an object of the answer, as Values.called does."""
        replaced = sys.stdin is not sys.__stdin__, sys.stdout is not sys.__stdout__
        if not any(replaced):
            return super().called(number, arguments, named)
        self.ask("input", None, sys.stdin.read() if replaced[0] else "")
        try:
            return super().called(number, arguments, named)
        finally:
            sys.stdout.write(self.ask("said", None))


class _Names(dict):  # type: ignore[type-arg]  # (as `typing` is not loaded here)
    """The global names of the tests, looked up in this order: the tests' own, the setup's, Python's built-ins, the
    answer's. first: names for which the answer comes before the setup and the built-ins. modules: names that the tests
    use only as modules."""

    def __init__(self, peer: Peer, first: set[str], modules: set[str]) -> None:
        super().__init__(__name__=TESTS)
        self.peer, self.first, self.modules = peer, first, modules
        self.setup: dict[str, Any] = {}

    def __missing__(self, name: str) -> Any:
        if name in self.first and (found := self._answers(name))[0]:
            return found[1]
        if name in self.setup:
            return self.setup[name]
        if name in _PRISTINE:
            raise KeyError(name)
        if name in self.modules and (name in _ALIASES or name in sys.stdlib_module_names):
            with contextlib.suppress(ImportError):
                return _module(_ALIASES.get(name, name))
        there, value = self._answers(name)
        if not there:
            raise KeyError(name)
        return value

    def _answers(self, name: str) -> tuple[bool, Any]:
        kind, value = self.peer.ask("name", None, name)
        if kind != "module":
            return kind == "value", value
        if value.rpartition(".")[2] != name:  # under another name the answer could pass off any module
            raise NotHanded(f"{name}, a module of the answer, cannot be handed to the test, which must import its own")
        return True, _module(value)


def _module(name: str) -> Any:
    return __import__(name, fromlist=["*"])


class _Task:
    """The input of the first process. code: the answer. setup: code that the tests need. tests: each run by itself.
    entry: the name of the function under test, if known. same_process: whether the tests run in the answer's process.
    seconds: wall time for setup, answer and tests together."""

    def __init__(
        self, code: str, setup: str, tests: list[str], entry: str | None, same_process: bool, seconds: float
    ) -> None:
        self.code, self.setup, self.tests = code, setup, tests
        self.entry, self.same_process, self.seconds = entry, same_process, seconds


class _Tests:
    """Runs the tests in their process. answer: the process id of the answer's process."""

    def __init__(self, peer: Peer, answer: int, task: _Task) -> None:
        self._peer, self._answer, self._task = peer, answer, task
        self._why: list[str] = []

    def outcome(self) -> dict[str, Any]:
        """Runs setup, answer and tests, and kills the answer's process. Returns `passed` and `why` (see the module)."""
        passed = 0
        try:
            with within(self._task.seconds, again_s=AGAIN_S):
                if self._peer.ask("run", None, self._task.setup, self._task.code) is True:
                    passed = self._passed()
        except Late:
            passed = 0
            self._why.append(f"stopped after {self._task.seconds:g} s")
        except Gone as gone:
            passed = 0
            self._why.append(f"{gone}{self._end()}")
        except BaseException as error:  # the answer's process can make `ask` raise any exception
            self._why.append(f"its process raises {type(error).__name__} where it should answer")
        os.kill(self._answer, signal.SIGKILL)  # killed and waited for here, so that no zombie is left to others
        os.waitpid(self._answer, 0)
        if said := ", ".join(sorted({*self._peer.distrusted})):
            self._why.append(f"a test would count what {said} of the answer's own class says; {_ADVICE}")
        return {"passed": passed, "why": "; ".join(dict.fromkeys(self._why))}

    def _passed(self) -> int:
        if self._task.same_process:
            return sum(self._peer.ask("test", None, test) is True for test in self._task.tests)
        names = _Names(self._peer, self._first(), set().union(*map(_modules, map(_parsed, self._task.tests))))
        self._set_up(names)
        passed = 0
        for test in self._task.tests:
            names["__builtins__"] = dict(_PRISTINE)
            before, crossed = (len(self._peer.distrusted), len(self._why)), self._peer.crossed
            fine = _passes(test, names, self._why)
            if fine and self._peer.crossed > crossed:
                self._why.append(f"an AssertionError of a test ended within the answer; {_ADVICE}")
            passed += fine and before == (len(self._peer.distrusted), len(self._why))
        return passed

    def _first(self) -> set[str]:
        """Names that are looked up in the answer first: that of the function under test. If that is not known, and the
        tests use no names but those of the setup, built-ins and modules, all names that they use."""
        if self._task.entry is not None:
            return {self._task.entry}
        known = set(_PRISTINE) | set(sys.stdlib_module_names) | set(_ALIASES) | _bound(_parsed(self._task.setup))
        used = set().union(*(_used(tree) - _bound(tree) for tree in map(_parsed, self._task.tests)))
        return used if used <= known else set()

    def _set_up(self, names: _Names) -> None:
        """Runs the setup's imports, functions and values here, so that the answer cannot replace them. Its classes are
        left to the answer's process, which also makes objects of them, and so are statements that fail here."""
        for statement in _parsed(self._task.setup).body:
            if isinstance(statement, ast.ClassDef):
                continue
            try:
                exec(compile(ast.Module([statement], []), "<setup>", "exec", dont_inherit=True), names)
            except (Gone, Late):
                raise
            except BaseException:
                continue
        names.setup = {name: value for name, value in names.items() if name not in ("__name__", "__builtins__")}
        for name in names.setup:
            del names[name]

    def _end(self) -> str:
        """How the answer's process ended, in brackets; '' if it still runs."""
        signal.sigtimedwait({signal.SIGCHLD}, PATIENCE_S)
        found = os.waitid(os.P_PID, self._answer, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return ""
        return f" (exit code {found.si_status})" if found.si_code == os.CLD_EXITED else f" (signal {found.si_status})"


def _passes(test: str, names: dict[str, Any], why: list[str] | None = None) -> bool:
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), names)
    except (Gone, Late):
        raise
    except NotHanded as error:
        if why is not None:
            why.append(f"{error}; {_ADVICE}")
        return False
    except BaseException:
        return False
    return True


def _parsed(text: str) -> ast.Module:
    """The syntax tree of the text; an empty one if it is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _modules(tree: ast.AST) -> set[str]:
    """Names of which only attributes are used, such as math in math.pi."""
    of_attributes = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {id(node): node.id for node in of_attributes if isinstance(node, ast.Name)}
    others = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in names}
    return {*names.values()} - others


def _bound(tree: ast.AST) -> set[str]:
    """Names that the code binds, in any scope."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found
