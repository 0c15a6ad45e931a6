"""The checks of the model, its chat template, the environment and the user's functions, which learner.driver.preflight
makes before a run starts.

Checks that need torch or vLLM run in a process of their own with a deadline (Trial): --dry-run itself loads neither.
"""

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any, NamedTuple

from cluster import confinement, own_path
from cluster.child import Program, nameless, tied, written
from cluster.errors import WrongInput
from learner.config import RunConfig
from learner.config.settings import LoraConfig
from learner.driver.evaluate import accuracy_of
from learner.driver.failure import Findings
from learner.driver.identity import base_name, same_base
from learner.driver.machine_checks import classifier_notes
from learner.model.adapter_config import (
    NOTE,
    VLLM_FOLDER,
    check_reference,
    follow,
    read_adapter,
    read_content,
    served,
)
from rewards.base import tag_of
from rewards.built_in.format import TAGS
from rewards.built_in.unit_tests import late
from rewards.call import Group
from rewards.check import try_rewards, withheld_notes
from rewards.config import RewardConfig, functions_of
from rewards.loader import BUILT_INS, no_file, no_function
from rollout.architecture import (
    check_architecture,
    check_length,
    check_on_cpu,
    check_shards,
    check_type,
    has_experts,
    text_of,
)
from rollout.data.chat import Chat, Messages, Prompt
from rollout.data.files import Row
from rollout.data.model_files import CONFIG, read_json, template_in
from rollout.data.observation import TemplateRefuses, check, hidden_tools, loses
from rollout.data.weight_names import check_adapter, check_copy, check_model, sizes_of
from rollout.env.config import ENVIRONMENT
from rollout.env.play import begin
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from rollout.env.protocol import Asked, Question, Start, ToolSpec, own_messages
from rollout.env.tools.parser import is_hermes, written_by
from rollout.env.trajectory import EnvironmentFault
from rollout.quantised import check_base, check_kernel, format_of
from rollout.schema import Problem

LEARNER, SHARED_BASE = "learner.model.trial model", "learner.model.trial shared_base"
LOSS = "learner.trainer.loss_trial"
ENGINE, TEACHER, TOOL_PARSER, GRAMMAR = (
    f"rollout.vllm.trial {kind}" for kind in ("engine", "teacher", "parser", "form")
)

log = logging.getLogger("learner")


class Trial:
    """A check in a process of its own, `python -m <module and kind>`. The process reads the configuration as JSON, and
    prints a JSON list of mistakes as its last line.

    module: module and kind. key: the setting that is checked. what: what that setting names, for messages.
    """

    def __init__(self, module: str, config: RunConfig, key: str = "model.path", what: str = "model") -> None:
        self._module, self._deadline = module, config.cluster.deadlines.start
        self._key, self._what = key, what
        self._begin = time.monotonic()
        self._out, self._err = nameless(), nameless()
        with nameless(config.model_dump_json().encode()) as given:
            self._program = Program(
                tied(*module.split()), stdin=given, stdout=self._out, stderr=self._err,
                env={**os.environ, **own_path.environment()},
            )  # fmt: skip

    def finish(self) -> None:
        """Waits for the result, and logs the process's notes. Raises WrongInput with a line for each mistake."""
        if not self._program.within(max(self._deadline - (time.monotonic() - self._begin), 0.1)):
            self.close()
            raise WrongInput(
                f"{self._key}: {self._module} did not come to an end within {self._deadline:g} s "
                f"(cluster.patience); give another {self._what}, or raise that"
            )
        out, err = written(self._out), written(self._err)
        try:
            wrong = json.loads(out.splitlines()[-1])
        except (IndexError, ValueError):
            last = next(reversed(err.strip().splitlines()), f"exit code {self._program.code()}")
            raise WrongInput(f"{self._key}: {self._module} could not try the {self._what}: {last[:300]}") from None
        for line in err.splitlines():  # libraries write to standard error, too
            if line.startswith(NOTE):
                log.warning(line.removeprefix(NOTE))
        if wrong:
            raise WrongInput("\n".join(" ".join(line.split()) for line in wrong))

    def close(self) -> None:
        """Kills the process and all that it has started. May be called after finish()."""
        self._program.kill()
        self._program.code()
        self._out.close()
        self._err.close()


def tried(module: str, config: RunConfig, key: str, what: str) -> None:
    """Makes a Trial and waits for its result. Raises as Trial.finish."""
    trial = Trial(module, config, key, what)
    try:
        trial.finish()
    finally:
        trial.close()


# Whether the model's chat template writes the text of every message into the prompt.

MARK = "said{}x"  # letters and digits; the x keeps a mark from being the beginning of another


def check_data_prompts(config: RunConfig, chat: Chat, prompts: Iterable[Prompt]) -> None:
    """`check_prompts` for the prompts of the data; with an environment `check_environment` checks its messages."""
    if config.env.use is None:
        check_prompts(chat, config.model.path, prompts)


def check_prompts(chat: Chat, model: str, prompts: Iterable[Prompt]) -> None:
    """Renders a conversation for each set of roles that occurs in the prompts. Raises WrongInput if the template leaves
    out a message: a template that does not know the role system, such as Phi-3-mini's, omits it without an error."""
    tried = set()
    for prompt in prompts:
        if isinstance(prompt, str):  # without a template nothing is left out
            continue
        roles = frozenset(message["role"] for message in prompt if message["content"].strip())
        if roles in tried:
            continue
        tried.add(roles)
        if (role := _left_out(chat, prompt)) is None:
            continue
        what = f"data: the chat template of {model} leaves out what a message of role {role} says"
        if role == "system":
            raise WrongInput(
                f"{what}, so that the policy would never read it; put it into the user's text (data.prompt: 'Be brief. "
                "{question}', without data.system or a message of that role), or give another model or template"
            )
        raise WrongInput(
            f"{what}, in a conversation of roles {', '.join(message['role'] for message in prompt)}; take that message "
            "out, or give another model or template"
        )


def _left_out(chat: Chat, prompt: Messages) -> str | None:
    """The role of the first message that the rendered text leaves out, or None."""
    marks = [MARK.format(index) for index in range(len(prompt))]
    marked = [{**said, "content": f"{said['content']} {mark}"} for said, mark in zip(prompt, marks, strict=True)]
    try:
        text = chat.observations.render(marked)
    except TemplateRefuses:  # the template refuses only the mark, since the prompt itself was rendered before
        return None
    wanted = zip(prompt, marks, strict=True)
    return next((str(said["role"]) for said, mark in wanted if said["content"].strip() and mark not in text), None)


# The user's own functions: rewards and a surrogate loss.


def check_accuracy(config: RunConfig) -> None:
    """Raises WrongInput if data.eval.reward is not one of the rewards."""
    try:
        accuracy_of(config)
    except ValueError as error:
        raise WrongInput(str(error)) from None


def check_loss(config: RunConfig) -> None:
    """Tries a surrogate loss of the user's on a few tokens, in a process that imports torch. Raises WrongInput."""
    if config.learner.loss.own:
        tried(LOSS, config, "learner.loss.ratio", "loss")


def check_grammar(config: RunConfig) -> None:
    """Raises WrongInput if rollout.structured_outputs cannot be compiled for the model."""
    if config.rollout.structured_outputs.form:
        tried(GRAMMAR, config, "rollout.structured_outputs", "form")


def check_uses(config: RunConfig) -> None:
    """Checks that the built-ins and files that `rewards` names exist, where the functions cannot be tried yet. Raises
    WrongInput with a line for each that does not."""
    wrong = []
    for reward in functions_of(config.rewards):
        place, colon, _ = reward.use.rpartition(":")
        file = place if colon else reward.use
        if file.endswith(".py") and not Path(file).is_file():
            wrong.append(f"reward {reward.name!r}: {no_file(Path(file).absolute())}; correct rewards: use")
        elif not colon and not file.endswith(".py") and reward.use not in BUILT_INS:
            wrong.append(f"reward {reward.name!r}: {no_function(reward.use)}")
    if wrong:
        raise WrongInput("\n".join(wrong))


def dummies(prompt: Prompt, columns: Row, prefilled: str = "") -> Group:
    """A group of two dummy completions, to try reward functions on. prefilled: opening tag at the end of the prompt."""
    return Group.of(prompt, ["", "0"], [[0], [0]], columns, prefilled)


def try_functions(config: RunConfig, group: Group) -> tuple[str, ...]:
    """Calls each reward function once, in a process like those of the run. Returns lines for the user. Raises
    WrongInput."""
    functions = functions_of(config.rewards)
    if not functions:
        return ()
    for i, reward in enumerate(config.rewards):
        size = config.rollout.num_generations
        if reward.use == "unit_tests" and (wrong := late(reward.args, size, reward.timeout_s)):
            raise WrongInput(f"rewards.{i}.{wrong}")
    return try_rewards(functions, group, config.rollout.reward_memory).notes


def check_rewards(
    config: RunConfig, problem: Problem, prefilled: str, tried: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Lines for the user about the reward functions, and about what their settings mean for this model. Raises as
    try_functions.

    prefilled: the opening tag that prompts end in, or "". tried: the result of try_functions on a problem like this
    one; None: try them now.
    """
    if tried is None:
        tried = try_functions(config, dummies(problem.messages, problem.columns, prefilled))
    functions = functions_of(config.rewards)
    return (*tried, *requests_notes(functions), *classifier_notes(config), *prefilled_notes(functions, prefilled))


def requests_notes(functions: Sequence[RewardConfig]) -> list[str]:
    """Lines for the user about environment variables that are kept from the reward functions, whose requests may then
    go to another address (rewards.check.withheld_notes)."""
    return [note for i, reward in enumerate(functions) for note in withheld_notes(reward, f"rewards.{i}")]


def prefilled_notes(functions: Sequence[RewardConfig], prefilled: str) -> list[str]:
    """Lines for the user about an opening tag that prompts end in: completions then begin inside of that tag."""
    if not prefilled or not functions:
        return []
    told = (
        f"data: prompts end with {prefilled!r}, so that completions begin inside of that tag: built-in rewards that "
        "look for it read them with it in front; regex and your own functions do not (a parameter `prefilled` has it)"
    )
    notes = [told]
    tag = tag_of(prefilled)
    for i, reward in enumerate(functions):
        tags = reward.args.get("tags", TAGS)
        if reward.use == "format" and tag not in tags:
            notes.append(
                f"rewards.{i}: format wants the tags {', '.join(map(str, tags))} and nothing around them, and "
                f"completions begin inside of <{tag}>: none can score; set args.tags, for example [{tag}, answer]"
            )
        pattern = str(reward.args.get("pattern", ""))
        anchored = reward.args.get("full") or re.match(r"(\(\?[a-zA-Z]+\))?(\^|\\A)", pattern)
        if reward.use == "regex" and (anchored or f"<{tag}>" in pattern):
            notes.append(
                f"rewards.{i}: args.pattern {pattern!r} is held against completions without the {prefilled!r} that "
                "prompts end with; let it begin behind that"
            )
    return notes


# The environment: whether it begins, and whether the model's chat template can render its turns.


class Tried(NamedTuple):
    """The result of a trial of the environment. notes: lines for the user. tools: number of tokens that the tools take
    in a prompt, beside the problem's own."""

    notes: tuple[str, ...] = ()
    tools: int = 0


def check_environment_column(config: RunConfig, rows: Iterable[Row]) -> None:
    """Checks, where each row of the data names its environment class (trl_environment), that the class exists. Raises
    WrongInput."""
    factories = config.env.args.get("factory")
    if config.env.use != "trl_environment" or not isinstance(factories, Mapping):
        return
    for number, row in enumerate(rows):
        name = row.get(ENVIRONMENT)
        if not isinstance(name, str) or name not in factories:
            raise WrongInput(
                f"env.args.factory: must have what the column `{ENVIRONMENT}` of each row names, and training row "
                f"{number} names {name!r:.80}; it has {', '.join(map(str, factories))}; add that, or correct the row"
            )


def check_environment(config: RunConfig, chat: Chat, problem: Problem) -> Tried:
    """Begins an environment on the problem, in a process like those of the run, and ends it. Then tries the chat
    template and the parser of tool calls.

    Raises WrongInput, or what rollout.env.process.spec_of raises.
    """
    if config.env.use is None:
        return Tried()
    if not chat.has_template:
        raise WrongInput(
            "env.use: an environment needs a model with a chat template, which says how its answers are written; "
            f"{config.model.path} has none; give an instruct model, or leave env out"
        )
    try:
        start = asyncio.run(_begun(config, problem))
    except EnvironmentFault as fault:
        raise WrongInput(f"env.use: {config.env.use}: {fault.sentence}") from None
    length, tools = _lengths(chat, start, problem)
    # If the problem itself is too long with the tools, the check of all problems (Problems.fitting) reports it.
    if length > config.rollout.max_prompt_length >= len(problem.prompt_ids) + tools:
        raise WrongInput(
            f"rollout.max_prompt_length: must hold the environment's first messages and tools, which take {length} "
            f"tokens of problem {problem.id}, got {config.rollout.max_prompt_length}; raise it"
        )
    if isinstance(start, Question):  # a program makes its prompts itself, without the chat template
        return Tried()
    check_prompts(chat, config.model.path, [begin(start, problem).messages])
    if start.tools:
        _check_tools(config, chat, start.tools)
    return Tried((*_check_template(config, chat, start.tools), *_open_walls(config)), tools)


def _open_walls(config: RunConfig) -> list[str]:
    """A line for each protection that this kernel lacks against the code that the Python tool runs."""
    functions = config.env.args.get("functions", ())
    if not any(
        str(one).endswith("python_code:python") for one in ([functions] if isinstance(functions, str) else functions)
    ):
        return []
    found = confinement.missed(confinement.walls())
    return [
        f"env.args.functions: the Python tool is not kept in on this kernel; {one} (gleaner doctor)" for one in found
    ]


def _lengths(chat: Chat, start: Start | Question | Asked, problem: Problem) -> tuple[int, int]:
    """Number of tokens that the trajectory begins with, and how many of them are the tools'. The latter is 0 where the
    environment begins with other messages than the problem's, whose length then does not matter."""
    if isinstance(start, Question):
        return len(start.token_ids), 0
    messages = begin(start, problem).messages
    length = len(chat.converse(messages, start.tools))
    if not start.tools or own_messages(problem)[-1]["content"] not in messages[-1]["content"]:
        return length, 0
    return length, length - len(chat.converse(messages))


def _check_tools(config: RunConfig, chat: Chat, tools: Sequence[ToolSpec]) -> None:
    if hidden := hidden_tools(chat.observations, tools):
        raise WrongInput(
            f"env.use: the model's chat template must write the tools into the prompt, and leaves out "
            f"{', '.join(hidden)}; give a model whose template knows tools"
        )
    if not is_hermes(written_by(chat), config.env.tool_parser):
        tried(TOOL_PARSER, config, "env.tool_parser", "parser")


def _check_template(config: RunConfig, chat: Chat, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
    """Lines for the user about how the template renders answers of the environment: those of its tools, if it has any,
    else those of role user. Raises WrongInput."""
    if config.env.history == "template":
        _check_rendered(chat, tools)
        return ()
    notes = []
    for roles in [("tool",), ("tool", "tool")] if tools else [("user",)]:
        verdict, named = check(chat.observations, roles, tools), " and ".join(roles)
        if verdict.state == "refused" and len(roles) == 1:
            raise WrongInput(
                f"env.use: the model's chat template must take an answer of role {named}, and {verdict.reason}; give a "
                "model whose template does"
            )
        if verdict.state == "varies" and config.env.history == "refuse":
            raise WrongInput(
                f"env.history: refuse, and the model's chat template writes answers of role {named} differently after "
                f"different turns: {verdict.reason}; set append, or give another model"
            )
        if verdict.state != "exact":
            notes.append(f"env: answers of role {named}: the model's chat template {verdict.state}: {verdict.reason}")
    return tuple(notes)


def _check_rendered(chat: Chat, tools: Sequence[ToolSpec]) -> None:
    """Raises WrongInput if the template loses text when it renders an answer behind a turn whose calls are part of its
    text, as sampled (rollout.env.play.ChatDialogue.past)."""
    role, written = "tool" if tools else "user", written_by(chat) if tools else []
    if wrong := loses(chat.observations, written[0].one if written else "A turn.", role, tools):
        raise WrongInput(
            f"env.history: template, and the model's chat template must write an answer of role {role} behind a turn "
            f"whose calls are text, and {wrong}; set append, or give another model"
        )


async def _begun(config: RunConfig, problem: Problem) -> Start | Question | Asked:
    forks = Forks(spec_of(config.env, config.rollout.environment_memory))
    env = EnvironmentProcess(forks, config.env)
    try:
        return await env.reset(problem, config.seed)
    finally:
        await env.close()
        forks.close()


# The model: tokenizer and chat template, architecture, the files of base and adapters.

TEMPLATE_S = 20.0  # most seconds for rendering one conversation, which takes milliseconds


def load_chat(config: RunConfig) -> Chat:
    """The model's tokenizer and template. Raises WrongInput if model, template, hardware or lengths do not fit."""
    data = config.data
    _check_name(config.model.path)
    chat = Chat.load(config.model.source, data.chat_template_kwargs, config.rollout.stop, template=data.chat_template)
    system = (config.data.system, config.data.teacher.system) != (None, None)
    chat.try_template(TEMPLATE_S, ["system", "user"] if system else ["user"])
    chat.stops(config.rollout.stop)
    _check_context(config, chat.context)
    check_architecture(chat.config, config.model.path, lora=config.learner.mode == "lora")
    check_type(chat.config, config.model.path, config.model.dtype)
    if config.cluster.gpus.generator == 0:
        check_on_cpu(chat.config, config.model.path)
    check_shards(chat.config, config.model.path, config.cluster.shards)
    _check_quantised(config, chat.config)
    if config.rollout.routing_replay and not has_experts(chat.config):
        raise WrongInput(
            f"rollout.routing_replay: needs a model with routed experts, and {config.model.path} (model_type "
            f"{chat.config.get('model_type')}) has none; leave it out"
        )
    longest = _longest_prompt(config)[0] + config.rollout.max_completion_length
    check_length(chat.config, config.model.path, longest)
    return chat


def _check_quantised(config: RunConfig, told: Mapping[str, Any]) -> None:
    """Raises WrongInput if the model's files are quantised and cannot be the frozen base of this run."""
    packed, path = format_of(told, config.model.path), config.model.path
    if packed is None:
        return
    check_base(packed, path, {
        "learner.mode: full": config.learner.mode == "full",
        "learner.push: merged": config.learner.push == "merged",
        "model.base: nf4": config.model.base == "nf4",
        "memory.layout: shared": config.arrangement.one_base,
        "memory.layout: sharded": config.arrangement.in_shards,
        "cluster.tensor_parallel": config.cluster.shards > 1,
    })  # fmt: skip
    check_kernel(packed, path, config.model.dtype, cuda=config.cluster.gpus.generator > 0)


def _check_name(path: str) -> None:
    folder = Path(path).expanduser().absolute()
    if has_magic(str(folder)) and folder.is_dir():
        raise WrongInput(
            f"model.path: a folder's path must be without * ? and [, which vLLM takes for a pattern of file names, got "
            f"{folder}; rename it, or give a link to it that has another name"
        )


def _longest_prompt(config: RunConfig) -> tuple[int, str]:
    """Returns (tokens of the longest prompt of policy and teacher, the settings that bound it with its completion)."""
    own, taught = config.rollout.max_prompt_length, config.data.teacher.longest
    if taught > own:
        return taught, "data.teacher.max_prompt_length + rollout.max_completion_length"
    return own, "rollout: max_prompt_length + max_completion_length"


def _check_context(config: RunConfig, context: int | None) -> None:
    prompt, names = _longest_prompt(config)
    need = prompt + config.rollout.max_completion_length
    if context is not None and need > context:
        raise WrongInput(f"{names} must be at most the model's context of {context} tokens, got {need}")


def check_weights(config: RunConfig, *, followed: bool) -> None:
    """Raises WrongInput if a file of the base or of an adapter is damaged, lacks a tensor or holds numbers that are not
    finite. A hub model is looked for only in the cache. followed: whether follow_adapter accepted the adapters and the
    reference; those that it refused are not checked again."""
    found, model = Findings(), config.model
    found.of(check_model, model.source)
    if model.reference is not None and config.learner.mode == "full" and followed:
        found.of(check_model, model.reference, "model.reference")
    for key, folder in adapters_in(config) if followed else ():
        found.of(check_lora, folder, key, model.source)
    found.finish()


def adapters_in(config: RunConfig) -> list[tuple[str, str]]:
    """Pairs of setting and folder, for the policy's and the reference's adapter."""
    if config.learner.mode == "full":  # model.reference is then a whole model, and there is no adapter
        return []
    named = (("model.adapter", config.model.adapter), ("model.reference", config.model.reference))
    return [(key, folder) for key, folder in named if folder is not None]


def check_lora(folder: str, key: str, base: str | None) -> None:
    """Raises WrongInput if the file of a plain LoRA adapter is damaged, or if its layers are not those of the base,
    unless that is None, or if the base does not exist."""
    sizes = None if base is None else sizes_of(read_json(base, CONFIG))
    check_adapter(folder, key, read_adapter(folder, key), sizes)


def check_served(folder: str, key: str, base: str | None) -> None:
    """As check_lora, also for the copy under vLLM's names in the adapter's folder, which must have the same layers.
    Adapters of Llama 4 that others trained have no such copy, and vLLM would compute something else with them."""
    check_lora(folder, key, base)
    copy = served(Path(folder))
    if copy == Path(folder):
        if base is not None and text_of(read_json(base, CONFIG)).get("model_type") == "llama4_text":
            raise WrongInput(
                f"{key}: an adapter of Llama 4 must have a copy in the order of rows that vLLM computes with, and "
                f"{folder} has no {VLLM_FOLDER}/; give model.adapter: {folder} to a run, whose adapters have one"
            )
    else:
        check_lora(str(copy), key, base)
        check_copy(folder, str(copy), key, read_adapter(folder, key), read_adapter(str(copy), key))


def check_unmerged(folder: Path, key: str, next_step: str = "") -> None:
    """Raises WrongInput if the adapter changes experts, for which vLLM has no LoRA on a CPU, and which its server is
    given merged. next_step: what else can be done, with an `or` at its end."""
    if read_content(str(folder), key).get("target_parameters"):
        raise WrongInput(
            f"{key}: must leave the experts as they are, which are served merged alone here, and {folder} adapts "
            f"them; {next_step}merge it (gleaner export RUN OUT), and give the model that it makes"
        )


def follow_adapter(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Fills in the fields that learner.lora leaves open from model.adapter, and checks the reference. Returns the new
    configuration and a line for the user. Raises WrongInput."""
    if config.model.reference is not None and config.learner.mode == "full":
        check_reference(config.model.reference, config.model.source)
    elif config.model.reference is not None:
        read_adapter(config.model.reference, "model.reference")
    if config.model.adapter is None:
        return config, ()
    lora = follow(config.learner.lora, config.model.adapter)
    if lora.adapts_experts and config.learner.pushes_adapters and config.cluster.gpus.generator == 0:
        raise WrongInput(
            f"model.adapter: an adapter of experts needs learner.push=merged where generators are on a CPU, "
            f"{config.model.adapter} is one, and got learner.push=adapter; set that, or give an adapter of other layers"
        )
    open_fields = [name for name in LoraConfig.model_fields if name not in config.learner.lora.model_fields_set]
    followed = ", ".join(f"{name} {getattr(lora, name)}" for name in open_fields)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})
    return config, (f"learner.lora follows model.adapter: {followed}",) if followed else ()


def adapter_notes(folder: str | None, key: str, model: str, chat: Chat) -> tuple[str, ...]:
    """Lines for the user about an adapter that may belong to another base, or was trained with another chat template.
    Raises WrongInput if its base is on this machine and is not model.path, or if its chat template cannot be read."""
    if folder is None:
        return ()
    notes, base = [], str(read_content(folder, key).get("base_model_name_or_path") or model)
    if (same := same_base(base, model)) is False:
        raise WrongInput(
            f"{key}: base_model_name_or_path of {folder} is {base_name(base)}, whose weights are not those of "
            f"model.path, {model} (it would make another policy of it); give one of this base, or write model.path "
            "there if it is meant"
        )
    if same is None:
        notes.append(
            f"{key}: {folder} was trained on {base_name(base)} (base_model_name_or_path of its adapter_config.json), "
            f"and model.path is {model}: if that is another base, it makes another policy of it"
        )
    own = template_in(Path(folder).expanduser(), key, "copy it again, or take it away")
    if own is not None and chat.has_template and own.strip() != str(chat.tokenizer.chat_template or "").strip():
        notes.append(
            f"{key}: {folder} has a chat template of its own, which is not that of {model}, and prompts are written "
            "with the latter; put its chat_template.jinja into the model's folder if the adapter was trained with it"
        )
    return tuple(notes)
