"""Chat: turns messages into token ids and token ids into text, by the model's tokenizer, chat template and end tokens.

All prompts and completions of a run pass through it, so that text is tokenised in one place and only once.
"""

import json
import re
import resource
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from difflib import get_close_matches
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from cluster.child import forked
from cluster.errors import WrongInput
from rewards.base import opening_at_end
from rollout.architecture import text_of
from rollout.data.model_files import load_tokenizer, needs_own_code, read_json
from rollout.data.observation import MARKER, USER, Observations, TemplateRefuses
from rollout.data.ordinary_text import meaningful
from rollout.types import split

# A chat template is a program that need not end, so it is tried in a forked process that can be killed.

MORE_BYTES = 2**30  # memory that the forked process may take beyond what this process has


def fails_within(seconds: float, function: Callable[[], object]) -> str:
    """Runs `function` in a forked process. Returns what is wrong if it does not end in `seconds` or dies, else "".

    The result and exceptions of the function are ignored. It must not need threads, since the forked process has none
    of this process's threads.
    """
    (found,) = forked([partial(_ended, function)], seconds, _limit_memory)
    if found.late:
        return f"did not come to an end within {seconds:g} s"
    return "" if found.code is None else f"ended its process (exit code {found.code})"


def _ended(function: Callable[[], object]) -> None:
    with suppress(Exception):
        function()


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


# Variables of a chat template that a user sets: data.chat_template_kwargs.

# Variables that `render` sets and a user must not: the prompt's messages, and whether the assistant's turn is opened.
OURS = ("messages", "add_generation_prompt")


def check_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises WrongInput for a variable that the chat template does not read, which jinja would silently ignore."""
    if not kwargs:
        return
    if not tokenizer.chat_template:
        raise WrongInput(
            f"data.chat_template_kwargs: needs a chat template, and this tokenizer has none (got {', '.join(kwargs)}); "
            "remove the key, or use an instruct model"
        )
    known = _variables(tokenizer) - set(OURS)
    for name in kwargs:
        if name in OURS:
            raise WrongInput(
                f"data.chat_template_kwargs: {name} must not be set, since prompts are rendered with their messages "
                "and the opening of the assistant's turn; remove it"
            )
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it reads {', '.join(sorted(known)) or 'none'}"
            raise WrongInput(
                f"data.chat_template_kwargs: {name} must be a variable that the model's chat template reads, else it "
                f"is ignored; {hint}"
            )


def _variables(tokenizer: Any) -> set[str]:
    """The variables that the chat template reads and does not define itself."""
    # Only transformers' jinja environment parses the tag `generation` and loop controls.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = tokenizer.get_chat_template()
    try:
        environment = _compile_jinja_template(source).environment
        return find_undeclared_variables(environment.parse(source)) - set(environment.globals)
    except TemplateError as error:
        raise WrongInput(f"model.path: the chat template must be valid jinja, and is not: {error}") from error


# How a chat template ends the policy's turn, which is found by rendering conversations.
#
# The end of a turn need not be an end token of the model. The usual case is a base model with ChatML: its end token is
# <|endoftext|>, its template ends turns with <|im_end|>. If that were no stop token, every completion would go on to
# the length limit.

ASKED = {"role": "user", "content": "askedQ7x"}
SAID = {"role": "assistant", "content": MARKER}


class TurnEnd(NamedTuple):
    """How a chat template ends the policy's turn, if not with a stop token of the model.

    token: the added token that ends the turn; None if a stop token of the model does, or no added token. text: the text
    that ends the turn, or begins the next one, if no token ends it; "" if the template writes nothing there; None if a
    token ends the turn, or the template refuses the test conversation.
    """

    token: str | None = None
    text: str | None = None


def turn_end(observations: Observations, stops: Collection[str], added: Mapping[str, int]) -> TurnEnd:
    """Finds how a template ends the policy's turn. stops: texts of the stop tokens. added: added token -> its id."""
    last = _behind(observations, ())
    if last is None:
        return TurnEnd()
    past = _behind(observations, (ASKED,)) or ""
    there = sorted((name for name in added if name in last or name in past), key=len, reverse=True)
    tokens = re.compile("|".join(map(re.escape, there)) or r"(?!)")
    # The common part of both ends any turn. Behind the last turn the template may also write the end of the whole
    # conversation. If past turns end with another token than the last one (gpt-oss), the policy samples the last one's.
    common, last = _common(last, past, tokens), last.removesuffix(_always_opened(observations, last))
    texts = (_common(last, past, tokens), common, last, "" if last.strip() else past)
    for found in texts:
        marks = tokens.findall(found)
        if any(mark in stops for mark in marks):
            return TurnEnd()
        if marks:
            return TurnEnd(token=marks[0])
    return TurnEnd(text=next((found.rstrip().lstrip(" ") for found in texts if found.strip()), ""))


def turn_marks(observations: Observations, added: Collection[str]) -> re.Pattern[str]:
    """A pattern of the added tokens that the template writes around messages. It matches nothing if the template
    refuses the test messages."""
    try:
        text = observations.render([USER, SAID, USER])
    except TemplateRefuses:
        text = ""
    marks = sorted((name for name in added if name in text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def opens_with(observations: Observations) -> str | None:
    """The text between a user's message and the assistant's answer; None if the template refuses the test messages."""
    try:
        text = observations.render([ASKED, SAID], opened=False)
    except TemplateRefuses:
        return None
    _, asked, rest = text.partition(ASKED["content"])
    between, said, _ = rest.partition(MARKER)
    return between if asked and said else None


def behind_asked(observations: Observations, *, opened: bool = True) -> str | None:
    """The text behind a user's message at the end of a prompt; None if the template refuses the test message."""
    try:
        _, asked, rest = observations.render([ASKED], opened=opened).partition(ASKED["content"])
    except TemplateRefuses:
        return None
    return rest if asked else None


def _behind(observations: Observations, more: tuple[dict[str, str], ...]) -> str | None:
    """The text behind an assistant's message, up to the message that follows it, or to the end."""
    try:
        text = observations.render([USER, SAID, *more], opened=False)
    except TemplateRefuses:
        return None
    _, said, rest = text.partition(MARKER)
    return rest.partition(more[0]["content"])[0] if said and more else rest if said else None


def _always_opened(observations: Observations, last: str) -> str:
    """The opening of the assistant's turn at the end of `last`, if the template writes it even when not asked to."""
    behind, unasked = behind_asked(observations), behind_asked(observations, opened=False)
    if behind is None or behind != unasked:
        return ""
    size = next((i for i, (a, b) in enumerate(zip(reversed(behind), reversed(last), strict=False)) if a != b), None)
    size = min(len(behind), len(last)) if size is None else size
    return last[len(last) - size :]


def _common(last: str, past: str, tokens: re.Pattern[str]) -> str:
    """The common beginning of both texts, without a part of a token."""
    size = next((i for i, (a, b) in enumerate(zip(last, past, strict=False)) if a != b), min(len(last), len(past)))
    cut = next((match.start() for match in tokens.finditer(last) if match.start() < size < match.end()), size)
    return last[:cut]


LONGEST_TAG = 32  # most tokens of an opening tag, white space included
Messages = Sequence[Mapping[str, Any]]
Prompt = tuple[dict[str, Any], ...] | str
Template = Literal["auto", "none"]
NO_TEMPLATE = "this tokenizer has no chat template, or data.chat_template is none"


class Chat:
    """Writes and reads conversations as one model does, by its chat template, tokenizer and end tokens.

    With a chat template, a prompt is a list of messages, rendered up to the opening of the assistant's turn. Without
    one (a base model, or data.chat_template: none), a prompt is plain text: the contents of the system and the user
    message with a blank line between them, encoded as the tokenizer encodes any text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        vocabulary: int,
        config: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        _check_tokens(tokenizer, stop_ids, vocabulary)
        self.tokenizer, self._template_kwargs = tokenizer, dict(template_kwargs or {})
        self._vocabulary, self._model_stops = vocabulary, tuple(stop_ids)
        check_kwargs(tokenizer, self._template_kwargs)
        if "strftime_now" in str(tokenizer.chat_template):  # one date, so that no group has two prompts at midnight
            self._template_kwargs["strftime_now"] = datetime.now().strftime
        self.config: dict[str, Any] = dict(config or {})  # the model's config.json
        self.has_template = bool(tokenizer.chat_template)
        self._stop = tuple(stop)
        self._dropped: set[int] = set()  # stop tokens that were left out at the end of prompts
        self._marked = Counter[frozenset[str]]()  # turn marks in the text of a prompt -> how many prompts hold them

    @classmethod
    def load(
        cls,
        path: str,
        template_kwargs: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        *,
        template: Template = "auto",
    ) -> "Chat":
        """The chat of the model at `path`, a folder or a hub name. Raises WrongInput.

        template_kwargs: variables of the chat template (data.chat_template_kwargs). stop: rollout.stop; the special
        tokens among these strings are left out at the end of prompts, as end tokens are. template: data.chat_template.
        """
        config = read_json(path, "config.json")
        if not config:
            raise WrongInput(f"model.path: must be a folder or hub name with a config.json, got {path}; check the name")
        if own := needs_own_code(config):
            raise WrongInput(
                f"model.path: {path} needs Python code that comes with the model ({own}), and such code is never run; "
                "give a model whose architecture transformers itself has"
            )
        if not isinstance(config.get("text_config", {}), dict):
            raise WrongInput(f"model.path: text_config in config.json of {path} must be a mapping; copy the file again")
        vocabulary = text_of(config).get("vocab_size")
        if not vocabulary:
            raise WrongInput(f"model.path: config.json of {path} has no vocab_size; give a causal language model")
        tokenizer = load_tokenizer(path)
        if not hasattr(tokenizer, "get_added_vocab"):
            raise WrongInput(
                f"model.path: the tokenizer of {path} is transformers' {type(tokenizer).__name__}, which renders no "
                "chat template and names no added tokens; give a folder with a tokenizer.json"
            )
        if template == "none":
            tokenizer.chat_template = None
        # config.json counts if there is no generation_config.json, as in transformers' generate.
        generation = read_json(path, "generation_config.json") or text_of(config)
        ends = [tokenizer.eos_token_id, generation.get("eos_token_id")]
        flat = [i for end in ends if end is not None for i in (end if isinstance(end, list) else [end])]
        context = text_of(config).get("max_position_embeddings", 0)
        _check_whole(path, {"vocab_size": [vocabulary], "eos_token_id": flat, "max_position_embeddings": [context]})
        known = [i for i in dict.fromkeys(flat) if 0 <= i < int(vocabulary)]  # other ids can never be sampled
        return cls(tokenizer, known, int(vocabulary), config, template_kwargs, stop)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end the policy's turn: the model's end tokens, and that of the chat template if it differs."""
        token = self._turn_end.token
        return self._model_stops if token is None else (*self._model_stops, self._added[token])

    @cached_property
    def observations(self) -> Observations:
        """The converter of the messages that follow a sampled turn."""
        return Observations(self.tokenizer, self.stop_ids, self._template_kwargs)

    @cached_property
    def _added(self) -> dict[str, int]:
        """Text -> id of the added tokens that have a meaning (rollout.data.ordinary_text) and are in the model."""
        return {text: id_ for text, id_ in meaningful(self.tokenizer).items() if id_ < self._vocabulary}

    @cached_property
    def _turn_end(self) -> TurnEnd:
        """How the template ends turns. It is found on the first use, so that `try_template` can come before."""
        if not self.has_template:
            return TurnEnd()
        template = Observations(self.tokenizer, self._model_stops, self._template_kwargs)
        return turn_end(template, {self.decode([one], special=True) for one in self._model_stops}, self._added)

    def notes(self, stop: Sequence[str]) -> tuple[str, ...]:
        """Lines for the user about prompts and ends of turns, once prompts were rendered. stop: rollout.stop."""
        told = []
        if (token := self._turn_end.token) is not None:
            told.append(
                f"model.path: the chat template ends turns with {token!r}, which is no end token of the model: it is "
                "taken as one, in training, evaluation, gleaner serve and gleaner export"
            )
        if (text := self._turn_end.text) is not None and not stop:
            behind = f"ends turns with the text {text!r}" if text else "writes nothing at the end of a turn"
            named = json.dumps([text]) if text else "what ends an answer"
            told.append(
                f"rollout.stop: the chat template {behind} and with no end token, so that a completion may go on to "
                f"rollout.max_completion_length; set rollout.stop to {named}"
            )
        if self._marked:
            names = ", ".join(map(repr, sorted(frozenset().union(*self._marked))))
            told.append(
                f"data: {self._marked.total()} of the prompts looked at hold {names} in a message, with which the chat "
                "template marks turns: it is rendered within a turn all the same; where such a text is a whole prompt, "
                "rendered already, set data.chat_template: none, and the model continues it as it stands"
            )
        return (*told, *self.left_out())

    def left_out(self) -> tuple[str, ...]:
        """A line for each stop token that was left out at the end of prompts; these are part of `notes`."""
        what = "chat template" if self.has_template else "tokenizer"
        tokens = sorted(self.decode([one], special=True) for one in self._dropped)
        return tuple(f"data: the {what} ends prompts with the stop token {one!r}, which is left out" for one in tokens)

    @property
    def context(self) -> int | None:
        """Most tokens that prompt and completion may have together; None if config.json does not say."""
        return text_of(self.config).get("max_position_embeddings")

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[Prompt, tuple[int, ...]]:
        """Returns (the prompt: messages, or plain text without a template; its token ids [P]). Raises WrongInput.

        tools: the tools that the policy may call, in the form of rollout.env.protocol.ToolSpec.
        """
        if tools and not self.has_template:
            raise WrongInput(
                f"model.path: tools need a chat template, and {NO_TEMPLATE}; use that of an instruct model"
            )
        if not self.has_template:
            text = _plain(messages)
            return text, self._known(self._open_ended(self._encoded(text), text))
        prompt = tuple(dict(message) for message in messages)
        if marks := frozenset(mark for one in prompt for mark in self._turn_marks.findall(str(one["content"]))):
            self._marked[marks] += 1
        try:
            # Without return_dict=False, transformers 5 returns a dictionary of ids and mask.
            ids = self.tokenizer.apply_chat_template(
                list(prompt),
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                return_dict=False,
                **self._template_kwargs,
            )
        except Exception as error:  # a template is a program and may raise any exception
            raise _refused(prompt, error) from error
        return prompt, self._known(self._open_ended(ids, prompt[-1]["content"]))

    def _encoded(self, text: str) -> Sequence[int]:
        """The ids of a plain text. If the text begins with the tokenizer's bos token, that token is not added again."""
        ids: list[int] = self.tokenizer.encode(text)
        twice = len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id
        return ids[1:] if twice and text.startswith(str(self.tokenizer.bos_token)) else ids

    @cached_property
    def _turn_marks(self) -> re.Pattern[str]:
        """A pattern of the special tokens that the chat template writes around messages, except the bos token."""
        return turn_marks(self.observations, [name for name in self._added if name != self.tokenizer.bos_token])

    def converse(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """The ids [P] of a conversation with an environment, as `render` gives them; but text in a message makes no
        special token, unless it is rollout.data.ordinary_text.OwnText."""
        if not self.has_template:
            return self.render(messages, tools)[1]
        try:
            ids = self.observations.played_ids(messages, tools)
        except TemplateRefuses as error:
            raise _refused(messages, error.__cause__ or error) from error
        return self._known(self._open_ended(ids, ""))

    def count(self, text: str) -> int:
        """How many tokens a text has by itself."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def observe(
        self, messages: Messages, closed_by: int | None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """The token ids that follow a sampled turn: these messages, as the template writes them, and the opening of the
        next turn.

        messages: of roles tool and user, with text as contents.
        closed_by: the last token of the sampled turn, if it is a stop token, which is not written again; None if the
            turn was cut off or ended with a stop string, so that the template's own ending comes first.
        tools: the tools that the conversation began with.

        Raises UnclosedTurn if the template ends such a turn with another stop token, WrongInput if it refuses the
        messages, drops them, or ends a past turn in an unknown way.
        """
        if not self.has_template:
            raise WrongInput(
                f"model.path: a conversation of several turns needs a chat template, and {NO_TEMPLATE}; use that of an "
                "instruct model"
            )
        return self._known(self._open_ended(self.observations.ids(messages, closed_by, tools), ""))

    def prefilled(self, prompt_ids: Sequence[int]) -> str:
        """The opening tag, such as <think>, with which a prompt ends, and the white space behind it; "" for none."""
        return self._opening(tuple(prompt_ids[-LONGEST_TAG:]))

    @cached_property
    def _opening(self) -> Callable[[tuple[int, ...]], str]:
        """Finds the opening tag at the end of ids, with a cache, since most prompts of a template end alike."""
        return lru_cache(maxsize=1024)(lambda ids: opening_at_end(self.decode(ids, special=True)))

    def _open_ended(self, ids: Sequence[int], said: str) -> Sequence[int]:
        """The ids of a prompt without stop tokens at its end, behind which the policy would not answer. said: the last
        text in the prompt. Raises WrongInput if a stop token is part of that text, or ends the user's turn in a
        template that does not open the assistant's."""
        size = len(ids)
        while size and ids[size - 1] in self._ends:
            size -= 1
        if size == len(ids):
            return ids
        token = self.decode([ids[size]], special=True)
        if token and said.rstrip().endswith(token):
            raise WrongInput(
                f"data: a prompt must not end with a stop token, behind which the policy would not answer, and one "
                f"ends with {token!r}; take it out of the text"
            )
        if self.has_template and not self._ends_anew:
            raise WrongInput(
                f"model.path: the chat template must open the assistant's turn, and ends prompts with the stop token "
                f"{token!r} of the user's; give a template that writes the opening where add_generation_prompt is set"
            )
        self._dropped |= set(ids[size:])
        return ids[:size]

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self.stops(self._stop)[0])

    @cached_property
    def _ends_anew(self) -> bool:
        """Whether what the template writes at the end of a prompt is more than the end of the user's turn, which also
        stands between a user's message and the answer."""
        between, behind = opens_with(self.observations), behind_asked(self.observations)
        return between is None or behind is None or not between.startswith(behind.rstrip())

    def try_template(self, seconds: float, roles: Sequence[str]) -> None:
        """Renders short conversations in a forked process: one of these roles, and one with an assistant's turn. Raises
        WrongInput if the template does not end in `seconds`. An exception of the template is left to `render`."""

        def rendered() -> object:  # only text, since a forked process lacks the threads of the tokenizer
            return [
                self.tokenizer.apply_chat_template(
                    [{"role": role, "content": "1+1?"} for role in of], add_generation_prompt=True, tokenize=False,
                    **self._template_kwargs,
                )
                for of in (roles, ("user", "assistant", "user"))
            ]  # fmt: skip

        if self.has_template and (wrong := fails_within(seconds, rendered)):
            raise WrongInput(f"model.path: the model's chat template {wrong}; correct it, or give another model")

    def stops(self, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Returns (ids that end a completion: stop_ids and the special tokens among `strings`; the other strings).
        strings: rollout.stop. Raises WrongInput for a string that could never end a completion."""
        ids, others = split(self.tokenizer, strings)
        return tuple(dict.fromkeys([*self.stop_ids, *ids])), others

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids [T], exactly as it was generated. Special tokens and a stop token at the end are left
        out unless `special`, since several models mark tool calls with special tokens."""
        if not special and len(ids) and ids[-1] == self._silent_stop:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return str(text)

    @cached_property
    def _silent_stop(self) -> int | None:
        """A stop token that only the chat template has; `decode` leaves it out, since it may not be special."""
        token = self._turn_end.token
        return None if token is None else self._added[token]

    def _known(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the ids. Raises WrongInput for an id that the model does not have."""
        if (highest := max(ids, default=0)) >= self._vocabulary:
            raise WrongInput(
                f"data: the text holds {self.tokenizer.convert_ids_to_tokens(highest)!r}, a special token of the "
                f"tokenizer (id {highest}) that the model, of vocab_size {self._vocabulary}, does not have; take it out"
            )
        return tuple(ids)


def _refused(messages: Messages, error: BaseException) -> WrongInput:
    roles = ", ".join(message["role"] for message in messages)
    said = " ".join(str(error).split())[:300]
    said = said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}"
    return WrongInput(
        f"data: the model's chat template must accept the roles {roles}, and says: {said}; where it knows no system "
        "role, set data.system: null and put the instruction into data.prompt"
    )


def prompt_of(messages: Messages, *, template: bool) -> Prompt:
    """The prompt as reward functions are given it: messages if the model has a chat template, else plain text. Raises
    WrongInput."""
    return tuple(dict(message) for message in messages) if template else _plain(messages)


def _plain(messages: Messages) -> str:
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise WrongInput(
            f"data.prompt: {NO_TEMPLATE}, so a prompt must be one text, got a conversation of roles "
            f"{', '.join(roles)}; use the chat template of an instruct model, or a column of text"
        )
    return "\n\n".join(message["content"] for message in messages)


def _check_tokens(tokenizer: Any, stop_ids: Sequence[int], vocabulary: int) -> None:
    # A special token with a higher id, as Gemma 3 has for images, does no harm until a prompt holds it.
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    highest = max(set(tokenizer.get_vocab().values()) - special, default=0)
    if highest >= vocabulary:
        raise WrongInput(
            f"model.path: every token id must lie below the model's vocab_size {vocabulary}, and the tokenizer has "
            f"id {highest} ({tokenizer.convert_ids_to_tokens(highest)!r}); give the tokenizer that the model was "
            "trained with, or resize the model's embeddings"
        )
    if not stop_ids:
        raise WrongInput(
            "model.path: generation must be able to end, and neither the tokenizer nor generation_config.json "
            "names an end token; set eos_token in the tokenizer"
        )


def _check_whole(path: str, numbers: Mapping[str, Sequence[Any]]) -> None:
    for name, values in numbers.items():
        if not all(isinstance(value, int) for value in values):
            raise WrongInput(
                f"model.path: {name} of {path} must be given in whole numbers (config.json, generation_config.json), "
                f"got {str(values)[:80]}; copy the files again"
            )
