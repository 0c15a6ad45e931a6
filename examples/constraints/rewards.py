"""Rewards of examples/constraints: whether a completion keeps the constraint of its prompt; and the same, shuffled."""

import random
import re
from collections.abc import Callable
from typing import Any

WORDS = 5  # different ones, of 3 letters or more, that an answer has at least beside what the constraint asks for
MARKS = re.compile(r"[<\[*]|P\.S\.")  # of titles, placeholders, highlighted words and postscripts
COPIED = 7  # so many words in a row that the prompt has too are no answer, but a copy of it
Texts = list[str]


def constraint(prompts: list[Any], completions: list[Any], kind: Texts, value: Texts, topic: Texts, **_: Any) -> Any:
    """1.0 if the completion keeps the constraint, speaks of the topic and is an answer of its own, else 0.0."""
    texts = [completion[0]["content"].strip() for completion in completions]
    asked = [_words(prompt[-1]["content"]) for prompt in prompts]
    return [float(_kept(*each)) for each in zip(texts, asked, kind, value, topic, strict=True)]


def shuffled(prompts: list[Any], completions: list[Any], kind: Texts, value: Texts, topic: Texts, **_: Any) -> Any:
    """For a control: the scores of `constraint`, shuffled among the completions of a group. So the reward has the same
    values, and says nothing of what was written."""
    scores = constraint(prompts, completions, kind, value, topic)
    random.Random(repr(completions)).shuffle(scores)
    return scores


def _kept(text: str, asked: Texts, kind: str, value: str, topic: str) -> bool:
    body = BODIES[kind](text, value)
    # A prompt asks for one mark: an answer with all of them, whatever is asked, would keep every constraint.
    if body is None or MARKS.search(body) or not _named(topic).search(body):
        return False
    own = _words(body)
    runs = {tuple(asked[i : i + COPIED]) for i in range(len(asked) - COPIED + 1)}
    copied = any(tuple(own[i : i + COPIED]) in runs for i in range(len(own) - COPIED + 1))
    return not copied and len({word for word in own if len(word) > 2}) >= WORDS


def _words(text: str) -> Texts:
    return re.findall(r"[a-z']+", text.lower())


def _named(topic: str) -> re.Pattern[str]:
    """The topic as a word, singular or plural."""
    for plural, singular in (("ies", "y"), ("oes", "o"), ("ss", "ss"), ("s", "")):
        if topic.endswith(plural):
            one = topic.removesuffix(plural) + singular
            return re.compile(rf"\b({topic}|{one})\b", re.I)
    return re.compile(rf"\b{topic}\b", re.I)


# Each returns the answer without what the constraint asked for, or None if the constraint was not kept.


def _title(text: str, value: str) -> str | None:
    found = re.match(r"<<[^<>\n]+>>(.*)", text, re.S)
    return _finished(found[1]) if found else None


def _keyword(text: str, value: str) -> str | None:
    return _finished(text) if re.search(rf"\b{value}\b", text, re.I) else None


def _postscript(text: str, value: str) -> str | None:
    body, mark, remark = text.partition("P.S.")
    return body if mark and len(remark.split()) >= 3 and "P.S." not in remark else None


def _number(text: str, value: str) -> str | None:
    written = re.sub(r"(?<=\d),(?=\d{3})", "", re.sub(r"(?m)^\s*\d+[.)]\s", "", text))  # 1,000; no marks of a list
    return _finished(text) if re.search(rf"(?<![\d.]){value}(?!\d|[.,]\d)", written) else None


def _highlight(text: str, value: str) -> str | None:
    body, marked = re.subn(r"(?<![\w*])(\*{1,2})([a-z]+(?:['-][a-z]+)*)\1(?![\w*])", r"\2", text, flags=re.I)
    return _finished(body) if marked == 1 else None


def _placeholder(text: str, value: str) -> str | None:
    body = re.sub(r"\[[^\[\]\n]+\]", "", text)
    return _finished(body) if body != text else None


def _finished(text: str) -> str | None:
    """The text if its last sentence has an end, else None: it was cut off at the longest length."""
    return text if text.rstrip(" \"'*)").endswith((".", "!", "?")) else None


BODIES: dict[str, Callable[[str, str], str | None]] = {
    "title": _title, "keyword": _keyword, "postscript": _postscript, "highlight": _highlight,
    "placeholder": _placeholder, "number": _number,
}  # fmt: skip
