"""Checks reward functions before a run loads any model: try_rewards calls each of them on a group, so that a broken
function costs seconds and not a run, and withheld_notes finds variables with addresses that functions will not see.
"""

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.errors import WrongInput
from cluster.reading import read_bytes
from rewards import limits
from rewards.base import JUDGE, prompt_text, text_of
from rewards.call import Group, Verdict
from rewards.config import RewardConfig
from rewards.limits import kept
from rewards.loader import BUILT_INS, own_imports
from rewards.pool import RewardPool, Scores

# Variables that set the address of a client and are withheld from reward functions. Without them a client would send
# the user's texts to its default address. Examples: OPENAI_BASE_URL, OPENAI_API_BASE, AZURE_OPENAI_ENDPOINT,
# OLLAMA_HOST; the first part is the owner (OPENAI).
_ADDRESS = re.compile(r"([A-Z0-9]+(?:_[A-Z0-9]+)*?)_(?:API_)?(?:BASE_URL|BASE|URL|ENDPOINT|HOST)")
_PROXY = re.compile(r"(?:https?|all)_proxy", re.IGNORECASE)
_CLIENTS = re.compile(rb"\b(?:requests|httpx|aiohttp|urllib|openai|anthropic|litellm|huggingface_hub)\b")
MOST = 1 << 20  # bytes; larger files of the user are not searched


def withheld_notes(reward: RewardConfig, label: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for the user about each withheld variable with an address that the function seems to need: its file, or a
    file that this imports, has the variable's name or owner, or `env` has another variable of that owner. label: the
    reward's name in messages."""
    if reward.use in BUILT_INS:
        return []
    text = b"\n".join(_texts(reward.use))
    owners = {name.partition("_")[0] for name in reward.env}
    found = [name for name in sorted(environ) if kept(name) and name not in reward.env and _reads(name, text, owners)]
    return [
        f"{label}: {name} is set here and kept from reward functions, so that a client in them goes to its default "
        f"address; if it is to count, set env=[{', '.join([*reward.env, name])}]"
        for name in found
    ]


def _reads(name: str, text: bytes, owners: set[str]) -> bool:
    if _PROXY.fullmatch(name):
        return bool(owners or _CLIENTS.search(text))
    if (address := _ADDRESS.fullmatch(name)) is None:
        return False
    whose = address[1].partition("_")[0]
    return whose in owners or name.encode() in text or re.search(rb"\b%s\b" % whose.lower().encode(), text) is not None


def _texts(use: str) -> Iterator[bytes]:
    """The contents of the function's file, Python or pickle, and of the user's files that it imports. Nothing if `use`
    names a module."""
    file = Path(use.rpartition(":")[0] or use)
    if file.is_file():
        for one in (file, *(own_imports(file, file.parent) if file.suffix == ".py" else ())):
            try:
                yield read_bytes(one, MOST)
            except (
                OSError,
                WrongInput,
            ):  # loading the function will report a file that cannot be read; a file beyond MOST is skipped
                continue


PATIENCE_S = 30.0  # at least, for another first call of a function that was late
FIRST_CALL = (
    "Only its first call is late: what a function imports or loads within a call counts; move that to the top of its "
    "file, whose loading is not charged."
)
OF_TEXTS = (
    "It treats completions as texts, and is given lists of messages, since the model has a chat template; read "
    'completion[0]["content"], or set data.chat_template: none if the model is to continue the prompts as they stand'
)


class Tried(NamedTuple):
    """The result of try_rewards. scores: those of the group. notes: a line for each function that works but probably
    does not do what the user wants."""

    scores: Scores
    notes: tuple[str, ...] = ()


def try_rewards(rewards: Sequence[RewardConfig], group: Group, memory_bytes: int = limits.DEFAULT_MEMORY) -> Tried:
    """Loads each function in a worker process and calls it on the group. Must not be called inside an event loop.

    A user's function that fails, or gives all completions the same number, is called once more with texts in place of
    messages. If that makes a difference, it was written for texts, and the user is told.

    The group should have two completions or more, so that a function which always returns a list of length 1 is found.
    Raises WrongInput, with one line for each function that does not load, raises, dies, is late or returns the wrong
    shape. None and NaN are accepted, since a function may have no number for a dummy completion.
    """
    if not group.completions:
        raise ValueError("try_rewards: needs at least one completion, got none")
    return asyncio.run(_try(rewards, group, memory_bytes))


async def _try(rewards: Sequence[RewardConfig], group: Group, memory_bytes: int) -> Tried:
    begin = time.perf_counter()
    async with RewardPool(rewards, memory_bytes=memory_bytes) as pool:
        verdicts = await pool.verdicts(group)
        ms = (time.perf_counter() - begin) * 1e3
        for_texts = await _for_texts(pool, rewards, group, verdicts)
    wrong, notes = [], []
    for i, verdict in enumerate(verdicts):
        if verdict.status in ("error", "timeout"):
            sentence = pool.sentence(i, verdict)
            if i in for_texts:
                sentence += f" {OF_TEXTS}."
            slow = verdict.status == "timeout" and await _slow_at_first(rewards[i], group, memory_bytes)
            wrong.append(f"{sentence} {FIRST_CALL}" if slow else sentence)
        elif i in for_texts:
            notes.append(f"reward {pool.names[i]!r}: gives {verdict.values[0]} to any completion. {OF_TEXTS}")
    if wrong:
        raise WrongInput("\n".join(wrong))
    scores = pool.combine(verdicts, len(group.completions), ms)
    return Tried(scores, (*notes, *scores.asked.values()))


async def _for_texts(
    pool: RewardPool, rewards: Sequence[RewardConfig], group: Group, verdicts: Sequence[Verdict]
) -> set[int]:
    """Indices of the functions that failed on messages, or gave all completions the same number, and do not if they get
    texts."""
    if all(isinstance(completion, str) for completion in group.completions):
        return set()
    doubtful = [
        i
        for i, (reward, verdict) in enumerate(zip(rewards, verdicts, strict=True))
        if reward.use not in BUILT_INS and reward.use != JUDGE
        if verdict.status == "error" or (verdict.status == "ok" and _alike(verdict))
    ]
    if not doubtful:
        return set()
    texts = Group(
        [prompt_text(prompt) for prompt in group.prompts],
        [text_of(completion) for completion in group.completions],
        group.completion_ids,
        group.columns,
        group.prefilled,
    )
    again = await pool.verdicts(texts, doubtful)
    return {
        i
        for i, verdict in zip(doubtful, again, strict=True)
        if verdict.status == "ok" and (verdicts[i].status == "error" or not _alike(verdict))
    }


def _alike(verdict: Verdict) -> bool:
    return len(set(verdict.values)) == 1


async def _slow_at_first(reward: RewardConfig, group: Group, memory_bytes: int) -> bool:
    """Whether a function that was late is late in its first call only, because it imports or loads something in it."""
    patient = reward.model_copy(update={"timeout_s": max(PATIENCE_S, reward.timeout_s)})
    async with RewardPool([patient], memory_bytes=memory_bytes) as pool:
        if not _answered(await pool.verdicts(group)):
            return False
        begin = time.perf_counter()
        second = await pool.verdicts(group)
    return _answered(second) and time.perf_counter() - begin <= reward.timeout_s


def _answered(verdicts: Sequence[Verdict]) -> bool:
    return all(verdict.status in ("ok", "nan") for verdict in verdicts)
