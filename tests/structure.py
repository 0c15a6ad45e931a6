"""How the code is cut into modules, counted: python -m tests.structure [COMMIT ...]; without one, the working tree.

    python -m tests.structure 5cd265e HEAD

5cd265e is the commit of the review that set the column "wanted". Per commit: product files and their lines, import
arrows (pairs of modules of which one imports the other, anywhere in it), the same within learner/driver, the files that
docs/architecture.md names on the way of one prompt, classes, exceptions, configuration keys and the rules between them,
tests, benchmarks; then the files above 600 lines.
"""

from __future__ import annotations

import ast
import builtins
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGES = ("learner", "rollout", "rewards", "cluster")
LONG = 600
WANTED = {
    "product files": 160, "product lines": 38_000, "import arrows": 560, "driver files": 13, "driver arrows": 35,
    "files on the walk": 17, "files beside the walk": 6, "classes": 320, "exceptions": 28, "keys": 105, "rules": 38,
    "test files": 170, "test lines": 33_000, "benchmark files": 25, "benchmark lines": 4_500,
}  # fmt: skip
COUNT_KEYS = """
try:
    from learner.config.load import keys
    from learner.config.run import RULES
except ImportError:  # before the modules were merged
    from learner.driver.config_io import keys
    from learner.config.rules import RULES
print(len(list(keys())), len(RULES))
"""


class Module(NamedTuple):
    path: Path
    tree: ast.Module
    lines: int


def modules(root: Path, folder: str) -> dict[str, Module]:
    """Dotted name -> what there is in the file."""
    found = {}
    for file in sorted((root / folder).rglob("*.py")):
        text = file.read_text()
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        found[name] = Module(file, ast.parse(text), text.count("\n"))
    return found


def product_of(root: Path, packages: Sequence[str] = PACKAGES) -> dict[str, Module]:
    """All modules of the packages."""
    return {name: module for package in packages for name, module in modules(root, package).items()}


def arrows(product: dict[str, Module]) -> set[tuple[str, str]]:
    """Who imports whom."""
    return {(name, other) for name, module in product.items() for other in _imported(module.tree, product) - {name}}


def _imported(tree: ast.Module, known: dict[str, Module]) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {full if (full := f"{node.module}.{one.name}") in known else node.module for one in node.names}
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
    return names & known.keys()


def classes(product: dict[str, Module]) -> tuple[list[str], list[str]]:
    """All classes, and those that are exceptions, by name."""
    bases: dict[str, list[str]] = {}
    names = []
    for module in product.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names.append(node.name)
                bases.setdefault(node.name, []).extend(ast.unparse(base).rpartition(".")[2] for base in node.bases)

    def raised(name: str, below: tuple[str, ...] = ()) -> bool:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return True
        return name not in below and any(raised(base, (*below, name)) for base in bases.get(name, []))

    return names, [name for name in names if raised(name)]


def walk(root: Path) -> tuple[int, int]:
    """Files in the numbered list of docs/architecture.md, and those named beside it."""
    text = (root / "docs" / "architecture.md").read_text()
    numbered = [line for line in text.splitlines() if line.partition(". `")[0].isdecimal() and ".py`" in line]
    beside = text.partition("hand nothing on:")[2].partition("\n\n")[0]
    return len(numbered), beside.count(".py`")


def counted(root: Path, product: dict[str, Module]) -> dict[str, int]:
    """The rows of the table."""
    pairs = arrows(product)
    driver = "learner.driver"
    names, raised = classes(product)
    told = subprocess.run([sys.executable, "-c", COUNT_KEYS], cwd=root, capture_output=True, text=True, check=True)
    keys, rules = map(int, told.stdout.split())
    walked, beside = walk(root)
    tests, benchmarks = modules(root, "tests"), modules(root, "benchmarks")
    return {
        "product files": len(product),
        "product lines": sum(module.lines for module in product.values()),
        "import arrows": len(pairs),
        "driver files": sum(name.startswith(f"{driver}.") for name in product),
        "driver arrows": sum(one.startswith(f"{driver}.") and other.startswith(f"{driver}.") for one, other in pairs),
        "files on the walk": walked,
        "files beside the walk": beside,
        "classes": len(names),
        "exceptions": len(raised),
        "keys": keys,
        "rules": rules,
        "test files": len(tests),
        "test lines": sum(module.lines for module in tests.values()),
        "benchmark files": len(benchmarks),
        "benchmark lines": sum(module.lines for module in benchmarks.values()),
    }


def long_files(root: Path, product: dict[str, Module]) -> Iterator[str]:
    for module in product.values():
        if module.lines > LONG:
            yield f"{module.path.relative_to(root)}: {module.lines} lines"


def main() -> None:
    commits = sys.argv[1:] or ["."]
    columns, long = {}, {}
    for commit in commits:
        with tempfile.TemporaryDirectory() as folder:
            root = ROOT
            if commit != ".":
                archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
                root = Path(folder)
                with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                    files.extractall(root, filter="data")
            product = product_of(root)
            columns[commit], long[commit] = counted(root, product), [*long_files(root, product)]
    table = Table("", *commits, "wanted")
    for row, wanted in WANTED.items():
        table.add_row(row, *(f"{columns[commit][row]:,}" for commit in commits), f"{wanted:,}")
    console = Console()
    console.print(table)
    for commit in commits:
        console.print(f"{commit}: files above {LONG} lines: {', '.join(long[commit]) or 'none'}")


if __name__ == "__main__":
    main()
