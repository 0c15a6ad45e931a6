"""The stream of problems: any source -> rows, tokenised once, in an order that is a function of (seed, epoch).

Because the order is a function, the place in the stream is the whole state: position 12345 is the same problem after a
restart, on another machine and for any number of workers.
"""

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rollout.config import DataConfig
from rollout.data import files, sources
from rollout.data.chat import Messages, Prompt
from rollout.data.chat_error import ChatError
from rollout.data.pace import Pace
from rollout.data.prompts import prompts_of
from rollout.data.sources import ProblemsError, Row
from rollout.schema import Problem

log = logging.getLogger("rollout")

__all__ = ["Problems", "ProblemsError", "load"]


class Renderer(Protocol):
    """What turns messages into the model's prompt and its token ids: rollout.data.chat.Chat."""

    def render(self, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        """Messages -> what the model is given, and its token ids [P]."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    """A problem without its place in the stream."""

    id: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    columns: Row

    def at(self, position: int, epoch: int) -> Problem:
        """The problem at a place of the stream."""
        return Problem(self.id, self.prompt, self.columns, self.prompt_ids, position, epoch)


Measured = TypeVar("Measured", Item, Problem)


class Problems:
    """The training problems, epoch after epoch without end, each epoch in a seeded order of its own."""

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        self._items, self._seed = items, seed

    def __len__(self) -> int:
        """Problems of one epoch."""
        return len(self._items)

    def rows(self) -> Iterator[Row]:
        """The columns of each problem, in the order of their source."""
        return (item.columns for item in self._items)

    def fitting(self, config: DataConfig, longest: int, tools: int) -> "Problems":
        """See the function of that name."""
        return Problems(fitting(self._items, config, longest, tools), self._seed)

    def prompts(self) -> Iterator[Prompt]:
        """What the model is given of each problem, likewise."""
        return (item.prompt for item in self._items)

    def at(self, position: int) -> Problem:
        """The problem at this position, counted over epochs from 0."""
        epoch, place = divmod(position, len(self._items))
        index = int(_order(self._seed, epoch, len(self._items))[place])
        return self._items[index].at(position, epoch)


@lru_cache(maxsize=4)  # around the end of an epoch, two are in use
def _order(seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)


def load(
    config: DataConfig, chat: Renderer, max_prompt_length: int, seed: int, deadline_s: float = sources.DEADLINE_S
) -> tuple[Problems, list[Problem]]:
    """Training problems, and the held-out ones for evaluation (none where `eval.every` is 0). Raises ProblemsError.

    Held-out problems come from `eval.path`, or from `eval.split` of `path`; where both are null, from a reasoning_gym
    task with another seed, and from any other source as a seeded choice of a tenth of its distinct prompts, at most
    `eval.size`, which training never sees. Their epoch is -1, so that their groups are never taken for groups of the
    stream. `deadline_s`: seconds for making the problems of a task, and again for tokenising the prompts.
    """
    wanted = config.eval.every > 0
    generated = config.path.startswith(sources.GENERATED)
    rows = sources.read(config.path, config.split, config.args, config.size, seed, deadline_s=deadline_s)
    items = _items(rows, config, chat, max_prompt_length, sources.label(config.path, config.split), deadline_s)
    if not wanted:
        return Problems(items, seed), []
    if config.eval.path is None and config.eval.split is None and not generated:
        items, held_out = _hold_out(items, config.eval.size, seed)
    else:
        path = config.path if config.eval.path is None else config.eval.path
        args = config.args if path == config.path else {}  # another source has settings of its own
        # A generator may repeat itself and training: the surplus leaves enough after those are dropped.
        fresh = path.startswith(sources.GENERATED)
        size, eval_seed = config.eval.size * (4 if fresh else 1), sources.other_seed(seed)
        rows = sources.read(path, config.eval.split, args, size, eval_seed, files.EVAL, deadline_s)
        name = sources.label(path, config.eval.split or "test")
        candidates = _items(rows, config, chat, max_prompt_length, f"eval-{name}", deadline_s, files.EVAL)
        held_out = _unseen(candidates, items)[: config.eval.size] if fresh else candidates
        if not fresh:
            _check_apart(candidates, items, config)
        if not held_out:
            raise ProblemsError(
                f"data.eval: {path} must have questions that training lacks, and all {len(candidates)} generated ones "
                "occur in training; lower data.size, or widen the task in data.args"
            )
    return Problems(items, seed), [item.at(index, epoch=-1) for index, item in enumerate(held_out)]


def load_whole(
    config: DataConfig, chat: Renderer, max_prompt_length: int, seed: int, deadline_s: float = sources.DEADLINE_S
) -> list[Problem]:
    """All problems of `path` in their order, held out or not, to be evaluated; arguments and errors as of load."""
    rows = sources.read(config.path, config.split, config.args, config.size, seed, deadline_s=deadline_s)
    items = _items(rows, config, chat, max_prompt_length, sources.label(config.path, config.split), deadline_s)
    return [item.at(index, epoch=-1) for index, item in enumerate(items)]


def _hold_out(items: list[Item], size: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Training and held-out items; a prompt that is held out is nowhere in training, however often it occurs."""
    distinct = _unseen(items, ())
    if len(distinct) < 2:
        raise ProblemsError(
            "data.path: must hold at least 2 different prompts, since some are held out for evaluation, got 1; "
            "set data.eval.path, or data.eval.every: 0"
        )
    chosen = random.Random(f"held-out-{seed}").sample(distinct, min(size, max(1, len(distinct) // 10)))
    return _unseen(items, chosen, distinct=False), chosen


def _check_apart(held_out: list[Item], items: list[Item], config: DataConfig) -> None:
    """Raises ProblemsError if evaluation would score what was trained on: the same source, or one without a new prompt.
    Single prompts in both are only warned of: other people's splits have them."""
    known = len(held_out) - len(_unseen(held_out, items, distinct=False))
    here, there = (Path(path).expanduser().resolve() for path in (config.path, config.eval.path or config.path))
    # Without a split of its own a file is taken whole, and of a hub data set `test`.
    same = here == there and (config.eval.split or (config.split if there.exists() else "test")) == config.split
    told = f"{known} of {len(held_out)} held-out problems are in the training data"
    if known and (same or known == len(held_out)):
        raise ProblemsError(
            f"data.eval: held-out problems must not be trained on, and {told} ({config.eval.path or config.path}); "
            "give another file or split, or leave data.eval.path out: then a tenth of the training problems is held out"
        )
    if known:
        log.warning("data.eval: %s, so they are scored after having been trained on", told)


def _unseen(items: Iterable[Item], known: Iterable[Item], distinct: bool = True) -> list[Item]:
    """Items whose prompt is not among the known ones and, if `distinct`, has not come before."""
    seen, kept = {item.prompt_ids for item in known}, []
    for item in items:
        if item.prompt_ids not in seen:
            kept.append(item)
            if distinct:
                seen.add(item.prompt_ids)
    return kept


def _items(
    rows: Sequence[Row],
    config: DataConfig,
    chat: Renderer,
    longest: int,
    name: str,
    deadline_s: float,
    names: files.Names = files.DATA,
) -> list[Item]:
    items = []
    pace = Pace(len(rows), deadline_s)
    for index, messages in prompts_of(rows, config, name):
        try:
            prompt, ids = chat.render(messages)
        except ChatError as error:
            raise ChatError(f"{error} ({name}-{index})") from error
        items.append(Item(f"{name}-{index}", prompt, ids, rows[index]))
        if late := pace.late(index + 1):
            raise ProblemsError(f"{names.size}: tokenising {late} (cluster.deadlines.start); lower {names.size}")
    return fitting(items, config, longest)


def fitting(items: Sequence[Measured], config: DataConfig, longest: int, tools: int = 0) -> list[Measured]:
    """Those whose prompt fits, with so many tokens more for an environment's tools; see data.overlong. Raises
    ProblemsError."""
    too_long = [item for item in items if len(item.prompt_ids) + tools > longest]
    told = f" with the environment's tools, which take {tools}" if tools else ""
    if too_long and config.overlong == "drop" and len(too_long) < len(items):
        name = items[0].id.rpartition("-")[0]
        log.warning("%s: dropped %d of %d prompts of over %d tokens%s", name, len(too_long), len(items), longest, told)
        return [item for item in items if len(item.prompt_ids) + tools <= longest]
    if too_long:
        most = max(len(item.prompt_ids) for item in too_long) + tools
        first = ", ".join(item.id for item in too_long[:5])
        raise ProblemsError(
            f"rollout.max_prompt_length: every prompt must fit into {longest} tokens{told}, and {len(too_long)} of "
            f"{len(items)} do not ({first}{', ...' if len(too_long) > 5 else ''}; the longest has {most}); set "
            f"rollout.max_prompt_length: {most}, or data.overlong: drop"
        )
    return list(items)
