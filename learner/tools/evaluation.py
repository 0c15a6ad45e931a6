"""gleaner eval: a model or an adapter on data, by the generators and reward functions of a run."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import islice
from math import comb, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cluster.actor import RevivableActor
from cluster.config import Deadlines, RewardProcessConfig
from cluster.errors import WrongInput
from cluster.placement import Role
from cluster.ray_cluster import Session, connect
from learner.config import RunConfig, generator_roles
from learner.config.load import absolute
from learner.driver.evaluate import accuracy_reward, generate, greedy, sampled, scores_of
from learner.driver.failure import Findings
from learner.driver.input_checks import (
    Tried,
    adapter_notes,
    check_accuracy,
    check_data_prompts,
    check_environment,
    check_rewards,
    check_served,
    load_chat,
)
from learner.driver.launch import CLOSE_S
from learner.driver.machine_checks import check_placement
from learner.driver.memory import Budgets, cards_present, settle, settled, size_for
from learner.driver.metrics import CUT, NEARLY_ALL, cut_off
from learner.driver.preflight import Untokenised
from learner.driver.roles import started, worker_spec
from learner.model.adapter_config import PEFT_RANK, read_content, served
from rewards.base import tagged, text_of
from rewards.built_in.number import last_number, parse_number
from rewards.config import functions_of
from rollout.data.chat import Chat
from rollout.data.model_files import WEIGHTS_FILE
from rollout.data.problems import Renderer, fitting, load, load_whole
from rollout.data.weight_names import check_model
from rollout.delivery import check_digest
from rollout.producer import SupervisedWorker
from rollout.schema import Problem, asked_of, failed, groups_of, said_of, whole
from rollout.service import RolloutService
from rollout.types import Adapter, Sampling, Weights, group_seed
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorker, WorkerSpec

# What a completion answers, for the vote of majority@k.

TAG = "answer"


def answer_of(text: str) -> str:
    """What stands in the last <answer>...</answer>, else in the last \\boxed{...}, else the last number, else the
    whole text, stripped. Numbers that are equal are one answer."""
    said = tagged(text, TAG)
    said = _boxed(text) if said is None else said
    if said:
        number = parse_number(said)
    else:
        said, number = text.strip(), last_number(text)
    return said if number is None else _shortest(number)


def _shortest(number: Decimal) -> str:
    """Digits without zeros at the end, and 0 without a sign: one text for all that are equal. Of Decimal's own,
    normalize rounds to 28 digits."""
    text = f"{number:f}"  # no longer than what was said, or a thousand digits of an exponent
    return (text.rstrip("0").rstrip(".") if "." in text else text) if number else "0"


def _boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, whose braces match."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip()
    return None


# What an evaluation says, from one score per completion, or None where it has none. Numbers only.
#
# Letters: P problems, K sampled completions of each.

DRAWS = 2000  # of the bootstrap
LEVEL = 95  # per cent of its means that lie inside an interval
Z = NormalDist().inv_cdf(0.5 + LEVEL / 200)
FEW = 10  # problems below which percentiles of a bootstrap are too narrow
WILSON, BOOTSTRAP, NONE = "wilson", "bootstrap", "none"


class Estimate(NamedTuple):
    """A mean over so many problems, and its interval of 95 % with the method that it was found by (`interval`): wilson
    or bootstrap. none: there is no interval, and low and high are None."""

    value: float
    low: float | None
    high: float | None
    problems: int
    method: str = BOOTSTRAP  # which earlier versions had alone

    def between(self, mark: str) -> str:
        """Both ends, for people."""
        return "-" if self.low is None or self.high is None else f"{self.low:.3f}{mark}{self.high:.3f}"


class Sampled(NamedTuple):
    """The K completions of one problem: what each answers, and its score."""

    answers: Sequence[str]
    scores: Sequence[float | None]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n completions, c of them correct, hold a correct one: 1 - C(n-c, k) / C(n, k), unbiased for the
    chance of k fresh ones (Chen et al. 2021, 2107.03374, equation 1). Needs 1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k: must have 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority(sampled: Sampled) -> float | None:
    """Score of the answer that most completions give: the mean over those that give it and have one; of several such
    answers, the mean over these (self-consistency, Wang et al. 2022, 2203.11171, with ties drawn at random). None
    where one of them has no score."""
    votes = Counter(sampled.answers)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    pairs = list(zip(sampled.answers, sampled.scores, strict=True))
    scores = [[score for said, score in pairs if said == answer and score is not None] for answer in winners]
    return float(np.mean([np.mean(own) for own in scores])) if all(scores) else None


def interval(values: Sequence[float], seed: int, *, share: bool = False) -> Estimate:
    """Mean of [P] values, and its interval.

    By Wilson where all are 0 or 1. Otherwise of the means of P values drawn from them with replacement (the bootstrap,
    Efron 1979), which says nothing where all values are the same, and too little of a few problems: there a `share`,
    whose values cannot leave 0..1, has Wilson's as well, and another mean has none where all are the same.
    """
    given: npt.NDArray[np.float64] = np.asarray(values, np.float64)
    mean, count = float(given.mean()), len(given)
    same = bool((given == given[0]).all())
    if np.isin(given, (0.0, 1.0)).all() or (share and (same or count < FEW)):
        return Estimate(mean, *wilson(mean, count), count, WILSON)
    if same:
        return Estimate(mean, None, None, count, NONE)
    rng = np.random.default_rng(seed)
    means = np.array([given[rng.integers(0, count, count)].mean() for _ in range(DRAWS)])
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high), count, BOOTSTRAP)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """The interval of a share of which `count` trials have this mean (Wilson 1927, without the correction for
    continuity). Of values between 0 and 1 it is the widest that their mean allows, since no other ones vary more than
    those that are all 0 or 1."""
    centre, scale = (mean + Z * Z / (2 * count)), 1 + Z * Z / count
    half = Z * sqrt(mean * (1 - mean) / count + (Z / (2 * count)) ** 2)
    # At the ends exact, whatever the last bit of a root.
    low, high = (centre - half) / scale, (centre + half) / scale
    return (0.0 if mean == 0 else low, 1.0 if mean == 1 else high)


def summary(
    greedy: Sequence[float | None], sampled: Sequence[Sampled], threshold: float, seed: int
) -> dict[str, Estimate]:
    """Metric -> estimate, over the problems with scores enough for it: mean@K needs one, pass@k needs k; without any
    such problem there is none. `sampled`: [P], or nothing; a completion is correct for pass@k from `threshold` on."""
    values = {"greedy": [score for score in greedy if score is not None]}
    shares = set()  # metrics whose values lie between 0 and 1 for certain
    if sampled:
        count = len(sampled[0].scores)
        scored = [[score for score in one.scores if score is not None] for one in sampled]
        values[f"mean@{count}"] = [float(np.mean(own)) for own in scored if own]
        least = np.float32(threshold)  # as scores are kept: 0.9 would be more than a score of 0.9
        correct = [(len(own), int((np.asarray(own, np.float32) >= least).sum())) for own in scored]
        for k in powers_to(count):
            values[f"pass@{k}"] = [pass_at_k(n, c, k) for n, c in correct if n >= k]
            shares.add(f"pass@{k}")
        values[f"majority@{count}"] = [score for one in sampled if (score := majority(one)) is not None]
        if {score for own in scored for score in own} <= {0.0, 1.0}:
            shares |= {f"mean@{count}", f"majority@{count}"}
    return {name: interval(own, seed, share=name in shares) for name, own in values.items() if own}


def powers_to(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


# Generators alone, each with the one policy that is evaluated: the processes of a run without its learner.


class Asked(NamedTuple):
    """All problems, sampled in one way. attempt: tells its groups from others of the same problems."""

    sampling: Callable[[int], Sampling]
    attempt: int


class EvaluatedWorker:
    """A generator's process and the policy that it has in all its lives."""

    def __init__(self, actor: RevivableActor[RolloutService], policy: Adapter | Weights, deadlines: Deadlines) -> None:
        self._worker, self._policy = SupervisedWorker(actor, deadlines), policy
        self._worker.supply.rearm = self._deliver

    async def begin(self) -> None:
        """Brings it the policy."""
        await self._worker.attempt(self._deliver)  # a process that is lost in it gets the policy as it is revived

    async def requests(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int,
        lost: Callable[[], None],
    ) -> pa.Table | None:  # fmt: skip
        """As Producer.requests."""
        return await self._worker.attempt(partial(self._worker.rollouts, problems, samplings, attempt, rounds), lost)

    @property
    def away(self) -> bool:
        """As SupervisedWorker.away, as the next."""
        return self._worker.away

    async def present(self) -> None:
        await self._worker.present()

    async def _deliver(self) -> None:
        worker = self._worker
        receipt = await worker.actor.call(RolloutService.take_policy, worker.deadlines.push, self._policy)
        assert receipt is not None, "no learner overwrites it"
        check_digest(self._policy, worker.name, receipt.digest)


def policy_of(adapter: str | None, base: str) -> Adapter | Weights:
    """The adapter of a folder in PEFT's format, of that base; without one the model's own weights. Raises WrongInput,
    WrongInput."""
    if adapter is None:
        return Weights.unchanged(0)
    check_served(adapter, "--adapter", base)
    folder = served(Path(adapter))
    return Adapter.build(0, (folder / WEIGHTS_FILE).read_bytes(), read_content(str(folder), "--adapter"))


async def groups(
    config: RunConfig,
    budgets: Budgets,
    policy: Adapter | Weights,
    problems: Sequence[Problem],
    asked: Sequence[Asked],
    done: Callable[[int, int], None],
) -> list[list[pa.Table]]:
    """For each way of sampling a group of every problem, in their order. Processes are started for it, and ended.

    done: is told how many more completions there are, of how many in all.
    """
    cpus = sum(role.cpus for role in _generators(config))
    session = connect(config.cluster.address, cpus, len(policy.payload))

    async def generated() -> list[list[pa.Table]]:
        async with _workers(session, config, budgets, policy) as workers:
            return await _generated(workers, problems, config, asked, done)

    try:
        return await session.ray_processes.beside(generated())
    finally:
        await session.close()


async def _generated(
    workers: Sequence[EvaluatedWorker],
    problems: Sequence[Problem],
    config: RunConfig,
    asked: Sequence[Asked],
    done: Callable[[int, int], None],
) -> list[list[pa.Table]]:
    sizes = [one.sampling(0).n for one in asked]
    total = len(problems) * sum(sizes)
    done(0, total)
    found: list[list[pa.Table]] = []
    for one, size in zip(asked, sizes, strict=True):
        more = partial(lambda size, groups: done(groups * size, total), size)
        tables = await generate(workers, problems, config, one.sampling, one.attempt, more)
        found.append([group for table in tables for group in groups_of(table)])
    return found


def _generators(config: RunConfig) -> list[Role]:
    """All roles but those that learn."""
    return generator_roles(config)


@asynccontextmanager
async def _workers(
    session: Session, config: RunConfig, budgets: Budgets, policy: Adapter | Weights
) -> AsyncIterator[list[EvaluatedWorker]]:
    """One for each generator, with the policy."""
    generators, deadlines = _generators(config), config.cluster.deadlines
    await session.reserve(generators, deadlines.start)
    env = required_env(cuda=config.cluster.gpus.generator > 0)
    specs = [_alone(worker_spec(config, rank, budgets), policy) for rank in range(len(generators))]
    actors = [session.spawn(role, RolloutWorker, [spec], env) for role, spec in zip(generators, specs, strict=True)]
    try:
        for actor in actors:
            await started(actor, deadlines.start)
        workers = [EvaluatedWorker(actor, policy, deadlines) for actor in actors]
        await asyncio.gather(*(worker.begin() for worker in workers))
        yield workers
    finally:
        await asyncio.gather(*(a.call(RolloutService.close, CLOSE_S) for a in actors), return_exceptions=True)


def _alone(spec: WorkerSpec, policy: Adapter | Weights) -> WorkerSpec:
    """Of a generator that has no learner beside it and gets this policy alone."""
    rank, targets = 0, ()
    if isinstance(policy, Adapter):
        rank = policy.config.get("r", PEFT_RANK)
        targets = tuple(sorted({name.rpartition(".")[2] for name in policy.config["target_modules"]}))
    engine = replace(
        spec.engine, max_lora_rank=rank, lora_targets=targets, adapter_window=2, in_flight="finish", sleeps=False,
        shares_base=False, room=0,
    )  # fmt: skip
    return replace(spec, engine=engine)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation found.

    Attributes:
        adapter_digest: sha256 of the adapter's weights, as they were served; None without an adapter.
        reward: name of the reward function that counts; None: the environment's own rewards.
        data: the file, hub name or task that the problems are of. part: which of its problems they are, in words.
        problems: that were asked. samples: completions of each, beside the greedy one.
        metrics: greedy, and with samples mean@K, pass@k, majority@K: means over problems with an interval of 95 %
            (`interval`).
        unscored: problems with a completion without a score, which counts nowhere: each metric says over how many
            problems it is. failed: completions that a reward function failed on; where it is the one that counts,
            they count as 0.
        truncated: share of completions that rollout.max_completion_length cut off.
        notes: what makes the scores say little, in sentences: see `doubts`.
        seconds: start and end of the processes included.
        rows: every completion, in rollout.schema; attempt 0 is greedy, 1 sampled.
    """

    model: str
    adapter: str | None
    adapter_digest: str | None
    data: str
    part: str
    reward: str | None
    problems: int
    samples: int
    temperature: float
    metrics: dict[str, Estimate]
    unscored: int
    failed: int
    truncated: float
    notes: list[str]
    seconds: float
    rows: pa.Table = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: all but the rows."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "rows"}
        return fields | {"metrics": {name: one._asdict() for name, one in self.metrics.items()}}


def evaluate(
    config: RunConfig,
    *,
    adapter: str | None = None,
    held_out: bool = True,
    samples: int = 0,
    limit: int | None = None,
    threshold: float = 1.0,
    note: Callable[[str], None] = print,
    done: Callable[[int, int], None] = lambda more, total: None,
) -> Evaluated:
    """Evaluates config.model.path, with an adapter on it where one is given. Not from inside an event loop.

    Args:
        config: model, data, rewards, lengths, temperature and seed are read of it; nothing is written to its folder.
        adapter: folder in PEFT's format.
        held_out: the held-out problems of such a run; else all of data.path, in its order.
        samples: completions of each problem beside the greedy one, at rollout.temperature.
        limit: the first so many problems.
        threshold: the score from which on a completion is correct for pass@k.
        note: gets lines for the user.
        done: is told how many more completions there are, of how many in all; first of 0, as generation begins.

    Raises:
        WrongInput: something given is wrong; one line per mistake.
    """
    begun = time.perf_counter()
    config, problems, notes = _checked(config, held_out)
    for line in notes:
        note(line)
    problems = problems[:limit]
    chat = load_chat(config)
    policy = _policy(adapter, config, chat, note)
    budgets = settle(config, chat.config, size_for(config, cards_present(config)))
    config = settled(config, budgets)
    name = accuracy_reward(config.rewards, config.data.eval.reward, environment=config.env.use is not None)
    asked = [Asked(lambda _: greedy(config), 0)]
    if samples:
        asked.append(Asked(lambda index: _sampling(config, samples, problems[index]), 1))
    told = f"problems: {len(problems)}, {'greedy' if not samples else f'greedy and {samples} samples each'}"
    note(f"{told}; starting Ray and {config.rollout.workers} generator{'s' if config.rollout.workers > 1 else ''}")
    tables = asyncio.run(groups(config, budgets, policy, problems, asked, done))
    metrics, unscored = metrics_of(tables, name, threshold, config.seed)
    rows = pa.concat_tables([table for several in tables for table in several]).combine_chunks()
    source, part = _asked(config, held_out)
    return Evaluated(
        model=config.model.source, adapter=adapter,
        adapter_digest=policy.digest if isinstance(policy, Adapter) else None,
        data=source, part=part, reward=name, problems=len(problems), samples=samples,
        temperature=config.rollout.temperature, metrics=metrics, unscored=unscored,
        failed=int(failed(whole(rows)).sum()), truncated=truncated_share(rows),
        notes=doubts(rows, name, threshold, config.rollout.max_completion_length),
        seconds=time.perf_counter() - begun, rows=rows,
    )  # fmt: skip


def _asked(config: RunConfig, held_out: bool) -> tuple[str, str]:
    """Where the problems are from, and which of them they are."""
    data, own = config.data, config.data.eval
    if not held_out:
        return data.path, f"split {data.split}" if data.split != "train" else "all problems"
    if own.path is None and own.split is None:
        return data.path, "held out of training"
    return own.path or data.path, "all problems" if own.split is None else f"split {own.split}"


def truncated_share(rows: pa.Table) -> float:
    """Of all completions, those that the length limit cut off."""
    ends: list[str] = whole(rows).column("finish_reason").to_pylist()
    return ends.count(CUT) / len(ends)


def doubts(rows: pa.Table, name: str | None, threshold: float, longest: int) -> list[str]:
    """What makes the scores of these completions say little, and what to do: nearly all were cut off, or none of them
    has a score, or all have the same one, below `threshold`. longest: rollout.max_completion_length."""
    ends, said = whole(rows), scores_of(whole(rows), name)
    scores = [_number(score) for score in said if score is not None]
    function = "the environment" if name is None else f"reward function {name}"
    found, cut = [], round(truncated_share(rows) * len(ends))
    if cut >= NEARLY_ALL * len(ends):
        found.append(f"{_of(cut, len(ends))} completions {cut_off(longest)}")
    if not scores:
        found.append(f"{function} scored none of the {len(ends)} completions: it gave None for each")
    elif len(set(scores)) == 1 and (same := scores[0]) is not None and same < threshold:
        why = "" if not found else ", of which it reads what was cut off"
        found.append(
            f"{function} gave {same:g} to {_of(len(scores), len(scores))} completions{why}: see what it says of an "
            "answer that you call right (gleaner rewards try), and read some of these (--save)"
        )
    return found


def _of(count: int, total: int) -> str:
    return f"all {total}" if count == total else f"{count} of {total}"


def _checked(config: RunConfig, held_out: bool) -> tuple[RunConfig, Sequence[Problem], tuple[str, ...]]:
    """The configuration with whole paths, the problems, and lines for the user. Raises WrongInput."""
    found, config, notes = Findings(), absolute(config), tuple[str, ...]()
    if config.env.use is None and not functions_of(config.rewards):
        found.lines.append("rewards: an evaluation needs a reward function, got none; name one with --reward")
    found.of(check_accuracy, config)
    found.of(check_placement, _without_learner(config), None)
    found.of(check_model, config.model.source)
    chat = found.of(load_chat, config)
    problems = found.of(_held_out if held_out else _whole, config, chat or Untokenised())
    if chat is not None and problems:
        found.of(check_data_prompts, config, chat, (problem.messages for problem in problems))
        notes = found.of(check_rewards, config, problems[0], chat.prefilled(problems[0].prompt_ids)) or ()
        tried = found.of(check_environment, config, chat, problems[0]) or Tried()
        problems = found.of(fitting, problems, config.data, config.rollout.max_prompt_length, tried.tools)
    found.finish()
    assert problems is not None
    assert chat is not None
    return config, problems, (*chat.notes(config.rollout.stop), *notes)


def _held_out(config: RunConfig, chat: Renderer) -> list[Problem]:
    longest, deadline = config.rollout.max_prompt_length, config.cluster.deadlines.start
    _, problems = load(config.data, chat, longest, config.seed, deadline)
    if not problems:
        raise WrongInput("data.eval.every: is 0, so nothing is held out; raise it, or name problems with --data")
    return problems


def _whole(config: RunConfig, chat: Renderer) -> list[Problem]:
    longest, deadline = config.rollout.max_prompt_length, config.cluster.deadlines.start
    return load_whole(config.data, chat, longest, config.seed, deadline)


def _policy(adapter: str | None, config: RunConfig, chat: Chat, note: Callable[[str], None]) -> Adapter | Weights:
    """Raises WrongInput."""
    found = Findings()
    policy = found.of(policy_of, adapter, config.model.source)
    for line in found.of(adapter_notes, adapter, "--adapter", config.model.path, chat) or ():
        note(line)
    found.finish()
    assert policy is not None
    return policy


def _without_learner(config: RunConfig) -> RunConfig:
    """Nor with reward processes of their own: generators score what they sample."""
    gpus = config.cluster.gpus.model_copy(update={"learner": 0.0})
    alone = {"gpus": gpus, "rewards": RewardProcessConfig()}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=alone)})


def _sampling(config: RunConfig, samples: int, problem: Problem) -> Sampling:
    return sampled(config, samples, group_seed(config.seed, problem.position, attempt=1))


def metrics_of(
    tables: list[list[pa.Table]], name: str | None, threshold: float, seed: int
) -> tuple[dict[str, Estimate], int]:
    """The metrics, each over the problems that have scores enough for it, and how many problems have a completion
    without a score. Where a reward function failed, the score is 0."""
    scored = [_by_problem(several, name) for several in tables]
    unscored = sum(any(None in own for own in both) for both in zip(*scored, strict=True))
    sampled = []
    if len(tables) > 1:
        texts = [said_in(whole(rows)) for rows in tables[1]]
        sampled = [Sampled([*map(answer_of, said)], own) for said, own in zip(texts, scored[1], strict=True)]
    return summary([own[0] for own in scored[0]], sampled, threshold, seed), unscored


def said_in(rows: pa.Table) -> list[str]:
    """Of each row what the policy said: of a trajectory its turns alone, not what the environment answered. Behind the
    tag that its prompt ends in, since an answer may be what stands in that."""
    columns = (rows.column(name).to_pylist() for name in ("completion", "messages", "problem"))
    opened = {problem: asked_of(problem).prefilled for problem in set(rows.column("problem").to_pylist())}
    return [
        opened[problem] + (text if turns is None else text_of(said_of(turns) or []))
        for text, turns, problem in zip(*columns, strict=True)
    ]


def _number(score: float | None) -> float | None:
    return 0.0 if score is not None and math.isnan(score) else score


def _by_problem(tables: Sequence[pa.Table], name: str | None) -> list[list[float | None]]:
    """The scores of each table's completions. Asked of all at once: that no problem has this reward is a mistake."""
    rows = [whole(table) for table in tables]
    scores = iter(scores_of(pa.concat_tables(rows), name))
    return [[*map(_number, islice(scores, own.num_rows))] for own in rows]
