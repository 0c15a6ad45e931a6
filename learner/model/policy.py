"""The policy: a frozen base model, its LoRA adapter, and the reference it may be held close to; or a model that is
trained as a whole (learner.mode: full), whose reference is a second set of weights (learner.model.reference, in shards
learner.model.sharded_reference).

Types. The forward and backward pass run in the base's own type, adapter included, without autocast: autocast would keep
a second, cast copy of each LoRA layer's input (9 bytes more per token, layer and hidden unit, bfloat16), and
the adapter would not be, bit for bit, the one that vLLM serves. Updates of a bfloat16 or float16 weight would be
rounded away, so the weights that the optimizer updates are float32 masters; the model holds their cast copy. With a
float32 base masters and model share their memory. Trained as a whole, N bfloat16 weights cost 2N bytes for the model,
4N for the masters, 4N for their gradients, 2N for those of a micro-batch and 8N for AdamW's states; with 8-bit states
there are no masters (learner.trainer.stochastic_rounding), and it is 2N for the model, 2N for gradients, 2N for
states. A reference is another 2N, or N.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor

from learner.batch.layout import Layout
from learner.batch.micro_batch import MicroBatch
from learner.config import ModelConfig
from learner.config.learner import LoraConfig
from learner.model import packing_check
from learner.model.activation_checkpointing import Policy as Checkpointing
from learner.model.activation_checkpointing import apply as apply_checkpointing
from learner.model.activation_checkpointing import offloaded
from learner.model.adapter_config import base_of
from learner.model.base import check_finite, head_of, load_base, to_eval
from learner.model.fusion import fuse
from learner.model.head import with_head
from learner.model.head_check import check_head
from learner.model.logits import logits_of
from learner.model.logprob import policy_logprobs, token_entropies, token_logprobs
from learner.model.lora import POLICY, REFERENCE, acting_as, as_json, attach
from learner.model.lora_merge import merged
from learner.model.mapped_base import MappedBase
from learner.model.masters import Masters
from learner.model.reference import Reference
from learner.model.roles import REWARD, ScoredAdapter, ScoredRole
from learner.model.sharded_reference import ShardedReference
from rollout.data.weight_files import WEIGHTS_FILE
from rollout.safetensors_stream import Source


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
        packed: whether micro-batches may be packed (learner.model.packed_attention); otherwise they must be padded.
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
        checkpointing: Checkpointing,
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
        apply_checkpointing(self._lm, checkpointing, model.path)
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
        """The base's weights that the adapter changes, with it (learner.model.lora_merge); the base's own stay."""
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
