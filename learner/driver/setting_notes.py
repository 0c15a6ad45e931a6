"""Lines about settings, model and data that may mean something else than the user believes. Nothing is loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

from learner.config import RunConfig

NO_TEXT = ("image", "images", "video", "videos", "audio", "audios")  # columns, as TRL and datasets name them
ATTENTION = ("attn_implementation", "_attn_implementation")  # in config.json


def setting_notes(config: RunConfig, model: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[str]:
    """model: the content of config.json. row: the columns of a problem."""
    loss = config.learner.loss
    if loss.ratio == "gspo" and loss.kind == "dapo" and "kind" not in loss.model_fields_set:
        yield (
            "learner.loss.ratio: gspo with kind: dapo, the default, weights a completion by its length, and its paper "
            "weights all alike; set learner.loss.kind=grpo for that, or dapo if it is meant"
        )
    for name in ATTENTION:
        if (wanted := model.get(name)) is not None:
            yield (
                f"model.path: {name} of its config.json, {wanted!s:.80}, is not followed: the learner has attention of "
                "its own, and vLLM chooses its"
            )
    if others := [name for name in NO_TEXT if row.get(name) is not None]:
        yield (
            f"data.path: the model reads text alone and is not given {', '.join(others)}, which reward functions are; "
            "if questions cannot be answered without, give other data"
        )
