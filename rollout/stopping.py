"""What ends a completion beside its length: end tokens and stop strings."""

from collections.abc import Sequence
from typing import Any


class StopError(ValueError):
    """A stop string that could never end a completion."""


def split(tokenizer: Any, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Stop strings -> the ids of those that are a special token of the tokenizer, and the other strings.

    Strings are looked for in the text that reward functions are given, which has no special tokens, so such a string
    ends completions by its id. Raises StopError for one that has a special token among other text.
    """
    special = {token.content: int(id_) for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tuple(special[text] for text in strings if text in special)
    others = tuple(text for text in strings if text not in special)
    for text in others:
        inside = next((token for token in special if token in text), None)
        if inside is not None:
            raise StopError(
                f"rollout.stop: {text!r} must not mix the special token {inside!r} with other text, since it is looked "
                f"for in text without special tokens; give {inside!r} alone, or a string without it"
            )
    return ids, others
