"""Which linear layers of a model learner.lora.targets means: names for PEFT, from a model that may have no weights."""

import logging
from collections.abc import Sequence
from typing import Any, Literal

from learner.model.adapter_config import AdapterError
from rollout.architecture import ATTENTION, has_experts
from rollout.linear_layers import linear_layers

log = logging.getLogger(__name__)

Wanted = Literal["all-linear"] | list[str]


def lora_targets(lm: Any, wanted: Wanted) -> list[str]:
    """Names of layers, or ends of them. all-linear: every nn.Linear but the output embedding; of a model with experts
    its attention. (PEFT's own all-linear takes experts and router, too, the fused ones with twice the rank.)

    Raises:
        ValueError: a name is none of a layer that can be adapted.
    """
    linear = linear_layers(lm)
    known = sorted({name.rpartition(".")[2] for name in linear})
    if has_experts(lm.config.to_dict()):
        return _attention(known, wanted)
    if wanted == "all-linear":
        return known
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ValueError(
                f"learner.lora.targets: each must name linear layers of the model other than its output embedding, got "
                f"{target!r}; known: {', '.join(known)}, or all-linear"
            )
    return wanted


def check_targets(lm: Any, wanted: Wanted, found: Sequence[str], folder: str) -> None:
    """Raises AdapterError if the layers of an adapter (target_modules of its folder) are none of the model that can be
    adapted, or where all-linear is wanted not those that it means."""
    try:
        lora_targets(lm, list(found))
    except ValueError as error:
        words = str(error).removeprefix("learner.lora.targets: ")
        raise AdapterError(f"model.adapter: target_modules of {folder}: {words}") from None
    if wanted != "all-linear":
        return
    leaves, meant = ({name.rpartition(".")[2] for name in names} for names in (found, lora_targets(lm, wanted)))
    if leaves != meant:
        raise AdapterError(
            f"model.adapter: target_modules of {folder} must be those of learner.lora.targets=all-linear, "
            f"{', '.join(sorted(meant))}, got {', '.join(sorted(leaves))}; set learner.lora.targets to the adapter's"
        )


def _attention(known: list[str], wanted: Wanted) -> list[str]:
    there = [name for name in ATTENTION if name in known]
    if there != list(ATTENTION):
        raise ValueError(
            f"model.path: of a model with experts {', '.join(ATTENTION)} are adapted, and this one has "
            f"{', '.join(known)}; give another architecture (docs/models.md)"
        )
    if wanted == "all-linear":
        log.warning("learner.lora.targets: all-linear of a model with experts is its attention (%s): vLLM has no LoRA "
                    "for experts on a CPU", ", ".join(there))  # fmt: skip
        return there
    for target in wanted:
        if target.rpartition(".")[2] not in there:
            raise ValueError(
                f"learner.lora.targets: of a model with experts only {', '.join(there)} are adapted, since vLLM has no "
                f"LoRA for experts on a CPU, got {target!r}; leave it out"
            )
    return wanted
