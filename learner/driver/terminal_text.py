"""Text of a model's or an environment's, for a terminal."""

import unicodedata

# Categories of Unicode: control, format (among them the marks that turn text around), lone halves of a pair, private,
# separators of lines and paragraphs.
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def escaped(text: str) -> str:
    """The text with each character that a terminal would obey, or not show, as its escape; line feeds stay."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or unicodedata.category(c) not in HIDDEN else _escape(c) for c in text)


def _escape(character: str) -> str:
    return ascii(character)[1:-1]
