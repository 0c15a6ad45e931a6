"""Evaluates the policy on held-out problems, and scores training groups with reward models.

An evaluation generates with the generators of the training and scores with its reward functions. Reward models lie on
the policy's base, so the learner computes their scores.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from cluster.actor import Actor
from cluster.errors import WrongInput
from cluster.telemetry import Timeline
from learner.config import RunConfig
from learner.driver.identity import base_name, same_base
from learner.driver.metrics import env_metrics, logged_means, reward_means
from learner.model.adapter_config import read_scored
from learner.trainer.service import TrainerService
from rewards.config import RewardConfig, adapters_of, functions_of, resolved_names, trained_on
from rollout.data.model_files import CONFIG, read_json
from rollout.data.weight_names import check_adapter, sizes_of
from rollout.schema import Problem, asked_of, failed, parts_of, whole, with_part
from rollout.scorer import alongside
from rollout.types import Sampling

# Many problems through several generators: they are divided into calls, and the generator that is free takes the next.

LARGEST = 16  # most problems in a call; a call costs about as much as a short completion
SHARES = 4  # least number of calls for each generator, so that the last call does not leave the others idle for long
AHEAD = 2  # a generator is asked for so many times the groups that it runs at once, so that it never waits for a call


class Asks(Protocol):
    """What `generate` needs of a generator; rollout.producer.Producer is one."""

    async def requests(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int,
        lost: Callable[[], None],
    ) -> pa.Table | None:  # fmt: skip
        """The groups of the problems, in their order. If the process is lost meanwhile, `lost` is called at once, and
        None is returned when a fresh process is ready."""

    @property
    def away(self) -> bool:
        """Whether the generator's process is being replaced."""

    async def present(self) -> None:
        """Waits until the generator's process is not being replaced."""


class Calls(NamedTuple):
    """How problems are divided into calls.

    size: most problems in a call. at_once: number of calls that each generator has at once. rounds: how many times a
    generator may have to run as many groups as it can before a call is answered; the call's deadline is that of a group
    times `rounds`.
    """

    size: int
    at_once: int
    rounds: int


def calls_of(problems: int, generators: int, running: int) -> Calls:
    """The division of so many problems into calls. running: number of groups that a generator runs at once."""
    size = max(1, min(LARGEST, running, problems // (SHARES * generators)))
    return Calls(size, AHEAD * running // size, min(AHEAD, ceil(problems / running)))


def groups_at_once(config: RunConfig, size: int) -> int:
    """Number of groups that a generator runs at once. size: completions per group."""
    sequences = config.rollout.sequences
    return max((sequences if config.env.use is None else min(sequences, config.trajectories)) // size, 1)


async def generate(
    asked: Sequence[Asks],
    problems: Sequence[Problem],
    config: RunConfig,
    sampling: Callable[[int], Sampling],
    attempt: int = 0,
    done: Callable[[int], None] = lambda count: None,
) -> list[pa.Table]:
    """The groups of all problems, in their order, in tables of one or more groups. If a generator is lost, the next
    generator that is free repeats its call.

    sampling: index of a problem -> how its group is sampled; all groups have the same size. done: called with the
    number of problems whose groups have just arrived.
    """
    calls = calls_of(len(problems), len(asked), groups_at_once(config, sampling(0).n))
    starts = range(0, len(problems), calls.size)
    waiting: asyncio.Queue[int] = asyncio.Queue()
    for start in starts:
        waiting.put_nowait(start)
    answers: dict[int, asyncio.Future[pa.Table]] = {start: asyncio.Future() for start in starts}

    async def lane(one: Asks) -> None:
        while True:
            await one.present()
            start = await waiting.get()
            if one.away:  # the generator was lost while this lane waited, so another one takes the call
                waiting.put_nowait(start)
                continue
            mine = problems[start : start + calls.size]
            samplings = [sampling(start + i) for i in range(len(mine))]
            groups = await one.requests(mine, samplings, attempt, calls.rounds, partial(waiting.put_nowait, start))
            if groups is not None:
                answers[start].set_result(groups)
                done(len(mine))

    async with alongside(lane(one) for one in [*asked] * calls.at_once):
        return [await answers[start] for start in starts]


NUM_SAMPLES = 16  # completions that an evaluation keeps; the end of a run shows some that changed
ACCURACY = "accuracy"
ACCURACY_METRIC = f"eval/{ACCURACY}"


@dataclass(slots=True)
class Evaluation:
    """Scores of one policy on the held-out problems, and a few of its completions."""

    step: int
    metrics: dict[str, float]
    samples: list[dict[str, Any]]  # each with the keys prompt, completion and reward

    def to_dict(self) -> dict[str, Any]:
        """The evaluation as values for JSON; `Evaluation(**d)` is the inverse."""
        return asdict(self)


def accuracy_reward(rewards: Sequence[RewardConfig], name: str | None, *, environment: bool = False) -> str | None:
    """The name of the reward that counts as accuracy: the configured `name`, else a reward function called `accuracy`,
    else the reward function with the largest weight. A watch counts only where it has that name, or where reward models
    alone are trained on. None where only an environment gives rewards: their sum counts. Reward models never count.

    environment: whether `name` may be a reward of an environment, whose names are known only once it gives them.

    Raises ValueError if no reward function has the configured name, or if another one than that called `accuracy` is
    configured: eval/accuracy is also the mean of the function of that name.
    """
    functions = functions_of(rewards)
    names = resolved_names(functions)
    trained = [one.name for one in trained_on(functions)]
    if name is None and ACCURACY not in names and not trained and (environment or not names):
        return None
    if name not in (None, ACCURACY) and ACCURACY in names:
        raise ValueError(
            f"data.eval.reward: must be {ACCURACY} where a reward function has that name, since eval/{ACCURACY} is its "
            f"mean, got {name}; give the function another by rewards.<i>.name"
        )
    if name is not None and environment:
        return name
    if name is None and ACCURACY in names:
        return ACCURACY
    if name is None:
        weights = {one: function.weight for one, function in zip(names, functions, strict=True)}
        return max(trained or names, key=lambda one: weights[str(one)])
    if name not in names:
        raise ValueError(f"data.eval.reward: must be one of {', '.join(names)}, got {name}")
    return name


def accuracy_of(config: RunConfig) -> str | None:
    """accuracy_reward of a configuration. Raises ValueError."""
    return accuracy_reward(config.rewards, config.data.eval.reward, environment=config.env.use is not None)


class HeldOut:
    """Evaluates the policy on the held-out problems, and keeps the evaluations of the run so far."""

    def __init__(
        self, producers: Sequence[Asks], problems: Sequence[Problem], config: RunConfig, timeline: Timeline
    ) -> None:
        self._producers, self._problems, self._config, self._timeline = producers, problems, config, timeline
        self.evaluations: list[Evaluation] = []

    def evaluated(self, step: int) -> bool:
        """Whether the policy of this step was evaluated, in this process or before the run was resumed."""
        return any(evaluation.step == step for evaluation in self.evaluations)

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest accuracy; of equal ones the first."""
        known = [one for one in self.evaluations if ACCURACY_METRIC in one.metrics]
        return max(known, key=lambda one: one.metrics[ACCURACY_METRIC], default=None)

    @property
    def spared(self) -> int | None:
        """The step whose checkpoint is kept by checkpoint.best; None without that setting."""
        best = self.best if self._config.checkpoint.best else None
        return None if best is None else best.step

    def kept(self) -> str | None:
        """A line for the user about the checkpoint that checkpoint.best keeps; None without that setting."""
        if not self._config.checkpoint.best or (best := self.best) is None:
            return None
        highest = f"{ACCURACY_METRIC} {best.metrics[ACCURACY_METRIC]:.4g}"
        if best.step == 0:
            return f"checkpoint.best: no policy was better than that of the start, {highest}"
        return f"checkpoint.best: {highest} is that of step {best.step}: gleaner export RUN OUT --step {best.step}"

    def ends(self) -> str | None:
        """The reason why early_stop ends the run now, else None."""
        stop, best = self._config.early_stop, self.best
        if best is None:
            return None
        highest = f"{ACCURACY_METRIC} was {best.metrics[ACCURACY_METRIC]:.4g} at step {best.step}"
        if stop.accuracy is not None and best.metrics[ACCURACY_METRIC] >= stop.accuracy:
            return f"early_stop.accuracy: {highest}, and {stop.accuracy:g} is enough: the run ends here"
        later = sum(one.step > best.step for one in self.evaluations)
        if stop.patience is not None and later >= stop.patience:
            return f"early_stop.patience: {highest}, and none of {later} evaluations since is higher: the run ends here"
        return None

    async def score(self, step: int) -> dict[str, float]:
        """The metrics of the generators' policy; empty where no problems are held out, or with data.eval.every=0."""
        if not self._problems or self._config.data.eval.every == 0:
            return {}
        with self._timeline.span("evaluate", "loop", step=step):
            self.evaluations.append(await evaluate(self._producers, self._problems, self._config, step))
        return self.evaluations[-1].metrics


def sampled(config: RunConfig, n: int, seed: int) -> Sampling:
    """The sampling of n completions in training."""
    rollout = config.rollout
    return Sampling(
        n=n, max_tokens=rollout.max_completion_length, temperature=rollout.temperature, seed=seed,
        top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p,
    )  # fmt: skip


def greedy(config: RunConfig) -> Sampling:
    """The sampling of one completion that takes the likeliest token each time."""
    return Sampling(n=1, max_tokens=config.rollout.max_completion_length, temperature=0.0)


async def evaluate(producers: Sequence[Asks], problems: Sequence[Problem], config: RunConfig, step: int) -> Evaluation:
    """Generates and scores one greedy completion per problem. If the accuracy's reward function fails on a completion,
    it counts as wrong; if that gives no score, it is left out of eval/accuracy, and counted in eval/unscored."""
    rows = pa.concat_tables(await generate(producers, problems, config, lambda _: greedy(config)))
    metrics = env_metrics(rows)
    rows = whole(rows)
    name = accuracy_of(config)
    said = scores_of(rows, name)
    scores = [0.0 if math.isnan(value) else value for value in said if value is not None]
    means = {key.replace("reward/", "eval/"): value for key, value in reward_means(rows).items()}
    means |= {key.replace("env/", "eval/"): value for key, value in metrics.items()}
    means |= {f"eval/log_{key.removeprefix('log/')}": value for key, value in logged_means(rows).items()}
    means["eval/failed"] = float(failed(rows).mean())
    if scores:
        means["eval/accuracy"] = sum(scores) / len(scores)
    if len(scores) < len(said):
        means["eval/unscored"] = float(len(said) - len(scores))
    return Evaluation(step, means, [_sample(row) for row in rows.slice(0, NUM_SAMPLES).to_pylist()])


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    asked = asked_of(row["problem"]).messages
    prompt = asked if isinstance(asked, str) else asked[-1]["content"]
    return {"prompt": prompt, "completion": row["completion"], "reward": row["reward"]}


def scores_of(rows: pa.Table, accuracy: str | None) -> list[float | None]:
    """The reward named `accuracy` of each row, or for None the sum of its rewards; nan where scoring failed, None where
    the row has no such reward."""
    parts, lost = parts_of(rows), failed(rows).tolist()
    if accuracy is None:
        rewards = rows.column("reward").to_pylist()
        return [math.nan if bad else value for value, bad in zip(rewards, lost, strict=True)]
    if not any(accuracy in row for row in parts) and not all(lost):
        given = sorted({name for row in parts for name in row})
        raise ValueError(f"data.eval.reward: must be one of {', '.join(given) or 'none'}, got {accuracy}")
    return [row.get(accuracy, math.nan if bad else None) for row, bad in zip(parts, lost, strict=True)]


# Reward models on the policy's base (`rewards` with `use: adapter:<folder>`). The learner holds them, since it holds
# the base; they are checked before the start, and score each batch before the update.
#
# Their scores go into the rows as if a rollout worker had written them, before the rows are written to disk and trained
# on. So no code that uses rewards needs to know of reward models.


class RewardModels:
    """Has the learner score groups with the reward models, and waits for it. Does nothing if there are none."""

    def __init__(
        self, rewards: Sequence[RewardConfig], trainer: Actor[TrainerService], deadline_s: float, timeline: Timeline
    ) -> None:
        self._models, self._trainer = adapters_of(rewards), trainer
        self._deadline_s, self._timeline = deadline_s, timeline

    async def score(self, groups: Sequence[pa.Table], step: int) -> tuple[list[pa.Table], dict[str, float]]:
        """The groups, with each model's score added to their rewards; and time/score, in seconds, if a model scored."""
        if not self._models or not groups:
            return list(groups), {}
        started = time.perf_counter()
        with self._timeline.span("train", "learner", step=step):  # counts as training: it keeps the same card busy
            said = await self._trainer.call(TrainerService.score, self._deadline_s, list(groups))
        scored, begin = [], 0
        for group in groups:
            for model, scores in zip(self._models, said, strict=True):
                group = with_part(group, str(model.name), model.share, scores[begin : begin + len(group)])
            scored.append(group)
            begin += len(group)
        return scored, {"time/score": time.perf_counter() - started}


def check_scored_adapters(config: RunConfig) -> None:
    """Checks the adapters of reward models, and the one that the value model starts from. Raises WrongInput if one was
    trained on another base, has no scalar head, or is damaged."""
    named = [(f"rewards: {model.name}", str(model.adapter)) for model in adapters_of(config.rewards)]
    if config.learner.value.start is not None:
        named.append(("learner.value.start", config.learner.value.start))
    sizes = sizes_of(read_json(config.model.source, CONFIG)) if named else None
    for key, folder in named:
        content = read_scored(folder, key)
        base = content.get("base_model_name_or_path")
        if base and not same_base(str(base), config.model.path):
            raise WrongInput(
                f"{key}: base_model_name_or_path of {folder} must be model.path, {config.model.path}, got "
                f"{base_name(str(base))}: on another base its scores mean nothing; train it on this one, or write "
                "model.path there if it is the same"
            )
        check_adapter(folder, key, content, sizes)
