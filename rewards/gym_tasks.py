"""Tasks of reasoning_gym, each imported with its own family (arithmetic, logic, games ...) instead of with all of them.

The package imports every family, with matplotlib and sympy: 1 s of a core in each of the three processes of a start
that need one task. The family of arithmetic takes a tenth of that.
"""

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

PACKAGE = "reasoning_gym"
_whole = RLock()


def factory(task: str | None = None) -> ModuleType:
    """reasoning_gym.factory, in which the task is registered if the package has it. Raises ImportError."""
    package = _package()
    import_module(f"{PACKAGE}.coaching")  # first, as in the package: it and the factory import each other
    found = import_module(f"{PACKAGE}.factory")
    if task is None:
        return found
    family = _family(package, task)
    if family is not None:
        import_module(f"{PACKAGE}.{family}")
    if family is None or task not in found.DATASETS:
        _ = package.create_dataset  # with every family
    return found


def _package() -> ModuleType:
    """The package. If nobody has imported it yet: without its content, which comes with the first attribute that is
    asked for, so that other code of the process finds all of it."""
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    spec = find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    package, loader = module_from_spec(spec), spec.loader

    def fill(name: str) -> Any:
        with _whole:
            if vars(package).pop("__getattr__", None) is not None:
                loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__getattr__"] = fill
    return sys.modules.setdefault(PACKAGE, package)


def _family(package: ModuleType, task: str) -> str | None:
    """The folder with a file of that name, which is how the package names nearly all of its tasks; else None."""
    if not task.isidentifier():
        return None
    files = {file.relative_to(home) for home in package.__path__ for file in Path(home).rglob(f"{task}.py")}
    folders = {file.parts[0] for file in files if len(file.parts) > 1}
    return folders.pop() if len(folders) == 1 else None
