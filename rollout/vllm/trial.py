"""Whether vLLM knows a model's architecture, LoRA for it, and 4 bits, by its registry alone: no engine is started.

A process of its own (learner.driver.input_checks): a configuration as JSON on stdin, a list of sentences as the last
line on stdout.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rollout.vllm.arguments import check_bitsandbytes, without_lora


def wrong_with(config: dict[str, Any]) -> list[str]:
    """One sentence, or none. `config`: of the run; only `model` and what the generators load are read."""
    try:
        from vllm import ModelRegistry
        from vllm.transformers_utils.config import get_config
    except ImportError as error:
        return [f"rollout: vLLM cannot be imported ({error}); run make setup, or pip install 'gleaner-rl[gpu]'"]
    path, revision, learner = config["model"]["path"], config["model"]["revision"], config["learner"]
    if config["model"]["base"] == "nf4":
        try:
            check_bitsandbytes()
        except ValueError as error:
            return [str(error)]
    try:
        names = list(get_config(path, trust_remote_code=False, revision=revision).architectures or ())
    except Exception as error:  # transformers', of a config.json that does not hold together
        return [f"model.path: vLLM cannot read the config.json of {path}: {' '.join(str(error).split())[:300]}"]
    known = [name for name in names if name in ModelRegistry.models]
    if not known:
        named = ", ".join(names) or "(config.json names none)"
        return [f"model.path: vLLM has no architecture {named}; give a model of one that it has, or a newer vLLM"]
    if learner["mode"] == "lora" and learner["push"] == "adapter":
        try:
            found: Any = ModelRegistry.models[known[0]].load_model_cls()
        except Exception as error:  # of a module that wants what is not installed, or another device
            return [f"model.path: vLLM cannot load its {known[0]} here: {' '.join(str(error).split())[:300]}"]
        if not getattr(found, "supports_lora", False):
            return [without_lora(known[0], path)]
    return []


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    print(json.dumps(wrong_with(json.loads(sys.stdin.read()))))
