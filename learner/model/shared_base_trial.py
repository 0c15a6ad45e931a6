"""Whether the learner could map the generator's base (memory.base: shared), from names and shapes alone: vLLM's loading
code and the learner's model, both without weights.

A process of its own (learner.driver.input_checks): a configuration as JSON on stdin, a list of sentences as the last
line on stdout. What cannot be told so, since vLLM wants numbers or a card for it, is left to the start of the run.
"""

import json
import os
import sys
from typing import Any

import torch

from learner.config import RunConfig
from learner.model.base import load_base
from learner.model.shared_base import no_views, refusal
from learner.model.trial_note import tell
from rollout.base_manifest import View
from rollout.data.weight_files import WeightsError, model_weights
from rollout.vllm.environment import required_env
from rollout.weights import linear_layers


def wrong_with(config: RunConfig) -> list[str]:
    """One sentence, or none."""
    from rollout.vllm.shared_base import views_of

    try:
        stored = model_weights(config.model.source)
        lm = load_base(config.model.model_copy(update={"base": "none"}), torch.device("meta"), lora=True)
    except (WeightsError, ValueError, OSError):  # said by learner.driver.input_checks and learner.model.model_trial
        return []
    if stored is None:  # not in this machine's cache
        return []
    try:
        views, refused = views_of(
            config.model.source, config.model.dtype, {name: own.shape for name, own in stored.items()}
        )
    except Exception as error:  # whatever vLLM raises; that it could not be told is no reason to refuse
        tell(f"memory.base: shared was not tried before the start: {error!r}")
        return []
    if config.model.base == "nf4":
        scattered = not_by_rows(lm, views)
        views = {name: view for name, view in views.items() if name not in scattered}
        refused |= scattered
    wanted = dict(lm.named_parameters())
    wrong = no_views(wanted, {name: view.shape for name, view in views.items()}, refused)
    return [refusal(wrong, len(wanted))] if wrong else []


def not_by_rows(lm: Any, views: dict[str, View]) -> dict[str, str]:
    """Matrices that 4 bits would be packed of, and whose rows do not lie one after the other. vLLM has another layout
    for these bits, but fuses the same tensors in the same order."""
    names = {f"{name}.weight" for name in linear_layers(lm)}
    return {
        name: f"its rows do not lie one after the other there (strides {list(view.strides)}), as packed ones must"
        for name, view in views.items()
        if name in names and view.strides != (view.shape[1], 1)
    }


if __name__ == "__main__":
    run = RunConfig.model_validate_json(sys.stdin.read())
    os.environ.update(required_env(cuda=run.cluster.gpus.generator > 0))
    print(json.dumps(wrong_with(run)))
