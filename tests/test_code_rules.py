"""The rules that no linter knows: sizes in both directions, who may import ray and vllm, what loads nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.structure import arrows, product_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("gleaner", "learner", "rollout", "rewards", "cluster")
SOURCES = sorted(
    file for folder in (*PACKAGES, "examples", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")
)
MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_ATTRIBUTES = 600, 60, 300, 15
MAX_FOLDER, FRAGMENT = 16, 80  # code files besides __init__.py; lines
MANY_COMMANDS = "learner/tools"  # one file per command, so as many as there are
# Below FRAGMENT with one importer, and why they stand alone; an entry point (`python -m`) may always.
ALONE = {
    "learner.tools.served_stops": "vLLM's server imports it by name, and nothing else of ours",
    "rollout.vllm.tool_parsers": "it imports vllm, which only this folder may",
    "rewards.built_in.": "the loader imports each by name",
    **dict.fromkeys(("learner.tools.reward_model", "learner.tools.rollouts"), "the command line imports each by name"),
}
HEAVY = ("torch", "vllm", "ray", "transformers", "datasets")
ONLY_IN = {"ray": "cluster/ray_*.py", "vllm": "rollout/vllm/*.py"}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Top-level names of what is imported anywhere in a file, functions included, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.partition(".")[0], node.lineno


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What its methods assign to `self`."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def breaches(name: str, text: str) -> list[str]:
    """What in this source file is against the rules."""
    tree = ast.parse(text)
    lines = len(text.splitlines())
    found = [f"{name}: {lines} lines, at most {MAX_FILE}"] if lines > MAX_FILE else []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}")
        elif isinstance(node, ast.ClassDef):
            length, attributes = (node.end_lineno or node.lineno) - node.lineno + 1, attributes_of(node)
            if length > MAX_CLASS:
                found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_CLASS}")
            if len(attributes) > MAX_ATTRIBUTES:
                found.append(
                    f"{name}:{node.lineno}: {node.name} has {len(attributes)} attributes, at most {MAX_ATTRIBUTES}"
                )
    for module, line in imports(tree):
        home = ONLY_IN.get(module)
        if home is not None and name.startswith(tuple(f"{p}/" for p in PACKAGES)) and not fnmatch(name, home):
            found.append(f"{name}:{line}: {module} is imported by {home} only")
        if module == "tests" and not name.startswith("tests/"):
            found.append(f"{name}:{line}: tests is imported by tests only")
    return found


def test_every_source_file_keeps_the_rules() -> None:
    assert len(SOURCES) > 20
    assert [breach for file in SOURCES for breach in breaches(name_of(file), file.read_text())] == []


@pytest.mark.parametrize(
    ("name", "text", "breach"),
    [
        ("learner/a.py", "x = 1\n" * 601, "601 lines"),
        ("learner/a.py", "async def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("learner/a.py", "class A:\n" + "    x = 1\n" * 300, "A has 301 lines"),
        (
            "learner/a.py",
            "class A:\n    def f(self):\n" + "".join(f"        self.a{i} = 1\n" for i in range(16)),
            "16 attr",
        ),
        ("learner/a.py", "def f():\n    from ray.util import queue\n", "ray is imported by cluster/ray_*.py only"),
        ("benchmarks/a.py", "from tests.flow.run import Run\n", "tests is imported by tests only"),
        ("rollout/worker.py", "import vllm.lora\n", r"vllm is imported by rollout/vllm/*.py only"),
    ],
)
def test_a_breach_is_seen(name: str, text: str, breach: str) -> None:
    assert [breach in found for found in breaches(name, text)] == [True]


def test_a_folder_holds_few_files() -> None:
    folders = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    held = {name_of(folder): len([*folder.glob("*.py")]) - (folder / "__init__.py").exists() for folder in folders}
    assert {folder: count for folder, count in held.items() if count > MAX_FOLDER and folder != MANY_COMMANDS} == {}


def test_what_only_one_module_uses_stands_in_it() -> None:
    product = product_of(ROOT, PACKAGES)
    importers: dict[str, set[str]] = {}
    for one, other in arrows(product):
        importers.setdefault(other, set()).add(one)
    fragments = {
        name: sorted(importers[name])
        for name, module in product.items()
        if module.lines < FRAGMENT
        and len(importers.get(name, ())) == 1
        and module.path.name not in ("__init__.py", "__main__.py")
        and "__main__" not in module.path.read_text()
        and not name.startswith(tuple(ALONE))
    }
    assert fragments == {}


@pytest.mark.parametrize(
    "modules",
    [
        "learner.config, rewards.config, rollout.config, cluster.config",
        # The driver's process: torch would cost seconds and memory.
        "learner.main, learner.driver.launch, learner.driver.preflight",
    ],
)
def test_neither_configuration_nor_driver_imports_anything_heavy(modules: str) -> None:
    code = f"import sys, {modules}\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert told.stdout.split() == []
