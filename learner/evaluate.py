"""Held-out score: greedy completions of the held-out problems, through the same workers and judges as training."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from learner.config import RunConfig
from learner.metrics import judge_means
from rewards.config import RewardConfig, resolved_names
from rollout.producer import Producer
from rollout.schema import Problem, parts_of
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
    """One greedy completion per problem; a completion that could not be judged counts as wrong."""
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
    scores = [parts[judge] or 0.0 for parts in parts_of(rows)]
    means = {key.replace("reward/", "eval/"): value for key, value in judge_means(rows).items()}
    failed = sum(status != "ok" for status in rows.column("reward_status").to_pylist())
    means |= {"eval/accuracy": sum(scores) / len(scores), "eval/failed": failed / len(scores)}
    samples = [
        {
            "prompt": problem.messages if isinstance(problem.messages, str) else problem.messages[-1]["content"],
            "completion": rows.column("completion")[i].as_py(),
            "reward": rows.column("reward")[i].as_py(),
        }
        for i, problem in enumerate(problems[:NUM_SAMPLES])
    ]
    return Evaluation(step, means, samples)
