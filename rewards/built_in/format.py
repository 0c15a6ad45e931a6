"""Does the text keep to the agreed layout of tags?"""

import re
from collections.abc import Sequence
from typing import Any

from rewards.base import check_tag, text_of


def format_(
    completions: Sequence[Any], *, tags: Sequence[str] = ("reasoning", "answer"), **columns: Sequence[Any]
) -> list[float]:
    """1.0 if the whole text is `<tag>...</tag>` for each tag in order, with only white space around them, else 0.0.

    A tag that the prompt ends in, such as one that a chat template opens for the completion, counts as its beginning.
    Each tag must open and close exactly once; what stands inside is free. The strict pattern of the published recipe
    asks for one line in each tag, line breaks around it and one at the end: that is the reward `regex` with
    `pattern: '^<reasoning>\\n.*?\\n</reasoning>\\n<answer>\\n.*?\\n</answer>\\n$'`.
    Raises ValueError if `tags` is not a list of plain names.
    """
    if isinstance(tags, str) or not tags:
        raise ValueError(f"args.tags: must be a list of tag names such as [reasoning, answer], got {tags!r}")
    names = [check_tag(tag) for tag in tags]
    layout = re.compile(r"\s*" + r"\s*".join(f"<{t}>.*?</{t}>" for t in map(re.escape, names)) + r"\s*", re.DOTALL)
    marks = [mark for name in names for mark in (f"<{name}>", f"</{name}>")]

    def fits(text: str) -> bool:
        # The count comes first: with every mark unique the pattern below cannot backtrack badly.
        return all(text.count(mark) == 1 for mark in marks) and layout.fullmatch(text) is not None

    return [float(fits(text_of(completion))) for completion in completions]


TAGS: Sequence[str] = (format_.__kwdefaults__ or {})["tags"]
