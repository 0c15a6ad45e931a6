"""An environment tried once before a run: does it begin, and can the model's chat template carry its turns."""

import asyncio

from learner.config import RunConfig
from learner.driver.findings import PreflightError
from rollout.data.chat import Chat
from rollout.env.play import EnvironmentFault, opened
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from rollout.env.protocol import Start
from rollout.schema import Problem


def check_environment(config: RunConfig, chat: Chat, problem: Problem) -> None:
    """Begins one environment on the first problem, in a process like those of the run, and ends it. Raises
    PreflightError, or what rollout.env.process.spec_of raises."""
    if config.env.use is None:
        return
    if not chat.has_template:
        raise PreflightError(
            "env.use: an environment needs a model with a chat template, which says how its answers are written; "
            f"{config.model.path} has none; give an instruct model, or leave env out"
        )
    try:
        start = asyncio.run(_begun(config, problem))
    except EnvironmentFault as fault:
        raise PreflightError(f"env.use: {config.env.use}: {fault.sentence}") from None
    length = len(chat.render(opened(start, problem), start.tools)[1])
    if length > config.rollout.max_prompt_length:
        raise PreflightError(
            f"rollout.max_prompt_length: must hold the environment's first messages and tools, which take {length} "
            f"tokens of problem {problem.id}, got {config.rollout.max_prompt_length}; raise it"
        )


async def _begun(config: RunConfig, problem: Problem) -> Start:
    forks = Forks(spec_of(config.env))
    env = EnvironmentProcess(forks, config.env)
    try:
        return await env.reset(problem, config.seed)
    finally:
        await env.close()
        forks.close()
