"""Messages to token ids and back: the only user of the chat template, so text is tokenised in one place and once."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jinja2 import TemplateError

from rollout.architecture import text_of
from rollout.data.bounded import fails_within
from rollout.data.template import TemplateKwargsError, check_kwargs
from rollout.remote_code import needs_own_code
from rollout.stopping import StopError, split

Messages = Sequence[Mapping[str, str]]
Prompt = tuple[dict[str, str], ...] | str

# Tokenizers that AutoTokenizer would load with this very class. Named here because the class alone does not import
# torch and AutoTokenizer does: 2 s instead of 6 s, and 300 MB less in every process that only needs the words.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class ChatError(ValueError):
    """A tokenizer or a conversation that cannot be used; the message says which, why, and what to do."""


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
        highest = max(tokenizer.get_vocab().values())
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
        self._tokenizer, self._template_kwargs = tokenizer, dict(template_kwargs or {})
        try:
            check_kwargs(tokenizer, self._template_kwargs)
        except TemplateKwargsError as error:
            raise ChatError(str(error)) from error
        self.stop_ids = tuple(stop_ids)
        self.config: dict[str, Any] = dict(config or {})  # the model's config.json
        self.has_template = bool(tokenizer.chat_template)

    @classmethod
    def load(cls, path: str, template_kwargs: Mapping[str, Any] | None = None) -> "Chat":
        """The chat of the model at `path`, a folder or a hub name; `template_kwargs` are variables of its chat template
        (data.chat_template_kwargs). Raises ChatError."""
        config = _read_json(path, "config.json")
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
        tokenizer = _tokenizer(path)
        # As transformers' generate: config.json counts where there is no generation_config.json.
        generation = _read_json(path, "generation_config.json") or text_of(config)
        ends = [tokenizer.eos_token_id, generation.get("eos_token_id")]
        flat = [i for end in ends if end is not None for i in (end if isinstance(end, list) else [end])]
        context = text_of(config).get("max_position_embeddings", 0)
        _check_whole(path, {"vocab_size": [vocabulary], "eos_token_id": flat, "max_position_embeddings": [context]})
        known = [i for i in dict.fromkeys(flat) if i < int(vocabulary)]  # another can never be sampled
        return cls(tokenizer, known, int(vocabulary), config, template_kwargs)

    @property
    def context(self) -> int | None:
        """Tokens that prompt and completion may have together; None where the model says nothing."""
        return text_of(self.config).get("max_position_embeddings")

    def render(self, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        """What the model is given (messages, or plain text without a template) and its token ids [P]."""
        if not self.has_template:
            text = self._plain(messages)
            return text, tuple(self._tokenizer.encode(text))
        prompt = tuple(dict(message) for message in messages)
        try:
            # return_dict: transformers 5 answers with a dictionary of ids and mask unless told not to.
            ids = self._tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, return_dict=False, **self._template_kwargs
            )
        except Exception as error:  # a template is a program: besides TemplateError it raises what its values raise
            roles = ", ".join(message["role"] for message in prompt)
            said = " ".join(str(error).split())[:300]
            said = said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}"
            raise ChatError(
                f"data: the model's chat template must accept the roles {roles}, and says: {said}; where it knows no "
                "system role, set data.system: null and put the instruction into data.prompt"
            ) from error
        return prompt, tuple(ids)

    def try_template(self, seconds: float, roles: Sequence[str]) -> None:
        """Renders a short conversation of these roles in a process that can be killed. Raises ChatError if the template
        does not come to an end in `seconds`; an error that it raises itself is left to `render`."""
        messages = [{"role": role, "content": "1+1?"} for role in roles]

        def rendered() -> object:  # as text: the tokenizer's own threads are not there in a copy of this process
            return self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._template_kwargs
            )

        if self.has_template and (wrong := fails_within(seconds, rendered)):
            raise ChatError(f"model.path: the model's chat template {wrong}; correct it, or give another model")

    def stops(self, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What ends a completion: the model's end tokens and those of rollout.stop that are special tokens, by id; and
        the other strings. Raises ChatError for a string that could never end one."""
        try:
            ids, others = split(self._tokenizer, strings)
        except StopError as error:
            raise ChatError(str(error)) from error
        return tuple(dict.fromkeys([*self.stop_ids, *ids])), others

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids [T] -> text, without special tokens and otherwise exactly as it was generated."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _plain(self, messages: Messages) -> str:
        roles = [message["role"] for message in messages]
        if roles not in (["user"], ["system", "user"]):
            raise ChatError(
                f"data.prompt: this tokenizer has no chat template, so a prompt must be one text, got a conversation "
                f"of roles {', '.join(roles)}; use an instruct model, or a column of text"
            )
        return "\n\n".join(message["content"] for message in messages)


def _check_whole(path: str, numbers: Mapping[str, Sequence[Any]]) -> None:
    for name, values in numbers.items():
        if not all(isinstance(value, int) for value in values):
            raise ChatError(
                f"model.path: {name} of {path} must be given in whole numbers (config.json, generation_config.json), "
                f"got {str(values)[:80]}; copy the files again"
            )


def _tokenizer(path: str) -> Any:
    try:
        if _read_json(path, "tokenizer_config.json").get("tokenizer_class") in PLAIN_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except ChatError:
        raise
    except Exception as error:  # the tokenizers library has no exceptions of its own
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        if "custom code" in reason:
            raise ChatError(
                f"model.path: the tokenizer of {path} needs Python code that comes with it, and such code is never "
                "run; save it as a tokenizer.json, or give another model"
            ) from error
        raise ChatError(f"model.path: {path} must hold a tokenizer that transformers can load: {reason}") from error


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # a name that is too long
        return False


def _read_json(path: str, name: str) -> dict[str, Any]:
    """One JSON file of a model folder or of a hub model; empty where the model has no such file."""
    if _is_folder(path):
        file = Path(path) / name
    elif Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ChatError(f"model.path: folder must exist, got {path}; check the path, or give a hub name like org/model")
    else:
        try:
            file = Path(hf_hub_download(path, name))
        except LocalEntryNotFoundError as error:
            raise ChatError(
                f"model.path: {path} is neither a folder here nor a hub model in the cache, and the hub cannot be "
                "reached; download it first (hf download), or give a folder"
            ) from error
        except EntryNotFoundError:
            return {}
        except (HfHubHTTPError, HFValidationError) as error:
            raise ChatError(
                f"model.path: must be a folder or a hub model that you may read, got {path[:100]}: "
                f"{str(error).strip().splitlines()[0][:200]}; check the name, or log in with: hf auth login"
            ) from error
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:200]
        raise ChatError(f"model.path: {file} cannot be read as JSON: {said}; copy it again") from error
    if not isinstance(content, dict):
        raise ChatError(f"model.path: {file} must hold a mapping, got {type(content).__name__}; copy it again")
    return content
