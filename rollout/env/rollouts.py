"""Plays the trajectories of a group concurrently, each with an environment of its own (Trajectories), and makes the
columns of rollout.schema from them (rows_of)."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cluster.errors import WrongInput
from rewards.base import Progress
from rewards.call import Group
from rewards.limits import OF_ENVIRONMENTS, described
from rewards.pool import LONGEST_ERROR, NOT_SCORED, Scores
from rollout.config import DEFAULT_ENVIRONMENT_MEMORY
from rollout.engine import Engine
from rollout.env.config import EnvConfig
from rollout.env.play import Player
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from rollout.env.trajectory import CUT, FAULT, TURNS, Limits, Trajectory
from rollout.schema import Origin, Problem, facts_of
from rollout.scorer import Scorer, side_by_side
from rollout.types import Completion, EngineError, Sampling, seed_of

# Trajectories become columns of rollout.schema, with the rewards of environments and of reward functions.


async def scored(
    scorer: Scorer | None, problem: Problem, trajectories: Sequence[Trajectory], progress: Progress
) -> Scores | None:
    """The reward functions' scores of the trajectories without a fault; None without scorer or such trajectories."""
    whole = [t for t in trajectories if not t.faulted]
    if scorer is None or not whole:
        return None
    group = Group(
        prompts=[list(t.opening) for t in whole],
        completions=[t.messages for t in whole],
        completion_ids=[t.rows[-1].ids for t in whole],
        columns={name: [value] * len(whole) for name, value in problem.columns.items()},
        prefilled=problem.prefilled,
        progress=progress,
    )
    return await scorer.score(group)


def rows_of(
    problem: Problem,
    trajectories: Sequence[Trajectory],
    decode: Callable[[Sequence[int]], str],
    scores: Scores | None,
    by: Origin,
    *,
    alone: bool,
) -> dict[str, Sequence[Any]]:
    """All columns of rollout.schema, with the rows of all of the group's trajectories.

    The last row of a trajectory holds what concerns all of it (messages, metrics). decode: ids -> text for the column
    `completion`. alone: whether there are no reward functions, only the environments' rewards.
    """
    rewards = _rewards(trajectories, scores, alone=alone)
    told = iter([] if scores is None else scores.logged)
    logged = [[] if trajectory.faulted else next(told, []) for trajectory in trajectories]
    places = [(i, row) for i, trajectory in enumerate(trajectories) for row in trajectory.rows]
    last = [row is trajectories[i].rows[-1] for i, row in places]
    completions = [
        Completion(
            np.asarray(row.ids, np.int32), np.asarray(row.logprobs, np.float32), trajectories[i].outcome,
            np.asarray(row.versions, np.int32), row.all_experts(),
        )
        for i, row in places
    ]  # fmt: skip
    of_all: list[tuple[str | None, list[tuple[str, float]]]] = [
        (json.dumps(trajectories[i].messages), list(trajectories[i].metrics.items())) if whole else (None, [])
        for (i, _), whole in zip(places, last, strict=True)
    ]
    return facts_of(problem, completions, by) | {
        "sample": [i for i, _ in places],
        "prompt_ids": [list(row.prompt_ids) for _, row in places],
        "completion": [decode(row.ids) for _, row in places],
        "loss_mask": [row.mask for _, row in places],
        "turns": [[turn.as_row() for turn in row.turns] for _, row in places],
        "messages": [messages for messages, _ in of_all],
        "env_metrics": [metrics for _, metrics in of_all],
        "generate_ms": [sum(turn.generate_ms for turn in row.turns) for _, row in places],
        "reward": [rewards[i][0] for i, _ in places],
        "reward_status": [rewards[i][1] for i, _ in places],
        "reward_parts": [list(rewards[i][2].items()) for i, _ in places],
        "reward_error": [rewards[i][3] for i, _ in places],
        "reward_ms": [0.0 if scores is None else scores.ms] * len(places),
        "logged": [logged[i] if whole else [] for (i, _), whole in zip(places, last, strict=True)],
    }


def _rewards(
    trajectories: Sequence[Trajectory], scores: Scores | None, *, alone: bool
) -> list[tuple[float | None, str, dict[str, float | None], str | None]]:
    """Returns (reward, status, parts by name, error message) of each trajectory. Environments' parts have weight 1."""
    found: list[tuple[float | None, str, dict[str, float | None], str | None]] = []
    asked = 0
    for trajectory in trajectories:
        if trajectory.faulted:
            found.append((None, FAULT, {}, sentence_of(trajectory)))
            continue
        parts = trajectory.parts
        if alone and not parts and trajectory.outcome in CUT:
            parts = {TURNS: 0.0}  # reward 0 for running into a limit; without a reward it would cost the policy nothing
        own: dict[str, float | None] = dict(parts)
        if scores is not None and (both := sorted(own.keys() & scores.parts.keys())):
            raise ValueError(
                f"rewards: each part must have a name of its own, and the environment gives {', '.join(both)} as well; "
                "set rewards.<i>.name"
            )
        reward, status = (sum(parts.values()), "ok") if own else (None, NOT_SCORED)
        error = None
        if scores is not None:
            given, error = scores.status[asked], scores.errors[asked]
            own |= {name: values[asked] for name, values in scores.parts.items()}
            if given not in ("ok", NOT_SCORED):
                reward, status = None, given
            elif given == "ok":
                reward, status = (reward or 0.0) + (scores.reward[asked] or 0.0), "ok"
            asked += 1
        found.append((reward, status, own, error))
    return found


def sentence_of(trajectory: Trajectory) -> str:
    """The environment's fault as a sentence for logs and for the column `reward_error`."""
    return f"environment: {trajectory.outcome}: {trajectory.fault}"[:LONGEST_ERROR]


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """The settings by which a rollout worker plays trajectories; "auto" of the configuration is resolved before.

    concurrency: most trajectories at once. seed: of the run. chat_template_kwargs: of data. alone: whether there are no
    reward functions. memory: most bytes that the process of one environment may hold.
    """

    config: EnvConfig
    limits: Limits
    concurrency: int
    seed: int
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    memory: int = DEFAULT_ENVIRONMENT_MEMORY


class Trajectories:
    """Plays groups, with at most `concurrency` trajectories of all groups together at once."""

    def __init__(self, settings: EnvSettings, engine: Engine, player: Player) -> None:
        self._settings, self._engine, self._player = settings, engine, player
        self._forks = Forks(spec_of(settings.config, settings.memory))
        self._room = asyncio.Semaphore(settings.concurrency)

    async def group(self, problem: Problem, sampling: Sampling) -> list[Trajectory]:
        """sampling.n trajectories of the problem. Raises WrongInput, EngineError, and RuntimeError for any other
        exception that is not the environment's fault: in which trajectory, and where it was raised."""
        trajectories = await side_by_side(self._play(problem, sampling, j) for j in range(sampling.n))
        if (told := _unequal_starts(problem, trajectories)) and self._settings.config.use != "program":
            raise WrongInput(f"{told}; draw everything in reset() from its seed")
        if told:  # agents write dates and folders into their prompts
            self._forks.sentences.warn_of({"starts": f"{told}; take the task from the problem, not by chance"})
        return trajectories

    async def _play(self, problem: Problem, sampling: Sampling, sample: int) -> Trajectory:
        async with self._room:
            env = EnvironmentProcess(self._forks, self._settings.config)
            try:
                policy = _Policy(self._engine, sampling, sample)
                return await self._player.play(env, policy, problem, _env_seed(self._settings.seed, problem))
            except (EngineError, WrongInput):
                raise
            except Exception as error:
                raise RuntimeError(
                    f"env: trajectory {sample} of problem {problem.id} failed, and not by its environment: "
                    f"{described(error, OF_ENVIRONMENTS)}"
                ) from error
            finally:
                await env.close()

    def close(self) -> None:
        """Ends the source of environments' processes. No group can be played afterwards."""
        self._forks.close()


class _Policy:
    """The engine as one trajectory asks it. Each turn is a request of its own, under the policy that is then newest."""

    def __init__(self, engine: Engine, sampling: Sampling, sample: int) -> None:
        self._engine, self._sampling, self._sample = engine, sampling, sample

    async def generate(self, token_ids: Sequence[int], max_tokens: int, turn: int) -> Completion:
        seed = None if self._sampling.seed is None else seed_of(self._sampling.seed, self._sample, turn)
        (completion,) = await self._engine.generate(
            token_ids, replace(self._sampling, n=1, max_tokens=max_tokens, seed=seed)
        )
        return completion


def _env_seed(run_seed: int, problem: Problem) -> int:
    """The seed for environments' resets. It depends on run and position only, so that all trajectories of a group, and
    later attempts of the group, have the same."""
    return seed_of("environment", run_seed, problem.epoch, problem.position)


def _unequal_starts(problem: Problem, trajectories: Sequence[Trajectory]) -> str:
    """What is wrong if not all trajectories of the group began alike, else ''."""
    starts = {(t.rows[0].prompt_ids, t.state) for t in trajectories if t.began}
    if len(starts) < 2:
        return ""
    what = "initial states" if len({state for _, state in starts}) > 1 else "first messages or tools"
    return (
        f"env: all trajectories of a group must begin alike, and those of {problem.id} have {len(starts)} different "
        f"{what}"
    )
