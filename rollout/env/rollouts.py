"""The trajectories of a group, each with an environment of its own, side by side."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rewards.described import OF_ENVIRONMENTS, described
from rollout.engine import Engine
from rollout.env.config import EnvConfig
from rollout.env.play import Limits, Player
from rollout.env.processes.forks import Forks, spec_of
from rollout.env.processes.process import EnvironmentProcess
from rollout.env.tools.tool_parser import ToolParserError
from rollout.env.trajectory import Trajectory
from rollout.schema import Problem
from rollout.seeds import seed_of
from rollout.side_by_side import side_by_side
from rollout.types import Completion, EngineError, Sampling


class UnequalStart(ValueError):
    """Environments of one group began differently, so their rewards cannot be compared."""


class TrajectoryFailed(RuntimeError):
    """An exception in a trajectory that is neither its environment's fault nor an error of the engine; the message says
    in which trajectory, and where it was raised."""


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """What a rollout process needs to play trajectories; resolved, no "auto". seed: of the run; chat_template_kwargs:
    of config.data. alone: nothing but the environment gives rewards."""

    config: EnvConfig
    limits: Limits
    concurrency: int
    seed: int
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False


class Trajectories:
    """Plays groups; at most `concurrency` trajectories at once, of whichever groups."""

    def __init__(self, settings: EnvSettings, engine: Engine, player: Player) -> None:
        self._settings, self._engine, self._player = settings, engine, player
        self._forks = Forks(spec_of(settings.config))
        self._room = asyncio.Semaphore(settings.concurrency)

    async def group(self, problem: Problem, sampling: Sampling) -> list[Trajectory]:
        """sampling.n trajectories of the problem. Raises UnequalStart, TrajectoryFailed, and EngineError."""
        trajectories = await side_by_side(self._play(problem, sampling, j) for j in range(sampling.n))
        _check_start(problem, trajectories)
        return trajectories

    async def _play(self, problem: Problem, sampling: Sampling, sample: int) -> Trajectory:
        async with self._room:
            env = EnvironmentProcess(self._forks, self._settings.config)
            try:
                policy = _Policy(self._engine, sampling, sample)
                return await self._player.play(env, policy, problem, _env_seed(self._settings.seed, problem))
            except (EngineError, ToolParserError):
                raise
            except Exception as error:
                raise TrajectoryFailed(
                    f"env: trajectory {sample} of problem {problem.id} failed, and not by its environment: "
                    f"{described(error, OF_ENVIRONMENTS)}"
                ) from error
            finally:
                await env.close()

    def close(self) -> None:
        """No group can be played after this."""
        self._forks.close()


class _Policy:
    """The engine, for one trajectory. Each turn is a request of its own, under the newest policy at its time."""

    def __init__(self, engine: Engine, sampling: Sampling, sample: int) -> None:
        self._engine, self._sampling, self._sample = engine, sampling, sample

    async def generate(self, token_ids: Sequence[int], max_tokens: int, turn: int) -> Completion:
        seed = None if self._sampling.seed is None else seed_of(self._sampling.seed, self._sample, turn)
        (completion,) = await self._engine.generate(
            token_ids, replace(self._sampling, n=1, max_tokens=max_tokens, seed=seed)
        )
        return completion


def _env_seed(run_seed: int, problem: Problem) -> int:
    """Of the problem's place in the run: the same for the whole group, and for a group that is issued again."""
    return seed_of("environment", run_seed, problem.epoch, problem.position)


def _check_start(problem: Problem, trajectories: Sequence[Trajectory]) -> None:
    starts = {(t.rows[0].prompt_ids, t.state) for t in trajectories if t.began}
    if len(starts) > 1:
        what = "initial states" if len({state for _, state in starts}) > 1 else "first messages or tools"
        raise UnequalStart(
            f"env: all trajectories of a group must begin alike, and those of {problem.id} have {len(starts)} "
            f"different {what}; draw everything in reset() from its seed"
        )
