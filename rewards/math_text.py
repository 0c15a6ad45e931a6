"""What math-verify is to read of an answer: forms that it takes for something else, written as it knows them."""

import re
from typing import NamedTuple

_DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[\[(])")  # $, \[ or \(, but no \$, which is money, and no \\[, a line's end
_BRACE = re.compile(r"\\boxed\{|\\[{}]|[{}]")
_EMPHASIS = re.compile(r"(\*\*|__|`)(?P<text>(?:(?!\1).)+)\1", re.DOTALL)
# Between boxes that are one answer, as in `$x=\boxed{1}$ or $x=\boxed{2}$`.
_WORD = r"\\text\{\s*(?:and|or)\s*\}|\\(?:lor|land)(?![A-Za-z])|\b(?:and|or)\b"
_APART = rf"[,;]|\\\\|\\q?quad|{_WORD}"
_JOINT = re.compile(rf"(?:[\s$~]|\\[()\[\],;: ]|{_APART})*(?:[A-Za-z]\w*(?:_\{{\w+\}})?\s*=\s*)?")
_SEPARATES = re.compile(_APART)
_RELATION = re.compile(r"(?:[\s$]|\\[(\[])*(?:\\(?:neq?|[gl]eq?|[gl]eqslant|[gl]t|not)(?![A-Za-z])|[<>≠≥≤]|!=)")
_BLANK = r"(?:[^\S\n]|~|\\[ ,;:]|\\q?quad)+"
_THIN = r"[ \u00a0\u202f]"
_GROUPED = re.compile(rf"(?<![\w.,/^}}])(?<![0-9]{_THIN})[1-9][0-9]{{0,2}}(?:(?:{_THIN}|\\,)[0-9]{{3}})+(?![0-9])")
_BEGIN = r"(?P<begin>(?:\\?\$\$?|\\[(\[])?\s*(?:[-+\u2212]\s*)?)"
_END = r"(?P<end>(?:\s+[A-Za-z]{3,}(?: [A-Za-z]+)*)?(?:\s*\\?%)?\.?(?:\s*(?:\$\$?|\\[)\]]))?\.?)"
_MIXED = re.compile(
    rf"{_BEGIN}(?P<whole>[0-9]{{1,20}}){_BLANK}(?P<over>[0-9]{{1,20}})\s*/\s*(?P<under>[0-9]{{1,20}}){_END}"
)
_ITEM = r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:\s*/\s*[0-9]+)?"
_SEVERAL = re.compile(rf"{_BEGIN}{_ITEM}(?:{_BLANK}{_ITEM})+{_END}")
_LATEX = (
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"√\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*([0-9]+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=[\w)}])\*\*(-?[0-9]+|[A-Za-z]\b)"), r"^{\1}"),
    *((re.compile(sign), rf"\\frac{{{over}}}{{{under}}}") for sign, over, under in ("½12", "⅓13", "⅔23", "¼14", "¾34")),
)


class Written(NamedTuple):
    """A text for math-verify; `bare` without LaTeX's delimiters; `relation` if it begins with one, such as `>`."""

    text: str
    bare: bool = False
    relation: bool = False


def written(text: str, *, prose: bool) -> Written | None:
    """`text` as math-verify is to read it; None for numbers with nothing but blanks between them, which it adds up.

    Of several boxes the last counts, with those that are joined to it by a comma, `and` or `or`. Prose without a box
    stays as it is.
    """
    if boxes := _boxes(text):
        last = len(boxes) - 1
        while last and _joined(text[boxes[last - 1][1] + 1 : boxes[last][0] - len(r"\boxed{")]):
            last -= 1
        first = text[slice(*boxes[last])]
        pieces, behind = [], 0
        for i, (start, end) in enumerate(boxes):
            said = _rewritten(text[start:end]) if i >= last else text[start:end]
            if said is None:
                return None
            pieces += [text[behind : start - len(r"\boxed{")], rf"\boxed{{{said}}}" if i >= last else said]
            behind = end + 1
        return Written("".join([*pieces, text[behind:]]), relation=bool(_RELATION.match(first)))
    if prose:
        return Written(text)
    said = _rewritten(text)
    if said is None:
        return None
    bare = not _DELIMITER.search(said) and "\\boxed" not in said
    return Written(said, bare=bare, relation=bool(_RELATION.match(said)))


def _joined(between: str) -> bool:
    """Whether boxes with this between them are one answer."""
    return bool(_JOINT.fullmatch(between) and _SEPARATES.search(between))


def _boxes(text: str) -> list[tuple[int, int]]:
    r"""Begin and end of what stands in each \boxed{...} that is closed, not empty and in no other."""
    opened: list[int] = []
    found: list[tuple[int, int]] = []
    for match in _BRACE.finditer(text):
        if match[0] == "}" and opened:
            begin = opened.pop()
            if begin >= 0 and text[begin : match.start()].strip():
                while found and found[-1][0] > begin:
                    found.pop()
                found.append((begin, match.start()))
        elif match[0][-1] == "{" and match[0] != r"\{":
            opened.append(match.end() if match[0] != "{" else -1)
    return found


def _rewritten(text: str) -> str | None:
    text = text.strip()
    while match := _EMPHASIS.fullmatch(text):
        text = match["text"].strip()
    for sign, latex in _LATEX:
        text = sign.sub(latex, text)
    match = _MIXED.fullmatch(text)
    if match and 0 < int(match["over"]) < int(match["under"]):
        over = int(match["whole"]) * int(match["under"]) + int(match["over"])
        return rf"{match['begin']}\frac{{{over}}}{{{int(match['under'])}}}{match['end']}"
    text = _GROUPED.sub(lambda group: re.sub("[^0-9]", "", group[0]), text)
    return None if _SEVERAL.fullmatch(text) else text
