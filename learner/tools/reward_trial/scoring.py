"""Completions as reward functions get them in a run, and what these say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.reading import Unreadable
from learner.tools.reward_trial.cases import Case
from rewards.base import RewardError
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores
from rewards.text import opening_at_end
from rollout.config import DataConfig
from rollout.data.chat_error import ChatError
from rollout.data.model_files import template_in

TAG = re.compile(r"<[A-Za-z_][\w.-]*>")
STAND_IN = "completion_ids are the bytes of the texts here, since no model's folder is named that has a tokenizer.json"


@dataclass(frozen=True, slots=True)
class Scored:
    """One row. ms: of the call of each reward function, in their order; loading is not in it."""

    case: Case
    scores: Scores
    ms: list[float]


class Texts:
    """What a model's tokenizer and chat template make of texts, as far as reward functions see it, without loading the
    model's libraries, unless its template may open a tag for the completion. model: a folder; of anything else
    conversations and bytes stand in, which `note` says. data: of the run, which says how templates are used."""

    def __init__(self, model: str | None, data: DataConfig | None = None) -> None:
        folder = Path(model) if model is not None else None
        file = folder / "tokenizer.json" if folder is not None else None
        self._tokenizer: Any = None
        as_it_stands = data is not None and data.chat_template == "none"
        self.note, self._plain = STAND_IN, as_it_stands
        self._chat: Any = None
        if folder is not None and file is not None and file.is_file():
            from tokenizers import Tokenizer

            self._tokenizer, self.note = Tokenizer.from_file(str(file)), ""
            template = "" if as_it_stands else _template(folder)
            self._plain = not template
            if TAG.search(template):
                from rollout.data.chat import Chat  # here: transformers loads with it

                self._chat = Chat.load(str(folder), data.chat_template_kwargs if data else None)

    def group(self, case: Case) -> Group:
        """The prompt is plain text where the model has no chat template."""
        texts = [text for _, text in case.completions]
        prompt = _plain(case) if self._plain else case.messages
        return Group.of(prompt, texts, [*map(self._ids, texts)], case.columns, self.prefilled(case))

    def prefilled(self, case: Case) -> str:
        """The opening tag that its prompt ends in, or ""."""
        if self._plain:
            return opening_at_end(_plain(case))
        return "" if self._chat is None else self._chat.prefilled(self._chat.render(case.messages)[1])

    def _ids(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _plain(case: Case) -> str:
    return "\n\n".join(message["content"] for message in case.messages)


def _template(folder: Path) -> str:
    try:
        return template_in(folder) or ""
    except Unreadable as error:
        raise ChatError(f"model.path: {error}; copy it again") from None


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
