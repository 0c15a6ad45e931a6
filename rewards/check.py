"""The trial: every reward function is called before any model loads, so that a broken one costs seconds, not a run."""

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

# Variables that say where requests go, are set where the run is started, and are kept from reward functions: without
# them a client goes to its default address, with the user's texts.

# OPENAI_BASE_URL, OPENAI_API_BASE, AZURE_OPENAI_ENDPOINT, OLLAMA_HOST, ...; what stands before is whose it is.
_ADDRESS = re.compile(r"([A-Z0-9]+(?:_[A-Z0-9]+)*?)_(?:API_)?(?:BASE_URL|BASE|URL|ENDPOINT|HOST)")
_PROXY = re.compile(r"(?:https?|all)_proxy", re.IGNORECASE)
_CLIENTS = re.compile(rb"\b(?:requests|httpx|aiohttp|urllib|openai|anthropic|litellm|huggingface_hub)\b")
MOST = 1 << 20  # bytes of a file of the user's that is looked through


def withheld_notes(reward: RewardConfig, label: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each such variable that the function names, or whose owner it names: in the text of its file and of
    what that imports from beside it, or by another variable of that owner in `env`. label: of the reward."""
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
    """Of the function's file, pickled or not; of a module that is named by its import nothing."""
    file = Path(use.rpartition(":")[0] or use)
    if file.is_file():
        for one in (file, *(own_imports(file, file.parent) if file.suffix == ".py" else ())):
            try:
                yield read_bytes(one, MOST)
            except (
                OSError,
                WrongInput,
            ):  # what cannot be read is said as it is loaded; a larger file is not looked through
                continue


PATIENCE_S = 30.0  # for the first call of a late function
FIRST_CALL = (
    "Only its first call is late: what a function imports or loads within a call counts; move that to the top of its "
    "file, whose loading is not charged."
)
OF_TEXTS = (
    "It treats completions as texts, and is given lists of messages, since the model has a chat template; read "
    'completion[0]["content"], or set data.chat_template: none if the model is to continue the prompts as they stand'
)


class Tried(NamedTuple):
    """notes: of functions that work and hardly do what is meant, a line each."""

    scores: Scores
    notes: tuple[str, ...] = ()


def try_rewards(rewards: Sequence[RewardConfig], group: Group, memory_bytes: int = limits.DEFAULT_MEMORY) -> Tried:
    """Loads each function in a worker process and calls it on the group. Not from inside an event loop.

    A user's own function that makes no difference between completions, or fails, is called once more with the texts of
    a conversation's messages: if it does then, it was written for texts.

    Give two completions or more, so that a function which returns a list of length 1 for any is found out. Raises
    WrongInput, with one line for each function that does not load, raises, dies, is late or returns the wrong shape. A
    None or NaN is accepted: a function may have no number for a dummy completion.
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
    """The places of functions that were given messages, and tell completions apart when they are given texts."""
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
    """Whether a function that was late is late at its first call only: then what took long is what it imports or loads
    inside that call."""
    patient = reward.model_copy(update={"timeout_s": max(PATIENCE_S, reward.timeout_s)})
    async with RewardPool([patient], memory_bytes=memory_bytes) as pool:
        if not _answered(await pool.verdicts(group)):
            return False
        begin = time.perf_counter()
        second = await pool.verdicts(group)
    return _answered(second) and time.perf_counter() - begin <= reward.timeout_s


def _answered(verdicts: Sequence[Verdict]) -> bool:
    return all(verdict.status in ("ok", "nan") for verdict in verdicts)
