"""The user's own files that a file imports: what lies beside it, as `helpers.py` or a package there. None is run."""

import ast
from collections.abc import Iterator
from pathlib import Path


def own_imports(file: Path, root: Path) -> list[Path]:
    """The files below `root` that `file` imports, and those that they import in their turn, in the order of their
    paths; `file` is not among them.

    root: the folder in which its imports are looked up. What is imported by a name that the code puts together, or
    does not parse, is not found.
    """
    found, left = {file}, [file]
    while left:
        new = {one for one in _imported(left.pop(), root) if one.is_relative_to(root)} - found
        found |= new
        left += sorted(new)
    return sorted(found - {file})


def _imported(file: Path, root: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # told by whoever imports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from _files(root, name.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            where = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else root
            module = node.module.split(".") if node.module else []
            yield from _files(where, module)
            for name in node.names:  # a module of the package, or something in it
                yield from _files(where, [*module, name.name])


def _files(where: Path, parts: list[str]) -> Iterator[Path]:
    """Of `import a.b`: a/__init__.py and a/b.py, or a/b/__init__.py, as far as they are there."""
    for count in range(1, len(parts) + 1):
        place = where.joinpath(*parts[:count])
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())
