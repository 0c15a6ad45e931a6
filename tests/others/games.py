"""The files of docs/adapters.md: environments of gem, TextArena and gymnasium, and their configuration and commands."""

import re
from pathlib import Path

from tests.documented.blocks import FENCE, ROOT

PAGE = ROOT / "docs" / "adapters.md"
NAME = re.compile(r"^# (\w+_game\.py|game\.yaml)$", re.MULTILINE)


def write(folder: Path) -> list[str]:
    """Writes those files, and returns the commands."""
    (section,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith("gem, TextArena, gymnasium")]
    commands: list[str] = []
    for language, text in FENCE.findall(section):
        if language == "bash":
            commands = text.splitlines()
        elif found := NAME.match(text):
            (folder / found[1]).write_text(text)
    return commands
