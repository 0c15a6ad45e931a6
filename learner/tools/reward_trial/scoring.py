"""Completions as reward functions get them in a run, and what these say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.tools.reward_trial.cases import Case
from rewards.base import RewardError
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores
from rollout.data.model_files import read_json

STAND_IN = "completion_ids are the bytes of the texts here, since no model's folder is named that has a tokenizer.json"


@dataclass(frozen=True, slots=True)
class Scored:
    """One row. ms: of the call of each reward function, in their order; loading is not in it."""

    case: Case
    scores: Scores
    ms: list[float]


class Texts:
    """What a model's tokenizer and chat template make of texts, as far as reward functions see it, without loading the
    model's libraries. model: a folder; of anything else conversations and bytes stand in, which `note` says."""

    def __init__(self, model: str | None) -> None:
        folder = Path(model) if model is not None else None
        file = folder / "tokenizer.json" if folder is not None else None
        self._tokenizer: Any = None
        self.note, self._plain = STAND_IN, False
        if folder is not None and file is not None and file.is_file():
            from tokenizers import Tokenizer

            self._tokenizer, self.note = Tokenizer.from_file(str(file)), ""
            config = read_json(str(folder), "tokenizer_config.json")
            self._plain = not (config.get("chat_template") or (folder / "chat_template.jinja").is_file())

    def group(self, case: Case) -> Group:
        """The prompt is plain text where the model has no chat template."""
        texts = [text for _, text in case.completions]
        plain = "\n\n".join(message["content"] for message in case.messages)
        return Group.of(plain if self._plain else case.messages, texts, [*map(self._ids, texts)], case.columns)

    def _ids(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


async def score(
    rewards: Sequence[RewardConfig], memory_bytes: int, texts: Texts, cases: Sequence[Case]
) -> list[Scored]:
    """A row after the other, its completions as one group. Raises RewardError for functions that do not load, or end
    their process, on the first row."""
    found: list[Scored] = []
    async with RewardPool(rewards, memory_bytes=memory_bytes) as pool:
        for case in cases:
            verdicts = await pool.verdicts(texts.group(case))
            unusable = [i for i, one in enumerate(verdicts) if one.status == "error" and not one.ms and not found]
            if unusable:
                raise RewardError("\n".join(pool.sentence(i, verdicts[i]) for i in unusable))
            ms = [verdict.ms for verdict in verdicts]
            found.append(Scored(case, pool.combine(verdicts, len(case.completions), sum(ms)), ms))
    return found
