"""Further roles on the policy's base: adapters with a scalar head (reward and value models), no second copy of it.

In files they are PEFT's sequence classification: task_type SEQ_CLS, `score` among modules_to_save, and the head beside
the LoRA weights as HEAD. PEFT itself would put the head into the model; here it is kept apart, since the model is one
that speaks.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from learner.model.lora import POLICY, as_json
from learner.model.masters import Masters, difference
from rollout.data.model_files import WEIGHTS_FILE, load_tokenizer

# A scalar head: one number of a hidden state, s = w . h, as transformers' sequence classification with one label has
# it (`score`, without bias). Reward and value models are such a head and an adapter on the base of all roles.
#
# It is float32 over a base in 16 bits, too: a reward near 10 in bfloat16 would be rounded to a sixteenth.


class ScalarHead(nn.Module):
    """weight: [1, H], of any floating type."""

    def __init__(self, weight: Float[Tensor, "1 H"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().to(torch.float32))

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> "ScalarHead":
        """One that says 0 of every state; its first gradient is the states' and not 0."""
        return cls(torch.zeros(1, width, device=device))

    def forward(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        """float32 numbers of the states, which may have 16 bits."""
        return hidden.float() @ self.weight[0]


REWARD = "reward_"  # and a number: names of reward models


@dataclass(frozen=True, slots=True)
class ScoredRole:
    """What is asked for.

    name: of the adapter, and of the role for learner.model.policy.Policy.acting_as. folder: of an adapter in PEFT's
    sequence-classification format; None: a fresh one of the policy's rank and targets, with a head of zeros. trained:
    whether its weights want a gradient. key: the setting that asks for it, for messages.
    """

    name: str
    folder: str | None
    trained: bool
    key: str


def reward_roles(folders: Sequence[str]) -> list[ScoredRole]:
    """Of frozen reward models."""
    return [ScoredRole(f"{REWARD}{i}", folder, trained=False, key="rewards") for i, folder in enumerate(folders)]


class ScoredAdapter:
    """An adapter beside the policy's, and its head.

    Attributes:
        head: of the states that the model has while it acts as this role.
        weights: PEFT's name of each LoRA weight, and HEAD -> the weight that the model computes with: the head float32,
            the others of the base's type.
        masters: of the weights, if they are trained.
        pad: id of the padding token, behind the last token that speaks for a sequence; None: the last of all speaks.
        peft_config: the content of its adapter_config.json.
    """

    def __init__(self, wrapped: Any, role: ScoredRole, seed: int) -> None:
        """Adds it to the PEFT model. Raises WrongInput: the folder is none for a scalar head on this base."""
        lm = wrapped.get_base_model()
        place = lm.get_output_embeddings().weight
        tensors = {} if role.folder is None else load_file(Path(role.folder) / WEIGHTS_FILE)
        settings = _settings(wrapped, role)
        with _unchanged(wrapped), torch.random.fork_rng():
            torch.manual_seed(seed)
            wrapped.add_adapter(role.name, settings)
        own = (f".lora_A.{role.name}.weight", f".lora_B.{role.name}.weight")  # a layer may be called as the role is
        lora = {
            f"{name.removesuffix(f'.{role.name}.weight')}.weight": weight
            for name, weight in wrapped.named_parameters()
            if name.endswith(own)
        }
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
        """For PEFT's AutoPeftModelForSequenceClassification, float32; `path` is the base model's. The folder is made.

        transformers' sequence classification also wants a padding token in the base's config.
        """
        folder.mkdir(parents=True, exist_ok=True)
        named = self.weights if self.masters is None else self.masters.named
        save_file(
            {name: weight.detach().to("cpu", torch.float32) for name, weight in named.items()}, folder / WEIGHTS_FILE
        )
        (folder / CONFIG_FILE).write_text(json.dumps(self.peft_config | base_of(path), indent=2))

    def load(self, folder: Path) -> None:
        """What `save` wrote, of a role that is trained. Raises ValueError if it is another adapter's."""
        assert self.masters is not None, "a frozen role is what it was made from"
        self.masters.load(load_file(folder / WEIGHTS_FILE))


def _padding(lm: Any, role: ScoredRole) -> int | None:
    """The base's; without one that of the tokenizer which TRL writes beside an adapter, by which it was trained."""
    pad: int | None = lm.config.get_text_config().pad_token_id
    if pad is None and role.folder is not None and (Path(role.folder) / "tokenizer_config.json").is_file():
        pad = load_tokenizer(role.folder).pad_token_id
    return pad


def _settings(wrapped: Any, role: ScoredRole) -> peft.LoraConfig:
    """For an adapter without the head."""
    if role.folder is None:
        settings: peft.LoraConfig = copy.deepcopy(wrapped.peft_config[POLICY])
    else:
        read_scored(role.folder, role.key)
        settings = peft.LoraConfig.from_pretrained(role.folder)
    settings = without_head(settings)
    settings.inference_mode, settings.lora_dropout, settings.init_lora_weights = False, 0.0, True
    return settings


def without_head(settings: peft.LoraConfig) -> peft.LoraConfig:
    """The same for a causal language model, in which PEFT finds no head to save."""
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


@contextmanager
def _unchanged(wrapped: Any) -> Iterator[None]:
    """Puts back what PEFT switches on all modules as it adds an adapter: what trains, and the mode of each module, on
    which checkpointing and 4-bit layers hang."""
    modes = [(module, module.training) for module in wrapped.modules()]
    trained = [(weight, weight.requires_grad) for weight in wrapped.parameters()]
    yield
    for module, training in modes:
        module.training = training
    for weight, wanted in trained:
        weight.requires_grad = wanted
