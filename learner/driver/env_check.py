"""An environment tried once before a run: does it begin, and can the model's chat template carry its turns."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cluster import confinement
from learner.config import RunConfig
from learner.driver.findings import PreflightError
from learner.driver.prompt_check import check_prompts
from learner.driver.trials import TOOL_PARSER, tried
from rollout.data.chat import Chat
from rollout.data.files import Row
from rollout.data.observation_check import check, hidden_tools, loses
from rollout.env.config import ENVIRONMENT
from rollout.env.play import opened
from rollout.env.processes.forks import Forks, spec_of
from rollout.env.processes.process import EnvironmentProcess
from rollout.env.program import Asked
from rollout.env.protocol import Start, ToolSpec, own_messages
from rollout.env.tools.tool_parser import is_hermes, written_by
from rollout.env.trajectory import EnvironmentFault
from rollout.schema import Problem


class Tried(NamedTuple):
    """notes: lines for the user. tools: tokens that the tools take in a prompt, beside the problem's own."""

    notes: tuple[str, ...] = ()
    tools: int = 0


def check_environment_column(config: RunConfig, rows: Iterable[Row]) -> None:
    """Where the data names an environment class for each problem (trl_environment), whether there is that class. Raises
    PreflightError."""
    factories = config.env.args.get("factory")
    if config.env.use != "trl_environment" or not isinstance(factories, Mapping):
        return
    for number, row in enumerate(rows):
        name = row.get(ENVIRONMENT)
        if not isinstance(name, str) or name not in factories:
            raise PreflightError(
                f"env.args.factory: must have what the column `{ENVIRONMENT}` of each row names, and training row "
                f"{number} names {name!r:.80}; it has {', '.join(map(str, factories))}; add that, or correct the row"
            )


def check_environment(config: RunConfig, chat: Chat, problem: Problem) -> Tried:
    """Begins one environment on the first problem, in a process like those of the run, and ends it; then tries the chat
    template and the parser of tool calls.

    Raises PreflightError, or what rollout.env.processes.process.spec_of raises.
    """
    if config.env.use is None:
        return Tried()
    if not chat.has_template:
        raise PreflightError(
            "env.use: an environment needs a model with a chat template, which says how its answers are written; "
            f"{config.model.path} has none; give an instruct model, or leave env out"
        )
    try:
        start = asyncio.run(_begun(config, problem))
    except EnvironmentFault as fault:
        raise PreflightError(f"env.use: {config.env.use}: {fault.sentence}") from None
    length, tools = _lengths(chat, start, problem)
    if length > config.rollout.max_prompt_length >= len(problem.prompt_ids) + tools:  # else all problems are looked at
        raise PreflightError(
            f"rollout.max_prompt_length: must hold the environment's first messages and tools, which take {length} "
            f"tokens of problem {problem.id}, got {config.rollout.max_prompt_length}; raise it"
        )
    if isinstance(start, Asked):  # a program writes its prompts itself
        return Tried()
    check_prompts(chat, config.model.path, [opened(start, problem)])
    if start.tools:
        _check_tools(config, chat, start.tools)
    return Tried((*_check_template(config, chat, start.tools), *_open_walls(config)), tools)


def _open_walls(config: RunConfig) -> list[str]:
    """What the Python tool's code can do here, since this kernel lacks a wall around it."""
    functions = config.env.args.get("functions", ())
    if not any(
        str(one).endswith("python_code:python") for one in ([functions] if isinstance(functions, str) else functions)
    ):
        return []
    found = confinement.missed(confinement.walls())
    return [
        f"env.args.functions: the Python tool is not kept in on this kernel; {one} (gleaner doctor)" for one in found
    ]


def _lengths(chat: Chat, start: Start | Asked, problem: Problem) -> tuple[int, int]:
    """Tokens that the trajectory begins with, and those of the tools among them; 0 where the environment begins with
    other messages than the problem's own, whose length says nothing then."""
    if isinstance(start, Asked):
        return len(start.token_ids), 0
    messages = opened(start, problem)
    length = len(chat.converse(messages, start.tools))
    if not start.tools or own_messages(problem)[-1]["content"] not in messages[-1]["content"]:
        return length, 0
    return length, length - len(chat.converse(messages))


def _check_tools(config: RunConfig, chat: Chat, tools: Sequence[ToolSpec]) -> None:
    if hidden := hidden_tools(chat.observations, tools):
        raise PreflightError(
            f"env.use: the model's chat template must write the tools into the prompt, and leaves out "
            f"{', '.join(hidden)}; give a model whose template knows tools"
        )
    if not is_hermes(written_by(chat), config.env.tool_parser):
        tried(TOOL_PARSER, config, "env.tool_parser", "parser")


def _check_template(config: RunConfig, chat: Chat, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
    """What the template does with the answers that the environment is likely to give: of tools where it has some."""
    if config.env.history == "template":
        _check_rendered(chat, tools)
        return ()
    notes = []
    for roles in [("tool",), ("tool", "tool")] if tools else [("user",)]:
        verdict, named = check(chat.observations, roles, tools), " and ".join(roles)
        if verdict.state == "refused" and len(roles) == 1:
            raise PreflightError(
                f"env.use: the model's chat template must take an answer of role {named}, and {verdict.reason}; give a "
                "model whose template does"
            )
        if verdict.state == "varies" and config.env.history == "refuse":
            raise PreflightError(
                f"env.history: refuse, and the model's chat template writes answers of role {named} differently after "
                f"different turns: {verdict.reason}; set append, or give another model"
            )
        if verdict.state != "exact":
            notes.append(f"env: answers of role {named}: the model's chat template {verdict.state}: {verdict.reason}")
    return tuple(notes)


def _check_rendered(chat: Chat, tools: Sequence[ToolSpec]) -> None:
    """Whether the template writes an answer behind a turn as it was sampled, the calls in its text
    (rollout.env.dialogue.ChatDialogue.past)."""
    role, written = "tool" if tools else "user", written_by(chat) if tools else []
    if wrong := loses(chat.observations, written[0].one if written else "A turn.", role, tools):
        raise PreflightError(
            f"env.history: template, and the model's chat template must write an answer of role {role} behind a turn "
            f"whose calls are text, and {wrong}; set append, or give another model"
        )


async def _begun(config: RunConfig, problem: Problem) -> Start | Asked:
    forks = Forks(spec_of(config.env))
    env = EnvironmentProcess(forks, config.env)
    try:
        return await env.reset(problem, config.seed)
    finally:
        await env.close()
        forks.close()
