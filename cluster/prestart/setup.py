"""setup.py ARGUMENTS: what the raylet of a private cluster starts for each worker, in the place of Ray's
setup_worker.py.

For a prestarted role it becomes the shim at once. Ray's own imports ray first, a third of a second of a core in which
the other processes of a start would get on; it is what any other worker still starts by.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

SHIM = str(Path(__file__).with_name("shim.py"))
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    arguments = sys.argv[1:]
    command = _shim(arguments)
    if command is None:
        ray = find_spec("ray")  # found, not imported
        assert ray is not None
        assert ray.origin is not None
        original = Path(ray.origin).parent / "_private" / "workers" / "setup_worker.py"
        command = [sys.executable, str(original), *arguments]
    os.execv(command[0], command)


def _shim(arguments: Sequence[str]) -> list[str] | None:
    """The command of a prestarted role's shim, once its environment is set; None for any other worker."""
    context = next((word.removeprefix(CONTEXT) for word in arguments if word.startswith(CONTEXT)), "{}")
    wanted = json.loads(context or "{}")
    executable = shlex.split(wanted.get("py_executable") or "")
    variables = wanted.get("env_vars") or {}
    if SHIM not in executable or wanted.get("command_prefix") or "$" in "".join(variables.values()):
        return None
    os.environ.update(variables)
    return [*executable, *(word for word in arguments if not word.startswith((CONTEXT, LANGUAGE)))]


if __name__ == "__main__":
    main()
