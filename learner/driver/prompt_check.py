"""Whether the model's chat template writes into a prompt what each of its messages says."""

from collections.abc import Iterable

from learner.config import RunConfig
from rollout.data.chat import Chat, Messages, Prompt
from rollout.data.chat_error import ChatError
from rollout.data.observation import TemplateRefuses

MARK = "said{}x"  # letters and digits, of which none is the beginning of another


def check_data_prompts(config: RunConfig, chat: Chat, prompts: Iterable[Prompt]) -> None:
    """Those of the data. An environment may begin with others, which learner.driver.env_check tries."""
    if config.env.use is None:
        check_prompts(chat, config.model.path, prompts)


def check_prompts(chat: Chat, model: str, prompts: Iterable[Prompt]) -> None:
    """Tries one conversation for each set of roles among the prompts. Raises ChatError: a template that knows no role
    system, such as Phi-3-mini's, leaves its messages out without a word."""
    tried = set()
    for prompt in prompts:
        if isinstance(prompt, str):  # without a template all is written
            continue
        roles = frozenset(message["role"] for message in prompt if message["content"].strip())
        if roles in tried:
            continue
        tried.add(roles)
        if (role := _left_out(chat, prompt)) is None:
            continue
        what = f"data: the chat template of {model} leaves out what a message of role {role} says"
        if role == "system":
            raise ChatError(
                f"{what}, so that the policy would never read it; put it into the user's text (data.prompt: 'Be brief. "
                "{question}', without data.system or a message of that role), or give another model or template"
            )
        raise ChatError(
            f"{what}, in a conversation of roles {', '.join(message['role'] for message in prompt)}; take that message "
            "out, or give another model or template"
        )


def _left_out(chat: Chat, prompt: Messages) -> str | None:
    """The role of the first message that is not in the text, if there is one."""
    marks = [MARK.format(index) for index in range(len(prompt))]
    marked = [{**said, "content": f"{said['content']} {mark}"} for said, mark in zip(prompt, marks, strict=True)]
    try:
        text = chat.observations.render(marked)
    except TemplateRefuses:  # the mark alone: the prompt itself was rendered
        return None
    wanted = zip(prompt, marks, strict=True)
    return next((str(said["role"]) for said, mark in wanted if said["content"].strip() and mark not in text), None)
