"""Imports a user's file by its path: the module `cluster.by_path.<name>`, whose name has the path in it, is a file or
the folder of a package. The name can be imported in any interpreter that has this package, for example in the fresh
interpreters of a process pool, which import a function's module by its name alone."""

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

INIT = "__init__.py"
BEGIN = f"{__name__}."


def name_of(path: Path) -> str:
    """The module name of a file or of a package's folder; path: absolute. It has the whole path, since two files may be
    called rewards.py, and neither may hide the package of that name."""
    return f"{BEGIN}{re.sub(r'[^A-Za-z0-9]', '_', path.stem)}_{bytes(path).hex()}"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        last = fullname.removeprefix(BEGIN)
        if last == fullname or "." in last:  # Python itself finds the modules inside a package
            return None
        place = Path(bytes.fromhex(last.rpartition("_")[2]).decode("utf-8", "surrogateescape"))
        if not place.is_dir():
            return importlib.util.spec_from_file_location(fullname, place)
        init = place / INIT
        spec = importlib.util.spec_from_file_location(fullname, init) if init.is_file() else None
        spec = spec or ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec


sys.meta_path.append(_Finder())
