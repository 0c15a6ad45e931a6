"""The policy: a frozen base model with a LoRA adapter, or a model that is trained as a whole (learner.mode: full). The
module also merges adapters into weights for generators, and sets activation checkpointing and offloading.

Types. The forward and backward pass run in the base's dtype, adapter included, without autocast. Autocast would keep a
second, cast copy of each LoRA layer's input (9 bytes more per token, layer and hidden unit, bfloat16), and the adapter
would not be, bit for bit, the one that vLLM serves. Updates of a bfloat16 or float16 weight would be lost in rounding,
so the optimizer updates float32 masters, and the model holds a cast copy of them. With a float32 base masters and model
share their memory.

Memory of a model of N bfloat16 weights that is trained as a whole: 2N bytes for the model, 4N for the masters, 4N for
their gradients, 2N for the gradients of a micro-batch and 8N for AdamW's states. With 8-bit states there are no masters
(learner.trainer.optimizer): 2N for the model, 2N for gradients, 2N for states. A reference takes another 2N, or N in 8
bits (learner.model.reference).
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
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
from learner.model.base import check_finite, head_of, load_base, text_prefix, to_eval
from learner.model.bases.shared import MappedBase
from learner.model.experts import Routers, merged_experts
from learner.model.fusion import fuse
from learner.model.logprob import (
    TaughtLogprobs,
    Top,
    decoder_of,
    logits_of,
    policy_logprobs,
    taught_logprobs,
    token_entropies,
    token_logprobs,
    with_head,
)
from learner.model.lora import POLICY, REFERENCE, acting_as, as_json, attach, attach_beside
from learner.model.masters import Masters
from learner.model.packing_check import check_head
from learner.model.reference import Reference, ShardedReference
from learner.model.roles import REWARD, ScoredAdapter, ScoredRole
from rollout.data.model_files import WEIGHTS_FILE
from rollout.text_part import text_adapter
from rollout.weights import Source

# Merged weights (learner.push: merged): W + alpha / r B A (Hu et al. 2021, section 4.1), for a generator that holds no
# adapter.
#
# Blocks without an adapter are not sent, since a generator has their weights from the model's files. A block (the
# linear layers of one module, such as self_attn with q, k, v and o) is sent as a whole, biases included: vLLM fuses
# some of its layers into one, and leaves undefined what is missing of a fused layer that is sent in part. So are the
# experts of a layer (learner.model.experts).


def merged(lm: Any) -> dict[str, Source]:
    """Returns the weights to send: the name by which vLLM loads it -> the source that computes the merged weight. The
    model itself stays as it is.

    Raises ValueError for an adapter on layers that are not nn.Linear.
    """
    blocks = {name.rpartition(".")[0] for name, module in lm.named_modules() if _is_adapted(module)}
    dense = {f"{block}.{name}": source for block in sorted(blocks) for name, source in _block(lm.get_submodule(block))}
    return dense | dict(merged_experts(lm, POLICY))


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
    """Whether the policy's adapter is on this layer; adapters of other roles may be on further layers. Experts are no
    layer (learner.model.experts)."""
    return isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper) and POLICY in module.scaling


def _merge(layer: Any, place: Tensor) -> None:
    """Writes the merged weight to `place`. It is computed in float32 from the weights that the learner computes with,
    then rounded to the dtype of `place`."""
    weight: Tensor = layer.get_base_layer().weight
    a, b = layer.lora_A[POLICY].weight.float(), layer.lora_B[POLICY].weight.float()
    there = place.dtype == torch.float32 and place.device == weight.device
    wide = place if there else torch.empty_like(weight, dtype=torch.float32)
    wide.copy_(weight).addmm_(b, a, alpha=layer.scaling[POLICY])
    if not there:
        # The weight is converted before it goes to another device, since copy_ would transfer float32.
        place.copy_(wide if wide.device == place.device else wide.to(place.dtype))


# Activation checkpointing: which activations are kept for the backward pass, and which are computed a second time.
#
#     policy   kept per decoder layer                       computed twice
#     none     everything (about 12h + 6f + 5kv per token)  nothing
#     k        none's, but only inputs in the first k       the first k layers
#     mlp      none's without the inside of the MLP         every MLP
#     full     the layer's input (2h per token)             every layer
#
# (Bytes per token in bfloat16 with LoRA; h hidden size, f MLP width, kv key and value width; on a CPU 8f instead of
# 6f.) The arithmetic is the same in all of them, so the gradients are equal bit for bit. With LoRA `full` takes half as
# long again as `none`, not a third, since frozen weights need no gradient.
#
# The first k layers are chosen, not the last: the backward pass reaches them when the activations of the other layers
# have been freed, so computing a layer again does not add to the memory peak.

log = logging.getLogger("learner")

# Re-entrant checkpointing does not work here: behind frozen embeddings its inputs require no gradient. Dropout is off
# in the learner, so no random state needs to be kept.
_AGAIN: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

CheckpointPolicy = str | int  # none | mlp | full | the number of layers


def resolve_checkpointing(setting: CheckpointPolicy, device: torch.device) -> CheckpointPolicy:
    """Returns the checkpointing policy of learner.checkpointing; `auto`, where no memory plan has replaced it, means
    full on a GPU and none on a CPU."""
    if setting != "auto":
        return setting
    policy = "none" if device.type == "cpu" else "full"
    log.info("learner.checkpointing: auto is %s on %s, no memory plan says otherwise", policy, device.type)
    return policy


def apply(lm: Any, policy: CheckpointPolicy, path: str) -> None:
    """Sets a checkpointing policy on a transformers model in eval mode.

    Raises:
        ValueError: the model does not support the policy, or has fewer layers than `policy`.
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
        layer.training = True  # only the layer itself reads this flag; its children stay in eval mode, without dropout


def _recompute_mlps(layers: list[Any], path: str) -> None:
    mlps: list[Any] = [mlp for layer in layers if isinstance(mlp := getattr(layer, "mlp", None), nn.Module)]
    if len(mlps) != len(layers) or not layers:
        raise ValueError(
            f"learner.checkpointing: mlp needs decoder layers with a module of that name, {path} has {len(mlps)} in "
            f"{len(layers)} layers; set it to full, none or a number of layers"
        )
    for mlp in mlps:
        # The method is replaced on the instance, so that the names of modules and weights, which PEFT and checkpoints
        # use, do not change.
        mlp.forward = partial(_AGAIN, mlp.forward)


MLP_TILE = 4096  # tokens; cluster.memory.learner.MLP_TILE, which imports no torch, is the same


def tile_mlps(lm: nn.Module) -> None:
    """Computes dense MLPs by tiles of tokens, each tile again in the backward pass, so that the widest tensors of a
    layer exist for one tile only (TiledMLP of Arctic Long Sequence Training, 2506.13996). A third pass through the MLPs
    is the price. The gradient is the same up to the order in which tiles are added. Blocks with experts stay whole, and
    so does an MLP that is no `mlp` or `feed_forward` with a `down_proj`; the memory plan goes by the same names."""
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    blocks: list[Any] = [getattr(layer, name, None) for layer in layers for name in ("mlp", "feed_forward")]
    for block in blocks:
        if hasattr(block, "down_proj") and not any("expert" in name for name, _ in block.named_modules()):
            block.forward = partial(_by_tiles, block.forward)  # on the instance, as in _recompute_mlps


def _by_tiles(forward: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    if states.shape[-2] <= MLP_TILE:
        return forward(states)
    of_tile = partial(_AGAIN, forward) if torch.is_grad_enabled() else forward
    return torch.cat([of_tile(tile) for tile in torch.split(states, MLP_TILE, -2)], -2)


@contextmanager
def offloaded(enabled: bool) -> Iterator[None]:
    """Inside this block the tensors that autograd saves are moved to pinned host memory, and back in the backward pass.

    It is meant for a forward pass with checkpointing policy `full`, which saves only the layers' inputs. What a layer
    computes again in the backward pass is computed outside of this block and stays on the device.
    """
    if not enabled:
        yield
        return
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        yield


class Policy:
    """The model that is trained: base model and adapter, or without `lora` the whole model. It computes hidden states,
    logprobs and entropies, and can act as other roles on the same base (reference, value, reward models).

    Args:
        checkpointing: the activation checkpointing policy.
        seed: seed of a new adapter's weights.
        offload: whether saved activations are moved to host memory (`offloaded`), and MLPs computed by tiles.
        keep_masters: whether the trained weights get float32 masters.
        keep_reference: whether a model that is trained as a whole keeps a reference.
        attention: name of the attention implementation (see learner.model.packing_check.enable).
        mapped: the generator's base, which is mapped; None: the base is loaded.
        sharded: whether the base is sharded over the ranks of the process group, all of which make their policies at
            the same time.
        roles: further adapters, each with a scalar head; they need `lora`.
        replays_routing: whether tokens go to the experts that micro-batches say (learner.model.experts.Routers).

    Attributes:
        head: [V, H] output embedding; frozen with an adapter. With a sharded base only its shape and device are valid.
        logits: how the model makes logits of head @ hidden.
        scored: name -> adapter of each role with a scalar head.
        trained: the weights that the optimizer updates.
        packed: whether micro-batches may be packed (learner.model.attention); otherwise they must be padded.
        text_prefix: what the names of the model's layers begin with on the whole checkpoint, if it has towers, too.
        peft_config: the content of the adapter's adapter_config.json as a dictionary; None without an adapter.

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
        replays_routing: bool = False,
    ) -> None:
        self._lm = load_base(model, device, lora=lora is not None, mapped=mapped, sharded=sharded)
        self._offload, self._adapter = offload, POLICY
        self._routers: Routers | None = None
        self.head = head_of(self._lm, model.path)
        self.logits = logits_of(self._lm.config.get_text_config())
        self._peft = self._lm.requires_grad_(True) if lora is None else attach(self._lm, model, lora, seed)
        self.text_prefix = None if lora is None else text_prefix(model)
        self.peft_config: dict[str, Any] | None = None
        self._roles: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        if lora is not None:
            adapters = self._peft.peft_config
            self.peft_config = as_json(adapters[POLICY]) | base_of(model.source)
            self._roles["reference"] = partial(acting_as, self._peft, REFERENCE if REFERENCE in adapters else None)
        self.scored = {role.name: ScoredAdapter(self._peft, role, seed, self.text_prefix) for role in roles}
        self._roles |= {name: partial(acting_as, self._peft, name) for name in self.scored}
        own = [(name, weight) for name, weight in self._peft.named_parameters() if weight.requires_grad]
        if lora is not None:
            own = [(name.replace(f".{POLICY}.", "."), weight) for name, weight in own if f".{POLICY}." in name]
        self.trained = Masters(dict(own), getattr(torch, model.dtype), keep=keep_masters)
        self._start_from(model)
        to_eval(self._peft)
        trial = partial(self.hidden, torch.zeros(1, 2, dtype=torch.int64, device=device))
        fuse(self._lm, trial, on_card=self.head.is_cuda)
        apply(self._lm, checkpointing, model.path)
        if offload:
            tile_mlps(self._lm)
        check_head(self._lm, self.logits, self.hidden, model.path)
        self.packed = packing_check.enable(self._lm, self.logits, self.predicting, self.dtype, attention)
        if replays_routing:
            self._routers = Routers(self._lm, model.path)
            trial(experts=torch.full((2, self._routers.width), -1, dtype=torch.int16, device=device))
        if lora is None and keep_reference:
            kept = ShardedReference(self._lm, model, device) if sharded else Reference(self._lm, model, trial)
            self._roles["reference"] = kept.acting

    def _start_from(self, model: ModelConfig) -> None:
        """Sets the weights to those of model.adapter, if training starts from one."""
        if model.adapter is not None:
            tensors = text_adapter(load_file(Path(model.adapter) / WEIGHTS_FILE))
            check_finite(tensors.items(), model.adapter, "model.adapter")
            self.load(tensors)

    def beside(self, number: int, model: ModelConfig, lora: LoraConfig, seed: int, *, keep_masters: bool) -> "Policy":
        """Returns the policy of another run on the same base: with an adapter of its own, that this one's constructor
        would have made of these arguments, and the same reference. `activate` says which of them the model computes
        with. number: of the run, from 1."""
        other, name = copy.copy(self), f"run{number}"
        weights = attach_beside(self._peft, name, lora, seed)
        other._adapter = name
        other.trained = Masters(weights, self.dtype, keep=keep_masters)
        adapters = self._peft.peft_config
        other.peft_config = as_json(adapters[name]) | base_of(model.source)
        reference = REFERENCE if REFERENCE in adapters else None
        other._roles = {"reference": partial(acting_as, self._peft, reference, name)}
        other._start_from(model)
        return other

    def activate(self) -> None:
        """Has the model compute with this policy's adapter, where several policies are on one base (`beside`)."""
        if self._peft.active_adapter != self._adapter:
            self._peft.set_adapter(self._adapter)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.trained.dtype

    @property
    def config(self) -> Any:
        """transformers' configuration of the model, or of its text part."""
        return self._lm.config.get_text_config()

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        layout: Layout | None = None,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Returns [B * L, H] final hidden states of [B, L] right-padded ids, or of a packed row [1, L] with its
        positions [1, L] and layout. experts: see MicroBatch, for a policy that replays routing; a backward pass must
        come before the next call.

        No attention mask is passed. Attention is causal and the padding comes last, so no real token sees it, and the
        attention kernels take their fast path instead of a dense [B, 1, L, L] mask.
        """
        # seq_idx is what learner.model.recurrence.carry_states says of it.
        if self._routers is not None:
            self._routers.replay(experts)
        packed = {} if layout is None else {"position_ids": positions, "packed_layout": layout, "seq_idx": layout}
        with offloaded(self._offload and torch.is_grad_enabled()):
            states: Tensor = decoder_of(self._lm)(input_ids=ids, use_cache=False, **packed).last_hidden_state
        return states.flatten(0, 1)

    def predicting(self, batch: MicroBatch) -> Tensor:
        """Returns the [N, H] hidden states that predict the completion tokens of the batch."""
        return self.hidden(batch.ids, batch.positions, batch.layout, batch.experts).index_select(0, batch.index)

    def logprobs(self, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns [N] logprobs and [N] entropies of the tokens that the [N, H] states predict, with gradients
        (learner.model.logprob.policy_logprobs)."""
        return with_head(self._lm, policy_logprobs, states, targets, temperature, logits=self.logits)

    def taught_logprobs(self, states: Tensor, targets: Tensor, top: Top, temperature: float) -> TaughtLogprobs:
        """As `logprobs`, with the KL to a teacher over its likeliest tokens (learner.model.logprob.taught_logprobs)."""
        return with_head(self._lm, taught_logprobs, states, targets, top, temperature, logits=self.logits)

    def token_logprobs(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Returns [N] logprobs without a gradient (learner.model.logprob.token_logprobs)."""
        return with_head(self._lm, token_logprobs, states, targets, temperature, logits=self.logits)

    def token_entropies(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Returns [N] entropies without a gradient (learner.model.logprob.token_entropies)."""
        return with_head(self._lm, token_entropies, states, targets, temperature, logits=self.logits)

    def acting_as(self, role: str) -> AbstractContextManager[None]:
        """Inside this block the model acts as another role on the same base: `reference`, or one of `scored`. A forward
        pass and its backward pass must be in the same block.

        With an adapter the reference is model.reference, else the adapter that training started from, else the base
        alone, which takes no memory. Without an adapter it is model.reference, else the weights that training started
        from.
        """
        return self._roles[role]()

    @property
    def reward_models(self) -> list[str]:
        """The names in `scored` of reward models (learner.model.roles.reward_roles), in their order."""
        return [name for name in self.scored if name.startswith(REWARD)]

    @property
    def masters(self) -> dict[str, Tensor]:
        """The weights that the optimizer updates, by PEFT's names of adapter weights (base_model.model.….lora_A.weight)
        or the model's names of its weights. They are float32 masters, or the model's own weights if keep_masters is
        false."""
        return self.trained.named

    def clear_gradients(self) -> None:
        """See Masters, also for the next three methods."""
        self.trained.clear_gradients()

    def collect_gradients(self) -> None:
        self.trained.collect_gradients()

    def sync(self) -> None:
        self.trained.sync()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.trained.load(tensors)

    def merged(self) -> dict[str, Source]:
        """Returns the base's weights that the adapter changes, with the adapter merged in (see the function
        `merged`)."""
        return merged(self._lm)

    def scalings(self) -> dict[str, float]:
        """Returns the scaling alpha / r of each layer with an adapter, by PEFT's name of the layer."""
        layers = ((name, module) for name, module in self._peft.named_modules() if isinstance(module, LoraLayer))
        own = self._adapter
        return {name: float(layer.scaling[own]) for name, layer in layers if own in layer.scaling}

    def save_config(self, folder: Path) -> None:
        """Writes the base model's config.json and generation_config.json."""
        self._lm.config.save_pretrained(folder)
        # save_pretrained is not used here: transformers refuses to save some generation configs that it loads, such as
        # a temperature without sampling.
        (folder / "generation_config.json").write_text(self._lm.generation_config.to_json_string())
