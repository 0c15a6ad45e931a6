"""The bytes that a token stands for, where they are a part of a character and so no text of their own."""

import re

ONE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece


def bytes_of(token: str) -> list[int] | None:
    """token: as the vocabulary has it. None if it is written in neither of the usual ways."""
    if (one := ONE.fullmatch(token)) is not None:
        return [int(one[1], 16)]
    return [LETTERS[letter] for letter in token] if set(token) <= LETTERS.keys() else None


def _letters() -> dict[str, int]:
    """GPT-2's: a byte that Latin-1 prints is its own letter; of the others, the n-th is U+0100 + n."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


LETTERS = _letters()
