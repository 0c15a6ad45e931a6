"""Models that bring Python code of their own (`auto_map` in config.json), which is never run."""

from collections.abc import Mapping
from typing import Any


def needs_own_code(config: Mapping[str, Any]) -> str | None:
    """The part of the model that only its own code can build; None if transformers can build all of it.

    Folders of well-known architectures often still bring code from before transformers had them: these pass.
    """
    brought: Mapping[str, Any] = config.get("auto_map") or {}
    if not brought:
        return None
    # Here: with torch, 10 s where nothing has imported it yet; and few models bring code.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    for name, known in (
        ("AutoConfig", CONFIG_MAPPING),
        ("AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ):
        if name in brought and kind not in known:
            return f"{brought[name]} for model_type {kind!r}"
    return None
