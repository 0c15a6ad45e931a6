"""The environment of benchmarks.system.env_concurrency: it takes its time, and sometimes goes wrong."""

import asyncio
import os
import random
import time
from collections.abc import Mapping

from rollout.env.protocol import Start, Step, Turn
from rollout.schema import Problem


class Waiting:
    """Answers after 0 to `seconds`, `turns` times. A trajectory in `every` hangs, dies or floods at its second turn."""

    def __init__(self, seconds: float, turns: int, every: int) -> None:
        self._seconds, self._turns, self._every, self._steps = seconds, turns, every, 0

    async def reset(self, problem: Problem, seed: int) -> Start:
        self._random = random.SystemRandom()
        wrong = self._every and self._random.randrange(self._every) == 0
        self._wrong = self._random.choice(["hang", "die", "flood"]) if wrong else ""
        return Start(({"role": "user", "content": str(problem.columns["question"])},), state=str(seed))

    async def step(self, turn: Turn) -> Step:
        self._steps += 1
        await asyncio.sleep(self._random.random() * self._seconds)
        if self._wrong and self._steps == 2:
            if self._wrong == "hang":
                time.sleep(3600)
            if self._wrong == "die":
                os._exit(1)
            return Step(({"role": "user", "content": "x" * 2**25},))
        return Step(({"role": "user", "content": "w1 w2 w3 w4"},), 1.0, done=self._steps == self._turns)

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None: ...
