"""A language model as a judge: it is asked about each completion, over HTTP, at any OpenAI-compatible endpoint.

It runs where groups are scored (rewards.pool), not in a reward process: it only waits, and a process that waits would
keep other reward functions waiting. What it says is a stranger's text, and what it is shown was written by the policy
that it grades: see JudgeSettings.score, and docs/rewards.md on what tags can and cannot do.
"""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.actor import within
from rewards.base import RewardError
from rewards.call import Group, Status, Verdict, failed
from rewards.config import RewardConfig
from rewards.judge_cache import JudgeCache
from rewards.judge_client import JudgeClient, JudgeFailed
from rewards.judge_settings import JudgeSettings, settings_of
from rewards.secret_values import scrubbed
from rewards.text import column_of, text_of

LATE = "no answer within timeout_s"


class Judge:
    """What one language model thinks of each completion, as a number from 0 to 1."""

    def __init__(self, reward: RewardConfig, name: str, folder: Path | None, share: float) -> None:
        """folder: where answers are kept; null: nowhere. share: of the requests a minute, the part of this process.
        Raises RewardError: an arg is wrong, or its environment variable is not set."""
        self._settings, self._args = settings_of(reward.args, f"reward {name!r}: args")
        if reward.env:
            raise RewardError(f"reward {name!r}: env: a judge has its key from args.api_key: env:NAME; leave env out")
        self._timeout_s = reward.timeout_s
        self._cache = JudgeCache(folder)
        try:
            self._client = JudgeClient(self._settings, share)
        except RewardError as error:
            raise RewardError(f"reward {name!r}: {error}") from None

    async def verdict(self, group: Group) -> Verdict:
        """Of a group, within the reward's timeout_s. Completions that are alike are asked about once. One that the
        judge gives no number for is nan, and the others keep theirs."""
        size, begin = len(group.completions), time.perf_counter()
        try:
            asked = [self._question(group, i) for i in range(size)]
        except ValueError as error:
            return failed("error", size, str(error))
        distinct = {one.key: one for one in asked}
        tasks = {key: asyncio.ensure_future(self._number(one)) for key, one in distinct.items()}
        try:
            with suppress(TimeoutError):
                async with within(self._timeout_s):
                    await asyncio.wait(tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        found = await asyncio.gather(*tasks.values(), return_exceptions=True)
        by_key = dict(zip(tasks, found, strict=True))
        verdict = _verdict([by_key[one.key] for one in asked])
        return replace(verdict, ms=(time.perf_counter() - begin) * 1e3)

    def _question(self, group: Group, i: int) -> "_Asked":
        settings = self._settings
        reference = "" if settings.column is None else _reference(group.columns, settings.column, i)
        return _Asked(settings, _conversation(group.prompts[i]), text_of(group.completions[i]), reference)

    async def _number(self, asked: "_Asked") -> float:
        """Raises JudgeFailed."""
        kept = self._cache.get(asked.key)
        try:
            if kept is not None:
                return self._settings.score(kept, asked.mark)
            said = await self._client.ask(asked.messages)
            score = self._settings.score(said, asked.mark)
        except (JudgeFailed, ValueError) as error:
            raise JudgeFailed(scrubbed(str(error), self._args)) from None
        self._cache.put(asked.key, said, {"score": score, "answer": asked.answer})
        return score

    async def close(self) -> None:
        """Lets go of its connections."""
        await self._client.close()


class _Asked:
    """One question to the judge: its messages, and the digest that they are kept under."""

    def __init__(self, settings: JudgeSettings, question: str, answer: str, reference: str) -> None:
        self.answer = answer
        # Of what the policy wrote: so no completion can hold its own mark, and equal ones have equal requests.
        self.mark = _digest([question, answer, reference])[:12]
        text = settings.message(question, answer, reference, self.mark)
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        self.messages = [*system, {"role": "user", "content": text}]
        self.key = _digest([settings.base_url, settings.model, settings.options, settings.pattern, self.messages])


def _reference(columns: Mapping[str, Sequence[Any]], column: str, i: int) -> str:
    """Raises ValueError where the row has none: the judge would be told that None is right."""
    value = column_of(columns, column)[i]
    if value is None:
        raise ValueError(f"args.column: each row must have a right answer, and {column!r} is null; leave such rows out")
    return str(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _conversation(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as text: of a conversation what each says, by its role; of a single message its content alone."""
    if isinstance(prompt, str):
        return prompt
    turns = [(str(message.get("role")), text_of([{**message, "role": "assistant"}])) for message in prompt]
    return turns[0][1] if len(turns) == 1 else "\n\n".join(f"[{role}]\n{text}" for role, text in turns)


def _verdict(found: Sequence[float | BaseException]) -> Verdict:
    values = [value if isinstance(value, float) else math.nan for value in found]
    errors = [one for one in found if isinstance(one, BaseException)]
    for error in errors:
        if not isinstance(error, JudgeFailed | asyncio.CancelledError):
            raise error
    if not errors:
        return Verdict("ok", list(values))
    words = [LATE if isinstance(one, asyncio.CancelledError) else str(one) for one in errors]
    status: Status = "timeout" if set(words) == {LATE} else "error"
    first = next((text for text in words if text != LATE), LATE)
    return Verdict(status, list(values), f"{len(errors)} of {len(found)} were not judged, first: {first}")
