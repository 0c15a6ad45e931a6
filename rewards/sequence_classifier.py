"""Any sequence-classification model of transformers as a reward function: its number for prompt and completion.

It is loaded once in each reward process, in main memory and without a card, before the process is asked for its first
group (rewards.worker.prepare). A reward model on the policy's own base costs less as `use: adapter:<folder>`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rewards.base import RewardError
from rewards.text import text_of


class _Classifier(NamedTuple):
    tokenizer: Any
    model: Any


def sequence_classifier(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    model: str,
    output: int | None = None,
    batch: int = 8,
    **columns: Sequence[Any],
) -> list[float]:
    """The logit of each completion after its prompt.

    Conversations go through the model's own chat template; without one, the texts follow each other.

    Args:
        model: folder or hub name. output: which logit, of a model that has several. batch: sequences at once.

    Raises:
        RewardError: the model has several outputs and none is chosen, or a sequence is longer than it can read.
    """
    import torch

    loaded = prepare(model=model, output=output)
    encoded = [_encoded(loaded.tokenizer, *case) for case in zip(prompts, completions, strict=True)]
    longest, most = max(map(len, encoded)), getattr(loaded.model.config, "max_position_embeddings", None)
    if most is not None and longest > most:
        raise RewardError(f"args.model: {model} reads at most {most} tokens, a sequence has {longest}; give another")
    # Without a padding token transformers finds the end of a sequence only where it is alone.
    count = batch if loaded.model.config.get_text_config().pad_token_id is not None else 1
    scores: list[float] = []
    with torch.no_grad():
        for first in range(0, len(encoded), count):
            rows = {"input_ids": encoded[first : first + count]}
            padded = rows if count == 1 else loaded.tokenizer.pad(rows, padding_side="right")
            tensors = {name: torch.tensor(padded[name]) for name in padded}
            scores += loaded.model(**tensors).logits[:, output or 0].float().tolist()
    return scores


def prepare(*, model: str, output: int | None = None, **_: Any) -> _Classifier:
    """Loads the model. Raises RewardError: it cannot be, or `output` is none of its outputs."""
    loaded = _load(model)
    labels = loaded.model.config.num_labels
    if (output is None and labels != 1) or not 0 <= (output or 0) < labels:
        raise RewardError(
            f"args.output: must be one of 0 to {labels - 1}, the outputs of {model}, got {output}; choose one"
        )
    return loaded


sequence_classifier.prepare = prepare  # type: ignore[attr-defined]


@lru_cache
def _load(model: str) -> _Classifier:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        found = AutoModelForSequenceClassification.from_pretrained(
            model, dtype="auto", trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RewardError(f"args.model: {model} is no sequence-classification model ({reason}); give another") from None
    classifier, report = found
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise RewardError(
            f"args.model: {model} lacks weights ({names}), so its scores would be random; give a model that was "
            "trained as a sequence classifier"
        )
    return _Classifier(tokenizer, classifier.eval())


def _encoded(tokenizer: Any, prompt: Any, completion: Any) -> list[int]:
    if isinstance(prompt, str) or not tokenizer.chat_template:
        text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
        ids: list[int] = tokenizer.encode(text + text_of(completion))
        return ids
    return list(tokenizer.apply_chat_template([*prompt, *completion], return_dict=False))
