"""Held-out score: greedy completions of held-out problems, through the workers and reward functions of the training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from cluster.telemetry import Timeline
from learner.config import RunConfig
from learner.driver.batch_metrics import logged_means, reward_means
from learner.driver.env_metrics import env_metrics
from learner.driver.held_out_calls import Asks, generate
from rewards.config import RewardConfig, functions_of, resolved_names
from rollout.schema import Problem, asked_of, failed, parts_of, whole
from rollout.types import Sampling

NUM_SAMPLES = 16  # that are kept, of which a run shows some that changed
ACCURACY = "accuracy"  # eval/accuracy is the held-out score
ACCURACY_METRIC = f"eval/{ACCURACY}"


@dataclass(slots=True)
class Evaluation:
    """Scores of one policy on the held-out problems, and a few of its completions."""

    step: int
    metrics: dict[str, float]
    samples: list[dict[str, Any]]  # prompt, completion, reward

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `Evaluation(**d)` is the inverse."""
        return asdict(self)


def accuracy_reward(rewards: Sequence[RewardConfig], name: str | None, *, environment: bool = False) -> str | None:
    """The name of the reward function that counts as accuracy: the configured one, else one called `accuracy`, else
    that of the largest weight; None, where only an environment gives rewards: their sum. Reward models are not asked.
    An environment's own rewards are known once it gives them.

    Raises ValueError where there is none of that name, or where eval/accuracy, which is also the mean of a function
    called `accuracy`, would be that of another.
    """
    functions = functions_of(rewards)
    names = resolved_names(functions)
    if name is None and not names:
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
        return max(zip(names, functions, strict=True), key=lambda pair: pair[1].weight)[0]
    if name not in names:
        raise ValueError(f"data.eval.reward: must be one of {', '.join(names)}, got {name}")
    return name


class HeldOut:
    """The held-out problems, and the evaluations of the run so far."""

    def __init__(
        self, producers: Sequence[Asks], problems: Sequence[Problem], config: RunConfig, timeline: Timeline
    ) -> None:
        self._producers, self._problems, self._config, self._timeline = producers, problems, config, timeline
        self.evaluations: list[Evaluation] = []

    def evaluated(self, step: int) -> bool:
        """Whether the policy of this step has been, in this run or before the checkpoint that it goes on from."""
        return any(evaluation.step == step for evaluation in self.evaluations)

    @property
    def best(self) -> Evaluation | None:
        """Of the highest accuracy, the first of several."""
        known = [one for one in self.evaluations if ACCURACY_METRIC in one.metrics]
        return max(known, key=lambda one: one.metrics[ACCURACY_METRIC], default=None)

    @property
    def spared(self) -> int | None:
        """The step whose checkpoint checkpoint.best keeps; None without it."""
        best = self.best if self._config.checkpoint.best else None
        return None if best is None else best.step

    def kept(self) -> str | None:
        """A line about the checkpoint that checkpoint.best keeps, else None."""
        if not self._config.checkpoint.best or (best := self.best) is None:
            return None
        highest = f"{ACCURACY_METRIC} {best.metrics[ACCURACY_METRIC]:.4g}"
        if best.step == 0:
            return f"checkpoint.best: no policy was better than that of the start, {highest}"
        return f"checkpoint.best: {highest} is that of step {best.step}: gleaner export RUN OUT --step {best.step}"

    def ends(self) -> str | None:
        """Why the run ends by early_stop, else None."""
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
        """The metrics of the policy that the generators have; none where nothing is held out or evaluated."""
        if not self._problems or self._config.data.eval.every == 0:
            return {}
        with self._timeline.span("evaluate", "loop", step=step):
            self.evaluations.append(await evaluate(self._producers, self._problems, self._config, step))
        return self.evaluations[-1].metrics


def sampled(config: RunConfig, n: int, seed: int) -> Sampling:
    """n completions as the training samples them."""
    rollout = config.rollout
    return Sampling(
        n=n, max_tokens=rollout.max_completion_length, temperature=rollout.temperature, seed=seed,
        top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p,
    )  # fmt: skip


def greedy(config: RunConfig) -> Sampling:
    """One completion, of the likeliest tokens."""
    return Sampling(n=1, max_tokens=config.rollout.max_completion_length, temperature=0.0)


async def evaluate(producers: Sequence[Asks], problems: Sequence[Problem], config: RunConfig, step: int) -> Evaluation:
    """One greedy completion per problem. Where the reward function of accuracy fails, it counts as wrong; where it has
    no score, it is left out of eval/accuracy and counted in eval/unscored."""
    rows = pa.concat_tables(await generate(producers, problems, config, lambda _: greedy(config)))
    metrics = env_metrics(rows)
    rows = whole(rows)
    name = accuracy_reward(config.rewards, config.data.eval.reward, environment=config.env.use is not None)
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
    """The reward that counts as accuracy, of each row; nan where the row failed, None where it has none."""
    parts, lost = parts_of(rows), failed(rows).tolist()
    if accuracy is None:
        rewards = rows.column("reward").to_pylist()
        return [math.nan if bad else value for value, bad in zip(rewards, lost, strict=True)]
    if not any(accuracy in row for row in parts) and not all(lost):
        given = sorted({name for row in parts for name in row})
        raise ValueError(f"data.eval.reward: must be one of {', '.join(given) or 'none'}, got {accuracy}")
    return [row.get(accuracy, math.nan if bad else None) for row, bad in zip(parts, lost, strict=True)]
