"""The blocks of code in the documents, and the commands in those of the shell."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One fence."""

    page: str  # as ROOT has it
    language: str  # '' for a picture or an output, which nobody runs
    text: str

    @property
    def first(self) -> str:
        return self.text.splitlines()[0].strip()

    @property
    def commands(self) -> list[str]:
        """Those of a block of the shell, without comments and with one space where there are several."""
        lines = self.text.replace("\\\n", " ").splitlines()
        bare = (" ".join(re.sub(r"(^|\s)#\s.*", "", line).split()) for line in lines)
        return [line for line in bare if line]


def blocks(language: str) -> Iterator[Block]:
    """All of that language, page by page."""
    for page in PAGES:
        for found in FENCE.finditer(page.read_text()):
            if found[1] == language:
                yield Block(page.relative_to(ROOT).as_posix(), found[1], found[2])


def commands_of(page: str) -> list[str]:
    return [command for block in blocks("bash") if block.page == page for command in block.commands]
