"""What a trial of reward functions says: on a terminal, and as JSON."""

import math
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import Any

from learner.driver.console import escaped
from learner.tools.reward_trial.scoring import Scored

PROMPT, TEXT = 240, 100  # characters that are shown
SENTENCES = 3  # of failures of one reward function
UNTOLD = (
    "no reward function tells a reference answer from an empty completion; give it the form that they read, for "
    "example --reference '<answer>{answer}</answer>'"
)


def as_text(found: Sequence[Scored], notes: Sequence[str]) -> str:
    """Row by row the prompt and each completion with its values; then each function over all rows."""
    lines = []
    for one in found:
        said = one.case.messages[-1]
        lines += [f"{one.case.id}  {said['role']}: {_short(said['content'], PROMPT)}"]
        kinds = [kind for kind, _ in one.case.completions]
        wide = max(map(len, kinds), default=0)
        for i, (kind, text) in enumerate(one.case.completions):
            lines.append(f"  {kind:{wide}}  {_values(one, i)}  {_short(text, TEXT) or '(nothing)'}")
    return "\n".join([*lines, "", *_functions(found), *_failures(found), *_zeroed(found), *notes, *_hint(found)])


def as_json(found: Sequence[Scored]) -> dict[str, Any]:
    """All of it: what is no number is null."""
    rows = [
        {
            "id": one.case.id, "prompt": one.case.messages, "kind": kind, "completion": text,
            "reward": one.scores.reward[i], "status": one.scores.status[i],
            "parts": {name: _finite(values[i]) for name, values in one.scores.parts.items()},
            "error": one.scores.errors[i],
        }
        for one in found
        for i, (kind, text) in enumerate(one.case.completions)
    ]  # fmt: skip
    names = list(found[0].scores.parts) if found else []
    calls = {name: {"ms": [one.ms[at] for one in found]} for at, name in enumerate(names)}
    return {"completions": rows, "functions": calls, "failures": sorted(_sentences(found))}


def failed(found: Sequence[Scored]) -> bool:
    """Whether a reward function failed on a completion."""
    return bool(_sentences(found))


def _values(one: Scored, i: int) -> str:
    parts = "  ".join(f"{name} {_number(values[i]):6}" for name, values in one.scores.parts.items())
    reward = one.scores.reward[i]
    return f"{parts}  reward {one.scores.status[i] if reward is None else _number(reward):6}"


def _functions(found: Sequence[Scored]) -> Iterator[str]:
    """Each function: the mean of each kind of completion, and how long its calls took."""
    names = list(found[0].scores.parts) if found else []
    wide = max(map(len, names), default=0)
    for at, name in enumerate(names):
        kinds: dict[str, list[float]] = {}
        for one in found:
            for (kind, _), value in zip(one.case.completions, one.scores.parts[name], strict=True):
                kinds.setdefault(kind, []).extend([] if _finite(value) is None else [float(value or 0)])
        means = "  ".join(f"{kind} {mean(values):.4g}" for kind, values in kinds.items() if values)
        ms = [one.ms[at] for one in found]
        yield f"{name:{wide}}  mean: {means or 'none'}; a call: {duration(median(ms))}, the slowest {duration(max(ms))}"


def _sentences(found: Sequence[Scored]) -> set[str]:
    return {sentence for one in found for sentence in one.scores.failures}


def _zeroed(found: Sequence[Scored]) -> list[str]:
    """Why a built-in function gave 0 to what is no wrong answer: one sentence of each kind."""
    return sorted({kind: sentence for one in found for kind, sentence in one.scores.zeroed.items()}.values())


def duration(ms: float) -> str:
    """In a unit in which it is no large number."""
    return f"{ms:.3g} ms" if ms < 999.5 else f"{ms / 1e3:.3g} s" if ms < 1e6 else f"{ms / 1e3:.0f} s"


def _failures(found: Sequence[Scored]) -> list[str]:
    kept: list[str] = []
    for sentence in sorted(_sentences(found)):
        about = sentence.partition(":")[0]
        if sum(other.startswith(about) for other in kept) < SENTENCES:
            kept.append(sentence)
    return kept


def _hint(found: Sequence[Scored]) -> list[str]:
    """Where the reference answers score no better than nothing at all."""
    pairs = [dict(zip((kind for kind, _ in one.case.completions), one.scores.reward, strict=True)) for one in found]
    told = [(pair["reference"], pair["empty"]) for pair in pairs if {"reference", "empty"} <= pair.keys()]
    return [UNTOLD] if told and all(best == least and best is not None for best, least in told) else []


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _number(value: float | None) -> str:
    return "none" if value is None else "failed" if math.isnan(value) else f"{value:.4g}"


def _short(text: str, most: int) -> str:
    line = escaped(text).replace("\n", "\\n")
    return line if len(line) <= most else f"{line[:most]}..."
