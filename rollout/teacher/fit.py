"""Whether a model can teach the policy of a run: checked before anything starts, without loading its weights."""

from collections.abc import Iterator, Mapping
from typing import Any

from cluster.errors import WrongInput
from rollout.architecture import check_causal, check_on_cpu, check_shards, check_type, text_of
from rollout.data.chat import Chat
from rollout.data.model_files import CONFIG, load_tokenizer, read_json
from rollout.data.weight_names import check_model
from rollout.quantised import is_quantised

KEY = "model.teacher"
CARDS = "cluster.gpus.teacher"


def check_teacher(
    teacher: str, chat: Chat, policy: str, longest: int, dtype: str, *, cuda: bool, shards: int
) -> tuple[str, ...]:
    """Lines for the user about the teacher, a folder, hub name or name@revision.

    chat, policy: of the policy's model. longest: tokens of the longest prompt with its completion. cuda, shards:
    whether the teacher is on cards, and on how many.

    Raises WrongInput if it is no causal language model that vLLM serves so, if its context is too short, if a file of
    its weights is damaged, or if a token that the policy may sample is another one, or none, to it.
    """
    config = read_json(teacher, CONFIG, KEY)
    if not config:
        raise WrongInput(f"{KEY}: {teacher} has no {CONFIG}; give the folder or the hub name of a model")
    check_causal(config, teacher, KEY)
    check_type(config, teacher, dtype)
    check_shards(config, teacher, shards, f"{CARDS}: a teacher of {shards} processes")
    if not cuda:
        check_on_cpu(config, teacher, KEY, CARDS)
    if not is_quantised(config):  # of others vLLM reads more formats than are known here
        check_model(teacher, KEY)
    tokenizer = load_tokenizer(teacher, KEY)
    _check_context(config, teacher, longest)
    _check_vocabulary(tokenizer, teacher, chat.tokenizer, policy)
    _check_head(config, teacher, chat.config, policy)
    return tuple(_template_notes(tokenizer, teacher, chat))


def _check_context(config: Mapping[str, Any], teacher: str, longest: int) -> None:
    context = text_of(config).get("max_position_embeddings")
    if isinstance(context, int) and longest >= context:  # vLLM samples one token behind them
        raise WrongInput(
            f"{KEY}: must have a context above rollout: max_prompt_length + max_completion_length, {longest} tokens, "
            f"and that of {teacher} is {context}; lower one of them, or give another teacher"
        )


def _check_vocabulary(tokenizer: Any, teacher: str, own: Any, policy: str) -> None:
    ours: dict[str, int] = own.get_vocab()
    theirs = {number: token for token, number in tokenizer.get_vocab().items()}
    wrong = sorted((number, token) for token, number in ours.items() if theirs.get(number) != token)
    if wrong:
        number, token = wrong[0]
        other = repr(theirs[number])[:60] if number in theirs else "no token"
        raise WrongInput(
            f"{KEY}: must have the policy's tokenizer, in which each id stands for the same text, and {len(wrong)} of "
            f"{len(ours)} tokens differ, first {number}: {token!r:.60} to {policy}, {other} to {teacher}; give a "
            "teacher of the same family"
        )


def _check_head(config: Mapping[str, Any], teacher: str, own: Mapping[str, Any], policy: str) -> None:
    """Beyond the tokens of the tokenizer a head may have rows that stand for none (padding), and are sampled all the
    same, if rarely."""
    ours, theirs = (text_of(one).get("vocab_size") for one in (own, config))
    if isinstance(ours, int) and isinstance(theirs, int) and ours > theirs:
        raise WrongInput(
            f"{KEY}: must have a logprob for each id that the policy may sample, and {policy} has {ours} (vocab_size), "
            f"{teacher} {theirs}; give a teacher with as many at least"
        )


def _template_notes(tokenizer: Any, teacher: str, chat: Chat) -> Iterator[str]:
    template = str(tokenizer.chat_template or "").strip()
    if chat.has_template and template != str(chat.tokenizer.chat_template or "").strip():
        yield (
            f"{KEY}: {teacher} has {'another' if template else 'no'} chat template: it reads prompts as the policy's "
            "template writes them, and turns that end as the policy's do, which it may not have been trained on"
        )
