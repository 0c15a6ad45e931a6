"""Where a call of learner.main.main cannot work: where PYTHONPATH has other packages of our names, inside a running
event loop, in a script without a guard; and how a path is ordered on which files of our names are the user's."""

import ast
import asyncio
import os
import sys
from pathlib import Path
from types import FrameType

from cluster.own_path import PACKAGES, ROOT, theirs
from learner.driver.installed_over import installed_over


def ours_first() -> None:
    """Folders with a module of our names come last on the path of this process, and so of those that multiprocessing
    starts from here. The user's files there are loaded by their paths (rewards.loader)."""
    sys.path.sort(key=lambda entry: next(theirs(entry), None) is not None)  # in which the others keep their order


def hidden_package() -> str:
    """A sentence if a new process would import a module of somebody else in place of a package of this project, or ''.

    The working directory does not count: no process of a run has it on its path before our packages.
    """
    given = os.environ.get("PYTHONPATH")
    for folder in given.split(os.pathsep) if given else ():
        if Path(folder).resolve() == ROOT:
            break
        if (file := next(theirs(folder), None)) is not None:
            name = file.parent.name if file.name == "__init__.py" else file.stem
            return (
                f"PYTHONPATH: {file} hides gleaner's package {name} (in {ROOT}) in the processes of a run; rename it, "
                "or leave that folder out"
            )
    return installed_over(PACKAGES)


def wrong_place() -> str:
    """A sentence if the present call comes from where a run cannot be started, or ''."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _unguarded()
    return (
        "main() runs an event loop of its own and cannot be called inside one, as in a notebook; call "
        "learner.train(config=FILE), which starts a process"
    )


def _unguarded() -> str:
    """The processes of the reward functions import the main script again: its call of main() must then not run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if frame is None or script is None or frame.f_globals.get("__spec__") is not None:  # `python -m` imports a name
        return ""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno):
            guarded = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            return "" if guarded else _advice(script, frame.f_lineno)
    return ""


def _advice(script: str, line: int) -> str:
    return (
        f"{script}, line {line}: main() starts processes that import this script again; put the call under "
        'if __name__ == "__main__":'
    )
