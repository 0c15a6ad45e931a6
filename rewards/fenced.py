"""The fenced blocks of a Markdown text, as CommonMark has them."""

import re
import textwrap
from collections.abc import Iterator

from markdown_it import MarkdownIt

_LANGUAGE = re.compile(r"[{.]*([\w+#-]+)")  # `python`, `{python}`, `{.python .numberLines}`, `python:file.py`
_MARKDOWN = MarkdownIt("commonmark")
_MARKDOWN.core.ruler.disable("inline")  # no block begins within a line
_MARKDOWN.block.ruler.disable("html_block")  # which <answer> or </think> alone on a line would begin


def fenced(text: str) -> Iterator[tuple[str, str]]:
    """(language in lower case, '' without one; content) of each block; one that nothing closes goes on to the end of
    the text, or of the list item that it stands in."""
    for token in _MARKDOWN.parse(text):
        if token.type == "fence":
            info = token.info.strip()
            language = _LANGUAGE.match(info)
            yield (language[1] if language else info).lower(), _to_the_margin(token.content)


def _to_the_margin(block: str) -> str:
    """Dedented if its first line is indented: dedent also empties lines of spaces, which texts in the code may have."""
    return textwrap.dedent(block) if block.lstrip("\n")[:1] in (" ", "\t") else block
