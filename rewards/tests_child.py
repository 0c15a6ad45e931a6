"""Unit tests and the answer that they are of, in a process each: what rewards.unit_tests starts.

The first process forks the second before it has read anything. The second runs the answer and never has the tests: it
is asked for names, calls, attributes and so on (rewards.exchange). The first runs the tests, in an interpreter in which
no line of the answer ever ran, with names that lead to the answer's; it compares, and says what passed. So an answer
decides what its own calls return, and nothing else, and it does not know what is expected.

Both confine themselves. The first is given JSON on its standard input, what `_Tests` is made of, and writes two lines
of JSON: before the answer begins what that can do, since this kernel lacks a wall; and then `passed`, how many tests
passed, and `why`, what else there is to say of the answer.
"""

from __future__ import annotations

import _socket
import ast
import builtins
import contextlib
import io
import json
import os
import select
import sys

from cluster.confinement import confine, missed
from rewards.exchange import Gone, Peer
from rewards.stand_ins import TESTS, NotHanded, shown_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MOST_PRINTED = 1 << 20  # bytes of what the answer prints in one call that a test may see
PATIENCE_S = 0.5  # for the kernel to tell how a process ended whose connection is closed
# What tests call modules that only the answer imports.
_ALIASES = {"np": "numpy", "pd": "pandas", "nx": "networkx", "sp": "scipy"}
_ADVICE = "args.same_process runs such tests beside the answer, which can forge them there"
_PRISTINE = dict(vars(builtins))


def main(seconds: str, memory_bytes: str, file_bytes: str) -> None:
    """Both processes, each to its end."""
    limits = int(seconds), int(memory_bytes), int(file_bytes)
    here, there = _socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        _close(0, 1, 2)
        confine(*limits)
        _Answer(there).serve()
    there.close()
    told, ended = os.dup(1), os.pidfd_open(child)
    walls = confine(*limits)
    task = json.loads(sys.stdin.buffer.read())
    _close(0, 1)
    os.write(told, json.dumps(missed(walls)).encode())
    os.write(told, b"\n")
    os.write(told, json.dumps(_Tests(_Asking(here, _shown, guarded=True), ended, **task).outcome()).encode())
    os._exit(0)


def _close(*standard: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in standard:
        os.dup2(nothing, descriptor)
    os.close(nothing)


class _Answer:
    """The process of the answer: what it is asked."""

    def __init__(self, connection: _socket.socket) -> None:
        self._peer = Peer(connection, self._serve, guarded=False)
        self._module = type(sys)("answer")  # by whose name dataclasses look for it
        sys.modules["answer"] = self._module
        self._printed = io.BytesIO()
        sys.stdout = io.TextIOWrapper(self._printed, "utf-8", "replace", write_through=True)

    def serve(self) -> NoReturn:
        """Until the other process has ended."""
        with contextlib.suppress(Gone):
            self._peer.answer()
        os._exit(0)

    def _serve(self, peer: Peer, what: str, of: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        asked: Callable[..., Any] | None = getattr(self, f"_{what}", None)
        return asked(*given) if asked is not None else shown_of(peer.mine[of], what, given, named)

    def _run(self, setup: str, code: str) -> bool:
        """Whether the answer runs to its end. A setup may need what it defines (MBPP's 927: `root = Node(1)`), or it
        what the setup imports: one that raises before the answer runs again after it."""
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
        """What the answer calls so: a value, a module by its own name, or nothing."""
        if name not in vars(self._module):
            return "nothing", None
        value = vars(self._module)[name]
        return ("module", value.__name__) if isinstance(value, type(sys)) else ("value", value)

    def _test(self, text: str) -> bool:
        """Whether a test passes here, where the answer may have changed whatever it likes."""
        names = vars(self._module)
        names["__builtins__"] = dict(_PRISTINE)
        return _passes(text, names)

    def _input(self, text: str) -> None:
        sys.stdin = io.StringIO(text)
        self._said()

    def _said(self) -> str:
        """What was printed since it was last asked for."""
        text = self._printed.getvalue()[:MOST_PRINTED].decode("utf-8", "replace")
        self._printed.seek(0)
        self._printed.truncate()
        return text


def _shown(peer: Peer, what: str, of: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What the answer is told of a test's own objects: calls, and what is public; no frame, no globals."""
    return shown_of(peer.mine[of], what, given, named, guarded=True)


class _Asking(Peer):
    """The side of the tests. A test that puts something in the place of stdin and stdout has the answer read and print
    there."""

    def called(self, number: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """As a Peer's."""
        replaced = sys.stdin is not sys.__stdin__, sys.stdout is not sys.__stdout__
        if not any(replaced):
            return super().called(number, arguments, named)
        self.ask("input", None, sys.stdin.read() if replaced[0] else "")
        try:
            return super().called(number, arguments, named)
        finally:
            sys.stdout.write(self.ask("said", None))


class _Names(dict):  # type: ignore[type-arg]  # (as `typing` is not loaded here)
    """The names that tests see: their own, the setup's, Python's, and then the answer's; those in `first` the answer's
    before the setup's and Python's."""

    def __init__(self, peer: Peer, first: set[str]) -> None:
        super().__init__(__name__=TESTS)
        self.peer, self.first = peer, first
        self.setup: dict[str, Any] = {}

    def __missing__(self, name: str) -> Any:
        if name in self.first and (found := self._answers(name))[0]:
            return found[1]
        if name in self.setup:
            return self.setup[name]
        if name in _PRISTINE:
            raise KeyError(name)
        if name in _ALIASES or (name in sys.stdlib_module_names and name not in self.first):
            try:
                return _module(_ALIASES.get(name, name))
            except ImportError:
                pass
        there, value = self._answers(name)
        if not there:
            raise KeyError(name)
        return value

    def _answers(self, name: str) -> tuple[bool, Any]:
        kind, value = self.peer.ask("name", None, name)
        if kind != "module":
            return kind == "value", value
        if value.rpartition(".")[2] != name:  # of that name it could be any
            raise NotHanded(f"{name}, a module of the answer, cannot be handed to the test, which must import its own")
        return True, _module(value)


def _module(name: str) -> Any:
    return __import__(name, fromlist=["*"])


class _Tests:
    """The process of the tests."""

    def __init__(
        self, peer: Peer, ended: int, code: str, setup: str, tests: list[str], entry: str | None, same_process: bool
    ) -> None:
        self._peer, self._ended, self._code, self._setup = peer, ended, code, setup
        self._tests, self._entry, self._beside = tests, entry, same_process
        self._why: list[str] = []

    def outcome(self) -> dict[str, Any]:
        """How many pass, and what is to be said of the answer."""
        try:
            passed = self._passed() if self._peer.ask("run", None, self._setup, self._code) is True else 0
        except Gone as gone:
            passed = 0
            self._why.append(f"{gone}{self._end()}")
        except BaseException as error:  # of the other process, which may raise what it likes
            passed = 0
            self._why.append(f"its process raises {type(error).__name__} where it should answer")
        if self._peer.distrusted:
            said = ", ".join(sorted(self._peer.distrusted))
            self._why.append(f"a test would count what {said} of the answer's own class says; {_ADVICE}")
        return {"passed": passed, "why": "; ".join(dict.fromkeys(self._why))}

    def _passed(self) -> int:
        if self._beside:
            return sum(self._peer.ask("test", None, test) is True for test in self._tests)
        names = _Names(self._peer, self._first())
        self._set_up(names)
        passed = 0
        for test in self._tests:
            names["__builtins__"] = dict(_PRISTINE)
            before = len(self._peer.distrusted), len(self._why)
            fine = _passes(test, names, self._why)
            passed += fine and before == (len(self._peer.distrusted), len(self._why))
        return passed

    def _first(self) -> set[str]:
        """Names that are the answer's although the setup or Python has them, too: of the function under test. Where
        that is not known, tests that use no other name are of those."""
        if self._entry is not None:
            return {self._entry}
        known = set(_PRISTINE) | set(sys.stdlib_module_names) | set(_ALIASES) | _bound(self._setup)
        used = set().union(*map(_free, self._tests))
        return used if used <= known else set()

    def _set_up(self, names: _Names) -> None:
        """The setup's imports, functions and values, which the answer must not be able to replace. Its classes are
        those of the answer's process, which makes objects of them, too; what does not run here is there as well."""
        try:
            statements = ast.parse(self._setup).body
        except SyntaxError:
            return
        for statement in statements:
            if isinstance(statement, ast.ClassDef):
                continue
            try:
                exec(compile(ast.Module([statement], []), "<setup>", "exec", dont_inherit=True), names)
            except Gone:
                raise
            except BaseException:
                continue
        names.setup = {name: value for name, value in names.items() if name not in ("__name__", "__builtins__")}
        for name in names.setup:
            del names[name]

    def _end(self) -> str:
        """How the answer's process ended, in brackets; '' if it lives."""
        if not select.select([self._ended], [], [], PATIENCE_S)[0]:
            return ""
        found = os.waitid(os.P_ALL, 0, os.WEXITED)
        assert found is not None
        return f" (exit code {found.si_status})" if found.si_code == os.CLD_EXITED else f" (signal {found.si_status})"


def _passes(test: str, names: dict[str, Any], why: list[str] | None = None) -> bool:
    try:
        exec(compile(test, "<test>", "exec", dont_inherit=True), names)
    except Gone:
        raise
    except NotHanded as error:
        if why is not None:
            why.append(f"{error}; {_ADVICE}")
        return False
    except BaseException:
        return False
    return True


def _free(text: str) -> set[str]:
    """Names that a text uses and does not bind."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return set()
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return loaded - _bound(text)


def _bound(text: str) -> set[str]:
    """Names that it binds, in whatever scope."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return set()
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
