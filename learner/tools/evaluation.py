"""gleaner eval: evaluates a model or an adapter on data, with the generators and reward functions of a run. It samples
completions, computes greedy score, mean@K, pass@k and majority@K with intervals, and says what makes them doubtful.
`evaluate` is the entry, also for Python.
"""

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
    check_unmerged,
    load_chat,
)
from learner.driver.launch import CLOSE_S
from learner.driver.machine_checks import check_placement
from learner.driver.memory import Budgets, cards_present, settle, settled, size_for
from learner.driver.metrics import CUT, NEARLY_ALL, cut_off
from learner.driver.preflight import Untokenised
from learner.driver.roles import started, worker_spec
from learner.model.adapter_config import PEFT_RANK, read_content, served, targets_of
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

TAG = "answer"


def answer_of(text: str) -> str:
    """Returns the answer of a completion for the vote of majority@K: the content of the last <answer>...</answer>, else
    of the last \\boxed{...}, else the last number, else the whole text, stripped. Numbers that are equal give the same
    answer."""
    said = tagged(text, TAG)
    said = _boxed(text) if said is None else said
    if said:
        number = parse_number(said)
    else:
        said, number = text.strip(), last_number(text)
    return said if number is None else _shortest(number)


def _shortest(number: Decimal) -> str:
    """Returns the same text for all equal numbers: without zeros at the end, and 0 without a sign. Decimal's normalize
    is not used, since it rounds to 28 digits."""
    text = f"{number:f}"  # no longer than the completion's text, or a thousand digits of an exponent
    return (text.rstrip("0").rstrip(".") if "." in text else text) if number else "0"


def _boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...}, up to the matching brace; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip()
    return None


# Metrics of an evaluation, from a score of each completion (None: the completion has no score).
#
# Letters: P problems, K sampled completions of each.

DRAWS = 2000  # resamples of the bootstrap
LEVEL = 95  # confidence level of intervals, per cent
Z = NormalDist().inv_cdf(0.5 + LEVEL / 200)
FEW = 10  # number of problems below which percentiles of a bootstrap are too narrow
WILSON, BOOTSTRAP, NONE = "wilson", "bootstrap", "none"


class Estimate(NamedTuple):
    """A mean over problems, and its confidence interval of 95 %."""

    value: float
    low: float | None  # None: there is no interval
    high: float | None
    problems: int  # number of problems that the mean is over
    method: str = BOOTSTRAP  # how the interval was found (`interval`); earlier versions had the bootstrap alone

    def between(self, mark: str) -> str:
        """Returns both ends as text with `mark` between them."""
        return "-" if self.low is None or self.high is None else f"{self.low:.3f}{mark}{self.high:.3f}"


class Sampled(NamedTuple):
    """The K completions of one problem: the answer and the score of each."""

    answers: Sequence[str]
    scores: Sequence[float | None]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the probability that k of n completions, c of them correct, include a correct one: 1 - C(n-c, k) / C(n,
    k). It is an unbiased estimate of the probability for k new completions (Chen et al. 2021, 2107.03374, equation 1).
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k: must have 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority(sampled: Sampled) -> float | None:
    """Returns the score of the answer that most completions give: the mean over the scored completions with that
    answer. If several answers have the most votes, it is the mean over these answers, which is the expectation if ties
    are drawn at random (self-consistency, Wang et al. 2022, 2203.11171). None if one of these answers has no score."""
    votes = Counter(sampled.answers)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    pairs = list(zip(sampled.answers, sampled.scores, strict=True))
    scores = [[score for said, score in pairs if said == answer and score is not None] for answer in winners]
    return float(np.mean([np.mean(own) for own in scores])) if all(scores) else None


def interval(values: Sequence[float], seed: int, *, share: bool = False) -> Estimate:
    """Returns the mean of [P] values and its interval.

    If all values are 0 or 1, it is Wilson's interval. Otherwise it is the bootstrap's (Efron 1979): percentiles of the
    means of P values drawn with replacement. The bootstrap fails if all values are equal, and is too narrow for few
    problems. In these cases a `share`, whose values are certain to be in 0..1, gets Wilson's interval; another mean
    gets none if all values are equal.
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
    """Returns the interval of a share of which `count` trials have this mean (Wilson 1927, without the correction for
    continuity). For values between 0 and 1 it is the widest that their mean allows, since values that are all 0 or 1
    have the largest variance."""
    centre, scale = (mean + Z * Z / (2 * count)), 1 + Z * Z / count
    half = Z * sqrt(mean * (1 - mean) / count + (Z / (2 * count)) ** 2)
    # The ends 0 and 1 are exact, whatever the rounding of the root.
    low, high = (centre - half) / scale, (centre + half) / scale
    return (0.0 if mean == 0 else low, 1.0 if mean == 1 else high)


def summary(
    greedy: Sequence[float | None], sampled: Sequence[Sampled], threshold: float, seed: int
) -> dict[str, Estimate]:
    """Returns metric -> estimate. A metric is over the problems with enough scores: mean@K needs one, pass@k needs k. A
    metric without such a problem is left out.

    greedy: [P] score of the greedy completion. sampled: [P], or empty. threshold: score from which a completion is
    correct for pass@k. seed: seed of the bootstrap.
    """
    values = {"greedy": [score for score in greedy if score is not None]}
    shares = set()  # metrics whose values are certain to be between 0 and 1
    if sampled:
        count = len(sampled[0].scores)
        scored = [[score for score in one.scores if score is not None] for one in sampled]
        values[f"mean@{count}"] = [float(np.mean(own)) for own in scored if own]
        least = np.float32(threshold)  # scores are float32: a float64 0.9 would be greater than a score of 0.9
        correct = [(len(own), int((np.asarray(own, np.float32) >= least).sum())) for own in scored]
        for k in powers_to(count):
            values[f"pass@{k}"] = [pass_at_k(n, c, k) for n, c in correct if n >= k]
            shares.add(f"pass@{k}")
        values[f"majority@{count}"] = [score for one in sampled if (score := majority(one)) is not None]
        if {score for own in scored for score in own} <= {0.0, 1.0}:
            shares |= {f"mean@{count}", f"majority@{count}"}
    return {name: interval(own, seed, share=name in shares) for name, own in values.items() if own}


def powers_to(n: int) -> list[int]:
    """Returns the powers of two below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


# Generation: a run's generators without its learner, each with the policy that is evaluated.


class SamplingRound(NamedTuple):
    """One way in which all problems are sampled."""

    sampling: Callable[[int], Sampling]  # index of a problem -> its sampling parameters
    attempt: int  # distinguishes its groups from other groups of the same problems


class EvaluatedWorker:
    """A generator's process with the policy that is evaluated. A process that replaces a lost one gets the policy,
    too."""

    def __init__(self, actor: RevivableActor[RolloutService], policy: Adapter | Weights, deadlines: Deadlines) -> None:
        self._worker, self._policy = SupervisedWorker(actor, deadlines), policy
        self._worker.supply.rearm = self._deliver

    async def begin(self) -> None:
        """Sends the policy to the process."""
        await self._worker.attempt(self._deliver)  # if the process is lost meanwhile, its successor gets the policy

    async def requests(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int,
        lost: Callable[[], None],
    ) -> pa.Table | None:  # fmt: skip
        """Does what Producer.requests does."""
        return await self._worker.attempt(partial(self._worker.rollouts, problems, samplings, attempt, rounds), lost)

    @property
    def away(self) -> bool:
        """See SupervisedWorker.away."""
        return self._worker.away

    async def present(self) -> None:
        await self._worker.present()

    async def _deliver(self) -> None:
        worker = self._worker
        receipt = await worker.actor.call(RolloutService.take_policy, worker.deadlines.push, self._policy)
        assert receipt is not None, "no learner overwrites it"
        check_digest(self._policy, worker.name, receipt.digest)


def policy_of(adapter: str | None, base: str, *, on_card: bool = False) -> Adapter | Weights:
    """Returns the policy to evaluate: the adapter of a folder in PEFT's format for that base, or without a folder the
    model's own weights. Raises WrongInput if the adapter cannot be served. on_card: whether generators have one."""
    if adapter is None:
        return Weights.unchanged(0)
    check_served(adapter, "--adapter", base)
    folder = served(Path(adapter))
    if not on_card:
        check_unmerged(folder, "--adapter", "give generators a card (cluster.gpus.generator=1), or ")
    return Adapter.build(0, (folder / WEIGHTS_FILE).read_bytes(), read_content(str(folder), "--adapter"))


async def groups(
    config: RunConfig,
    budgets: Budgets,
    policy: Adapter | Weights,
    problems: Sequence[Problem],
    asked: Sequence[SamplingRound],
    done: Callable[[int, int], None],
) -> list[list[pa.Table]]:
    """Returns for each way of sampling a group of every problem, in their order. Generators are started for it, and
    ended.

    done: called with the number of further completions, and the number of all completions.
    """
    cpus = sum(role.cpus for role in generator_roles(config))
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
    asked: Sequence[SamplingRound],
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


@asynccontextmanager
async def _workers(
    session: Session, config: RunConfig, budgets: Budgets, policy: Adapter | Weights
) -> AsyncIterator[list[EvaluatedWorker]]:
    """Starts the generators, and yields a worker for each, which has the policy."""
    generators, deadlines = generator_roles(config), config.cluster.deadlines
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
    """Returns the specification of a generator that gets only this policy, and has no learner on its device."""
    rank, targets = 0, tuple[str, ...]()
    if isinstance(policy, Adapter):
        rank = policy.config.get("r", PEFT_RANK)
        targets = tuple(targets_of(policy.config))
    engine = replace(
        spec.engine, max_lora_rank=rank, lora_targets=targets, adapter_window=2, in_flight="finish", sleeps=False,
        shares_base=False, room=0,
    )  # fmt: skip
    return replace(spec, engine=engine)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation.

    Attributes:
        model: the base model.
        adapter: folder of the adapter; None without an adapter.
        adapter_digest: sha256 of the adapter's weights as they were served; None without an adapter.
        data: the file, hub name or task that the problems are from.
        part: which of its problems were used, in words.
        reward: name of the reward function whose scores count; None: the environment's rewards count.
        problems: number of problems.
        samples: number of completions of each problem besides the greedy one.
        temperature: sampling temperature of the samples.
        metrics: greedy, and with samples mean@K, pass@k, majority@K: means over problems with an interval of 95 %
            (`interval`).
        unscored: number of problems with a completion that has no score. It counts in no metric: each metric says over
            how many problems it is.
        failed: number of completions on which a reward function failed. If its scores count, they count as 0.
        truncated: share of completions that rollout.max_completion_length cut off.
        notes: sentences that say why the scores mean little (`doubts`).
        seconds: duration, with start and end of the processes.
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
        """Returns all fields except the rows as values for JSON."""
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
    """Evaluates config.model.path, perhaps with an adapter. It must not be called in an event loop.

    Args:
        config: model, data, rewards, lengths, temperature and seed are used; nothing is written to its run folder.
        adapter: folder of an adapter in PEFT's format; None: the model is evaluated as it is.
        held_out: whether the problems are those that a run of this configuration holds out; else they are all of
            data.path, in its order.
        samples: number of completions of each problem besides the greedy one, at rollout.temperature.
        limit: most problems, from the first on; None: all.
        threshold: score from which a completion is correct for pass@k.
        note: called with each line for the user.
        done: called with the number of further completions and the number of all; first with 0 when generation begins.

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
    if isinstance(policy, Adapter):  # whose rank and layers the memory plan needs
        lora = {"rank": policy.config.get("r", PEFT_RANK), "targets": targets_of(policy.config)}
        learner = config.learner.model_copy(update={"lora": config.learner.lora.model_copy(update=lora)})
        config = config.model_copy(update={"learner": learner})
    cards = cards_present(config)
    budgets = settle(config, chat.config, size_for(config, cards), None if cards is None else cards.kind)
    config = settled(config, budgets)
    name = accuracy_reward(config.rewards, config.data.eval.reward, environment=config.env.use is not None)
    asked = [SamplingRound(lambda _: greedy(config), 0)]
    if samples:
        asked.append(SamplingRound(lambda index: _sampling(config, samples, problems[index]), 1))
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
    """Returns where the problems are from, and which part of the data they are, in words."""
    data, own = config.data, config.data.eval
    if not held_out:
        return data.path, f"split {data.split}" if data.split != "train" else "all problems"
    if own.path is None and own.split is None:
        return data.path, "held out of training"
    return own.path or data.path, "all problems" if own.split is None else f"split {own.split}"


def truncated_share(rows: pa.Table) -> float:
    """Returns the share of completions that the length limit cut off."""
    ends: list[str] = whole(rows).column("finish_reason").to_pylist()
    return ends.count(CUT) / len(ends)


def doubts(rows: pa.Table, name: str | None, threshold: float, longest: int) -> list[str]:
    """Returns sentences on why the scores of these completions mean little, and what to do: nearly all completions were
    cut off, or none has a score, or all have the same score, below `threshold`.

    name: name of the reward function that counts; None: the environment. longest: rollout.max_completion_length.
    """
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
    """Returns the configuration with absolute paths, the problems, and lines for the user. Raises WrongInput."""
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
    policy = found.of(partial(policy_of, on_card=config.cluster.gpus.generator > 0), adapter, config.model.source)
    for line in found.of(adapter_notes, adapter, "--adapter", config.model.path, chat) or ():
        note(line)
    found.finish()
    assert policy is not None
    return policy


def _without_learner(config: RunConfig) -> RunConfig:
    """Returns the configuration without a learner, and without reward processes of their own: generators score what
    they sample."""
    gpus = config.cluster.gpus.model_copy(update={"learner": 0.0})
    alone = {"gpus": gpus, "rewards": RewardProcessConfig()}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=alone)})


def _sampling(config: RunConfig, samples: int, problem: Problem) -> Sampling:
    return sampled(config, samples, group_seed(config.seed, problem.position, attempt=1))


def metrics_of(
    tables: list[list[pa.Table]], name: str | None, threshold: float, seed: int
) -> tuple[dict[str, Estimate], int]:
    """Returns the metrics (see `summary`), and the number of problems with a completion that has no score. Where the
    reward function failed, the score is 0.

    tables: the groups of greedy completions, and with samples those of sampled ones. name: see `doubts`.
    """
    scored = [_by_problem(several, name) for several in tables]
    unscored = sum(any(None in own for own in both) for both in zip(*scored, strict=True))
    sampled = []
    if len(tables) > 1:
        texts = [said_in(whole(rows)) for rows in tables[1]]
        sampled = [Sampled([*map(answer_of, said)], own) for said, own in zip(texts, scored[1], strict=True)]
    return summary([own[0] for own in scored[0]], sampled, threshold, seed), unscored


def said_in(rows: pa.Table) -> list[str]:
    """Returns for each row the text that the policy sampled; for a trajectory that is its turns without the
    environment's answers. The tag in which the prompt ends is put before it, since it may open the answer."""
    columns = (rows.column(name).to_pylist() for name in ("completion", "messages", "problem"))
    opened = {problem: asked_of(problem).prefilled for problem in set(rows.column("problem").to_pylist())}
    return [
        opened[problem] + (text if turns is None else text_of(said_of(turns) or []))
        for text, turns, problem in zip(*columns, strict=True)
    ]


def _number(score: float | None) -> float | None:
    return 0.0 if score is not None and math.isnan(score) else score


def _by_problem(tables: Sequence[pa.Table], name: str | None) -> list[list[float | None]]:
    """Returns the scores of each table's completions. scores_of gets all tables at once, since it raises if no
    completion at all has this reward."""
    rows = [whole(table) for table in tables]
    scores = iter(scores_of(pa.concat_tables(rows), name))
    return [[*map(_number, islice(scores, own.num_rows))] for own in rows]
