"""What a node of a syntax tree defines: names of a module, members and fields of a class, parameters of a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


def top_level(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Names that a module binds, also under `if`, `try` and `with`; of one that is bound twice the last comes last."""
    for node in _flat(tree.body):
        if isinstance(node, ast.ClassDef | Function):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = (name for name in ast.walk(target) if isinstance(name, ast.Name))
                yield from ((name.id, node) for name in names if isinstance(name.ctx, ast.Store))  # not X of X.y = 1
            if ast.unparse(node.targets[0]) == "MODULE_ATTRS" and isinstance(node.value, ast.Dict):  # of vllm itself
                yield from items(node.value)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _flat([*node.body, *getattr(node, "orelse", [])])


def items(node: ast.Dict) -> Iterator[tuple[str, ast.expr]]:
    """Those with a string for a key."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, value


def spread(node: ast.Dict) -> list[ast.expr]:
    """The others that a dictionary takes in with `**`."""
    return [value for key, value in zip(node.keys, node.values, strict=True) if key is None]


def origin(module: str, node: ast.ImportFrom, is_folder: bool) -> str:
    """The module that `from ... import` names, absolute."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_folder]
    return ".".join([*kept, *([node.module] if node.module else [])])


def in_class(node: ast.ClassDef, name: str) -> ast.AST | None:
    """A method, field or class attribute, or else what a method assigns to self.<name>."""
    own = [part for part in _flat(node.body) if name in _bound(part)]
    if own:
        return own[-1]  # those before it are overloads
    return next((part for part in ast.walk(node) if _assigns(part, name)), None)


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, Function):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _assigns(node: ast.AST, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(
        isinstance(part, ast.Attribute) and part.attr == name and ast.unparse(part.value) == "self"
        for target in targets
        for part in ast.walk(target)
    )


def fields(node: ast.ClassDef) -> Iterator[str]:
    """Annotated fields as parameters, `=` behind those with a default; a dataclass, pydantic's or msgspec's."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            kind = ast.unparse(part.annotation)
            if not kind.startswith(("ClassVar", "InitVar[None]")):
                yield f"{part.target.id}{'' if part.value is None else '='}"


def decorators(node: Function) -> set[str]:
    return {ast.unparse(one) for one in node.decorator_list}


def parameters(node: Function) -> list[str]:
    """Names in order, without self; `=` behind those with a default, `*` before those by keyword only, *a and **k."""
    own = node.args
    named = [*own.posonlyargs, *own.args]
    plain = len(named) - len(own.defaults)
    found = [f"{arg.arg}{'=' if index >= plain else ''}" for index, arg in enumerate(named)]
    if found and named[0].arg in ("self", "cls"):
        found = found[1:]
    if own.vararg is not None or own.kwonlyargs:
        found.append("*" if own.vararg is None else f"*{own.vararg.arg}")
    for arg, default in zip(own.kwonlyargs, own.kw_defaults, strict=True):
        found.append(f"{arg.arg}{'' if default is None else '='}")
    if own.kwarg is None:
        return found
    popped = [f"{name}=" for name in _popped(node, own.kwarg.arg)]
    return [*found, *popped] if popped else [*found, f"**{own.kwarg.arg}"]


def _popped(node: Function, kwargs: str) -> Iterator[str]:
    """Keywords that a function takes out of its **kwargs by name."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == f"{kwargs}.pop" and call.args:
            key = call.args[0]
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value
