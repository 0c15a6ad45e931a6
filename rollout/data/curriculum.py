"""data.curriculum: problems are drawn the more often, the more the completions of their past groups differed in score.

A group teaches through the differences between its rewards: the advantages of a group whose completions all score alike
are 0. For scores of 0 and 1 the expected spread of a problem that is solved at a rate p is its variance p (1 - p), by
which problems are weighted (Foster et al., "Learning to Reason at the Frontier of Learnability", 2502.12272; DAPO,
2503.14476, section 3.2, drops groups without spread after they were generated). The variance says the same of scores
between 0 and 1, and of any other.

An epoch still has as many positions as there are problems. A problem of weight w occurs in it n w / sum(w) times,
rounded down or up at random with that mean, so that equal weights give each problem once. Weights change only between
epochs, and each epoch's are recorded before a position of it is issued: the order is a pure function of (seed, epoch,
weights).
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cluster.errors import WrongInput
from cluster.files import fsync, writing
from cluster.reading import json_value
from rollout import ledger
from rollout.config import DataConfig
from rollout.schema import Problem, group_position, groups_of, parts_of, rewards_of, whole

Float = npt.NDArray[np.float64]

# Completions of the policy as it was say less of the policy as it is: each further group of a problem halves the weight
# of all groups of the problem before it.
KEPT = 0.5
# Half a made-up completion for each problem, as much of the lowest as of the highest score (for scores of 0 and 1 a
# Beta(1/4, 1/4): most problems are solved nearly never or nearly always). A single group without spread does not say
# that there never is any, and a problem that was never tried has the greatest weight.
PRIOR = 0.5
# Least weight, as a share of the greatest that there is. A problem occurs at least FLOOR times an epoch on average, so
# that one that was never solved is tried once in 20 epochs at least: the policy may have learned what it takes.
FLOOR = 0.05

FOLDER = "curriculum"  # folder of a run with a file for each epoch
FILE = "curriculum.parquet"  # file of a checkpoint
KEY = b"gleaner.curriculum"
KNOWN = ("completions", "score", "variance")
LEAST = 1e-9  # weight in a file; a draw needs weights above 0
LONGEST = 2**16  # most bytes of the facts in a file

log = logging.getLogger("rollout")


class Listed(Protocol):
    """Problems by their number: rollout.data.problems.Problems, or a test's own."""

    def __len__(self) -> int:
        """How many problems there are."""

    def ids(self) -> list[str]:
        """The id of each problem."""

    def columns_of(self, indices: npt.NDArray[np.int64]) -> Iterator[Mapping[str, Any]]:
        """The columns of the problems of these numbers, which must ascend."""

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The numbers of all problems in the seeded order of an epoch, each once."""

    def nth(self, index: int, position: int) -> Problem:
        """The problem of this number, at a position of the stream."""


class Moments(NamedTuple):
    """Of some scores: how many there are, their mean, and their variance (divided by N). Numbers, or arrays [N]."""

    count: Any
    mean: Any
    variance: Any

    def joined(self, other: "Moments") -> "Moments":
        """Of both together; at least one of them must have scores (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        apart, share = other.mean - self.mean, other.count / count
        variance = (1 - share) * self.variance + share * other.variance + share * (1 - share) * apart**2
        return Moments(count, self.mean + share * apart, variance)


class Estimates:
    """What the scores of past completions say of each of `size` problems.

    known: count, mean and variance of each problem's scores, arrays [size]; a count need not be whole (KEPT). low,
    high: the lowest and the highest score of all; inf and -inf before the first.
    """

    def __init__(self, size: int) -> None:
        self.known = Moments(np.zeros(size), np.zeros(size), np.zeros(size))
        self.low, self.high = math.inf, -math.inf

    def add(self, index: int, scores: Sequence[float | None]) -> None:
        """Takes the scores of one more group of a problem, of which None and nan say nothing."""
        found = np.array([score for score in scores if score is not None and math.isfinite(score)])
        if not len(found):
            return
        self.low, self.high = min(self.low, float(found.min())), max(self.high, float(found.max()))
        count, mean, variance = (float(column[index]) for column in self.known)
        new = Moments(KEPT * count, mean, variance).joined(Moments(len(found), found.mean(), found.var()))
        for column, value in zip(self.known, new, strict=True):
            column[index] = value

    def weights(self) -> Float:
        """[size] The weight of each problem, FLOOR to 1: the variance of its scores, in terms of the greatest that
        scores between `low` and `high` can have. All are 1 where no two scores differ yet."""
        size = len(self.known.count)
        if not self.low < self.high:
            return np.ones(size)
        greatest = (self.high - self.low) ** 2 / 4  # of scores that are as often the lowest as the highest
        prior = Moments(np.full(size, PRIOR), np.full(size, (self.low + self.high) / 2), np.full(size, greatest))
        weights: Float = np.clip(prior.joined(self.known).variance / greatest, FLOOR, 1.0)
        return weights


def scores_of(group: pa.Table, scored: str | None) -> Sequence[float | None]:
    """The score of each completion of a group, None or nan where it has none. scored: the name of a part of the
    rewards; None: their sum."""
    rows = whole(group)
    return rewards_of(rows).tolist() if scored is None else [parts.get(scored) for parts in parts_of(rows)]


def draws(order: npt.NDArray[np.int64], weights: Float, seed: Sequence[int]) -> npt.NDArray[np.int64]:
    """[n] The numbers of the problems of an epoch, drawn by systematic sampling with unequal probabilities (Madow
    1949): a problem of weight w occurs n w / sum(w) times on average, and never a whole time more or fewer than that.
    Its occurrences are spread evenly over the epoch.

    order: [n] the numbers 0 to n - 1 in the epoch's order without weights; what equal weights give. seed: of the draw.
    """
    size = len(order)
    edges = np.cumsum(weights[order]) * (size / weights.sum())
    edges[-1] = size
    # An offset that is no multiple of 1: rounding in the sum must not tip a problem whose edges are whole numbers.
    offset = (np.random.default_rng(seed).integers(2**20) + 0.5) / 2**20
    counts = np.diff(np.floor(edges + offset).astype(np.int64), prepend=0)
    which = np.repeat(np.arange(size), counts)
    nth = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    when = (nth + which / size) / counts[which]
    return order[which[np.argsort(when, kind="stable")]]


class Curriculum:
    """The training problems of a run in the order of their weights. It lives as long as one attempt of the run.

    source: own, or the name of the folder with the rollouts that the run began with. step: of the last step whose
    rollouts are in the estimates.
    """

    def __init__(
        self, problems: Listed, start: Estimates, seed: int, folder: Path, scored: str | None, source: str
    ) -> None:
        """start: what is known before the first step; is not changed. folder: the run's. scored: as of scores_of."""
        self._problems, self._seed, self._folder, self._scored = problems, seed, folder / FOLDER, scored
        self.source, self.step = source, 0
        self._ids = problems.ids()
        self._index = {id: index for index, id in enumerate(self._ids)}
        self._estimates = Estimates(len(problems))
        self._estimates.known = Moments(*(column.copy() for column in start.known))
        self._estimates.low, self._estimates.high = start.low, start.high
        self._weights: dict[int, Float] = {}  # of each epoch that has begun
        self._order = lru_cache(maxsize=4)(self._ordered)

    def at(self, position: int) -> Problem:
        """The problem at this position, counted over epochs from 0. The first of an epoch fixes its weights."""
        epoch, place = divmod(position, len(self._ids))
        if epoch not in self._weights:
            self._begin(epoch)
        return self._problems.nth(int(self._order(epoch)[place]), position)

    @property
    def newest(self) -> int:
        """The newest epoch that has weights; 0 before the first."""
        return max(self._weights, default=0)

    def learned(self, step: int, groups: Sequence[pa.Table]) -> None:
        """Takes the scores of the groups that a step has consumed, in the order of their positions. They count from the
        next epoch on that begins."""
        for group in sorted(groups, key=group_position):
            index = self._index.get(group.column("problem_id")[0].as_py())
            if index is not None:  # a group that was generated before the data was changed at a resume
                self._estimates.add(index, scores_of(group, self._scored))
        self.step = step

    def save(self, folder: Path, low: int) -> None:
        """Writes the estimates and the weights of the epochs that may still be issued into a checkpoint's folder. low:
        the position below which all are done."""
        first = low // len(self._ids)
        self._write(folder / FILE, {epoch: one for epoch, one in self._weights.items() if epoch >= first})

    def restore(self, folder: Path, low: int, *, own: bool) -> None:
        """Continues from a checkpoint, unless its run had another data.curriculum. own: whether the checkpoint is this
        run's, so that weights count that were recorded after it from the rollouts up to it. Raises WrongInput."""
        kept = recorded(folder / FILE)
        if kept is None or kept.source != self.source:
            return
        self._estimates, self.step = kept.estimates_of(self._ids), kept.step
        files = [kept]
        if own:
            files += [one for file in sorted(self._folder.glob("epoch-*.parquet")) if (one := recorded(file))]
        for one in files:
            if one.step <= kept.step and one.source == self.source and one.ids == self._ids:
                for epoch, weights in one.weights.items():
                    if epoch >= low // len(self._ids):
                        self._weights.setdefault(epoch, weights)

    def _begin(self, epoch: int) -> None:
        weights = self._estimates.weights()
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._write(self._folder / f"epoch-{epoch:06d}.parquet", {epoch: weights})
        self._weights[epoch] = weights
        if (seen := self._estimates.known.count > 0).any():
            log.info(
                "epoch %d: problems are weighted by the rollouts up to step %d: %d of %d were tried, and the scores of "
                "%d of these were all alike", epoch, self.step, seen.sum(), len(seen),
                (self._estimates.known.variance[seen] == 0).sum(),
            )  # fmt: skip

    def _ordered(self, epoch: int) -> npt.NDArray[np.int64]:
        return draws(self._problems.order(epoch), self._weights[epoch], [self._seed, epoch, 1])

    def _write(self, file: Path, weights: Mapping[int, Float]) -> None:
        """Writes a file, which is on the disk when this returns."""
        facts = {"step": self.step, "source": self.source, "low": self._estimates.low, "high": self._estimates.high}
        columns: dict[str, Any] = {"problem_id": self._ids, **dict(zip(KNOWN, self._estimates.known, strict=True))}
        columns |= {f"weight_{epoch}": one for epoch, one in weights.items()}
        table = pa.table(columns).replace_schema_metadata({KEY: json.dumps(facts)})
        partial = file.with_suffix(".partial")
        with writing(partial):
            pq.write_table(table, partial)
            fsync(partial)
            os.replace(partial, file)
            fsync(file.parent)


def source_of(config: DataConfig) -> str:
    """Whose rollouts a run begins with, as its files say it: own, or the name of another run's folder."""
    return Path(str(config.curriculum)).name


class Recorded(NamedTuple):
    """What a file of Curriculum holds: of an epoch, or of a checkpoint.

    step, source: as of Curriculum. ids: of the problems. known, low, high: as of Estimates. weights: epoch -> weights.
    """

    step: int
    source: str
    ids: list[str]
    known: Moments
    low: float
    high: float
    weights: dict[int, Float]

    def estimates_of(self, ids: Sequence[str]) -> Estimates:
        """The estimates of these problems, by their ids: the data may have been changed on purpose since."""
        found, index = Estimates(len(ids)), {id: index for index, id in enumerate(self.ids)}
        found.low, found.high = self.low, self.high
        there = [(to, index[id]) for to, id in enumerate(ids) if id in index]
        to, of = np.array(there, np.int64).reshape(-1, 2).T
        for column, values in zip(found.known, self.known, strict=True):
            column[to] = values[of]
        return found


def recorded(file: Path) -> Recorded | None:
    """Reads a file of Curriculum; None if there is none. Raises WrongInput if it is not as Curriculum writes it."""
    if not file.is_file():
        return None
    try:
        table = ledger.read_table(file)
        facts = json_value((table.schema.metadata or {})[KEY][:LONGEST], KEY.decode())
        step, source, low, high = int(facts["step"]), str(facts["source"]), float(facts["low"]), float(facts["high"])
        known = Moments(*(_numbers(table, name, 0.0) for name in KNOWN))
        named = [name for name in table.column_names if name.startswith("weight_")]
        weights = {int(name.removeprefix("weight_")): _numbers(table, name, LEAST) for name in named}
        return Recorded(step, source, table.column("problem_id").to_pylist(), known, low, high, weights)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise WrongInput(
            f"data.curriculum: {file} cannot be read ({type(error).__name__}: {reason}); take it away, or resume from "
            "another checkpoint"
        ) from error


def _numbers(table: pa.Table, name: str, least: float) -> Float:
    found: Float = table.column(name).to_numpy().astype(np.float64)
    if not np.isfinite(found).all() or (name != "score" and (found < least).any()):
        raise ValueError(f"{name} must hold numbers from {least:g}")
    return found


def forget_after(run_dir: Path, step: int) -> None:
    """Deletes the records of epochs whose weights are from rollouts of steps after `step`, which a resumed run takes
    again. Raises WrongInput."""
    for file in (run_dir / FOLDER).glob("epoch-*.parquet"):
        if (one := recorded(file)) is not None and one.step > step:
            file.unlink()


# The rollouts of another run.


def check_rollouts(folder: Path) -> list[Path]:
    """The files of a run's rollouts, oldest first. Raises WrongInput if there are none."""
    found = ledger.steps(folder / "rollouts") if folder.is_dir() else []
    if not found:
        what = "holds no rollouts/step-*.parquet" if folder.is_dir() else "is not there"
        raise WrongInput(
            f"data.curriculum: must be own, or the folder of a run with rollouts, and {folder} {what}; give another "
            "run's folder, or own"
        )
    return found


def estimates_from(folder: Path, problems: Listed, scored: str | None) -> Estimates:
    """What a run's rollouts say of these problems. All rollouts of a problem count alike, from whichever step: the
    variance of a problem that this run learned is that over its whole way. Problems of which there are none are as new.

    Raises WrongInput: there are no rollouts, they cannot be read or have no such score, or they are of other problems.
    """
    index = {id: number for number, id in enumerate(problems.ids())}
    scores: dict[int, list[float | None]] = {}
    asked: dict[int, str] = {}
    others = 0
    for file in check_rollouts(folder):
        try:
            table = ledger.read(file)
            for group in groups_of(table):
                number = index.get(group.column("problem_id")[0].as_py())
                if number is None:
                    others += 1
                    continue
                asked.setdefault(number, group.column("problem")[0].as_py())
                scores.setdefault(number, []).extend(scores_of(group, scored))
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())[:200]
            raise WrongInput(f"data.curriculum: {file} cannot be used: {reason}; give another run's folder") from error
    _check_same(folder, problems, asked)
    found = Estimates(len(problems))
    for number, own in scores.items():
        found.add(number, own)
    if not found.known.count.any():
        raise WrongInput(
            f"data.curriculum: must be rollouts with the score that counts as accuracy, {scored or 'a reward'}, and "
            f"none in {folder} has it; give another run's folder, or set data.eval.reward"
        )
    if others:
        log.warning("data.curriculum: %d groups in %s are of problems that are not trained on here", others, folder)
    return found


def _check_same(folder: Path, problems: Listed, asked: Mapping[int, str]) -> None:
    """Raises WrongInput unless the recorded problems have the columns of those of the same id."""
    if not asked:
        raise WrongInput(
            f"data.curriculum: must be rollouts of the problems of data.path, and none of those in {folder} has the id "
            "of one; give the folder of a run on the same data"
        )
    numbers = np.array(sorted(asked))
    for number, row in zip(numbers.tolist(), problems.columns_of(numbers), strict=True):
        if _text(row) != _text(json.loads(asked[number])["columns"]):
            raise WrongInput(
                f"data.curriculum: must be rollouts of the problems of data.path, and {problems.ids()[number]} is "
                f"another in {folder}; give the folder of a run on the same data (of a task: with the same seed)"
            )


def _text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=str)
