"""What our sources use of other packages, read from their syntax: names, and how what they name is called.

Two things are followed. A name that an import binds; and an object of vLLM or Ray that has no type here (`Any`), of
which tests.contracts.objects says the class. Where it says none, that is a finding of its own (`unknown`), so that a
new use of vLLM cannot go unnoticed. `getattr` and `hasattr` with a name in quotes are how our code asks whether
something is there; they count as no use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.contracts.objects import ASKED_FOR, CALLED_WITH, OBJECTS, VARIABLES
from tests.contracts.syntax import (
    assignments,
    declarations,
    functions_of_any,
    is_any,
    keys_of,
    own_name,
    path_of,
    root_of,
)

ROOT = Path(__file__).parents[2]
PACKAGES = ("learner", "rollout", "cluster")
DISTRIBUTIONS = {"fla": "fla-core"}  # packages that are installed under another name
UNTYPED = ("rollout/vllm/", "cluster/ray_")  # where objects of other packages have no type


@dataclass(frozen=True, slots=True)
class Call:
    """complete: without * and **, so that what is not passed must have a default."""

    positional: int
    keywords: frozenset[str]
    complete: bool


@dataclass(frozen=True, slots=True)
class Use:
    """symbol: dotted, module and all; where: file and line; call: None where it is only read."""

    symbol: str
    where: str
    call: Call | None = None

    @property
    def package(self) -> str:
        """As it is installed."""
        root = self.symbol.partition(".")[0]
        return DISTRIBUTIONS.get(root, root.replace("_", "-"))


def uses_of(package: str) -> list[Use]:
    """Of a package, named as it is installed, in all our sources."""
    return [use for use in _all() if use.package == package and _counts(use.symbol)]


def unknown() -> list[str]:
    """Objects of other packages that tests.contracts.objects does not name, one sentence each."""
    anyhow = set().union(*(functions_of_any(file.tree) for file in files()))
    return [told for file in files() for told in file.unknown(anyhow)]


@cache
def _all() -> list[Use]:
    return [use for file in files() for use in file.uses()]


@cache
def files() -> list[File]:
    """Our source files."""
    found = sorted(file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py"))
    return [File(file.relative_to(ROOT).as_posix(), file.read_text()) for file in found]


def _counts(symbol: str) -> bool:
    """Of torch only what is Python: what its top level holds, and its operations, are compiled."""
    parts = symbol.split(".")
    if any(part.startswith("__") for part in parts) or len(parts) < 2:
        return False
    return parts[0] != "torch" or (len(parts) > 2 and parts[1].islower() and parts[1] != "ops")


class File:
    """One source file: its path in the repository, and its text."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.tree = name, ast.parse(text)
        self._objects = {path: own for place, table in OBJECTS.items() if name.startswith(place)
                         for path, own in table.items()}  # fmt: skip
        self._imported = dict(self._imports())

    def _imports(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2

    def uses(self) -> Iterator[Use]:
        """Everything that comes from an import or an object of the table, whatever its package."""
        nodes = list(ast.walk(self.tree))
        called = {id(node.func): _call(node) for node in nodes if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Attribute | ast.Name):  # assigned to as well: it must be there to have an effect
                for symbol in self._symbols(path_of(node), id(node) in called, whole=id(node) not in inner):
                    yield Use(symbol, self._at(node), called.get(id(node)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node.value in ASKED_FOR:
                    yield Use(ASKED_FOR[node.value], self._at(node))
                starts = [start for start in VARIABLES if node.value.startswith(start) and node.value.isidentifier()]
                if starts:
                    yield Use(f"{VARIABLES[max(starts, key=len)]}.{node.value}", self._at(node))
            elif isinstance(node, ast.ClassDef):
                yield from self._inherited(node)
            elif isinstance(node, ast.FunctionDef) and f"{self.name}:{node.name}" in CALLED_WITH:
                call = Call(0, frozenset(keys_of(node)), complete=False)
                yield Use(CALLED_WITH[f"{self.name}:{node.name}"], self._at(node), call)

    def _inherited(self, node: ast.ClassDef) -> Iterator[Use]:
        """What a class asks of those that it derives from."""
        bases = [self._imported[name] for base in node.bases if (name := path_of(base)) in self._imported]
        for call in ast.walk(node):
            path = path_of(call.func) if isinstance(call, ast.Call) else ""
            if isinstance(call, ast.Call) and path.startswith("super()."):
                yield from (
                    Use(f"{base}.{path.removeprefix('super().')}", self._at(call), _call(call)) for base in bases
                )

    def paths(self) -> set[str]:
        """Of all names and attributes, as the tables have them."""
        return {own_name(path_of(node)) for node in ast.walk(self.tree) if isinstance(node, ast.expr)} - {""}

    def _symbols(self, path: str, is_called: bool, *, whole: bool) -> list[str]:
        path = own_name(path)
        base, _, last = path.rpartition(".")
        if base in self._objects:
            return [f"{known}.{last}" for known in self._objects[base]]
        if path in self._objects:
            return list(self._objects[path]) if is_called else []
        root, _, rest = path.partition(".")
        if root not in self._imported or not whole or set("[]()") & set(path):
            return []
        return [f"{self._imported[root]}.{rest}" if rest else self._imported[root]]

    def unknown(self, anyhow: set[str]) -> Iterator[str]:
        """anyhow: functions of ours that return Any."""
        if not self.name.startswith(UNTYPED):
            return
        for scope in self.tree.body:
            foreign = self._foreign(scope, anyhow)
            for node in ast.walk(scope):
                path = own_name(path_of(node.value)) if isinstance(node, ast.Attribute) else ""
                if not isinstance(node, ast.Attribute) or root_of(path) not in foreign:
                    continue
                if path not in self._objects and not self._is_plain(path):
                    yield (
                        f"{self._at(node)}: what is `{path}`, of which `{node.attr}` is used? Say its class in "
                        "tests/contracts/objects.py"
                    )

    def _is_plain(self, path: str) -> bool:
        """Whether it is, or comes from, what the table says is no object of a package."""
        while path and self._objects.get(path) != ():
            path = path[:-2] if path.endswith(("()", "[]")) else path.rpartition(".")[0]
        return bool(path)

    def _foreign(self, scope: ast.AST, anyhow: set[str]) -> set[str]:
        """Names that hold what has no type here: declared as Any, or made from such a name."""
        declared = dict(declarations(scope))
        found = {name for name, annotation in declared.items() if is_any(annotation)}
        typed = {name for name, annotation in declared.items() if annotation is not None} - found
        source = {f"{name}()" for name in anyhow} | {name for name, symbol in self._imported.items()
                                                     if symbol.startswith("vllm")}  # fmt: skip
        pairs, before = list(assignments(scope)), -1
        while before != len(found):
            before = len(found)
            found |= {name for name, roots in pairs if name and roots & (found | source)} - typed
        return found - self._imported.keys()

    def _at(self, node: ast.expr | ast.stmt) -> str:
        return f"{self.name}:{node.lineno}"


def _call(node: ast.Call) -> Call:
    spread = any(isinstance(arg, ast.Starred) for arg in node.args) or any(one.arg is None for one in node.keywords)
    named = frozenset(one.arg for one in node.keywords if one.arg is not None)
    return Call(sum(not isinstance(arg, ast.Starred) for arg in node.args), named, not spread)
