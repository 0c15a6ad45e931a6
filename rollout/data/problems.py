"""The stream of problems that producers take from: the rows of a data source as tokenised prompts, in a seeded order.

The order is a pure function of (seed, epoch), so a position in the stream identifies a problem: position 12345 is the
same problem after a restart, on another machine and for any number of workers. Problems is the training stream, load
makes it together with the held-out problems, and rollout.producer.Cursor knows which positions are done. With
data.curriculum the order is that of rollout.data.curriculum, a function of recorded weights as well.
"""

import logging
import random
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.errors import WrongInput
from rollout.config import DataConfig
from rollout.data import files, sources
from rollout.data.chat import Messages, Prompt
from rollout.data.files import Names
from rollout.data.prompts import messages_of, prompts_of, said_of_teacher
from rollout.data.sources import Pace
from rollout.data.tables import Row
from rollout.schema import Problem

# The prompts of a source. A prompt is rendered and tokenised when it is asked for, since tokenising a million prompts
# takes minutes.
#
# Two questions must be answered for all prompts before a run. Does each prompt fit? A text has at most as many tokens
# as its words have one by one, and the template adds equally many tokens to all conversations of the same roles. The
# tokens of frequent words are counted once; any other word has at most one token for each byte. Are two prompts equal?
# They are not if their user messages differ in more than white space and letter case. Where these rules do not decide,
# the prompt is tokenised. All of the first prompts are tokenised, and both rules are tried on them: if one of them
# breaks a rule, every prompt is tokenised.

log = logging.getLogger("rollout")

FIRST = 1000  # how many prompts are tokenised at once, and how many rows across the source have their words counted
OFTEN = 2  # how often a word must occur in these rows for its tokens to be counted
OTHER_SCRIPT = 12  # most tokens for a byte of a non-ASCII word: U+FDFA has 3 bytes, and 33 in some normal forms

ENDLESS = 2**31 - 1  # a bound of tokens that is not known

Places = npt.NDArray[np.int64]  # indices among the prompts of a Stock
Kind = tuple[tuple[str, bool], ...]
"""The role of each message of a prompt, and whether the message has any content."""


class Renderer(Protocol):
    """Turns messages into the model's prompt and its token ids. rollout.data.chat.Chat implements it."""

    def render(self, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        """Returns (the prompt that the model is given for these messages, its token ids [P])."""
        ...

    def count(self, text: str) -> int:
        """How many tokens a text has by itself."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    """A problem without its position in the stream."""

    id: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    columns: Row

    def at(self, position: int, epoch: int) -> Problem:
        """The problem at a position of the stream."""
        return Problem(self.id, self.prompt, self.columns, self.prompt_ids, position, epoch)


class Stock:
    """All rows of a source that have a prompt. A place is the index of such a row among them.

    Args:
        name: prefix of the problems' ids.
        deadline_s: seconds for the tokenising that is done before the run.
        names: how error messages call the source.

    Attributes:
        kinds: one prompt of each Kind.

    Raises WrongInput: a row is wrong. WrongInput: the template refuses a conversation.
    """

    def __init__(
        self, rows: Sequence[Row], config: DataConfig, chat: Renderer, name: str, deadline_s: float, names: Names
    ) -> None:
        self._rows, self._config, self._chat, self.name = rows, config, chat, name
        self._deadline_s, self._names = deadline_s, names
        self.kinds: dict[Kind, Prompt] = {}
        self._places = array("q")  # place -> index of the row
        self._most = array("l")  # place -> most tokens that the prompt can have
        # Place -> a number that prompts of equal messages share; one that prompts share which may have equal token ids.
        self._same, self._alike = array("q"), array("q")
        self._bound = _Bound(chat)
        self._read()
        self._exact = np.arange(len(self._places)) < FIRST

    def _read(self) -> None:
        """Goes once through all rows. There may be a million, so that each operation in the loop costs seconds."""
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
        """The problem at a place. Raises WrongInput if the chat template refuses its messages."""
        index = self._places[place]
        row = self._rows[index]
        prompt, ids = self._rendered(index, messages_of(row, self._config, self.id_of(place)))
        return Item(self.id_of(place), prompt, ids, row)

    def id_of(self, place: int) -> str:
        """The id of the problem at a place."""
        return f"{self.name}-{self._places[place]}"

    def rows(self, places: Places) -> Places:
        """The indices of the rows at these places."""
        return np.asarray(self._places, np.int64)[places]

    def columns(self, places: Places) -> Iterator[Row]:
        """The columns of the rows at these places, which must ascend."""
        wanted = iter(self.rows(places).tolist())
        following = next(wanted, -1)
        for index, row in enumerate(self._rows):
            if index == following:
                yield row
                following = next(wanted, -1)

    def fitting(self, places: Places, longest: int, tools: int = 0, overlong: str | None = None) -> Places:
        """Those of the places whose prompts have at most `longest` tokens.

        tools: tokens that an environment's tools add. overlong: what becomes of longer prompts; None: data.overlong.
        Raises WrongInput as check_fitting does.
        """
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
        refused = (self.id_of(place) for place in places[~fits])
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
        """The texts of about FIRST rows, evenly spread over the source."""
        for index in range(0, len(self._rows), max(len(self._rows) // FIRST, 1)):
            try:
                messages = messages_of(self._rows[index], self._config, "")
            except WrongInput:  # _read raises the error when it comes to this row
                continue
            yield from (said["content"] for said in messages)

    def marks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns (for each place a number that prompts of equal messages share, a number that all prompts of equal
        token ids share)."""
        if self._config.by_environment:  # such problems differ in their columns
            of_columns = [hash(repr(sorted(row.items()))) for row in self._rows]
            found = np.array(of_columns, np.int64)[np.asarray(self._places)]
            return found, found
        if not self._bound.sure:  # the tokenizer may give equal ids for texts that differ
            of_ids = [hash(self.item(place).prompt_ids) for place in range(len(self))]
            return np.array(of_ids, np.int64), np.array(of_ids, np.int64)
        return np.asarray(self._same, np.int64), np.asarray(self._alike, np.int64)


class _Bound:
    """Estimates the most tokens that a conversation can have, without tokenising it.

    Attributes:
        sure: whether the first prompts, all of which were tokenised, contradict neither this bound nor the rule by
            which a Stock compares prompts.
    """

    def __init__(self, chat: Renderer) -> None:
        self._chat, self.sure = chat, True
        self._words = _Words()
        self._frames: dict[Kind, int] = {}
        self._systems: dict[str, tuple[bool, int]] = {}  # system message -> whether it has words, and its most tokens
        self._seen: list[tuple[Messages, int]] = []
        self._learned = False

    def saw(self, messages: Messages, tokens: int) -> None:
        """Remembers a prompt that was tokenised, until `learn`."""
        if not self._learned:
            self._seen.append((messages, tokens))

    def learn(self, others: Iterable[str]) -> None:
        """Counts the tokens of frequent words, in the prompts that were seen and in other texts of the source."""
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
        """Returns (a conversation's Kind, a number that all with equal token ids share, the most tokens it can have).

        The last is at least ENDLESS before `learn`, and where the bound is not sure.
        """
        kind, plain, tokens = [], [], 0
        for said in messages:
            role, text = said["role"], said["content"]
            if role == "system" and text in self._systems:  # most rows have the same system message
                filled, own = self._systems[text]
            else:
                words = text.split()
                joined = " ".join(words)
                filled, own = bool(words), sum(map(self._words.__getitem__, words))
                if joined != text:
                    # Every known tokenizer takes one space before a word into the word; other spaces may be tokens.
                    own += len(text) - len(joined) + len(words)
                if role == "system":
                    self._systems[text] = filled, own
                elif role == "user":
                    plain.append(joined.lower() if joined.isascii() else _plain(joined))
            tokens += own
            kind.append((role, filled))
        return (whole := tuple(kind)), hash(tuple(plain)), self._frame(whole) + tokens

    def _frame(self, kind: Kind) -> int:
        """How many tokens the template adds to the contents of a conversation of this kind."""
        if not (self._learned and self.sure):
            return ENDLESS
        if kind not in self._frames:
            messages = [{"role": role, "content": "x" if filled else ""} for role, filled in kind]
            try:
                self._frames[kind] = len(self._chat.render(messages)[1])
            except WrongInput:  # the template may refuse these contents and accept others
                self._frames[kind] = ENDLESS
        return self._frames[kind]


class _Words(dict[str, int]):
    """Word -> its tokens, if they were counted, else the most tokens that the word can have."""

    def __missing__(self, word: str) -> int:
        return 1 + (len(word) if word.isascii() else OTHER_SCRIPT * len(word.encode("utf-8", "surrogatepass")))


def _plain(text: str) -> str:
    """A normal form in which texts are equal whenever a tokenizer or a template may make the same tokens of them."""
    return " ".join(unicodedata.normalize("NFKC", text).split()).casefold()


def classes(*several: tuple[Stock, Places]) -> list[Places]:
    """For each prompt of each stock, a number that it shares with all prompts of equal token ids in all stocks.

    The number is the index of the first such prompt, counted over all given places, one stock after the other.
    """
    marks = [(stock.marks(), places) for stock, places in several]
    same = np.concatenate([own[places] for (own, _), places in marks])
    alike = np.concatenate([own[places] for (_, own), places in marks])
    _, firsts, which = np.unique(same, return_index=True, return_inverse=True)
    found: Places = firsts[which]
    heads = np.sort(firsts)  # one prompt for each set of equal messages
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
    """Raises WrongInput if prompts have over `longest` tokens; with overlong "drop" only logs it, unless all have.

    sizes: tokens of each prompt, with the tools'. refused: ids of the prompts that are too long.
    """
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


class TeacherPrompts:
    """The prompts that a teacher is given (data.teacher) in place of those of a stock's rows.

    Attributes:
        stock: the same rows, with these prompts.
    """

    def __init__(self, rows: Sequence[Row], config: DataConfig, chat: Renderer, name: str, deadline_s: float) -> None:
        self._longest = config.teacher.max_prompt_length
        with said_of_teacher():
            self.stock = Stock(rows, config.of_teacher, chat, f"teacher-{name}", deadline_s, files.DATA)
            fitting = self.stock.fitting(np.arange(len(self.stock)), self._longest)
        self._rows, self._fitting = self.stock.rows(np.arange(len(self.stock))), self.stock.rows(fitting)

    def having(self, stock: Stock, places: Places) -> Places:
        """Those of the places in `stock` whose rows have such a prompt, which fits. Raises WrongInput if none has."""
        found = places[np.isin(stock.rows(places), self._fitting)]
        if not len(found):
            raise WrongInput("data.teacher: some row must have a prompt for the policy and one for the teacher")
        return found

    def ids(self, row: int) -> tuple[int, ...]:
        """The token ids [P] of a row's prompt. Raises WrongInput if it is too long after all, as Problems.at."""
        with said_of_teacher():
            item = self.stock.item(int(np.searchsorted(self._rows, row)))
            _check_length(item, self._longest)
        return item.prompt_ids


class Problems:
    """The training problems, epoch after epoch without end, each epoch in a seeded order of its own."""

    def __init__(
        self, stock: Stock, places: Places, longest: int, seed: int | None, teacher: TeacherPrompts | None = None
    ) -> None:
        """places: ascending places in the stock. longest: most tokens that their prompts have. seed: determines the
        order; None: each epoch has the order of the stock. teacher: the teacher's prompts; None: it is given these."""
        self._stock, self._places, self._longest, self._seed = stock, places, longest, seed
        self._teacher = teacher

    def __len__(self) -> int:
        """How many problems one epoch has."""
        return len(self._places)

    def rows(self) -> Iterator[Row]:
        """The columns of each problem, in the order of their source."""
        return self._stock.columns(self._places)

    def ids(self) -> list[str]:
        """The id of each problem, in the order of their source."""
        return [self._stock.id_of(place) for place in self._places.tolist()]

    def columns_of(self, indices: Places) -> Iterator[Row]:
        """The columns of the problems of these indices, which must ascend."""
        return self._stock.columns(self._places[indices])

    def fitting(self, config: DataConfig, longest: int, tools: int) -> "Problems":
        """The problems whose prompts fit into `longest` tokens when an environment's tools add `tools` tokens; see
        data.overlong. Raises WrongInput."""
        places = self._stock.fitting(self._places, longest, tools, config.overlong)
        return Problems(self._stock, places, longest - tools, self._seed, self._teacher)

    def prompts(self) -> Iterator[Prompt]:
        """One prompt, as the model is given it, for each Kind that occurs, also of a teacher's prompts."""
        others = {} if self._teacher is None else self._teacher.stock.kinds
        return chain(self._stock.kinds.values(), others.values())

    def at(self, position: int) -> Problem:
        """The problem at this position, counted over epochs from 0.

        Raises WrongInput if its prompt is too long after all: the bound used before a run need not hold for every
        tokenizer.
        """
        epoch, place = divmod(position, len(self._places))
        return self.nth(int(self.order(epoch)[place]), position)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The indices of all problems in the order of an epoch, each once; a problem's index is its place among them in
        the order of their source."""
        size = len(self._places)
        return np.arange(size) if self._seed is None else _order(self._seed, epoch, size)

    def nth(self, index: int, position: int) -> Problem:
        """The problem of this index, at a position of the stream. Raises WrongInput as `at` does."""
        item = self._stock.item(int(self._places[index]))
        _check_length(item, self._longest)
        problem = item.at(position, position // len(self._places))
        if self._teacher is None:
            return problem
        row = int(self._stock.rows(self._places[index]))
        return replace(problem, teacher_ids=self._teacher.ids(row))


def _check_length(item: Item, longest: int) -> None:
    if len(item.prompt_ids) > longest:
        raise WrongInput(
            f"rollout.max_prompt_length: every prompt must fit into {longest} tokens, and {item.id} has "
            f"{len(item.prompt_ids)}, more than its words have; set it to {len(item.prompt_ids)}, or take that row out"
        )


@lru_cache(maxsize=4)  # two orders are in use around the end of an epoch
def _order(seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)


def load(
    config: DataConfig, chat: Renderer, max_prompt_length: int, seed: int, deadline_s: float = sources.DEADLINE_S
) -> tuple[Problems, list[Problem]]:
    """Returns (training problems, held-out problems for evaluation; none if `eval.every` is 0). Raises WrongInput.

    Held-out problems come from `eval.path`, or from `eval.split` of `path`. If both are null, a reasoning_gym task
    makes them with another seed; of any other source a seeded choice of a tenth of the distinct prompts, at most
    `eval.size`, is held out and never trained on. Their epoch is -1, so that their groups are not taken for groups of
    the stream. deadline_s: seconds for making the problems of a task, and again for tokenising the prompts.
    """
    wanted, order = config.eval.every > 0, seed if config.shuffle else None
    generated = sources.is_made(config.path)
    read = _rows(config, seed, deadline_s)
    stock = _stock(read, config, chat, deadline_s)
    places, teacher = stock.fitting(np.arange(len(stock)), max_prompt_length), None
    if config.teacher.privileged:
        teacher = TeacherPrompts(read, config, chat, stock.name, deadline_s)
        places = teacher.having(stock, places)
    if not wanted:
        return Problems(stock, places, max_prompt_length, order, teacher), []
    if config.eval.path is None and config.eval.split is None and not generated:
        places, held_out = _hold_out(stock, places, config, seed)
        return Problems(stock, places, max_prompt_length, order, teacher), _problems(stock, held_out)
    path = config.path if config.eval.path is None else config.eval.path
    args = config.args if path == config.path else {}  # data.args are settings of data.path only
    # A task may generate a problem twice, or one of the training; with four times as many, enough are left.
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
    return Problems(stock, places, max_prompt_length, order, teacher), _problems(candidates, kept)


def load_whole(
    config: DataConfig, chat: Renderer, max_prompt_length: int, seed: int, deadline_s: float = sources.DEADLINE_S
) -> list[Problem]:
    """All problems of `path` for an evaluation, in the order of the source; arguments and errors are those of load."""
    stock = _stock(_rows(config, seed, deadline_s), config, chat, deadline_s)
    return _problems(stock, stock.fitting(np.arange(len(stock)), max_prompt_length))


def _rows(config: DataConfig, seed: int, deadline_s: float) -> Sequence[Row]:
    return sources.read(config.path, config.split, config.args, config.size, seed, deadline_s=deadline_s)


def _stock(rows: Sequence[Row], config: DataConfig, chat: Renderer, deadline_s: float) -> Stock:
    return Stock(rows, config, chat, sources.label(config.path, config.split), deadline_s, files.DATA)


def _problems(stock: Stock, places: Places) -> list[Problem]:
    """The held-out problems at these places."""
    return [stock.item(place).at(index, epoch=-1) for index, place in enumerate(places.tolist())]


def _first_of_each(found: Places, before: int = 0) -> npt.NDArray[np.bool_]:
    """[prompts] True where a prompt is the first of its class. found: an array that `classes` returned. before: how
    many prompts stood before it there."""
    first: npt.NDArray[np.bool_] = found == np.arange(before, before + len(found))
    return first


def _hold_out(stock: Stock, places: Places, config: DataConfig, seed: int) -> tuple[Places, Places]:
    """Returns (places of training prompts, places of held-out prompts). No held-out prompt occurs in the training.

    If the source has a single distinct prompt, none is held out; it is an error if the user configured data.eval.
    """
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
    """Raises WrongInput if the evaluation would score training problems: if both come from the same source, or if no
    held-out prompt is new. If only some prompts are in both, as in many published splits, a warning is logged.

    known: how many of the held-out prompts are in the training data.
    """
    here, there = (Path(path).expanduser().resolve() for path in (config.path, config.eval.path or config.path))
    # If eval.split is null, a file is taken whole, and of a hub data set the split `test`.
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
    """Those of `items`, whose prompts are tokenised already, that fit; otherwise as Problems.fitting."""
    if not items:
        return []
    sizes = np.array([len(item.prompt_ids) + tools for item in items])
    refused = (item.id for item in items if len(item.prompt_ids) + tools > longest)
    check_fitting(sizes, refused, config.overlong, longest, tools, items[0].id.rpartition("-")[0])
    return [item for item, size in zip(items, sizes.tolist(), strict=True) if size <= longest]
