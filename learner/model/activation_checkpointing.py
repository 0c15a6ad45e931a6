"""What of the forward pass is kept for the backward pass, and what is computed a second time.

    policy   kept per decoder layer                       computed twice
    none     everything (about 12h + 6f + 5kv per token)  nothing
    k        none's, but only inputs in the first k       the first k layers
    mlp      none's without the inside of the MLP         every MLP
    full     the layer's input (2h per token)             every layer

(bytes per token in bfloat16 with LoRA; h hidden, f MLP width, kv key and value width; on a CPU 8f.) The arithmetic is
the same in all of them, so the gradients are equal bit for bit. With LoRA `full` costs half as much again as `none`,
not a third, since a frozen weight has no gradient of its own.

The *first* k layers, not the last: the backward pass comes to them when the kept layers have been freed, so the layer
that is being computed again finds their room empty instead of adding to the peak.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

log = logging.getLogger("learner")

# Not re-entrant: the re-entrant kind finds nothing to differentiate behind frozen embeddings. Dropout is off in the
# learner, so no random state needs to be kept.
_AGAIN: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

Policy = str | int  # none | mlp | full | the number of layers


def resolve(setting: Policy, device: torch.device) -> Policy:
    """The policy for learner.checkpointing: what the planner left at auto is full on a GPU and none on a CPU."""
    if setting != "auto":
        return setting
    policy = "none" if device.type == "cpu" else "full"
    log.info("learner.checkpointing: auto is %s on %s, no memory plan says otherwise", policy, device.type)
    return policy


def apply(lm: Any, policy: Policy, path: str) -> None:
    """Sets the policy on a transformers model in eval mode.

    Raises:
        ValueError: the model cannot, or has fewer layers than are asked for.
    """
    if policy == "none":
        return
    layers: list[Any] = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if policy == "mlp":
        _recompute_mlps(layers, path)
        return
    if not lm.supports_gradient_checkpointing or not layers:
        raise ValueError(f"learner.checkpointing: {path} does not support {policy}; set it to none")
    count = len(layers) if policy == "full" else int(policy)
    if count > len(layers):
        raise ValueError(
            f"learner.checkpointing: must be at most the {len(layers)} layers of {path}, got {count}; set it to full"
        )
    for layer in layers[:count]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = _AGAIN
        layer.training = True  # the layer alone asks this flag; its children stay in eval, free of dropout


def _recompute_mlps(layers: list[Any], path: str) -> None:
    mlps: list[Any] = [mlp for layer in layers if isinstance(mlp := getattr(layer, "mlp", None), nn.Module)]
    if len(mlps) != len(layers) or not layers:
        raise ValueError(
            f"learner.checkpointing: mlp needs decoder layers with a module of that name, {path} has {len(mlps)} in "
            f"{len(layers)} layers; set it to full, none or a number of layers"
        )
    for mlp in mlps:
        # On the instance, so that module and weight names, which PEFT and the checkpoints use, stay as they are.
        mlp.forward = partial(_AGAIN, mlp.forward)


@contextmanager
def offloaded(enabled: bool) -> Iterator[None]:
    """Inside this block what the forward pass keeps goes to pinned host memory and comes back in the backward pass.

    Meant around a backbone under `full`: then that is the layers' inputs. What a layer computes again in the backward
    pass is outside of this block and stays on the device.
    """
    if not enabled:
        yield
        return
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        yield
