"""Token ids as the pieces of text that they stand for, from files on this machine: a report asks no hub."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from learner.tools.report.token_bytes import bytes_of
from rollout.data.hub import split

FILE = "tokenizer.json"
MOST = 2**28  # bytes: the largest that are published have a tenth


class Words:
    """The tokenizer of a model folder, or of a hub model in the cache; `missing` says why there is none."""

    def __init__(self, model: str | None) -> None:
        self._tokenizer: Any = None
        self.missing = ""
        file = _file_of(model) if model else None
        if file is None:
            self.missing = f"Tokens are not coloured: {FILE} of {model or 'the model'} is not on this machine."
            return
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library has no exceptions of its own
            self.missing = f"Tokens are not coloured: {FILE} of {model} cannot be read: {str(error)[:200]}"

    @property
    def known(self) -> bool:
        """Whether ids can be turned into text."""
        return self._tokenizer is not None

    def pieces(self, ids: Iterable[int]) -> dict[int, str | list[int]]:
        """Each id's text as it stands inside a text, special tokens too; bytes of UTF-8 where they are no whole text.

        Behind an ordinary token, since many tokenizers drop the space before the first one of a text.
        """
        some, size = [*ids], self._tokenizer.get_vocab_size()
        anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        before = self._tokenizer.decode(anchor, skip_special_tokens=False)
        known = [i for i in some if 0 <= i < size]
        texts = self._tokenizer.decode_batch([[*anchor, i] for i in known], skip_special_tokens=False)
        found: dict[int, str | list[int]] = {}
        for i, text in zip(known, texts, strict=True):
            parts = bytes_of(self._tokenizer.id_to_token(i)) if "\ufffd" in text else None
            found[i] = parts or text.removeprefix(before)
        return {i: found.get(i, f"<{i}>") for i in some}


def _file_of(model: str) -> Path | None:
    file = Path(model) / FILE
    try:
        if file.is_file():
            return file if file.stat().st_size <= MOST else None
    except (OSError, ValueError):  # what no file is called
        return None
    try:
        name, revision = split(model)
        cached = try_to_load_from_cache(name, FILE, revision=revision)
    except HFValidationError:  # a path that is not here
        return None
    return Path(cached) if isinstance(cached, str) else None
