"""Where a call of learner.main.main cannot work: beside other packages of our names, inside a running event loop, in a
script without a guard. Loads the standard library alone, since packages of our names may be other people's."""

import ast
import asyncio
import importlib.util
import sys
from pathlib import Path
from types import FrameType

from learner.driver.installed_over import installed_over

ROOT = Path(__file__).parents[2]
OURS = ("cluster", "learner", "rewards", "rollout")


def hidden_package() -> str:
    """A sentence if a module of somebody else would be imported in place of a package of this project, or ''.

    The working directory counts in any case: Ray puts it first on the path of its workers.
    """
    for name in OURS:
        spec = importlib.util.find_spec(name)
        found = [] if spec is None or spec.origin is None else [Path(spec.origin)]
        here = [Path(f"{name}.py").absolute(), Path(name, "__init__.py").absolute()]
        for file in [*found, *(file for file in here if file.is_file())]:
            if file.resolve() != (ROOT / name / "__init__.py").resolve():
                return (
                    f"{file} hides gleaner's package {name} (in {ROOT}) in the processes of a run; rename it, or "
                    "start from another folder"
                )
    return installed_over(OURS)


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
