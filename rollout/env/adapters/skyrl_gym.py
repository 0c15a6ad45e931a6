"""Environments of SkyRL-Gym 0.4, unchanged: registered ones by their id, or a class of one's own."""

import asyncio
from collections.abc import Mapping
from numbers import Real
from typing import Any

from cluster.errors import WrongInput
from rewards.loader import load_own
from rollout.env.protocol import Start, Step, Turn
from rollout.schema import Problem


class SkyRLGym:
    """Drives skyrl_gym.envs.base_text_env.BaseTextEnv as SkyRL's generator does.

    The instance is made with `env_config` and, as `extras`, the problem's columns and `max_turns`; `init(messages)` may
    change the first messages; `step(text)` gives the next ones, a reward of this turn and whether it is over. An answer
    that holds `postprocessed_action`, which would change what was sampled, is refused: sampled tokens stay as they are.
    Numbers of get_metrics() are metrics of the last step.

    env: an id that skyrl_gym has registered, such as gsm8k, or path/file.py:Class of your own.
    config: the `env_config` of the instance.
    max_turns: that the instance is told; say the same in env.max_turns.

    Raises WrongInput if the package or the class is missing.
    """

    def __init__(self, env: str, config: Mapping[str, Any] | None = None, max_turns: int = 8) -> None:
        self._name, self._config, self._max_turns = env, _Config(config or {}), max_turns
        self._make = load_own(env, "MyEnv") if ":" in env else _registered(env)

    async def reset(self, problem: Problem, seed: int) -> Start:
        """skyrl_gym has no seed: an environment that draws is to take it from a column."""
        if isinstance(problem.messages, str):
            raise WrongInput("skyrl_gym: problems must be chat messages, got plain text; see data.prompt")
        extras = {"max_turns": self._max_turns, **problem.columns}
        self._env = await asyncio.to_thread(self._make, env_config=self._config, extras=extras)
        messages, _ = await asyncio.to_thread(self._env.init, [dict(message) for message in problem.messages])
        return Start(tuple(messages))

    async def step(self, turn: Turn) -> Step:
        """Passes the turn's text on. Raises WrongInput for an answer that changes it."""
        answer = await asyncio.to_thread(self._env.step, turn.text)
        changed = answer.get("postprocessed_action")
        if changed is not None and changed != turn.text:
            raise WrongInput(
                f"skyrl_gym: {self._name} changes what was sampled (postprocessed_action), which then would be no "
                "longer what the policy said; let it answer by an observation instead"
            )
        metrics = self._env.get_metrics() if answer["done"] else {}
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        return Step(tuple(answer["observations"]), float(answer["reward"]), bool(answer["done"]), numbers)

    async def score(self) -> Mapping[str, float]:
        """Turns have it all."""
        return {}

    async def close(self) -> None:
        """Closes the instance."""
        await asyncio.to_thread(self._env.close)


class _Config(dict[str, Any]):
    """As OmegaConf's: its keys are attributes, too, also of mappings in it."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"env.args.config has no {name}")
        value = self[name]
        return _Config(value) if isinstance(value, Mapping) else value


def _registered(name: str) -> Any:
    try:
        import skyrl_gym
    except ImportError as error:
        raise WrongInput(
            f"env.args.env: {name} is an environment of skyrl_gym, which does not import ({error}); run: pip install "
            "--no-deps skyrl-gym, and what the environment needs; or give path/file.py:Class"
        ) from error

    def make(**how: Any) -> Any:
        return skyrl_gym.make(name, **how)

    return make
