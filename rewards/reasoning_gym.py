"""The reward functions that come with the tasks of reasoning_gym."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewards import gym_tasks
from rewards.text import check_tag, tagged, text_of

gym_tasks.factory()  # with this module, which only the loader imports: what is missing is said as it loads


@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    factory = gym_tasks.factory(task)
    scorer: Callable[..., float] = factory.get_score_answer_fn(task)  # builds a data set, so once per task
    return scorer


def reasoning_gym(
    completions: Sequence[Any],
    answer: Sequence[str],
    metadata: Sequence[str | Mapping[str, Any]],
    *,
    strict: bool = True,
    tag: str = "answer",
) -> list[float]:
    """The task's own score, 0..1, of what stands in the last `<tag>...</tag>`; 0.0 if there is no such tag.

    Needs the columns `answer` and `metadata` (a mapping, or JSON text of one, with `source_dataset`) as reasoning_gym
    makes them. strict: only a full score counts, since some tasks give partial credit to junk.
    Raises ValueError if metadata names no task that reasoning_gym knows.
    """
    check_tag(tag)
    scores = []
    for completion, gold, meta in zip(completions, answer, metadata, strict=True):
        facts: dict[str, Any] = json.loads(meta) if isinstance(meta, str) else dict(meta)
        if "source_dataset" not in facts:
            raise ValueError(f"column 'metadata': needs the key source_dataset, has {sorted(facts)}")
        scorer = _scorer(facts["source_dataset"])
        said = tagged(text_of(completion), tag)
        score = 0.0 if said is None else float(scorer(answer=said, entry={"answer": gold, "metadata": facts}))
        scores.append(float(score >= 1.0) if strict else score)
    return scores
