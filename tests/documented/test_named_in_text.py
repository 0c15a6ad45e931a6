"""Commands that the text names between backticks: the command, its options and the target of make are there.

CHANGELOG.md speaks of commands that were renamed.
"""

import re
import shlex
from pathlib import Path

import pytest

from learner.tools.cli import build
from tests.cli_page import commands
from tests.documented.blocks import FENCE, PAGES, ROOT

NAMED = re.compile(r"`((?:gleaner|make) [^`\n]+)`")
OPTIONS = {
    path.split(" ", 1)[1]: {option for parameter in command.params for option in parameter.opts}
    for path, command in commands(build(), "gleaner")
    if not hasattr(command, "commands")
}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def wrong(command: str) -> str:
    """What is not there, or ''."""
    program, *words = shlex.split(command.replace("<", "").replace(">", ""))
    if program == "make":
        return "" if words[0] in TARGETS else f"no target {words[0]}"
    if words[0].startswith("--"):
        return "" if words[0] in ("--help", "--version", "--install-completion") else f"no option {words[0]}"
    path = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in OPTIONS), None)
    if path is None:
        return "" if any(known.startswith(f"{words[0]} ") for known in OPTIONS) else f"no command {words[0]}"
    given = words[: words.index("--")] if "--" in words else words
    asked = {word.partition("=")[0] for word in given if re.match(r"--[a-z]", word) and "." not in word}
    return ", ".join(sorted(asked - OPTIONS[path] - {"--help"}))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_what_the_text_names_is_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    found = {command: wrong(command) for command in NAMED.findall(text) if "..." not in command}
    assert {command: told for command, told in found.items() if told} == {}


def test_a_mistake_would_be_seen() -> None:
    assert wrong("gleaner plan --gpu 24 --modle x") == "--modle"
    assert wrong("gleaner trian --config x") == "no command trian"
    assert wrong("make demos") == "no target demos"
    assert wrong("gleaner serve runs/<name> -- --max-model-len 9") == wrong("gleaner rewards try") == ""
