"""Variables of a chat template that a user sets: data.chat_template_kwargs."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

# What rendering itself sets: the prompt's messages, and the opening of the assistant's turn.
OURS = ("messages", "add_generation_prompt")


class TemplateKwargsError(ValueError):
    """data.chat_template_kwargs that would be ignored, or that contradict how prompts are rendered."""


def check_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises TemplateKwargsError for a variable that the tokenizer's chat template does not read: jinja would ignore
    it without a word."""
    if not kwargs:
        return
    if not tokenizer.chat_template:
        raise TemplateKwargsError(
            f"data.chat_template_kwargs: needs a chat template, and this tokenizer has none (got {', '.join(kwargs)}); "
            "remove the key, or use an instruct model"
        )
    known = _variables(tokenizer) - set(OURS)
    for name in kwargs:
        if name in OURS:
            raise TemplateKwargsError(
                f"data.chat_template_kwargs: {name} must not be set, since prompts are rendered with their messages "
                "and the opening of the assistant's turn; remove it"
            )
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it reads {', '.join(sorted(known)) or 'none'}"
            raise TemplateKwargsError(
                f"data.chat_template_kwargs: {name} must be a variable that the model's chat template reads, else it "
                f"is ignored; {hint}"
            )


def _variables(tokenizer: Any) -> set[str]:
    """The variables that the chat template reads and does not define itself."""
    # With its own tags (generation) and loop controls, which only transformers' environment parses.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = tokenizer.get_chat_template()
    try:
        environment = _compile_jinja_template(source).environment
        return find_undeclared_variables(environment.parse(source)) - set(environment.globals)
    except TemplateError as error:
        raise TemplateKwargsError(f"model.path: the chat template must be valid jinja, and is not: {error}") from error
