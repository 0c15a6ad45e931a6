"""The policy: a frozen base model, its LoRA adapter, and the reference it may be held close to.

Types. The forward and backward pass run in the base's own type, adapter included, without autocast: autocast would keep
a second, cast copy of each LoRA layer's input (24 instead of 15 bytes per token, layer and hidden unit, bfloat16), and
the adapter would not be, bit for bit, the one that vLLM serves. Updates of a bfloat16 or float16 weight would be
rounded away, so the weights that the optimizer updates are float32 masters; the model holds their cast copy. With a
float32 base masters and model share their memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.batch import MicroBatch
from learner.config import LoraConfig, ModelConfig

ADAPTER, REFERENCE = "default", "reference"
WEIGHTS_FILE = "adapter_model.safetensors"

# Settings of a transformers config by which some models transform their logits after the head, which learner.logprob
# does not do; 1 and null are harmless.
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # share of the largest logit


class Policy:
    """Base model plus adapter.

    Attributes:
        head: [V, H] frozen output embedding.
        masters: PEFT's name of each adapter weight (base_model.model.….lora_A.weight) -> float32 weight to optimize.
        peft_config: of the adapter, as a JSON-able dictionary (the content of adapter_config.json).

    Raises:
        ValueError: the model cannot be trained here, or the adapter contradicts `lora`; the message names the setting.
        OSError: the model or the adapter was not found (raised by transformers and peft).
    """

    def __init__(
        self, model: ModelConfig, lora: LoraConfig, *, checkpointing: str, seed: int, device: torch.device
    ) -> None:
        self._lm = load_base(model, device)
        self.head = head_of(self._lm, model.path)
        self._peft, self._has_reference = attach(self._lm, model, lora, seed)
        self._cast = [
            (name.replace(f".{ADAPTER}.", "."), weight)
            for name, weight in self._peft.named_parameters()
            if weight.requires_grad
        ]
        self.masters = {name: _master(weight, self.head.dtype) for name, weight in self._cast}
        if model.adapter is not None:
            self.load(load_file(Path(model.adapter) / WEIGHTS_FILE))
        self.peft_config = _as_json(self._peft.peft_config[ADAPTER]) | {"base_model_name_or_path": model.path}
        self._peft.eval()
        if checkpointing == "full":
            self._checkpoint_layers(model.path)
        self._check_head(model.path)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, L] right-padded ids -> [B * L, H] final hidden states.

        No attention mask is passed: attention is causal and the padding comes last, so no real token sees it, and
        the attention kernels take their fast path instead of a dense [B, 1, L, L] mask.
        """
        states: Tensor = self._lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1)

    def predicting(self, batch: MicroBatch) -> Tensor:
        """[N, H] states that predict the completion tokens of the batch."""
        return self.hidden(batch.ids).index_select(0, batch.index)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it the model is the reference: the adapter it was started from, frozen, or the base model alone."""
        if not self._has_reference:
            with self._peft.disable_adapter():
                yield
            return
        self._peft.set_adapter(REFERENCE, inference_mode=True)
        try:
            yield
        finally:
            self._peft.set_adapter(ADAPTER)

    def clear_gradients(self) -> None:
        """To be called before the first micro-batch; a step that failed half-way may have left some."""
        for name, weight in self._cast:
            self.masters[name].grad = weight.grad = None

    def collect_gradients(self) -> None:
        """Adds the gradients of a micro-batch to those of the masters, in float32."""
        for name, weight in self._cast:
            master = self.masters[name]
            if master is weight or weight.grad is None:
                continue
            master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
            weight.grad = None

    @torch.no_grad()
    def sync(self) -> None:
        """Masters -> the copy that the model computes with; to be called after each change of the masters."""
        for name, weight in self._cast:
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Sets masters and model. Raises ValueError if names or shapes differ from this policy's."""
        wanted = {name: master.shape for name, master in self.masters.items()}
        found = {name: tensor.shape for name, tensor in tensors.items()}
        if wanted != found:
            names = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise ValueError(
                f"adapter weights: names and shapes must be this model's, {len(names)} differ, first {names[0]}: "
                f"wanted {wanted.get(names[0])}, got {found.get(names[0])}; compare learner.lora with r and "
                "target_modules in the adapter's adapter_config.json"
            )
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[name])
        self.sync()

    def check_ids(self, highest: int) -> None:
        """Raises ValueError if a token id is beyond the model's vocabulary."""
        if highest >= len(self.head):
            raise ValueError(
                f"token ids: must be below the vocabulary of model.path, {len(self.head)}, got {highest}; the rollouts "
                "were made with another tokenizer or model"
            )

    def _checkpoint_layers(self, path: str) -> None:
        if not self._lm.supports_gradient_checkpointing:
            raise ValueError(f"learner.checkpointing: {path} does not support full; set it to none")
        # Not re-entrant: the re-entrant kind finds nothing to differentiate behind frozen embeddings.
        self._lm.gradient_checkpointing_enable({"use_reentrant": False})
        for module in self._lm.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # the layer alone asks this flag; its children stay in eval, free of dropout

    @torch.no_grad()
    def _check_head(self, path: str) -> None:
        """The model's own logits must be head @ hidden: catches whatever LOGIT_SETTINGS does not name."""
        ids = torch.arange(1, min(9, len(self.head)), device=self.head.device)[None]
        own = self._lm(input_ids=ids, use_cache=False).logits[0].float()
        ours = (self.hidden(ids) @ self.head.t()).float()
        error = float((own - ours).abs().max() / own.abs().max().clamp(min=1e-6))
        if not error <= HEAD_TOLERANCE[self.head.dtype]:
            raise ValueError(
                f"model.path: {path} does something to its logits after the output embedding (they differ from "
                f"head @ hidden by {error:.1e} of the largest); its logprobs would be wrong. Train another architecture"
            )


def load_base(model: ModelConfig, device: torch.device) -> Any:
    """The frozen causal language model of model.path in model.dtype, without dropout."""
    config = AutoConfig.from_pretrained(model.path)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)  # the sampler has none, so neither may the learner
    for name in LOGIT_SETTINGS:
        value = getattr(config.get_text_config(), name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(
                f"model.path: the config of {model.path} sets {name}={value}, which the learner's logprobs do not "
                "apply (only plain head @ hidden); train a model without it"
            )
    lm: Any = AutoModelForCausalLM.from_pretrained(model.path, config=config, dtype=getattr(torch, model.dtype))
    return lm.to(device).requires_grad_(False)


def head_of(lm: Any, path: str) -> Tensor:
    """[V, H] weight of the output embedding; ValueError if it has a bias or none can be found."""
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"model.path: {path} must end in a linear output embedding without bias, got {head}")
    return head.weight


def attach(lm: Any, model: ModelConfig, lora: LoraConfig, seed: int) -> tuple[Any, bool]:
    """(the PEFT model, whether it holds a second, frozen copy of model.adapter as reference)."""
    if model.adapter is not None:
        _check_adapter(peft.PeftConfig.from_pretrained(model.adapter), model.adapter, lora)
        wrapped: Any = peft.PeftModel.from_pretrained(lm, model.adapter, adapter_name=ADAPTER, is_trainable=True)
        wrapped.load_adapter(model.adapter, REFERENCE, is_trainable=False)
    else:
        settings = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            target_modules=lora.targets,
            lora_dropout=0.0,
            bias="none",
            task_type=peft.TaskType.CAUSAL_LM,
        )
        if lora.targets != "all-linear":
            _check_targets(lm, list(lora.targets))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            wrapped = peft.get_peft_model(lm, settings, adapter_name=ADAPTER)
    for name, weight in wrapped.named_parameters():
        if f".{REFERENCE}." in name:
            weight.data = weight.data.to(lm.dtype)
    return wrapped, model.adapter is not None


def _check_targets(lm: Any, targets: list[str]) -> None:
    head = lm.get_output_embeddings()
    linear = {name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head}
    known = sorted({name.rsplit(".", 1)[-1] for name in linear})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ValueError(
                f"learner.lora.targets: each must name linear layers of the model other than its output embedding, got "
                f"{target!r}; known: {', '.join(known)}, or all-linear"
            )


def _check_adapter(config: Any, folder: str, lora: LoraConfig) -> None:
    wanted: dict[str, Any] = {
        "peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none", "use_dora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    for name, value in wanted.items():
        found = getattr(config, name, None)
        if found != value:
            raise ValueError(
                f"model.adapter: {name} of {folder} must be {value!r}, got {found!r}; set learner.lora.rank and .alpha "
                "to the adapter's, or start from a plain LoRA adapter"
            )


def _master(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A float32 copy of `weight`, which itself becomes `dtype`; for float32 the weight itself."""
    if dtype == torch.float32:
        return weight
    master = weight.detach().float().clone().requires_grad_()
    weight.data = weight.data.to(dtype)
    return master


def _as_json(config: peft.PeftConfig) -> dict[str, Any]:
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    plain["inference_mode"] = True
    return {name: getattr(value, "value", value) for name, value in plain.items()}
