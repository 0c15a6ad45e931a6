"""Small questions to Python's syntax, for tests.contracts.uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_PASS_ON = {"sorted", "zip", "enumerate", "list", "dict", "tuple", "set", "reversed", "getattr", "next", "iter", "vars"}


def path_of(node: ast.AST) -> str:
    """a.b[c].d(e) -> a.b[].d(); "" for what does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner, end = node.value, f".{node.attr}"
    elif isinstance(node, ast.Subscript):
        inner, end = node.value, "[]"
    elif isinstance(node, ast.Call):
        inner, end = node.func, "()"
    else:
        return ""
    base = path_of(inner)
    return f"{base}{end}" if base else ""


def own_name(path: str) -> str:
    """An attribute of `self` under the name that it has without: self._engine.step -> engine.step."""
    return re.sub(r"^self\._?(?=\w)", "", path)


def root_of(path: str) -> str:
    """The name that a path begins with."""
    return re.split(r"[.\[(]", own_name(path), maxsplit=1)[0]


def is_any(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("Any", "list[Any]", "Sequence[Any]", "Any | None")


def functions_of_any(tree: ast.AST) -> set[str]:
    """Names of functions that return Any."""
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_any(node.returns)}


def declarations(scope: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names with a type, and the type; an argument without one has None."""
    for node in ast.walk(scope):
        if isinstance(node, ast.arg):
            yield node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            yield root_of(path_of(node.target)), node.annotation


def assignments(scope: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """(a name that is assigned to, roots of what it may hold) of assignments, loops and comprehensions."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield from _pairs(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            yield from _pairs(node.target, node.iter)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, set[str]]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, own in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, own)
    elif isinstance(target, ast.Tuple | ast.Starred):
        for one in target.elts if isinstance(target, ast.Tuple) else [target.value]:
            yield from _pairs(one, value)
    else:
        yield root_of(path_of(target)), _held(value)


def _held(value: ast.expr) -> set[str]:
    """Roots of the names whose parts a value may be; of a function that is ours, its name with `()`."""
    if isinstance(value, ast.IfExp):
        return _held(value.body) | _held(value.orelse)
    if isinstance(value, ast.BoolOp):
        return set().union(*map(_held, value.values))
    if isinstance(value, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return _held(value.elt)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        passed = set().union(*map(_held, value.args)) if value.func.id in _PASS_ON else set()
        return {f"{value.func.id}()", *passed}
    path = path_of(value)
    return {root_of(path)} if path else set()


def keys_of(function: ast.FunctionDef) -> Iterator[str]:
    """String keys of the dictionaries that a function makes or adds to; not of those inside of others."""
    nested = {id(value) for node in ast.walk(function) if isinstance(node, ast.Dict) for value in node.values}
    for node in ast.walk(function):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict) and id(node) not in nested:
            keys = node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys = [node.slice]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
