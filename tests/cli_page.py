"""Makes docs/cli.md out of the commands themselves.

python -m tests.cli_page        # writes docs/cli.md; tests/learner/tools/test_cli.py compares
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer import Context

from learner.tools.cli import build

DOCUMENT = Path(__file__).parents[1] / "docs" / "cli.md"
TEXT = """# The command line

Made by `python -m tests.cli_page` from the commands' own `--help`; `tests/learner/tools/test_cli.py` compares it with
them.

`gleaner --install-completion` lets your shell complete commands, options, choices and the keys of a configuration.
`gleaner --version` says the versions of gleaner, vLLM, torch and Ray. A mistake is answered in one line on stderr, with
what is nearest. Every command exits with 0 when it has done what was asked, 1 when that failed, 2 when its input is
wrong, and 130 when Ctrl-C ended it; where 1 means something else, it is said below.
"""


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each command and group with its path, such as `gleaner rewards try`."""
    yield path, command.loaded() if hasattr(command, "loaded") else command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


def document() -> str:
    """The content of docs/cli.md."""
    leaves = [(path, one) for path, one in commands(build(), "gleaner") if not hasattr(one, "commands")]
    return "\n".join([TEXT, *(_section(path, command) for path, command in leaves)])


def _section(path: str, command: Any) -> str:
    context = Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    examples, codes = command.epilog.removeprefix("\b\nExamples:\n").split("\n\n")
    records = [param.get_help_record(context) for param in command.params]
    rows = [f"| `{name.replace('|', chr(92) + '|')}` | {says.replace('|', chr(92) + '|')} |" for name, says in records]
    failed = re.fullmatch(r"Exit codes: 0 done, 1 (.*), 2 the input is wrong\.", codes)
    assert failed is not None
    code = "" if failed[1].startswith("it failed") else f"\nExit code 1: {failed[1]}.\n"
    lines = "\n".join(line.strip() for line in examples.splitlines())
    table = "\n".join(["| option | what it is |", "|---|---|", *rows])
    help_text = command.help.replace("\n\n", " ", 1).replace("\n", " ")
    return f"## `{path} {usage}`\n\n{help_text}\n\n{table}\n{code}\n```bash\n{lines}\n```\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
