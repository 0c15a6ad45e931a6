"""An environment that goes wrong for every fourth trajectory, each time in another way. Loaded by its file."""

import os
import random
import time
from collections.abc import Mapping

from rollout.env.protocol import Start, Step, Turn
from rollout.schema import Problem


class Wild:
    """Asks twice; what goes wrong is drawn in its own process."""

    async def reset(self, problem: Problem, seed: int) -> Start:
        self._wrong = random.SystemRandom().choice(["raise", "kill", "hang", "flood"] + [""] * 12)
        self._steps = 0
        return Start(({"role": "user", "content": str(problem.columns["question"])},), state=str(seed))

    async def step(self, turn: Turn) -> Step:
        self._steps += 1
        match self._wrong:
            case "raise":
                raise ValueError("wild")
            case "kill":
                os.kill(os.getpid(), 9)
            case "hang":
                time.sleep(600)
            case "flood":
                return Step(({"role": "user", "content": "x" * 2**25},))
        return Step(({"role": "user", "content": "And again?"},), len(turn.token_ids) / 100, done=self._steps == 2)

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None: ...
