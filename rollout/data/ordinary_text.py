"""Encodes conversations so that text from tools and environments never makes a special token of the model.

A tokenizer turns the name of a special token into that token wherever it reads the name. So a web page or a program's
output that contains <|im_end|> would end the turn, and with <tool_call> it would be a call. To tell names in messages
from those that the chat template writes, names in messages are replaced by words before rendering (`cover`) and put
back afterwards (`ids`). Then a copy of the tokenizer encodes the text, in which each special token has a secret name;
only the special tokens that the template wrote get these names.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from cluster.errors import WrongInput

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # the token of a byte
SPACES = " \t\n\r\u2581"  # the last one is sentencepiece's space
UNKNOWN = "\U0010fffd"  # a letter that no vocabulary has
STRUCTURE = ("role", "type")  # values that templates compare and do not copy, so that they must stay as they are


class OwnText(str):
    """Text in which names of special tokens make special tokens: what the policy sampled, and the user's own data."""


class Encode(Protocol):
    """The ids of a text, without special tokens around it. encode: a function to use instead of the tokenizer's own.
    Raises WrongInput."""

    def __call__(self, text: str, encode: Callable[[str], Sequence[int]] | None = None) -> list[int]: ...


class OrdinaryText:
    """Covers and encodes conversations for one tokenizer. stops: ids of the stop tokens."""

    def __init__(self, tokenizer: Any, encode: Encode, stops: Collection[int]) -> None:
        self._tokenizer, self._encode = tokenizer, encode
        self._ids = meaningful(tokenizer)
        self._names = list(self._ids)
        # If letters that the vocabulary lacks become the unknown token, that token does not count as special.
        unknown = {*encode(UNKNOWN)} & {tokenizer.unk_token_id} - {*stops}
        self._special = frozenset(self._ids.values()) - unknown
        self._mark = f"Q{secrets.token_hex(6)}x"  # all words begin with this secret, so that no text contains them
        longest_first = sorted(self._names, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._word = re.compile(rf"{self._mark}(\d+)s(\d+)e(\d+)z")

    def cover(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, or tools, with words in place of the names of special tokens in every text but OwnText.

        A part of a name at the beginning or end of a content is replaced, too, since the template might write the rest.
        """
        return [
            {key: self._covered(value, parts=key == "content", key=key) for key, value in message.items()}
            for message in messages
        ]

    def ids(self, rendered: str) -> list[int]:
        """The ids of what a template made of covered messages. Raises WrongInput if a text cannot be encoded without a
        special token, or if the template changes letters of texts, and with them the words."""
        self._check_words(rendered)
        wanted = self._special_in([self._ids[name] for name in self._token.findall(rendered)])
        text = self._uncovered(rendered)
        if not any(match[0] == self._word_for_all(match) for match in self._word.finditer(rendered)):
            found = self._encode(text)
            if self._special_in(found) == wanted:
                return found
        found = self._apart(rendered)
        if len(self._special_in(found)) > len(wanted):
            raise WrongInput(
                f"trajectory: an answer must not hold special tokens of the model, and this tokenizer cannot write "
                f"{text!r:.80} without them; take them out"
            )
        return found

    def _check_words(self, rendered: str) -> None:
        left, secret = "".join(self._word.sub("", rendered).split()).lower(), self._mark[1:-1]
        if secret in left or secret[::-1] in left:
            raise WrongInput(
                "model.path: the chat template must write what tools and environments say as it is, and it changes "
                "letters or their order (a filter such as upper or wordwrap), so that a special token in it could not "
                "be told from the template's own; take the filter out of the template"
            )

    def _special_in(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._special]

    def _covered(self, value: Any, *, parts: bool, key: str = "") -> Any:
        if isinstance(value, OwnText):
            return value
        if isinstance(value, str):
            if key in STRUCTURE:
                return value
            text = self._token.sub(lambda match: self._word_for(match[0], 0, len(match[0])), value)
            return self._with_parts(text) if parts else text
        if isinstance(value, Mapping):
            return {
                self._covered(name, parts=False): self._covered(one, parts=parts, key=name)
                for name, one in value.items()
            }
        return [self._covered(one, parts=parts) for one in value] if isinstance(value, list | tuple) else value

    def _word_for(self, name: str, start: int, stop: int) -> str:
        return f"{self._mark}{self._names.index(name)}s{start}e{stop}z"

    def _word_for_all(self, match: re.Match[str]) -> str:
        """The word for the whole name, given a word for the name or a part of it."""
        name = self._names[int(match[1])]
        return self._word_for(name, 0, len(name))

    def _uncovered(self, text: str) -> str:
        return self._word.sub(lambda match: self._names[int(match[1])][int(match[2]) : int(match[3])], text)

    def _with_parts(self, text: str) -> str:
        if not (bare := text.strip()):
            return text
        before, _, behind = text.partition(bare)
        longest = max(map(len, self._names), default=0)
        within = next((name for name in self._names if bare in name), None) if len(bare) < longest else None
        if within is not None:
            start = within.index(bare)
            return before + self._word_for(within, start, start + len(bare)) + behind
        sizes = range(min(longest - 1, len(bare)), 0, -1)
        head = next((bare[:size] for size in sizes if bare[:size] in self._ends), "")
        if head and not bare.startswith(self._mark):
            name = self._ends[head]
            bare = self._word_for(name, len(name) - len(head), len(name)) + bare[len(head) :]
        tail = next((bare[-size:] for size in sizes if bare[-size:] in self._begins), "")
        if tail and not self._word.fullmatch(bare[bare.rfind(self._mark) :]):
            bare = bare[: -len(tail)] + self._word_for(self._begins[tail], 0, len(tail))
        return before + bare + behind

    @cached_property
    def _begins(self) -> dict[str, str]:
        """Each proper beginning of a special token's name -> the name."""
        return {name[:size]: name for name in self._names for size in range(1, len(name))}

    @cached_property
    def _ends(self) -> dict[str, str]:
        return {name[-size:]: name for name in self._names for size in range(1, len(name))}

    def _apart(self, rendered: str) -> list[int]:
        """The ids of a text in which the template and messages wrote names of special tokens."""
        twin = self._twin
        if twin is None:
            return self._piece_by_piece(rendered)
        text = self._token.sub(lambda match: twin.names[match[0]], rendered)
        return self._encode(self._uncovered(text), twin.encode)

    @cached_property
    def _twin(self) -> "_Twin | None":
        """The copy of the tokenizer. It is made on first use, since a large vocabulary takes a second or two."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else _twin_of(backend.to_str(), self._ids, self._mark)

    def _piece_by_piece(self, rendered: str) -> list[int]:
        """The ids for a tokenizer in Python, which cannot be copied: each special token of the template and each text
        between two is encoded by itself; names in the texts are cut behind their first letter."""
        found: list[int] = []
        start = 0
        for match in (*self._token.finditer(rendered), None):
            stop = len(rendered) if match is None else match.start()
            text = self._uncovered(rendered[start:stop])
            for piece in re.split(rf"(?<=(?=(?:{self._token.pattern})).)", text, flags=re.DOTALL) if text else ():
                found += self._encode(piece)
            if match is not None:
                found.append(self._ids[match[0]])
                start = match.end()
        return found


class _Twin:
    """A copy of a fast tokenizer in which special tokens have secret names. names: name of a token -> secret name."""

    def __init__(self, core: Any, names: Mapping[str, str]) -> None:
        self._core, self.names = core, names

    def encode(self, text: str) -> list[int]:
        return list(self._core.encode(text, add_special_tokens=False).ids)


def meaningful(tokenizer: Any) -> dict[str, int]:
    """The ids, by name, of added tokens that mean more than their characters: those marked as special, and tokens such
    as <tool_call> and <think>. Words and spaces that were added to a vocabulary are not among them."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    template = str(tokenizer.chat_template)

    def means(name: str) -> bool:
        if name in special:
            return True
        bare = name.strip(SPACES)
        return bool(bare) and not BYTE.fullmatch(bare) and (not bare.isalnum() or bare in template)

    return {name: int(id_) for name, id_ in tokenizer.get_added_vocab().items() if means(name)}


def _twin_of(core: str, ids: Mapping[str, int], mark: str) -> _Twin | None:
    """The copy of a tokenizer; None if its ids would differ. core: the tokenizer in the JSON of its library."""
    from tokenizers import Tokenizer  # imported here, since it takes 30 ms and is rarely needed

    names = {name: f"{mark}t{index}z" for index, name in enumerate(ids)}
    tree = json.loads(core)
    for token in tree["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model, renamed = tree["model"], False
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        renamed = not names.keys().isdisjoint(vocabulary)
        model["vocab"] = {names.get(word, word): id_ for word, id_ in vocabulary.items()}
    elif isinstance(vocabulary, list):  # a list of unigrams with their scores
        model["vocab"] = [[names.get(word, word), *rest] for word, *rest in vocabulary]
    if renamed and model.get("merges"):
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tree |= {"truncation": None, "padding": None, "post_processor": None}
    twin = Tokenizer.from_str(json.dumps(tree))
    return _Twin(twin, names) if all(twin.token_to_id(names[name]) == id_ for name, id_ in ids.items()) else None
