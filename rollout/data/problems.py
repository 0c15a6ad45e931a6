"""The stream of problems: any source -> rows, and prompts as the model reads them, in an order that is a function of
(seed, epoch).

Because the order is a function, the place in the stream is the whole state: position 12345 is the same problem after a
restart, on another machine and for any number of workers.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollout.config import DataConfig
from rollout.data import files, sources
from rollout.data.chat import Prompt
from rollout.data.sources import ProblemsError, Row
from rollout.data.stock import Places, Renderer, Stock, check_fitting, classes
from rollout.schema import Problem

log = logging.getLogger("rollout")

__all__ = ["Problems", "ProblemsError", "Renderer", "load"]


class Problems:
    """The training problems, epoch after epoch without end, each epoch in a seeded order of its own."""

    def __init__(self, stock: Stock, places: Places, longest: int, seed: int | None) -> None:
        """Those at `places` of the stock, which ascend; none has more than `longest` tokens. seed: None: each epoch is
        in the order of the stock."""
        self._stock, self._places, self._longest, self._seed = stock, places, longest, seed

    def __len__(self) -> int:
        """Problems of one epoch."""
        return len(self._places)

    def rows(self) -> Iterator[Row]:
        """The columns of each problem, in the order of their source."""
        return self._stock.columns(self._places)

    def fitting(self, config: DataConfig, longest: int, tools: int) -> "Problems":
        """Those whose prompt fits, with so many tokens more for an environment's tools; see data.overlong. Raises
        ProblemsError."""
        places = self._stock.fitting(self._places, longest, tools, config.overlong)
        return Problems(self._stock, places, longest - tools, self._seed)

    def prompts(self) -> Iterator[Prompt]:
        """What the model is given, once for each sequence of roles that a prompt has."""
        return iter(self._stock.kinds.values())

    def at(self, position: int) -> Problem:
        """The problem at this position, counted over epochs from 0. Raises ProblemsError if its prompt is longer than
        it was held to be: what tells that before a run is no proof for every tokenizer."""
        epoch, place = divmod(position, len(self._places))
        index = place if self._seed is None else int(_order(self._seed, epoch, len(self._places))[place])
        item = self._stock.item(int(self._places[index]))
        if len(item.prompt_ids) > self._longest:
            raise ProblemsError(
                f"rollout.max_prompt_length: every prompt must fit into {self._longest} tokens, and {item.id} has "
                f"{len(item.prompt_ids)}, more than its words have; set it to {len(item.prompt_ids)}, or take that row "
                "out"
            )
        return item.at(position, epoch)


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
    wanted, order = config.eval.every > 0, seed if config.shuffle else None
    generated = sources.is_made(config.path)
    stock = _stock(config, chat, seed, deadline_s)
    places = stock.fitting(np.arange(len(stock)), max_prompt_length)
    if not wanted:
        return Problems(stock, places, max_prompt_length, order), []
    if config.eval.path is None and config.eval.split is None and not generated:
        places, held_out = _hold_out(stock, places, config, seed)
        return Problems(stock, places, max_prompt_length, order), _problems(stock, held_out)
    path = config.path if config.eval.path is None else config.eval.path
    args = config.args if path == config.path else {}  # another source has settings of its own
    # A generator may repeat itself and training: the surplus leaves enough after those are dropped.
    fresh = sources.is_made(path)
    size, eval_seed = config.eval.size * (4 if fresh else 1), sources.other_seed(seed)
    rows = sources.read(path, config.eval.split, args, size, eval_seed, files.EVAL, deadline_s)
    name = sources.label(path, config.eval.split or "test")
    candidates = Stock(rows, config, chat, f"eval-{name}", deadline_s, files.EVAL)
    kept = candidates.fitting(np.arange(len(candidates)), max_prompt_length)
    known, own = classes((stock, places), (candidates, kept))
    new = ~np.isin(own, known)
    if fresh:
        kept = kept[new & _first_of_each(own, len(known))][: config.eval.size]
    else:
        _check_apart(int((~new).sum()), len(kept), config)
    if not len(kept):
        raise ProblemsError(
            f"data.eval: {path} must have questions that training lacks, and all {len(candidates)} generated ones "
            "occur in training; lower data.size, or widen the task in data.args"
        )
    return Problems(stock, places, max_prompt_length, order), _problems(candidates, kept)


def load_whole(
    config: DataConfig, chat: Renderer, max_prompt_length: int, seed: int, deadline_s: float = sources.DEADLINE_S
) -> list[Problem]:
    """All problems of `path` in their order, held out or not, to be evaluated; arguments and errors as of load."""
    stock = _stock(config, chat, seed, deadline_s)
    return _problems(stock, stock.fitting(np.arange(len(stock)), max_prompt_length))


def _stock(config: DataConfig, chat: Renderer, seed: int, deadline_s: float) -> Stock:
    rows = sources.read(config.path, config.split, config.args, config.size, seed, deadline_s=deadline_s)
    return Stock(rows, config, chat, sources.label(config.path, config.split), deadline_s, files.DATA)


def _problems(stock: Stock, places: Places) -> list[Problem]:
    """Held-out ones."""
    return [stock.item(place).at(index, epoch=-1) for index, place in enumerate(places.tolist())]


def _first_of_each(found: Places, before: int = 0) -> npt.NDArray[np.bool_]:
    """Which are the first of their class; found: of stock.classes, so many others before them."""
    first: npt.NDArray[np.bool_] = found == np.arange(before, before + len(found))
    return first


def _hold_out(stock: Stock, places: Places, config: DataConfig, seed: int) -> tuple[Places, Places]:
    """Training and held-out prompts; one that is held out is nowhere in training, however often it occurs. Of a single
    prompt none is, unless evaluation was asked for."""
    (found,) = classes((stock, places))
    distinct = found[_first_of_each(found)]
    if len(distinct) < 2 and not config.eval.model_fields_set:
        log.warning("data.path: holds one prompt, however often, so that none is held out and nothing is evaluated")
        return places, places[:0]
    if len(distinct) < 2:
        raise ProblemsError(
            "data.path: must hold at least 2 different prompts, since some are held out for evaluation, got 1; "
            "set data.eval.path, or data.eval.every: 0"
        )
    count = min(config.eval.size, max(1, len(distinct) // 10))
    chosen = distinct[random.Random(f"held-out-{seed}").sample(range(len(distinct)), count)]
    return places[~np.isin(found, chosen)], places[chosen]


def _check_apart(known: int, held_out: int, config: DataConfig) -> None:
    """Raises ProblemsError if evaluation would score what was trained on: the same source, or one without a new prompt.
    Single prompts in both are only warned of: other people's splits have them. known: how many of the held-out prompts
    are in the training data."""
    here, there = (Path(path).expanduser().resolve() for path in (config.path, config.eval.path or config.path))
    # Without a split of its own a file is taken whole, and of a hub data set `test`.
    same = here == there and (config.eval.split or (config.split if there.exists() else "test")) == config.split
    told = f"{known} of {held_out} held-out problems are in the training data"
    if known and (same or known == held_out):
        raise ProblemsError(
            f"data.eval: held-out problems must not be trained on, and {told} ({config.eval.path or config.path}); "
            "give another file or split, or leave data.eval.path out: then a tenth of the training problems is held out"
        )
    if known:
        log.warning("data.eval: %s, so they are scored after having been trained on", told)


def fitting(items: Sequence[Problem], config: DataConfig, longest: int, tools: int = 0) -> list[Problem]:
    """As Problems.fitting, of problems whose prompts are known."""
    if not items:
        return []
    sizes = np.array([len(item.prompt_ids) + tools for item in items])
    refused = (item.id for item in items if len(item.prompt_ids) + tools > longest)
    check_fitting(sizes, refused, config.overlong, longest, tools, items[0].id.rpartition("-")[0])
    return [item for item, size in zip(items, sizes.tolist(), strict=True) if size <= longest]
