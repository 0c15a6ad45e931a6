"""gleaner rewards list: the built-in reward functions as their sources describe them. Nothing of them is imported: one
takes seconds to load, and another may lack its package."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rewards.loader import BUILT_INS

GIVEN = ("prompts", "completions", "completion_ids")  # by every call; other parameters that are no args are columns


class BuiltIn(NamedTuple):
    """One function. columns: of the data, that it reads whatever its args say; args: name -> default, as written, or
    `required`."""

    name: str
    says: str
    columns: tuple[str, ...]
    args: dict[str, str]


def built_ins() -> list[BuiltIn]:
    """All of them, by name."""
    return [_described(name, *place.split(":")) for name, place in sorted(BUILT_INS.items())]


def as_text(found: list[BuiltIn]) -> str:
    """Two or three lines each, and how one is used."""
    lines = []
    for one in found:
        lines.append(f"{one.name:20} {one.says}")
        if one.columns:
            lines.append(f"{'':20} columns: {', '.join(one.columns)}")
        if one.args:
            lines.append(f"{'':20} args: {', '.join(f'{name}={value}' for name, value in one.args.items())}")
    return "\n".join([*lines, "rewards: [{use: NAME, weight: 1.0, args: {...}}]; docs/rewards.md says more"])


def _described(name: str, module: str, what: str) -> BuiltIn:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    (node,) = [node for node in tree.body if isinstance(node, kinds) and node.name == what]
    summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
    columns: tuple[str, ...] = ()
    if isinstance(node, ast.ClassDef):  # settings
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        pairs = [(ast.unparse(one.target), one.value) for one in fields]
    else:
        columns = tuple(one.arg for one in node.args.args if one.arg not in GIVEN)
        names = [one.arg for one in node.args.kwonlyargs]
        pairs = list(zip(names, node.args.kw_defaults, strict=True))
    args = {arg: "required" if default is None else ast.unparse(default) for arg, default in pairs}
    return BuiltIn(name, " ".join(summary.split()), columns, args)
