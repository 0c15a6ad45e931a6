"""A program in its process, served like an environment: question, answer, next question."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

from rollout.env.processes.wire import BadAnswer
from rollout.env.program import Asked, Model, NoMore, OutOfBudget, Program, Sampled
from rollout.env.protocol import Step
from rollout.schema import Problem


class Driven:
    """A program as its process serves it: each answer to it leads to its next question, or to its end."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._task: asyncio.Task[Mapping[str, float]] | None = None
        self._questions: asyncio.Queue[Asked] = asyncio.Queue()
        self._answers: asyncio.Queue[Sampled | NoMore] = asyncio.Queue()
        self._turn = asyncio.Lock()  # questions that come together are answered one after the other

    async def reset(self, problem: Problem, seed: int) -> Asked:
        """The first question. Raises BadAnswer if there is none, and what the program raises."""
        self._task = asyncio.create_task(_run(self._program, problem, seed, self))
        first = await self._next()
        if isinstance(first, Step):
            raise BadAnswer("run: must ask the policy for a turn before it ends, and did not")
        return first

    async def step(self, answer: Sampled | NoMore) -> Asked | Step:
        """Answers the last question -> the next one, or that the program has ended."""
        self._answers.put_nowait(answer)
        return await self._next()

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Sampled:
        """For the program: see Model."""
        async with self._turn:
            self._questions.put_nowait(Asked(tuple(token_ids), max_tokens))
            answer = await self._answers.get()
        if isinstance(answer, NoMore):
            raise OutOfBudget(answer.reason)
        return answer

    async def score(self) -> Mapping[str, float]:
        """What the program returned."""
        assert self._task is not None
        return await self._task

    async def close(self) -> None:
        """Ends the program where it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _next(self) -> Asked | Step:
        assert self._task is not None
        question = asyncio.ensure_future(self._questions.get())
        await asyncio.wait([question, self._task], return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return question.result()
        question.cancel()
        await self._task  # raises what it raised
        return Step(done=True)


async def _run(program: Program, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
    try:
        running = program.run(problem, seed, model)
        if not isinstance(running, Awaitable):
            raise BadAnswer("run: must be `async def`, since it waits for the policy")
        return await running
    except OutOfBudget:  # an end as others are: rollout.env.drive knows of which kind
        return {}
