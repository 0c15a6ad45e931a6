"""Any sequence-classification model of transformers as a reward function: its number for prompt and completion.

It is loaded once in each reward process, before the process is asked for its first group (rewards.slot.prepare): in
main memory, or on the card of a process that has one of its own (cluster.rewards.gpus). A reward model on the policy's
own base costs less as `use: adapter:<folder>`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cluster.errors import WrongInput
from rewards.base import text_of
from rewards.limits import DEVICE

OTHER_HEADS = ("lm_head.", "cls.")  # beside the classifier's, of the language model that it was made from


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
    """The logit of each completion after its prompt; nan where they are longer than the model can read.

    They go through the model's own chat template, a prompt that is a text as the user's message; without a template
    they are a pair of texts, as its tokenizer puts pairs together.

    Args:
        model: folder or hub name. output: which logit, of a model that has several. batch: sequences at once.

    Raises:
        WrongInput: the model has several outputs and none is chosen.
    """
    import torch

    loaded = prepare(model=model, output=output)
    encoded = [_encoded(loaded.tokenizer, *case) for case in zip(prompts, completions, strict=True)]
    config = loaded.model.config
    # RoBERTa's has two positions more than it can read: only its tokenizer knows.
    most = min(getattr(config, "max_position_embeddings", None) or math.inf, loaded.tokenizer.model_max_length)
    scores = [math.nan] * len(encoded)
    short = [i for i, one in enumerate(encoded) if len(one["input_ids"]) <= most]
    pad = config.get_text_config().pad_token_id
    # Without a padding token transformers finds the end of a sequence only where it is alone.
    count = batch if pad is not None else 1
    with torch.no_grad():
        for first in range(0, len(short), count):
            places = short[first : first + count]
            padded = _padded([encoded[i] for i in places], pad)
            device = loaded.model.device
            logits = loaded.model(**{name: torch.tensor(rows, device=device) for name, rows in padded.items()}).logits
            for i, score in zip(places, logits[:, output or 0].float().tolist(), strict=True):
                scores[i] = score
    return scores


def prepare(*, model: str, output: int | None = None, **_: Any) -> _Classifier:
    """Loads the model. Raises WrongInput: it cannot be, or `output` is none of its outputs."""
    loaded = _load(model)
    labels = loaded.model.config.num_labels
    if (output is None and labels != 1) or not 0 <= (output or 0) < labels:
        raise WrongInput(
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
            model, dtype="auto", trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise WrongInput(f"args.model: {model} is no sequence-classification model ({reason}); give another") from None
    classifier, report = found
    if wrong := _wrong_with(classifier, report):
        raise WrongInput(
            f"args.model: {model} {wrong}; give a model that was trained as a sequence classifier, with its own "
            "config.json"
        )
    device = os.environ.get(DEVICE)
    if device is None:
        return _Classifier(tokenizer, classifier.eval())
    try:
        return _Classifier(tokenizer, classifier.eval().to(device))
    except (RuntimeError, AssertionError) as error:  # as torch says that there is no card, or no room on it
        reason = " ".join(str(error).split())[:200]
        raise WrongInput(
            f"args.model: {model} cannot be put on the card of its process ({reason}); lower rollout.reward_workers, "
            "or set cluster.rewards.gpus=0"
        ) from None


def _wrong_with(classifier: Any, report: Mapping[str, Any]) -> str:
    """Which of a model's weights are made up, left out or no numbers, as part of a sentence; "" if none is. report: of
    transformers, about what it loaded."""
    import torch

    strange = [name for name in report["unexpected_keys"] if not name.startswith(OTHER_HEADS)]
    shapes = [name for name, *_ in report["mismatched_keys"]]
    ends = {name: torch.stack(torch.aminmax(weight.detach())) for name, weight in classifier.named_parameters()}
    numbers = [name for name, both in ends.items() if not bool(torch.isfinite(both).all())]
    said = {
        "lacks weights ({}), so its scores would be random": report["missing_keys"],
        "has weights that the model of its config.json has no place for ({})": strange,
        "has weights in another shape than its config.json says ({}), so its scores would be random": shapes,
        "has weights that are not finite numbers ({})": numbers,
    }
    return next((text.format(", ".join(sorted(names)[:3])) for text, names in said.items() if names), "")


def _encoded(tokenizer: Any, prompt: Any, completion: Any) -> Mapping[str, list[int]]:
    """What the model is called with, of one sequence: input_ids, and of some models token_type_ids."""
    if tokenizer.chat_template:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        # An assistant's text holds its calls as it wrote them; a template would write them once more.
        told = [{name: value for name, value in message.items() if name != "tool_calls"} for message in said]
        found: Mapping[str, list[int]] = tokenizer.apply_chat_template([*asked, *told], return_dict=True)
        return found
    text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
    # In a list: a second text that is empty would otherwise not be taken for one.
    return {name: rows[0] for name, rows in tokenizer([(text, text_of(completion))]).items()}


def _padded(rows: Sequence[Mapping[str, list[int]]], pad: int | None) -> dict[str, list[list[int]]]:
    """On the right, with the padding token of the model's config: by that, and not by the tokenizer's own,
    transformers finds the last token of each."""
    longest = max(len(row["input_ids"]) for row in rows)
    fills = {name: pad or 0 if name == "input_ids" else 0 for name in rows[0]}  # 0: no attention; the first type
    return {name: [[*row[name], *[fill] * (longest - len(row[name]))] for row in rows] for name, fill in fills.items()}
