"""An environment that goes wrong for every third trajectory, each time in another way. Loaded by its file."""

import os
import time
from collections.abc import Mapping

from rollout.env.protocol import Start, Step, Turn
from rollout.schema import Problem

WRONG = {1: "raise", 4: "kill", 7: "hang", 10: "flood"}  # of twelve trajectories in the order of their starts


class Wild:
    """Asks twice. begun: a file, to which each trajectory adds a byte, so that no batch has more faults than its part
    of WRONG."""

    def __init__(self, begun: str) -> None:
        self._begun = begun

    async def reset(self, problem: Problem, seed: int) -> Start:
        with open(self._begun, "ab") as file:
            file.write(b".")
            file.flush()
            self._wrong = WRONG.get(file.tell() % 12, "")
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
