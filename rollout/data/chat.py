"""Messages to token ids and back: the only user of the chat template, so text is tokenised in one place and once."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from rollout.architecture import text_of
from rollout.data.bounded import fails_within
from rollout.data.chat_error import ChatError as ChatError  # here too: whoever uses Chat catches it
from rollout.data.model_files import load_tokenizer, read_json
from rollout.data.observation import Observations
from rollout.data.template import TemplateKwargsError, check_kwargs
from rollout.remote_code import needs_own_code
from rollout.stopping import StopError, split

Messages = Sequence[Mapping[str, Any]]
Prompt = tuple[dict[str, Any], ...] | str


class Chat:
    """How a model writes conversations: its chat template, tokenizer and end tokens.

    Where the tokenizer has a chat template, a prompt is its messages and is rendered with the opening of the
    assistant's turn. Where it has none (a base model), a prompt is plain text: the contents of the system and the user
    message, a blank line between them, encoded as the tokenizer encodes any text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        vocabulary: int,
        config: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        _check_tokens(tokenizer, stop_ids, vocabulary)
        self.tokenizer, self._template_kwargs = tokenizer, dict(template_kwargs or {})
        self._vocabulary = vocabulary
        try:
            check_kwargs(tokenizer, self._template_kwargs)
        except TemplateKwargsError as error:
            raise ChatError(str(error)) from error
        if "strftime_now" in str(tokenizer.chat_template):  # else a group that begins at midnight has two prompts
            self._template_kwargs["strftime_now"] = datetime.now().strftime
        self.stop_ids = tuple(stop_ids)
        self.config: dict[str, Any] = dict(config or {})  # the model's config.json
        self.has_template = bool(tokenizer.chat_template)
        self.observations = Observations(tokenizer, self.stop_ids, self._template_kwargs)

    @classmethod
    def load(cls, path: str, template_kwargs: Mapping[str, Any] | None = None) -> "Chat":
        """The chat of the model at `path`, a folder or a hub name; `template_kwargs` are variables of its chat template
        (data.chat_template_kwargs). Raises ChatError."""
        config = read_json(path, "config.json")
        if not config:
            raise ChatError(f"model.path: must be a folder or hub name with a config.json, got {path}; check the name")
        if own := needs_own_code(config):
            raise ChatError(
                f"model.path: {path} needs Python code that comes with the model ({own}), and such code is never run; "
                "give a model whose architecture transformers itself has"
            )
        if not isinstance(config.get("text_config", {}), dict):
            raise ChatError(f"model.path: text_config in config.json of {path} must be a mapping; copy the file again")
        vocabulary = text_of(config).get("vocab_size")
        if not vocabulary:
            raise ChatError(f"model.path: config.json of {path} has no vocab_size; give a causal language model")
        tokenizer = load_tokenizer(path)
        # As transformers' generate: config.json counts where there is no generation_config.json.
        generation = read_json(path, "generation_config.json") or text_of(config)
        ends = [tokenizer.eos_token_id, generation.get("eos_token_id")]
        flat = [i for end in ends if end is not None for i in (end if isinstance(end, list) else [end])]
        context = text_of(config).get("max_position_embeddings", 0)
        _check_whole(path, {"vocab_size": [vocabulary], "eos_token_id": flat, "max_position_embeddings": [context]})
        known = [i for i in dict.fromkeys(flat) if 0 <= i < int(vocabulary)]  # another can never be sampled
        return cls(tokenizer, known, int(vocabulary), config, template_kwargs)

    @property
    def context(self) -> int | None:
        """Tokens that prompt and completion may have together; None where the model says nothing."""
        return text_of(self.config).get("max_position_embeddings")

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[Prompt, tuple[int, ...]]:
        """What the model is given (messages, or plain text without a template) and its token ids [P].

        tools: what it may call, in the form of rollout.env.protocol.ToolSpec.
        """
        if tools and not self.has_template:
            raise ChatError(
                "model.path: tools need a chat template, and this tokenizer has none; use an instruct model"
            )
        if not self.has_template:
            text = _plain(messages)
            return text, self._known(self.tokenizer.encode(text))
        prompt = tuple(dict(message) for message in messages)
        try:
            # return_dict: transformers 5 answers with a dictionary of ids and mask unless told not to.
            ids = self.tokenizer.apply_chat_template(
                list(prompt),
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                return_dict=False,
                **self._template_kwargs,
            )
        except Exception as error:  # a template is a program: besides TemplateError it raises what its values raise
            roles = ", ".join(message["role"] for message in prompt)
            said = " ".join(str(error).split())[:300]
            said = said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}"
            raise ChatError(
                f"data: the model's chat template must accept the roles {roles}, and says: {said}; where it knows no "
                "system role, set data.system: null and put the instruction into data.prompt"
            ) from error
        return prompt, self._known(ids)

    def count(self, text: str) -> int:
        """Tokens of a piece of text by itself."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def observe(
        self, messages: Messages, closed_by: int | None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Token ids that the template puts behind a sampled turn: these messages (roles tool and user, contents as
        text), and the opening of the next turn.

        closed_by: the last token of the sampled turn, a stop token, which is not written again; None where the turn
            was cut off or ended with a stop string, so that the template's own ending comes first.
        tools: those that the conversation began with.

        Raises UnclosedTurn if the template ends such a turn with another stop token, ChatError if it refuses the
        messages, drops them, or ends a turn that is past in a way that is not recognised.
        """
        if not self.has_template:
            raise ChatError(
                "model.path: a conversation of several turns needs a chat template, and this tokenizer has none; use "
                "an instruct model"
            )
        return self._known(self.observations.ids(messages, closed_by, tools))

    def try_template(self, seconds: float, roles: Sequence[str]) -> None:
        """Renders a short conversation of these roles in a process that can be killed. Raises ChatError if the template
        does not come to an end in `seconds`; an error that it raises itself is left to `render`."""
        messages = [{"role": role, "content": "1+1?"} for role in roles]

        def rendered() -> object:  # as text: the tokenizer's own threads are not there in a copy of this process
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._template_kwargs
            )

        if self.has_template and (wrong := fails_within(seconds, rendered)):
            raise ChatError(f"model.path: the model's chat template {wrong}; correct it, or give another model")

    def stops(self, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What ends a completion: the model's end tokens and those of rollout.stop that are special tokens, by id; and
        the other strings. Raises ChatError for a string that could never end one."""
        try:
            ids, others = split(self.tokenizer, strings)
        except StopError as error:
            raise ChatError(str(error)) from error
        return tuple(dict.fromkeys([*self.stop_ids, *ids])), others

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Token ids [T] -> text exactly as it was generated, without special tokens unless `special`: several models
        mark tool calls with them."""
        text = self.tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return str(text)

    def _known(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids. Raises ChatError for one that the model does not have."""
        if (highest := max(ids, default=0)) >= self._vocabulary:
            raise ChatError(
                f"data: the text holds {self.tokenizer.convert_ids_to_tokens(highest)!r}, a special token of the "
                f"tokenizer (id {highest}) that the model, of vocab_size {self._vocabulary}, does not have; take it out"
            )
        return tuple(ids)


def _plain(messages: Messages) -> str:
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise ChatError(
            f"data.prompt: this tokenizer has no chat template, so a prompt must be one text, got a conversation "
            f"of roles {', '.join(roles)}; use an instruct model, or a column of text"
        )
    return "\n\n".join(message["content"] for message in messages)


def _check_tokens(tokenizer: Any, stop_ids: Sequence[int], vocabulary: int) -> None:
    # A special token beyond them, as Gemma 3's for images, does no harm until a prompt holds it.
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    highest = max(set(tokenizer.get_vocab().values()) - special, default=0)
    if highest >= vocabulary:
        raise ChatError(
            f"model.path: every token id must lie below the model's vocab_size {vocabulary}, and the tokenizer has "
            f"id {highest} ({tokenizer.convert_ids_to_tokens(highest)!r}); give the tokenizer that the model was "
            "trained with, or resize the model's embeddings"
        )
    if not stop_ids:
        raise ChatError(
            "model.path: generation must be able to end, and neither the tokenizer nor generation_config.json "
            "names an end token; set eos_token in the tokenizer"
        )


def _check_whole(path: str, numbers: Mapping[str, Sequence[Any]]) -> None:
    for name, values in numbers.items():
        if not all(isinstance(value, int) for value in values):
            raise ChatError(
                f"model.path: {name} of {path} must be given in whole numbers (config.json, generation_config.json), "
                f"got {str(values)[:80]}; copy the files again"
            )
