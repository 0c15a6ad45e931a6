"""The stream of problems: any source -> rows, and prompts as the model reads them, in an order that is a function of
(seed, epoch).

Because the order is a function, the place in the stream is the whole state: position 12345 is the same problem after a
restart, on another machine and for any number of workers.
"""

import heapq
import logging
import random
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.errors import WrongInput
from rollout.config import DataConfig
from rollout.data import files, sources
from rollout.data.chat import Messages, Prompt
from rollout.data.files import Names
from rollout.data.prompts import messages_of, prompts_of
from rollout.data.sources import Pace
from rollout.data.tables import Row
from rollout.schema import Problem

# Which problems were issued, are done, or must be issued again: the data ledger of a run.
#
# Order is a pure function of (seed, epoch), so a position identifies a group for ever. The state is a low-water mark
# and the sparse set of positions done above it; it is committed together with the weights, which makes each problem
# count exactly once along the surviving line of checkpoints.


class Cursor:
    """Hands out positions; knows what to hand out again."""

    def __init__(self) -> None:
        self.restore(0, ())

    def restore(self, low: int, done: Iterable[int]) -> None:
        """Continues from a saved state; everything that was not consumed by then is issued again."""
        self.low = low  # every position below is done
        self._done = set(done)
        self._next = low
        self._again: list[tuple[int, int]] = []  # heap of (position, attempt)

    def issue(self) -> tuple[int, int]:
        """The next (position, attempt): what failed or went stale first, then the stream in order."""
        if self._again:
            return heapq.heappop(self._again)
        self._next = max(self._next, self.low)  # finishing one position may close a gap up to restored ones
        while self._next in self._done:
            self._next += 1
        self._next += 1
        return self._next - 1, 0

    def again(self, position: int, attempt: int) -> None:
        """This attempt was lost or dropped: the position will be issued once more."""
        heapq.heappush(self._again, (position, attempt + 1))

    def finish(self, position: int) -> None:
        """The learner has consumed this position; doing that twice is a bug."""
        if position < self.low or position in self._done:
            raise ValueError(f"cursor: position {position} was consumed twice")
        self._done.add(position)
        while self.low in self._done:
            self._done.remove(self.low)
            self.low += 1

    @property
    def consumed(self) -> int:
        """How many positions the learner has consumed."""
        return self.low + len(self._done)

    def state(self) -> dict[str, object]:
        """JSON-able arguments for `restore`."""
        return {"low": self.low, "done": sorted(self._done)}


# The prompts of a source, as many as there are. Each is written as the model reads it when it is asked for; of a
# million that would take minutes.
#
# Before a run two things are asked of all. Does each prompt fit? A text has at most as many tokens as its words have
# one by one, and the template adds as many to one conversation as to another of the same roles; what frequent words
# have is counted once, and any other word has at most one a byte. Are two prompts the same? If what users say in them
# differs in more than white space and letter case, they are not. Where this does not decide, the prompt is tokenised.
# All of the first prompts are, and both rules are tried on them: if one of them breaks a rule, every prompt is
# tokenised.

log = logging.getLogger("rollout")

FIRST = 1000  # prompts that are tokenised, and rows of all parts of the source whose words are counted
OFTEN = 2  # times that a word must occur among them
OTHER_SCRIPT = 12  # tokens a byte at most, of a word beyond ASCII: U+FDFA has 3 bytes, and 33 in some normal forms

ENDLESS = 2**31 - 1

Places = npt.NDArray[np.int64]
Kind = tuple[tuple[str, bool], ...]
"""The role of each message, and whether there is anything in it."""


class Renderer(Protocol):
    """What turns messages into the model's prompt and its token ids: rollout.data.chat.Chat."""

    def render(self, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        """Messages -> what the model is given, and its token ids [P]."""
        ...

    def count(self, text: str) -> int:
        """Tokens of a piece of text by itself."""
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


class Stock:
    """All rows of a source that have a prompt.

    Args:
        name: what the ids of its problems begin with.
        deadline_s: for tokenising, as far as that is to be done at once.
        names: what messages call the source.

    Attributes:
        kinds: one prompt of each kind.

    Raises WrongInput: a row is wrong. WrongInput: the template refuses a conversation.
    """

    def __init__(
        self, rows: Sequence[Row], config: DataConfig, chat: Renderer, name: str, deadline_s: float, names: Names
    ) -> None:
        self._rows, self._config, self._chat, self.name = rows, config, chat, name
        self._deadline_s, self._names = deadline_s, names
        self.kinds: dict[Kind, Prompt] = {}
        self._places = array("q")  # of the rows that have one
        self._most = array("l")  # tokens that each has at most
        self._same, self._alike = array("q"), array("q")  # equal numbers: of the same messages; of ones that may be
        self._bound = _Bound(chat)
        self._read()
        self._exact = np.arange(len(self._places)) < FIRST

    def _read(self) -> None:
        """Once through all rows: of a million, so that each operation here takes seconds."""
        pace, told = Pace(min(FIRST, len(self._rows)), self._deadline_s), dict[tuple[int, ...], int]()
        places, most, same, alike, bound = self._places, self._most, self._same, self._alike, self._bound
        for index, messages in prompts_of(self._rows, self._config, self.name):
            if len(places) == FIRST:
                bound.learn(self._texts())
            kind, rough, tokens = bound.of(messages)
            if len(places) < FIRST or kind not in self.kinds:
                prompt, ids = self._rendered(index, messages)
                self.kinds.setdefault(kind, prompt)
                tokens = len(ids)
                bound.saw(messages, tokens)
                bound.sure &= told.setdefault(ids, rough) == rough
                if late := pace.late(len(places) + 1):
                    raise self._late(late)
            places.append(index)
            most.append(tokens)
            same.append(hash(tuple([(said["role"], said["content"]) for said in messages])))
            alike.append(rough)

    def __len__(self) -> int:
        return len(self._places)

    def item(self, place: int) -> Item:
        """The prompt at a place, counted among those that there are. Raises WrongInput if the template refuses it."""
        index = self._places[place]
        row = self._rows[index]
        prompt, ids = self._rendered(index, messages_of(row, self._config, f"{self.name}-{index}"))
        return Item(f"{self.name}-{index}", prompt, ids, row)

    def columns(self, places: Places) -> Iterator[Row]:
        """Of the rows at these places, which ascend."""
        wanted = iter(np.asarray(self._places)[places].tolist())
        following = next(wanted, -1)
        for index, row in enumerate(self._rows):
            if index == following:
                yield row
                following = next(wanted, -1)

    def fitting(self, places: Places, longest: int, tools: int = 0, overlong: str | None = None) -> Places:
        """Those of the prompts that fit. tools: tokens of an environment's tools. overlong: see data.overlong, which it
        is if not given. Raises WrongInput."""
        most = np.asarray(self._most)
        unsure = places[(most[places] + tools > longest) & ~self._exact[places]]
        pace = Pace(len(unsure), self._deadline_s)
        for done, place in enumerate(unsure.tolist(), start=1):
            self._most[place] = len(self.item(place).prompt_ids)
            if late := pace.late(done):
                raise self._late(late)
        self._exact[unsure] = True
        sizes = np.asarray(self._most)[places] + tools
        fits: npt.NDArray[np.bool_] = sizes <= longest
        refused = (f"{self.name}-{self._places[place]}" for place in places[~fits])
        check_fitting(sizes, refused, overlong or self._config.overlong, longest, tools, self.name)
        return places[fits]

    def _late(self, late: str) -> WrongInput:
        size = self._names.size
        return WrongInput(f"{size}: tokenising {late} (cluster.patience); lower {size}")

    def _rendered(self, index: int, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        try:
            return self._chat.render(messages)
        except WrongInput as error:
            raise WrongInput(f"{error} ({self.name}-{index})") from error

    def _texts(self) -> Iterator[str]:
        """Some of all parts of the source. What is wrong with a row is told in its turn."""
        for index in range(0, len(self._rows), max(len(self._rows) // FIRST, 1)):
            try:
                messages = messages_of(self._rows[index], self._config, "")
            except WrongInput:
                continue
            yield from (said["content"] for said in messages)

    def marks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(of each prompt a number that those of equal messages share; a number that all of equal ids share)."""
        if self._config.by_environment:  # what tells them apart is in their columns
            of_columns = [hash(repr(sorted(row.items()))) for row in self._rows]
            found = np.array(of_columns, np.int64)[np.asarray(self._places)]
            return found, found
        if not self._bound.sure:  # the tokenizer makes one prompt of texts that differ
            of_ids = [hash(self.item(place).prompt_ids) for place in range(len(self))]
            return np.array(of_ids, np.int64), np.array(of_ids, np.int64)
        return np.asarray(self._same, np.int64), np.asarray(self._alike, np.int64)


class _Bound:
    """The most tokens that a conversation can have.

    Attributes:
        sure: whether the first prompts, all of which were tokenised, contradict neither this bound nor what a Stock
            goes by when it compares prompts.
    """

    def __init__(self, chat: Renderer) -> None:
        self._chat, self.sure = chat, True
        self._words = _Words()
        self._frames: dict[Kind, int] = {}
        self._systems: dict[str, tuple[bool, int]] = {}  # whether a system message says anything, and its tokens
        self._seen: list[tuple[Messages, int]] = []
        self._learned = False

    def saw(self, messages: Messages, tokens: int) -> None:
        """A prompt that was tokenised."""
        if not self._learned:
            self._seen.append((messages, tokens))

    def learn(self, others: Iterable[str]) -> None:
        """From the prompts that were seen, and other texts of the same source."""
        texts = [said["content"] for messages, _ in self._seen for said in messages]
        counted = Counter(word for text in (*texts, *others) for word in text.split())
        for word, times in counted.items():
            if times >= OFTEN:
                self._words[word] = max(self._chat.count(word), self._chat.count(f" {word}"))
        self._systems.clear()
        self._learned = True
        self.sure &= all(self.of(messages)[2] >= tokens for messages, tokens in self._seen)
        self._seen.clear()

    def of(self, messages: Messages) -> tuple[Kind, int, int]:
        """(the kind of a conversation, a number that all of equal token ids share, the most tokens that it has).

        Before it has learned, and where it is not sure, the tokens are ENDLESS.
        """
        kind, plain, tokens = [], [], 0
        for said in messages:
            role, text = said["role"], said["content"]
            if role == "system" and text in self._systems:  # which most rows have in common
                filled, own = self._systems[text]
            else:
                words = text.split()
                joined = " ".join(words)
                filled, own = bool(words), sum(map(self._words.__getitem__, words))
                if joined != text:
                    # One space before a word is part of it for every tokenizer that is known; others may be tokens.
                    own += len(text) - len(joined) + len(words)
                if role == "system":
                    self._systems[text] = filled, own
                elif role == "user":
                    plain.append(joined.lower() if joined.isascii() else _plain(joined))
            tokens += own
            kind.append((role, filled))
        return (whole := tuple(kind)), hash(tuple(plain)), self._frame(whole) + tokens

    def _frame(self, kind: Kind) -> int:
        """Tokens that the template adds."""
        if not (self._learned and self.sure):
            return ENDLESS
        if kind not in self._frames:
            messages = [{"role": role, "content": "x" if filled else ""} for role, filled in kind]
            try:
                self._frames[kind] = len(self._chat.render(messages)[1])
            except WrongInput:  # of these contents, though it takes others
                self._frames[kind] = ENDLESS
        return self._frames[kind]


class _Words(dict[str, int]):
    """Tokens of each word that is known; of any other the most that it can have."""

    def __missing__(self, word: str) -> int:
        return 1 + (len(word) if word.isascii() else OTHER_SCRIPT * len(word.encode("utf-8", "surrogatepass")))


def _plain(text: str) -> str:
    """What texts have in common that a tokenizer or a template may make one of."""
    return " ".join(unicodedata.normalize("NFKC", text).split()).casefold()


def classes(*several: tuple[Stock, Places]) -> list[Places]:
    """Of each prompt a number that it shares with those of equal token ids, of all stocks alike: the place of the first
    of them among all that are given, one stock after the other."""
    marks = [(stock.marks(), places) for stock, places in several]
    same = np.concatenate([own[places] for (own, _), places in marks])
    alike = np.concatenate([own[places] for (_, own), places in marks])
    _, firsts, which = np.unique(same, return_index=True, return_inverse=True)
    found: Places = firsts[which]
    heads = np.sort(firsts)  # one prompt for all of equal messages
    values, counts = np.unique(alike[heads], return_counts=True)
    doubtful = heads[np.isin(alike[heads], values[counts > 1])]
    owner = [(stock, place) for stock, places in several for place in places.tolist()] if len(doubtful) else []
    by_ids: dict[tuple[int, ...], int] = {}
    to = np.arange(len(found))
    for head in doubtful.tolist():
        stock, place = owner[head]
        to[head] = by_ids.setdefault(stock.item(place).prompt_ids, head)
    found = to[found]
    return np.split(found, np.cumsum([len(places) for _, places in several])[:-1])


def check_fitting(sizes: Places, refused: Iterable[str], overlong: str, longest: int, tools: int, name: str) -> None:
    """Of prompts of these sizes, in tokens. refused: ids of those that are too long. Raises WrongInput if there are
    such, unless they may be left out, which is said."""
    too_long = int((sizes > longest).sum())
    if not too_long:
        return
    told = f" with the environment's tools, which take {tools}" if tools else ""
    if overlong == "drop" and too_long < len(sizes):
        log.warning("%s: dropped %d of %d prompts of over %d tokens%s", name, too_long, len(sizes), longest, told)
        return
    first = [id for id, _ in zip(refused, range(5), strict=False)]
    raise WrongInput(
        f"rollout.max_prompt_length: every prompt must fit into {longest} tokens{told}, and {too_long} of "
        f"{len(sizes)} do not ({', '.join(first)}{', ...' if too_long > 5 else ''}; the longest has {sizes.max()}); "
        f"set rollout.max_prompt_length: {sizes.max()}, or data.overlong: drop"
    )


__all__ = ["Problems", "Renderer", "load"]


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
        WrongInput."""
        places = self._stock.fitting(self._places, longest, tools, config.overlong)
        return Problems(self._stock, places, longest - tools, self._seed)

    def prompts(self) -> Iterator[Prompt]:
        """What the model is given, once for each sequence of roles that a prompt has."""
        return iter(self._stock.kinds.values())

    def at(self, position: int) -> Problem:
        """The problem at this position, counted over epochs from 0. Raises WrongInput if its prompt is longer than
        it was held to be: what tells that before a run is no proof for every tokenizer."""
        epoch, place = divmod(position, len(self._places))
        index = place if self._seed is None else int(_order(self._seed, epoch, len(self._places))[place])
        item = self._stock.item(int(self._places[index]))
        if len(item.prompt_ids) > self._longest:
            raise WrongInput(
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
    """Training problems, and the held-out ones for evaluation (none where `eval.every` is 0). Raises WrongInput.

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
        raise WrongInput(
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
        raise WrongInput(
            "data.path: must hold at least 2 different prompts, since some are held out for evaluation, got 1; "
            "set data.eval.path, or data.eval.every: 0"
        )
    count = min(config.eval.size, max(1, len(distinct) // 10))
    chosen = distinct[random.Random(f"held-out-{seed}").sample(range(len(distinct)), count)]
    return places[~np.isin(found, chosen)], places[chosen]


def _check_apart(known: int, held_out: int, config: DataConfig) -> None:
    """Raises WrongInput if evaluation would score what was trained on: the same source, or one without a new prompt.
    Single prompts in both are only warned of: other people's splits have them. known: how many of the held-out prompts
    are in the training data."""
    here, there = (Path(path).expanduser().resolve() for path in (config.path, config.eval.path or config.path))
    # Without a split of its own a file is taken whole, and of a hub data set `test`.
    same = here == there and (config.eval.split or (config.split if there.exists() else "test")) == config.split
    told = f"{known} of {held_out} held-out problems are in the training data"
    if known and (same or known == held_out):
        raise WrongInput(
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
