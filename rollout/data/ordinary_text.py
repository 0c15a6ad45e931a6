"""Text of tools and environments in a prompt: the tokens of its characters, and never a special token of the model.

A tokenizer makes a special token of its name wherever it reads it, so that a web page or a program's output with
<|im_end|> in it would end the turn, and one with <tool_call> would be a call. Which names in a rendered conversation
the chat template wrote, and which came with a message, is known as it is rendered: those of messages are covered by
words before, and put back behind it (`cover`, `ids`). Then a copy of the tokenizer encodes the text, in which each
special token has a secret name, which is given to those alone that the template wrote.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from cluster.errors import WrongInput

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # the token of a byte
SPACES = " \t\n\r\u2581"  # the last as sentencepiece writes one
UNKNOWN = "\U0010fffd"  # a letter that no vocabulary has
STRUCTURE = ("role", "type")  # what templates compare, and write as they please


class OwnText(str):
    """Text whose special tokens count: what the policy sampled, and the user's own data."""


class Encode(Protocol):
    """Text -> ids, without special tokens around it, by a tokenizer's own function or by another. Raises WrongInput."""

    def __call__(self, text: str, encode: Callable[[str], Sequence[int]] | None = None) -> list[int]: ...


class OrdinaryText:
    """For one tokenizer. stops: the stop tokens."""

    def __init__(self, tokenizer: Any, encode: Encode, stops: Collection[int]) -> None:
        self._tokenizer, self._encode = tokenizer, encode
        self._ids = meaningful(tokenizer)
        self._names = list(self._ids)
        # What stands for a letter that the vocabulary lacks is what that letter's token is.
        unknown = {*encode(UNKNOWN)} & {tokenizer.unk_token_id} - {*stops}
        self._special = frozenset(self._ids.values()) - unknown
        self._mark = f"Q{secrets.token_hex(6)}x"  # begins words that nobody's text holds, since nobody knows it
        longest_first = sorted(self._names, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._word = re.compile(rf"{self._mark}(\d+)s(\d+)e(\d+)z")

    def cover(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages, or tools, with words in the place of special tokens in every text that is not OwnText; also of
        a beginning or an end of one where a content ends or begins with it: the template may have written the rest."""
        return [
            {key: self._covered(value, parts=key == "content", key=key) for key, value in message.items()}
            for message in messages
        ]

    def ids(self, rendered: str) -> list[int]:
        """The ids of what a template made of covered messages. Raises WrongInput where a text cannot be written without
        a special token, or the template changes letters of texts, and so the words in them."""
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
        """The word for the whole token that a word stands for, or for a part of."""
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
        """Each proper beginning of a token, and the token."""
        return {name[:size]: name for name in self._names for size in range(1, len(name))}

    @cached_property
    def _ends(self) -> dict[str, str]:
        return {name[-size:]: name for name in self._names for size in range(1, len(name))}

    def _apart(self, rendered: str) -> list[int]:
        """The ids, where what the template wrote and what came with messages has the same names."""
        twin = self._twin
        if twin is None:
            return self._piece_by_piece(rendered)
        text = self._token.sub(lambda match: twin.names[match[0]], rendered)
        return self._encode(self._uncovered(text), twin.encode)

    @cached_property
    def _twin(self) -> "_Twin | None":
        """Made when it is first needed: of a large vocabulary it takes a second or two."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else _twin_of(backend.to_str(), self._ids, self._mark)

    def _piece_by_piece(self, rendered: str) -> list[int]:
        """For tokenizers in Python, which have nothing to copy: the ids of each token of the template, and of each text
        between two, in which names are cut after their first letter."""
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
    """A copy of a fast tokenizer in which special tokens have other names. names: name -> its name here."""

    def __init__(self, core: Any, names: Mapping[str, str]) -> None:
        self._core, self.names = core, names

    def encode(self, text: str) -> list[int]:
        return list(self._core.encode(text, add_special_tokens=False).ids)


def meaningful(tokenizer: Any) -> dict[str, int]:
    """The added tokens that are more than their characters, and their ids: those that are called special, and such as
    <tool_call> and <think>. Words and spaces that were added to a vocabulary are words and spaces."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    template = str(tokenizer.chat_template)

    def means(name: str) -> bool:
        if name in special:
            return True
        bare = name.strip(SPACES)
        return bool(bare) and not BYTE.fullmatch(bare) and (not bare.isalnum() or bare in template)

    return {name: int(id_) for name, id_ in tokenizer.get_added_vocab().items() if means(name)}


def _twin_of(core: str, ids: Mapping[str, int], mark: str) -> _Twin | None:
    """core: of the tokenizer, as its library writes it. None where the copy does not have the same ids."""
    from tokenizers import Tokenizer  # here: 30 ms, and only conversations with special tokens in their texts need it

    names = {name: f"{mark}t{index}z" for index, name in enumerate(ids)}
    tree = json.loads(core)
    for token in tree["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model, renamed = tree["model"], False
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        renamed = not names.keys().isdisjoint(vocabulary)
        model["vocab"] = {names.get(word, word): id_ for word, id_ in vocabulary.items()}
    elif isinstance(vocabulary, list):  # of unigrams, with their scores
        model["vocab"] = [[names.get(word, word), *rest] for word, *rest in vocabulary]
    if renamed and model.get("merges"):
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tree |= {"truncation": None, "padding": None, "post_processor": None}
    twin = Tokenizer.from_str(json.dumps(tree))
    return _Twin(twin, names) if all(twin.token_to_id(names[name]) == id_ for name, id_ in ids.items()) else None
