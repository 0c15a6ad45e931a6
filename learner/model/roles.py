"""Further roles on the policy's base: reward models and PPO's value, which are adapters with a scalar head. They share
the base, so they need no second copy of it.

Their files have PEFT's format of sequence classification: task_type SEQ_CLS, `score` among modules_to_save, and the
head under the name HEAD beside the LoRA weights. PEFT would put the head into the model; here it is a separate module,
since the base is a causal language model with its own head.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cluster.errors import WrongInput
from learner.model.adapter_config import CONFIG_FILE, HEAD, base_of, read_scored
from learner.model.base import check_finite
from learner.model.lora import POLICY, adapter_weights, as_json, unchanged
from learner.model.masters import Masters, difference
from rollout.data.model_files import WEIGHTS_FILE, load_tokenizer
from rollout.text_part import text_adapter, whole_adapter


class ScalarHead(nn.Module):
    """Computes one number of a hidden state, s = w . h, as transformers' sequence classification with one label does
    (`score`, without bias). It is float32 over a base in 16 bits, too: a reward near 10 would be rounded to a sixteenth
    in bfloat16.

    weight: [1, H], of any floating dtype.
    """

    def __init__(self, weight: Float[Tensor, "1 H"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().to(torch.float32))

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> "ScalarHead":
        """Returns a head that gives 0 for every state. Its gradient is not 0, since that is made of the states."""
        return cls(torch.zeros(1, width, device=device))

    def forward(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        """Returns [N] float32 numbers for the hidden states, which may have 16 bits."""
        return hidden.float() @ self.weight[0]


REWARD = "reward_"  # prefix of the names of reward models; a number follows


@dataclass(frozen=True, slots=True)
class ScoredRole:
    """Says which adapter with a scalar head a Policy is to have.

    name: name of the adapter, and of the role for learner.model.policy.Policy.acting_as.
    folder: folder of an adapter in PEFT's sequence-classification format; None: a new adapter with the policy's rank
        and targets, and a head of zeros.
    trained: whether its weights are trained.
    key: the setting that asks for the role, for messages.
    """

    name: str
    folder: str | None
    trained: bool
    key: str


def reward_roles(folders: Sequence[str]) -> list[ScoredRole]:
    """Returns the roles of frozen reward models, in the order of their folders."""
    return [ScoredRole(f"{REWARD}{i}", folder, trained=False, key="rewards") for i, folder in enumerate(folders)]


class ScoredAdapter:
    """An adapter on the policy's base with a scalar head.

    Attributes:
        head: computes a number of each hidden state that the model has while it acts as this role.
        weights: the weights that the model computes with, by PEFT's names of LoRA weights and HEAD: the head is
            float32, the others have the base's dtype.
        masters: masters of the weights; None if the role is frozen.
        pad: id of the padding token: the score of a sequence is at its last token that is not padding; None: at its
            last token.
        peft_config: the content of the role's adapter_config.json.
    """

    def __init__(self, wrapped: Any, role: ScoredRole, seed: int, text_prefix: str | None = None) -> None:
        """Adds the adapter to the PEFT model. text_prefix: learner.model.policy.Policy.text_prefix. Raises WrongInput
        if the folder does not hold an adapter with a scalar head for this base."""
        self._text_prefix = text_prefix
        lm = wrapped.get_base_model()
        place = lm.get_output_embeddings().weight
        tensors = {} if role.folder is None else text_adapter(load_file(Path(role.folder) / WEIGHTS_FILE))
        settings = _settings(wrapped, role)
        with unchanged(wrapped), torch.random.fork_rng():
            torch.manual_seed(seed)
            wrapped.add_adapter(role.name, settings)
        lora = adapter_weights(wrapped, role.name)
        self.head = ScalarHead.zeros(place.shape[1], place.device)
        self.weights: dict[str, nn.Parameter] = lora | {HEAD: self.head.weight}
        if role.folder is not None:
            _fill(self.weights, tensors, role.folder, role.key)
        for weight in self.weights.values():
            weight.requires_grad = role.trained
        self.pad = _padding(lm, role)
        self.masters: Masters | None = None
        if role.trained:
            self.masters = Masters(self.weights, place.dtype, wide=(HEAD,))
        else:
            for weight in lora.values():
                weight.data = weight.data.to(place.dtype)
        self.peft_config = as_json(settings) | {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}

    def save(self, folder: Path, path: str) -> None:
        """Writes the adapter in float32 for PEFT's AutoPeftModelForSequenceClassification; the folder is created. For
        its use, transformers' sequence classification needs a padding token in the base's config. The adapter of a
        checkpoint's text part has the names of the whole checkpoint (rollout.text_part), of which transformers has such
        a class for Gemma 3 and Qwen3.5 alone.

        path: name or folder of the base model.
        """
        folder.mkdir(parents=True, exist_ok=True)
        named = self.weights if self.masters is None else self.masters.named
        own = {name: weight.detach().to("cpu", torch.float32) for name, weight in named.items()}
        tensors, config = whole_adapter(own, self.peft_config | base_of(path), self._text_prefix)
        save_file(tensors, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))

    def load(self, folder: Path) -> None:
        """Loads what `save` wrote; only for a trained role. Raises ValueError if names or shapes of weights differ."""
        assert self.masters is not None, "a frozen role is what it was made from"
        self.masters.load(text_adapter(load_file(folder / WEIGHTS_FILE)))


def _padding(lm: Any, role: ScoredRole) -> int | None:
    """Returns the id of the padding token: that of the base's config, else that of the tokenizer which TRL writes into
    the adapter's folder, and with which the adapter was trained."""
    pad: int | None = lm.config.get_text_config().pad_token_id
    if pad is None and role.folder is not None and (Path(role.folder) / "tokenizer_config.json").is_file():
        pad = load_tokenizer(role.folder).pad_token_id
    return pad


def _settings(wrapped: Any, role: ScoredRole) -> peft.LoraConfig:
    """Returns PEFT's settings of the role's adapter, without its head."""
    if role.folder is None:
        settings: peft.LoraConfig = copy.deepcopy(wrapped.peft_config[POLICY])
    else:
        read_scored(role.folder, role.key)
        settings = peft.LoraConfig.from_pretrained(role.folder)
    settings = without_head(settings)
    if settings.target_parameters:  # the same experts may have been named by longer names, which PEFT takes for others
        others = (one.target_parameters for one in wrapped.peft_config.values() if one.target_parameters)
        settings.target_parameters = next(others, settings.target_parameters)
    settings.inference_mode, settings.lora_dropout, settings.init_lora_weights = False, 0.0, True
    return settings


def without_head(settings: peft.LoraConfig) -> peft.LoraConfig:
    """Changes PEFT's settings to those of a causal language model without towers, for which PEFT adds no head."""
    settings.exclude_modules = None
    settings.modules_to_save, settings.task_type = None, peft.TaskType.CAUSAL_LM
    return settings


def _fill(weights: dict[str, nn.Parameter], tensors: dict[str, Tensor], folder: str, key: str) -> None:
    if odd := difference(weights, tensors):
        raise WrongInput(
            f"{key}: {folder}: must have the names and shapes of model.path, {odd}; give an adapter that was trained "
            "on this base"
        )
    check_finite(tensors.items(), folder, key)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
