"""Held-out score: greedy completions of the held-out problems, through the same workers and judges as training."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from learner.config import RunConfig
from learner.driver.batch_metrics import judge_means
from rewards.config import RewardConfig, resolved_names
from rollout.producer import Producer
from rollout.schema import Problem, failed, parts_of
from rollout.types import Sampling

NUM_SAMPLES = 3


@dataclass(slots=True)
class Evaluation:
    """Scores of one policy on the held-out problems, and a few of its completions."""

    step: int
    metrics: dict[str, float]
    samples: list[dict[str, Any]]  # prompt, completion, reward

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `Evaluation(**d)` is the inverse."""
        return asdict(self)


def accuracy_judge(rewards: Sequence[RewardConfig], judge: str | None) -> str:
    """The name of the judge that counts as accuracy: the configured one, else the one with the largest weight."""
    names = resolved_names(rewards)
    if judge is None:
        return max(zip(names, rewards, strict=True), key=lambda pair: pair[1].weight)[0]
    if judge not in names:
        raise ValueError(f"data.eval.judge: must be one of {', '.join(names)}, got {judge}")
    return judge


async def evaluate(
    producers: Sequence[Producer], problems: Sequence[Problem], config: RunConfig, step: int
) -> Evaluation:
    """One greedy completion per problem. Where the reward function of accuracy fails, it counts as wrong; where it has
    no opinion, it is left out of eval/accuracy and counted in eval/no_opinion."""
    # As many at once as run at once: the deadline of a group is for the group, not for the queue before it.
    places = [asyncio.Semaphore(config.rollout.max_num_seqs) for _ in producers]
    greedy = Sampling(n=1, max_tokens=config.rollout.max_completion_length, temperature=0.0)

    async def answer(index: int, problem: Problem) -> pa.Table:
        mine = index % len(producers)
        async with places[mine]:
            while (group := await producers[mine].request(problem, greedy, attempt=0)) is None:
                pass  # the process was lost and is alive again
            return group

    rows = pa.concat_tables(await asyncio.gather(*(answer(i, p) for i, p in enumerate(problems))))
    judge = accuracy_judge(config.rewards, config.data.eval.judge)
    said = [parts[judge] for parts in parts_of(rows)]
    scores = [0.0 if math.isnan(value) else value for value in said if value is not None]
    means = {key.replace("reward/", "eval/"): value for key, value in judge_means(rows).items()}
    means["eval/failed"] = float(failed(rows).mean())
    if scores:
        means["eval/accuracy"] = sum(scores) / len(scores)
    if len(scores) < len(said):
        means["eval/no_opinion"] = float(len(said) - len(scores))
    samples = [
        {
            "prompt": problem.messages if isinstance(problem.messages, str) else problem.messages[-1]["content"],
            "completion": rows.column("completion")[i].as_py(),
            "reward": rows.column("reward")[i].as_py(),
        }
        for i, problem in enumerate(problems[:NUM_SAMPLES])
    ]
    return Evaluation(step, means, samples)
