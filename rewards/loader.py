"""Loads the function that a reward's `use` names (`load`), and finds its source files without running them (source_of,
own_imports). Importing a user's file runs code, so only reward processes load functions, and never the driver.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

from cluster.by_path import BEGIN, INIT, name_of
from cluster.errors import WrongInput
from cluster.own_path import PACKAGES
from rewards import functions
from rewards.base import ADAPTER, JUDGE, Reward
from rewards.limits import described


def own_imports(file: Path, root: Path) -> list[Path]:
    """The user's files that `file` imports, directly or through other files of the user, sorted by path and without
    `file` itself. They are found by parsing; none is run.

    root: the folder in which imports are looked up; files elsewhere are left out. An import by a computed name, or in a
    file with a syntax error, is not found.
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
    except (OSError, SyntaxError, ValueError, RecursionError):  # importing the file will report this
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from _files(root, name.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            where = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else root
            module = node.module.split(".") if node.module else []
            yield from _files(where, module)
            for name in node.names:  # the name may be that of a module in the package
                yield from _files(where, [*module, name.name])


def _files(where: Path, parts: list[str]) -> Iterator[Path]:
    """The existing files that `import a.b` runs: a/__init__.py, and a/b.py or a/b/__init__.py."""
    for count in range(1, len(parts) + 1):
        place = where.joinpath(*parts[:count])
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


GRADERS = {
    "json_schema": "jsonschema",
    "math": "math-verify",
    "reasoning_gym": "reasoning-gym",
}  # built-in -> the package on which its scores depend


def source_of(use: str) -> Path | None:
    """The file of the function that `use` names (see `load`), a Python source or a pickled function, found without
    running it. None if the module has no source or does not exist."""
    place = BUILT_INS.get(use, use).rpartition(":")[0]
    if use in BUILT_INS:
        return Path(__file__).parents[1] / f"{place.replace('.', '/')}.py"
    if place.endswith((".py", functions.SUFFIX)):
        file = Path(place).resolve()
        return file if file.is_file() else None
    return _module_file(place)


def grader_version(use: str) -> str:
    """Name and version of the package in GRADERS for a built-in; '' if there is none or it is not installed."""
    package = GRADERS.get(use, "")
    if not package:
        return ""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _module_file(name: str) -> Path | None:
    """The file of a module, found without an import. (importlib.util.find_spec("a.b") would import a, so it looks up
    the first part only.)"""
    first, *others = name.split(".")
    with _here_on_path():
        spec = importlib.util.find_spec(first)
    found = first
    for part in others:
        found = f"{found}.{part}"
        folders = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(found, folders) if folders is not None else None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


@contextmanager
def _here_on_path() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


BUILT_INS = {
    "format": "rewards.built_in.format:format_",
    "json_match": "rewards.built_in.json_match:json_match",
    "json_schema": "rewards.built_in.json_schema:json_schema",
    "judge": "rewards.judge:JudgeSettings",
    "length": "rewards.built_in.length:length",
    "math": "rewards.built_in.math:math",
    "number": "rewards.built_in.number:number",
    "reasoning_gym": "rewards.built_in.reasoning_gym:reasoning_gym",
    "regex": "rewards.built_in.regex:regex",
    "sequence_classifier": "rewards.built_in.sequence_classifier:sequence_classifier",
    "unit_tests": "rewards.built_in.unit_tests:unit_tests",
}
_KEPT: dict[Path, set[str]] = {}  # folder of a loaded file -> names of the modules in it
EXTRAS = {"math": "math-verify", "reasoning_gym": "'gleaner-rl[demo]'"}


def load(use: str) -> Reward:
    """Loads the function that `use` names: a built-in, `package.module:function`, `path/file.py:function`, or
    `path/file.pickle:function` (rewards.functions). A class with `__call__` (as in ms-swift) gives an instance.

    Raises WrongInput with one sentence: what is missing, and what there is instead.
    """
    if use == JUDGE:
        raise WrongInput(f"{use!r} is no function: rewards.pool asks it; give a function")
    if use in BUILT_INS:
        return _built_in(use)
    if use.startswith(ADAPTER):
        raise WrongInput(f"{use!r} is a reward model, which the learner scores; give a function")
    if ":" not in use and not use.endswith(".py"):
        raise WrongInput(no_function(use))
    found = load_own(use, "my_reward")
    return _instance(found, use) if isinstance(found, type) else cast(Reward, found)


def no_function(use: str) -> str:
    """The error's sentence for a name without a colon that is no built-in."""
    return _model(use) or no_built_in(use, "reward", BUILT_INS, "function")


def _model(use: str) -> str | None:
    """The error's sentence if `use` names a model, by its folder or its name on the hub, as TRL allows; else None."""
    folder = Path(use).expanduser()
    if (folder / "adapter_config.json").is_file():
        return f"{use!r} is the folder of an adapter; for a reward model on the run's own base write {ADAPTER}{use}"
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", use) and not folder.exists()
    if on_hub or (folder / "config.json").is_file():
        what = "may be a model of the hub" if on_hub else "is the folder of a model"
        return (
            f"{use!r} is no function, and {what}; for a classifier's score write {{use: sequence_classifier, args: "
            f"{{model: {use}}}}}"
        )
    return None


def _instance(kind: type, use: str) -> Reward:
    if not _has_call(kind):
        raise WrongInput(f"{use}: is a class without __call__; write __call__(self, completions, **kwargs)")
    try:
        return cast(Reward, kind())
    except (Exception, SystemExit) as error:
        raise WrongInput(
            f"{use}: is a class, made without arguments, and raised {described(error, caller=__file__)}; if it wants "
            f"some, make it in your file, reward = {kind.__name__}(...), and use: file.py:reward"
        ) from error


def _has_call(kind: type) -> bool:
    return any("__call__" in vars(one) for one in kind.__mro__)  # hasattr would find `type.__call__`


def no_built_in(use: str, what: str, known: Collection[str], kind: str) -> str:
    """The error's sentence for a name that is not in `known`. what: reward, or another kind of built-in. kind: function
    or class, for the form of a user's own."""
    nearest = difflib.get_close_matches(use, known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return (
        f"{use!r} is no built-in {what}; {hint}Built-ins: {', '.join(sorted(known))}. "
        f"Your own: path/file.py:{kind} or package.module:{kind}"
    )


def load_own(use: str, example: str) -> Callable[..., Any]:
    """Loads the callable of the user that `use` names: a reward function, or one for another purpose. example: a name
    for the error's sentence if `use` has none; a capital letter means that a class is allowed. Raises WrongInput with
    one sentence."""
    place, _, function = use.rpartition(":")
    if place.endswith(functions.SUFFIX):
        return cast(Callable[..., Any], functions.load_pickled(Path(place)))
    if not place:
        place, function = use, ""
    if place in PACKAGES and Path(f"{place}.py").is_file():
        raise WrongInput(f"{use!r} names gleaner's own package {place}; for your file write {place}.py:{function}")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    return _function(module, function, use, example)


def _built_in(name: str) -> Reward:
    module, _, function = BUILT_INS[name].partition(":")
    try:
        return cast(Reward, getattr(importlib.import_module(module), function))
    except ModuleNotFoundError as error:
        raise WrongInput(
            f"reward {name!r} needs the package {error.name}, which is not installed; "
            f"run: pip install {EXTRAS.get(name, error.name)}"
        ) from error


def _import_module(name: str) -> ModuleType:
    try:
        with _on_path(Path.cwd()):  # sys.path of a console script or a Ray worker may lack the working directory
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise WrongInput(f"module {name!r} does not import: {described(error)}") from error


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise WrongInput(no_file(path))
    package = _package_of(path)
    name = name_of(path) if package is None else ".".join((name_of(package), *_parts(path, package)))
    if name in sys.modules:
        return sys.modules[name]
    _forget(_KEPT.keys() - {path.parent})  # helpers that functions of other folders have imported in their calls
    before = set(sys.modules)
    try:
        with _on_path(path.parent):
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise WrongInput(f"{path} does not import: {described(error)}") from error
    finally:
        _forget({path.parent}, before)
    _keep_on_path(path.parent)
    return module


def no_file(path: Path) -> str:
    """The error's sentence for a file that does not exist."""
    return f"there is no file {path}; a relative path starts at the working directory {Path.cwd()}"


def _parts(path: Path, package: Path) -> tuple[str, ...]:
    return path.relative_to(package).with_suffix("").parts


def _package_of(path: Path) -> Path | None:
    """The folder of the outermost package of a file with relative imports; the file's own folder if that has no
    __init__.py. None for a file without relative imports, which is imported alone, without its package's
    __init__.py."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # importing the file will report this
        return None
    if not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        return None
    top = path.parent
    while (top / INIT).is_file() and (top.parent / INIT).is_file():
        top = top.parent
    return top


def _keep_on_path(folder: Path) -> None:
    """Puts a folder at the end of sys.path, for imports inside its functions. Of several folders with a module of the
    same name none stays on sys.path, since a function could get the helper of another folder."""
    names = {found.name for found in pkgutil.iter_modules([str(folder)])}
    like = [other for other, others in _KEPT.items() if other != folder and names & others]
    _KEPT[folder] = names
    for one in like:
        if str(one) in sys.path:
            sys.path.remove(str(one))
    if not like and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _forget(folders: Collection[Path], before: Collection[str] = ()) -> None:
    """Removes the modules of these folders from sys.modules, except those in `before`: the next file's `helpers` may be
    another file of that name."""
    for name in set(sys.modules).difference(before) if folders else ():
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).resolve().parent in folders and not name.startswith(BEGIN):
            del sys.modules[name]


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _function(module: ModuleType, name: str, use: str, example: str) -> Callable[..., Any]:
    found = getattr(module, name, None) if name else None
    if callable(found):
        return cast(Callable[..., Any], found)
    classes = example[0].isupper()
    wanted, plural = ("class or function", "classes and functions") if classes else ("function", "functions")
    own = [n for n, one in vars(module).items() if _own(one, module.__name__, classes)]
    there = f"{plural} there: {', '.join(own) or 'none'}"
    if found is not None:
        raise WrongInput(f"{module.__file__}: {name!r} is a {type(found).__name__}, not a {wanted}; {there}")
    if not name:
        raise WrongInput(
            f"{use!r} names no {wanted}; write it after a colon, as in {use.rstrip(':')}:{example}; {there}"
        )
    raise WrongInput(f"{module.__file__} has no {wanted} {name!r}; {there}")


def _own(value: Any, module: str, classes: bool) -> bool:
    """Whether an error may offer the value as one of the module's own functions: it is a function, a class whose
    instances can be called, or such an instance; with `classes` any class."""
    if isinstance(value, partial):
        return True
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, FunctionType) or (classes and isinstance(value, type)):
        return bool(value.__module__ == module)
    return kind.__module__ == module and _has_call(kind)
