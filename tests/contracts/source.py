"""A package's names, read from its source files without importing it: what a dotted name stands for, its parameters,
and the values that a field may have. Followed are imports (lazy ones too), base classes, and types of objects."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from tests.contracts.definitions import (
    Function,
    decorators,
    fields,
    in_class,
    items,
    origin,
    parameters,
    spread,
    top_level,
)  # fmt: skip


class Found(NamedTuple):
    """A definition, and the module that it stands in; of a module its whole tree."""

    module: str
    node: ast.AST


class Source:
    """read: "a/b.py" -> its text, or None if the package has no such file."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = cache(read)
        self._tree = cache(self._parse)
        self._asked: set[tuple[str, str]] = set()
        self._names = cache(lambda module: dict(top_level(self._tree(module) or ast.Module([], []))))

    def find(self, symbol: str) -> Found | None:
        """What a dotted name stands for."""
        parts = symbol.split(".")
        for size in range(len(parts), 0, -1):
            module = ".".join(parts[:size])
            tree = self._tree(module)
            if tree is not None:
                return self._follow(Found(module, tree), parts[size:])
        return None

    def parameters(self, found: Found) -> list[str] | None:
        """As definitions.parameters, of a function, of a class's constructor, or of what takes a dictionary's keys.

        None for what is not called, or in no way that the source shows.
        """
        node = found.node
        if isinstance(node, Function):
            return None if "property" in decorators(node) else parameters(node)
        if isinstance(getattr(node, "value", None), ast.Dict):
            return ["*", *(f"{key}=" for key in dict(self._items(found)))]
        if not isinstance(node, ast.ClassDef):
            return None
        line = list(self._line(found))
        made = (in_class(own, name) for own in line for name in ("__init__", "__new__"))
        by_hand = next((one for one in made if isinstance(one, Function)), None)
        if by_hand is not None:
            return parameters(by_hand)
        own_fields = {field.rstrip("="): field for own in reversed(line) for field in fields(own)}
        return list(own_fields.values()) or None

    def choices(self, found: Found) -> list[object] | None:
        """The values that a field may have, if its type is a Literal; those that are named, if others may be added."""
        kind = getattr(found.node, "annotation", None)
        for annotation in (kind.left, kind.right) if isinstance(kind, ast.BinOp) else (kind,):  # Literal | str
            named = self._named(found.module, annotation)
            literal = annotation if named is None else getattr(named.node, "value", None)
            if isinstance(literal, ast.Subscript) and ast.unparse(literal.value).endswith("Literal"):
                parts = literal.slice.elts if isinstance(literal.slice, ast.Tuple) else [literal.slice]
                return [part.value for part in parts if isinstance(part, ast.Constant)]
        return None

    def _parse(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        text = self._read(f"{path}/__init__.py") or self._read(f"{path}.py")
        return None if text is None else ast.parse(text)

    def _follow(self, found: Found | None, names: list[str]) -> Found | None:
        for name in names:
            found = None if found is None else self._member(found, name)
        return found

    def _member(self, found: Found, name: str) -> Found | None:
        """An attribute of a module, of a class, or of an object whose class is known; a dictionary's item."""
        module, node = found
        if isinstance(node, ast.Module):
            return self._in_module(module, name)
        if isinstance(node, ast.ClassDef):
            return next((Found(module, part) for own in self._line(found) if (part := in_class(own, name))), None)
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict):
            return dict(self._items(found)).get(name)
        for kind in (getattr(node, "annotation", None), getattr(value, "func", None)):  # x: Class, x = Class()
            known = self._named(module, kind)
            if known is not None and isinstance(known.node, ast.ClassDef):
                return self._member(known, name)
        return None

    def _in_module(self, module: str, name: str) -> Found | None:
        if (module, name) in self._asked:  # a module that imports from itself
            return None
        self._asked.add((module, name))
        found = self._looked_up(module, name)
        self._asked.remove((module, name))
        return found

    def _looked_up(self, module: str, name: str) -> Found | None:
        node = self._names(module).get(name)
        if isinstance(node, ast.ImportFrom):
            real = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return self.find(f"{origin(module, node, self._is_folder(module))}.{real}")
        if isinstance(node, ast.Constant):  # of a table of lazy imports: ".module:name"
            return self.find(module + str(node.value).replace(":", "."))
        if node is not None:
            return Found(module, node)
        below = self._tree(f"{module}.{name}")
        return self._starred(module, name) if below is None else Found(f"{module}.{name}", below)

    def _starred(self, module: str, name: str) -> Found | None:
        tree = self._tree(module)
        stars = (
            [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
            if tree
            else []
        )
        for node in stars:
            place = origin(module, node, self._is_folder(module))
            found = None if self._tree(place) is None else self._in_module(place, name)
            if found is not None:
                return found
        return None

    def _is_folder(self, module: str) -> bool:
        return self._read(f"{module.replace('.', '/')}/__init__.py") is not None

    def _items(self, found: Found) -> Iterator[tuple[str, Found]]:
        """Of a dictionary, those that it takes in from others included."""
        value = getattr(found.node, "value", None)
        if not isinstance(value, ast.Dict):
            return
        for other in spread(value):
            known = self._named(found.module, other)
            if known is not None:
                yield from self._items(known)
        yield from ((key, Found(found.module, item)) for key, item in items(value))

    def _named(self, module: str, node: ast.AST | None) -> Found | None:
        """What a plain or dotted name, or one in quotes, refers to in a module."""
        if isinstance(node, ast.Name | ast.Attribute):
            text = ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            return None
        first, *rest = text.split(".")
        return self._follow(self._in_module(module, first), rest)

    def _line(self, found: Found) -> Iterator[ast.ClassDef]:
        """The class and those of the package that it derives from."""
        if not isinstance(found.node, ast.ClassDef):
            return
        yield found.node
        for base in found.node.bases:
            known = self._named(found.module, base.value if isinstance(base, ast.Subscript) else base)
            if known is not None:
                yield from self._line(known)
