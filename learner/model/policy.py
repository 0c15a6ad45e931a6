"""The policy: a frozen base model, its LoRA adapter, and the reference it may be held close to; or a model that is
trained as a whole (learner.mode: full), whose reference is a second set of weights (learner.model.reference, in shards
learner.model.reference).

Types. The forward and backward pass run in the base's own type, adapter included, without autocast: autocast would keep
a second, cast copy of each LoRA layer's input (9 bytes more per token, layer and hidden unit, bfloat16), and
the adapter would not be, bit for bit, the one that vLLM serves. Updates of a bfloat16 or float16 weight would be
rounded away, so the weights that the optimizer updates are float32 masters; the model holds their cast copy. With a
float32 base masters and model share their memory. Trained as a whole, N bfloat16 weights cost 2N bytes for the model,
4N for the masters, 4N for their gradients, 2N for those of a micro-batch and 8N for AdamW's states; with 8-bit states
there are no masters (learner.trainer.optimizer), and it is 2N for the model, 2N for gradients, 2N for
states. A reference is another 2N, or N.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.batch.layout import Layout
from learner.batch.micro_batch import MicroBatch
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model import packing_check
from learner.model.adapter_config import base_of
from learner.model.base import check_finite, head_of, load_base, to_eval
from learner.model.fusion import fuse
from learner.model.logprob import logits_of, policy_logprobs, token_entropies, token_logprobs, with_head
from learner.model.lora import POLICY, REFERENCE, acting_as, as_json, attach
from learner.model.masters import Masters
from learner.model.packing_check import check_head
from learner.model.reference import Reference, ShardedReference
from learner.model.roles import REWARD, ScoredAdapter, ScoredRole
from learner.model.shared_base import MappedBase
from rollout.data.model_files import WEIGHTS_FILE
from rollout.weights import Source

# learner.push: merged. The weights of a model with its LoRA adapter multiplied out, W + alpha / r B A (Hu et al. 2021,
# section 4.1), for a generator that holds no adapter.
#
# What the adapter does not touch is not sent: a generator has it from the model's files. But a block (the linear layers
# of one module, as self_attn with q, k, v and o) is sent as a whole, biases included, since vLLM fuses some of its
# layers into one and fills a fused layer that comes in part with anything.


def merged(lm: Any) -> dict[str, Source]:
    """The checkpoint's name of each weight to send -> how it is made. The model itself stays as it is.

    Raises ValueError for an adapter on layers that are not nn.Linear.
    """
    blocks = {name.rpartition(".")[0] for name, module in lm.named_modules() if _is_adapted(module)}
    return {f"{block}.{name}": source for block in sorted(blocks) for name, source in _block(lm.get_submodule(block))}


def _block(block: nn.Module) -> Iterator[tuple[str, Source]]:
    for name, layer in block.named_children():
        base = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
        if not isinstance(base, nn.Linear):
            if base is layer:
                continue  # a norm, an activation
            raise ValueError(
                f"learner.push: merged is for adapters of nn.Linear, {name} is {type(base).__name__}; set push=adapter"
            )
        for kind, weight in base.named_parameters():
            moved = kind == "weight" and _is_adapted(layer)
            yield f"{name}.{kind}", Source(weight.shape, partial(_merge, layer)) if moved else Source.of(weight)


def _is_adapted(module: nn.Module) -> bool:
    """By the policy's adapter; another role's may lie on further layers."""
    return isinstance(module, LoraLayer) and POLICY in module.scaling


def _merge(layer: Any, place: Tensor) -> None:
    """In float32, from the weights that the learner computes with, then in the model's type."""
    weight: Tensor = layer.get_base_layer().weight
    a, b = layer.lora_A[POLICY].weight.float(), layer.lora_B[POLICY].weight.float()
    there = place.dtype == torch.float32 and place.device == weight.device
    wide = place if there else torch.empty_like(weight, dtype=torch.float32)
    wide.copy_(weight).addmm_(b, a, alpha=layer.scaling[POLICY])
    if not there:
        # Converted before it goes to another device, to which copy_ would take the bytes of float32.
        place.copy_(wide if wide.device == place.device else wide.to(place.dtype))


# What of the forward pass is kept for the backward pass, and what is computed a second time.
#
#     policy   kept per decoder layer                       computed twice
#     none     everything (about 12h + 6f + 5kv per token)  nothing
#     k        none's, but only inputs in the first k       the first k layers
#     mlp      none's without the inside of the MLP         every MLP
#     full     the layer's input (2h per token)             every layer
#
# (bytes per token in bfloat16 with LoRA; h hidden, f MLP width, kv key and value width; on a CPU 8f.) The arithmetic is
# the same in all of them, so the gradients are equal bit for bit. With LoRA `full` costs half as much again as `none`,
# not a third, since a frozen weight has no gradient of its own.
#
# The *first* k layers, not the last: the backward pass comes to them when the kept layers have been freed, so the layer
# that is being computed again finds their room empty instead of adding to the peak.

log = logging.getLogger("learner")

# Not re-entrant: the re-entrant kind finds nothing to differentiate behind frozen embeddings. Dropout is off in the
# learner, so no random state needs to be kept.
_AGAIN: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

CheckpointPolicy = str | int  # none | mlp | full | the number of layers


def resolve_checkpointing(setting: CheckpointPolicy, device: torch.device) -> CheckpointPolicy:
    """The policy for learner.checkpointing: what the planner left at auto is full on a GPU and none on a CPU."""
    if setting != "auto":
        return setting
    policy = "none" if device.type == "cpu" else "full"
    log.info("learner.checkpointing: auto is %s on %s, no memory plan says otherwise", policy, device.type)
    return policy


def apply(lm: Any, policy: CheckpointPolicy, path: str) -> None:
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


class Policy:
    """Base model plus adapter; without `lora`, the whole model.

    Args:
        attention: see learner.model.packing_check.enable. mapped: the base to use, instead of one of its own.
        sharded: over the ranks of the process group, all of which make their policies at once.
        roles: further adapters, with a scalar head each; they need `lora`.

    Attributes:
        head: [V, H] output embedding; frozen with an adapter. Of a base in shards it has a shape and a device only.
        logits: what the model does to head @ hidden.
        model_type: of its config.
        scored: name -> adapter of each further role with a scalar head.
        trained: the weights that the optimizer updates.
        packed: whether micro-batches may be packed (learner.model.attention); otherwise they must be padded.
        peft_config: of the adapter, as a JSON-able dictionary (the content of adapter_config.json); None without one.

    Raises:
        ValueError: the model cannot be trained here, or the adapter contradicts `lora`; the message names the setting.
        OSError: the model or the adapter was not found (raised by transformers and peft).
    """

    def __init__(
        self,
        model: ModelConfig,
        lora: LoraConfig | None,
        *,
        checkpointing: CheckpointPolicy,
        seed: int,
        device: torch.device,
        offload: bool = False,
        keep_masters: bool = True,
        keep_reference: bool = False,
        attention: str | None = None,
        mapped: MappedBase | None = None,
        sharded: bool = False,
        roles: Sequence[ScoredRole] = (),
    ) -> None:
        self._lm = load_base(model, device, lora=lora is not None, mapped=mapped, sharded=sharded)
        self._offload = offload
        self.head = head_of(self._lm, model.path)
        self.logits = logits_of(self._lm.config.get_text_config())
        self._peft = self._lm.requires_grad_(True) if lora is None else attach(self._lm, model, lora, seed)
        self.peft_config: dict[str, Any] | None = None
        self._roles: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        if lora is not None:
            adapters = self._peft.peft_config
            self.peft_config = as_json(adapters[POLICY]) | base_of(model.source)
            self._roles["reference"] = partial(acting_as, self._peft, REFERENCE if REFERENCE in adapters else None)
        self.scored = {role.name: ScoredAdapter(self._peft, role, seed) for role in roles}
        self._roles |= {name: partial(acting_as, self._peft, name) for name in self.scored}
        own = [(name, weight) for name, weight in self._peft.named_parameters() if weight.requires_grad]
        if lora is not None:
            own = [(name.replace(f".{POLICY}.", "."), weight) for name, weight in own if f".{POLICY}." in name]
        self.trained = Masters(dict(own), getattr(torch, model.dtype), keep=keep_masters)
        if model.adapter is not None:
            tensors = load_file(Path(model.adapter) / WEIGHTS_FILE)
            check_finite(tensors.items(), model.adapter, "model.adapter")
            self.load(tensors)
        to_eval(self._peft)
        trial = partial(self.hidden, torch.zeros(1, 2, dtype=torch.int64, device=device))
        fuse(self._lm, trial, on_card=self.head.is_cuda)
        apply(self._lm, checkpointing, model.path)
        check_head(self._lm, self.logits, self.hidden, model.path)
        self.packed = packing_check.enable(self._lm, self.logits, self.predicting, self.dtype, attention)
        if lora is None and keep_reference:
            kept = ShardedReference(self._lm, model, device) if sharded else Reference(self._lm, model, trial)
            self._roles["reference"] = kept.acting

    @property
    def dtype(self) -> torch.dtype:
        """That the model computes in."""
        return self.trained.dtype

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture."""
        return str(self._lm.config.get_text_config().model_type)

    def hidden(self, ids: Tensor, positions: Tensor | None = None, layout: Layout | None = None) -> Tensor:
        """[B, L] right-padded ids, or a packed row with its positions [1, L] and layout -> [B * L, H] final states.

        No attention mask is passed: attention is causal and the padding comes last, so no real token sees it, and
        the attention kernels take their fast path instead of a dense [B, 1, L, L] mask.
        """
        packed = {} if layout is None else {"position_ids": positions, "packed_layout": layout}
        with offloaded(self._offload and torch.is_grad_enabled()):
            states: Tensor = self._lm.base_model(input_ids=ids, use_cache=False, **packed).last_hidden_state
        return states.flatten(0, 1)

    def predicting(self, batch: MicroBatch) -> Tensor:
        """[N, H] states that predict the completion tokens of the batch."""
        return self.hidden(batch.ids, batch.positions, batch.layout).index_select(0, batch.index)

    def logprobs(self, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Of [N] tokens, by the [N, H] states that predict them: learner.model.logprob.policy_logprobs."""
        return with_head(self._lm, policy_logprobs, states, targets, temperature, logits=self.logits)

    def token_logprobs(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Likewise, without a gradient: learner.model.logprob.token_logprobs."""
        return with_head(self._lm, token_logprobs, states, targets, temperature, logits=self.logits)

    def token_entropies(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Likewise: learner.model.logprob.token_entropies."""
        return with_head(self._lm, token_entropies, states, targets, temperature, logits=self.logits)

    def acting_as(self, role: str) -> AbstractContextManager[None]:
        """Inside this block the model acts as another role on the same base: `reference`, or one of `scored`. A forward
        pass and its backward pass belong into one block.

        The reference is model.reference, else the adapter that training started from, else the base alone (0 bytes); of
        a model that is trained as a whole, model.reference or the weights that training started from.
        """
        return self._roles[role]()

    @property
    def reward_models(self) -> list[str]:
        """Those of `scored` that are reward models (learner.model.roles.reward_roles), in their order."""
        return [name for name in self.scored if name.startswith(REWARD)]

    @property
    def masters(self) -> dict[str, Tensor]:
        """PEFT's name of each adapter weight (base_model.model.….lora_A.weight), or the model's own name of each of its
        weights -> float32 weight to optimize; the model's own weight if keep_masters is false."""
        return self.trained.named

    def clear_gradients(self) -> None:
        """See Masters, as the next three."""
        self.trained.clear_gradients()

    def collect_gradients(self) -> None:
        self.trained.collect_gradients()

    def sync(self) -> None:
        self.trained.sync()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.trained.load(tensors)

    def merged(self) -> dict[str, Source]:
        """The base's weights that the adapter changes, with it; the base's own stay."""
        return merged(self._lm)

    def scalings(self) -> dict[str, float]:
        """PEFT's name of each layer with an adapter -> what B A is multiplied with, alpha / r."""
        layers = ((name, module) for name, module in self._peft.named_modules() if isinstance(module, LoraLayer))
        return {name: float(layer.scaling[POLICY]) for name, layer in layers if POLICY in layer.scaling}

    def save_config(self, folder: Path) -> None:
        """Writes the base model's config.json and generation_config.json."""
        self._lm.config.save_pretrained(folder)
        # Not save_pretrained: transformers refuses to save some that it loads, such as a temperature without sampling.
        (folder / "generation_config.json").write_text(self._lm.generation_config.to_json_string())
