"""The tables of docs/trl_tests.md, and what another version of TRL has more or no longer:

python -m tests.trl_tests path/to/trl
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "trl_tests.md"
FILES = ("test_grpo_trainer.py", "test_rewards.py")
ROW = re.compile(r"^\| `(\w+::\w+)` \| ([a-z ]+)(?:: (.+))? \| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """A test of TRL's, and what shows the same here."""

    name: str
    kind: str
    reason: str
    shown: str


def rows(file: str) -> list[Row]:
    """Those of one of TRL's files."""
    (section,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith(f"{file}\n")]
    return [Row(*groups) for groups in ROW.findall(section)]


def named_in(file: Path) -> set[str]:
    """The names of a file's tests, `Class::test` for those of a class."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        body = node.body if isinstance(node, ast.ClassDef) else [node]
        of = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = [one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        found |= {of + one.name for one in functions if one.name.startswith("test")}
    return found


if __name__ == "__main__":
    for file in FILES:
        theirs, told = named_in(Path(sys.argv[1]) / "tests" / file), {row.name for row in rows(file)}
        print(f"{file}: {len(theirs)} tests; not in the table: {sorted(theirs - told)}; gone: {sorted(told - theirs)}")
