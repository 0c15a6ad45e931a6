"""Trajectories of a group -> columns of rollout.schema, with what environments and reward functions give for them."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rewards.pool import NOT_SCORED, RewardPool, Scores
from rollout.env.trajectory import Trajectory
from rollout.facts import Sampled, facts_of
from rollout.schema import Problem
from rollout.types import Completion

FAULT = "environment"  # reward_status of a trajectory that its environment's fault ended


async def scored(pool: RewardPool | None, problem: Problem, trajectories: Sequence[Trajectory]) -> Scores | None:
    """What the reward functions give for the trajectories without a fault; None where there is nothing to ask."""
    whole = [t for t in trajectories if not t.faulted]
    if pool is None or not whole:
        return None
    return await pool.score(
        prompts=[list(t.opening) or problem.messages for t in whole],
        completions=[t.messages for t in whole],
        completion_ids=[t.ids for t in whole],
        columns={name: [value] * len(whole) for name, value in problem.columns.items()},
    )


def rows_of(
    problem: Problem, trajectories: Sequence[Trajectory], texts: Sequence[str], scores: Scores | None, by: Sampled
) -> dict[str, Sequence[Any]]:
    """All columns of the group. texts: the trajectories decoded, for people."""
    completions = [
        Completion(
            np.asarray(t.ids, np.int32), np.asarray(t.logprobs, np.float32), t.outcome, np.asarray(t.versions, np.int32)
        )
        for t in trajectories
    ]
    rewards = _rewards(trajectories, scores)
    return facts_of(problem, completions, by) | {
        "prompt_ids": [list(t.prompt_ids) for t in trajectories],
        "completion": texts,
        "loss_mask": [t.mask for t in trajectories],
        "turns": [[turn.as_row() for turn in t.turns] for t in trajectories],
        "messages": [json.dumps(t.messages) for t in trajectories],
        "env_metrics": [list(t.metrics.items()) for t in trajectories],
        "generate_ms": [sum(turn.generate_ms for turn in t.turns) for t in trajectories],
        "reward": [reward for reward, _, _ in rewards],
        "reward_status": [status for _, status, _ in rewards],
        "reward_parts": [list(parts.items()) for _, _, parts in rewards],
        "reward_ms": [0.0 if scores is None else scores.ms] * len(trajectories),
    }


def _rewards(
    trajectories: Sequence[Trajectory], scores: Scores | None
) -> list[tuple[float | None, str, dict[str, float | None]]]:
    """(reward, status, parts by name) of each. The environment's own parts count with weight 1."""
    found: list[tuple[float | None, str, dict[str, float | None]]] = []
    asked = 0
    for trajectory in trajectories:
        if trajectory.faulted:
            found.append((None, FAULT, {}))
            continue
        own: dict[str, float | None] = dict(trajectory.parts)
        if scores is not None and (both := sorted(own.keys() & scores.parts.keys())):
            raise ValueError(
                f"rewards: each part must have a name of its own, and the environment gives {', '.join(both)} as well; "
                "set rewards.<i>.name"
            )
        reward, status = (sum(trajectory.parts.values()), "ok") if own else (None, NOT_SCORED)
        if scores is not None:
            given = scores.status[asked]
            own |= {name: values[asked] for name, values in scores.parts.items()}
            if given not in ("ok", NOT_SCORED):
                reward, status = None, given
            elif given == "ok":
                reward, status = (reward or 0.0) + (scores.reward[asked] or 0.0), "ok"
            asked += 1
        found.append((reward, status, own))
    return found
