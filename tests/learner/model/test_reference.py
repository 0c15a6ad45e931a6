"""The reference of a model that is trained as a whole: the textbook's KL, whatever happened to the policy meanwhile.
Adapters with a scalar head beside the policy's, against PEFT's sequence classification.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cluster.errors import WrongInput
from examples.random_model import make_tiny_model
from learner.algo.surrogates import LossConfig
from learner.config import ModelConfig
from learner.config.settings import LoraConfig, OptimizerConfig
from learner.model.adapter_config import HEAD, read_scored
from learner.model.policy import Policy
from learner.model.reference import _narrowed
from learner.model.roles import ScoredRole
from learner.trainer.trainer import Trainer
from tests.learner import naive
from tests.learner.trainers import advantages_by_hand, distance, gradient, groups_near, make_trainer, naive_gradient
from tests.peak import peak_bytes

ROOT = Path(__file__).parents[3]
IDS = list(range(3, 40))
FULL: dict[str, Any] = {"mode": "full", "learning_rate": 0.01, "loss": LossConfig(beta=0.3, ratio="clip")}


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture, other weights."""
    return str(make_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=5))


def said(policy: Policy) -> Tensor:
    """Logits of IDS."""
    with torch.no_grad():
        return policy.hidden(torch.tensor([IDS])) @ policy.head.t()


def as_reference(policy: Policy) -> Tensor:
    with policy.acting_as("reference"):
        return said(policy)


@pytest.mark.parametrize("given", [False, True])
async def test_kl_is_the_textbooks_and_a_resumed_run_has_the_same_reference(
    tiny_path: str, other_path: str, groups: list[pa.Table], tmp_path: Path, given: bool
) -> None:
    """What training started from, or model.reference; not what was learned by the time of the checkpoint."""
    model = {"reference": other_path if given else None}
    trainer, resumed = (make_trainer(tiny_path, model=model, token_budget=60, **FULL) for _ in range(2))
    metrics = await trainer.step(groups)
    assert (metrics["policy/kl"] > 1e-3) == given  # at first it is the policy itself
    await trainer.save(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    near = groups_near(policy)
    found = await gradient(trainer, near)
    wanted = naive_gradient(
        policy, naive.load(other_path if given else tiny_path, None), near, FULL["loss"], advantages_by_hand("batch")
    )
    assert distance(found, wanted) < 5e-5
    await resumed.load(tmp_path)
    assert distance(await gradient(resumed, near), found) == 0


@pytest.mark.parametrize("kind", ["auto", "int8"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
async def test_the_reference_stays_and_the_policy_comes_back_bit_for_bit(
    tiny_path: str, groups: list[pa.Table], kind: str, optimizer: Any
) -> None:
    settings = FULL | {"optimizer": OptimizerConfig(kind=optimizer)}
    trainer = make_trainer(tiny_path, dtype="bfloat16", model={"reference_dtype": kind}, **settings)
    policy, start = trainer._policy, said(trainer._policy)
    reference = as_reference(policy)
    assert torch.equal(reference, start) == (kind == "auto")
    assert (reference - start).abs().max() < 0.05 * start.abs().max()
    await trainer.step(groups)
    moved = said(policy)
    assert not torch.equal(moved, start)
    assert torch.equal(as_reference(policy), reference)
    with pytest.raises(ZeroDivisionError), policy.acting_as("reference"):
        raise ZeroDivisionError
    assert torch.equal(said(policy), moved)


async def test_each_update_of_a_batch_is_held_to_the_reference(tiny_path: str, groups: list[pa.Table]) -> None:
    whole = await make_trainer(tiny_path, **FULL).step(groups)
    split = await make_trainer(tiny_path, updates_per_batch=2, **FULL).step(groups)
    assert whole["policy/kl"] == 0
    assert split["policy/kl"] > 1e-3  # of the second, after the first has moved the policy


def held_bytes(policy: Policy) -> int:
    """Of the reference's own tensors."""
    reference = policy._roles["reference"].__self__  # type: ignore[attr-defined]
    kept = [values for _, values in reference._whole]
    kept += [part for narrow in reference._narrow for part in (narrow.numbers, narrow.scales)]
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


def test_what_8_bits_cost_and_save_on_a_trained_model() -> None:
    """Half the bytes; logprobs of the model of gsm8k_cpu.yaml move by 0.02 nats in the mean."""
    path, device = str(ROOT / "examples/tiny-gsm8k"), torch.device("cpu")

    def made(kind: Any) -> Policy:
        model = ModelConfig(path=path, dtype="bfloat16", reference_dtype=kind)
        return Policy(model, None, checkpointing="none", seed=0, device=device, keep_reference=True)

    half, eight = made("auto"), made("int8")
    weights = list(half._lm.parameters())
    assert held_bytes(half) == 2 * sum(weight.numel() for weight in weights)
    linear = [module for module in half._lm.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    saved = sum(module.weight.numel() - 2 * len(module.weight) for module in linear)
    assert held_bytes(eight) == held_bytes(half) - saved
    logs = [as_reference(policy).float().log_softmax(-1) for policy in (half, eight)]
    error = (logs[0] - logs[1])[:-1].gather(1, torch.tensor(IDS[1:])[:, None]).abs()
    assert 1e-4 < float(error.mean()) < 0.05
    plain = peak_bytes(lambda: said(eight))
    largest = max(module.weight.nbytes for module in linear)
    assert peak_bytes(lambda: as_reference(eight)) < plain + 1.1 * largest


async def test_in_8_bits_a_head_apart_stays_as_it_is(tmp_path: Path, groups: list[pa.Table]) -> None:
    path = str(make_tiny_model(tmp_path, tied=False))
    trainer = make_trainer(path, model={"reference_dtype": "int8"}, **FULL)
    assert 0 < (await trainer.step(groups))["policy/kl"] < 1e-2


def test_each_row_has_a_scale_of_its_own_and_one_of_zeros_stays() -> None:
    weight = torch.randn(3, 50) * torch.tensor([[1.0], [1000.0], [0.0]])
    narrow = _narrowed(nn.Linear(50, 3), weight, weight)
    narrow = narrow._replace(weight=torch.empty(0))
    narrow.widen()
    error = (narrow.weight - weight).abs().amax(1)
    assert (error <= weight.abs().amax(1) / 254 * 1.01).all()


def test_what_cannot_be_a_reference_is_refused(tiny_path: str, adapter_path: str, tmp_path: Path) -> None:
    def made(reference: str) -> Trainer:
        return make_trainer(tiny_path, model={"reference": reference}, **FULL)

    folder = tmp_path / "model"
    shutil.copytree(tiny_path, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"rms_norm_eps": 1e-3, "eos_token_id": 7}))
    with pytest.raises(ValueError, match=r"model.reference: .* rms_norm_eps of .* is 0.001, not 1e-06; give another"):
        made(str(folder))
    with pytest.raises(ValueError, match=r"model.reference: must be a whole model, .* is an adapter"):
        made(adapter_path)


# Adapters with a scalar head beside the policy's, against PEFT's sequence classification.

ROLES_IDS = torch.tensor([[5, 9, 2, 7, 7, 3]])


def theirs(path: str, folder: str | None = None, outputs: int = 1, **lora: Any) -> Any:
    """A reward model as anyone makes one: from `folder`, or fresh with no weight zero."""
    base: Any = AutoModelForSequenceClassification.from_pretrained(path, num_labels=outputs, dtype=torch.float32)
    base.config.pad_token_id = 0
    if folder is not None:
        return peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    torch.manual_seed(3)
    settings: Any = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], "task_type": "SEQ_CLS"}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings | lora)).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.fixture(scope="module")
def scored_path(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("scored"))
    theirs(tiny_path).save_pretrained(folder)
    return folder


def policy_with(path: str, *roles: ScoredRole, adapter: str | None = None, **settings: Any) -> Policy:
    return Policy(
        ModelConfig(path=path, adapter=adapter, dtype=settings.pop("dtype", "float32")),
        LoraConfig(rank=8, alpha=16),
        checkpointing=settings.pop("checkpointing", "none"),
        seed=0,
        device=torch.device("cpu"),
        roles=roles,
    )


def last_score(policy: Policy, role: str, ids: Tensor = ROLES_IDS) -> Tensor:
    with policy.acting_as(role):
        scores: Tensor = policy.scored[role].head(policy.hidden(ids))
    return scores[-1]


def test_a_frozen_role_scores_as_transformers_and_peft_do_and_leaves_the_policy_alone(
    tiny_path: str, adapter_path: str, scored_path: str
) -> None:
    alone = policy_with(tiny_path, adapter=adapter_path)
    role = ScoredRole("reward", scored_path, trained=False, key="rewards")
    policy = policy_with(tiny_path, role, adapter=adapter_path)
    wanted = theirs(tiny_path, scored_path)(input_ids=ROLES_IDS).logits[0, 0]
    assert wanted.abs() > 1e-3
    torch.testing.assert_close(last_score(policy, "reward"), wanted, atol=1e-6, rtol=1e-6)
    assert torch.equal(policy.hidden(ROLES_IDS), alone.hidden(ROLES_IDS))
    assert policy.masters.keys() == alone.masters.keys()
    assert policy.scalings() == alone.scalings()
    assert not any(weight.requires_grad for weight in policy.scored["reward"].weights.values())


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_trained_role_has_the_gradient_of_peft_and_the_policy_none(
    tiny_path: str, scored_path: str, checkpointing: str
) -> None:
    role = ScoredRole("value", scored_path, trained=True, key="learner")
    policy = policy_with(tiny_path, role, checkpointing=checkpointing)
    model = theirs(tiny_path, scored_path)
    model(input_ids=ROLES_IDS).logits.sum().backward()
    wanted = {
        name.replace(".default", "").replace("modules_to_save.", ""): weight.grad
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    value = policy.scored["value"]
    assert value.masters is not None
    with policy.acting_as("value"):
        value.head(policy.hidden(ROLES_IDS))[-1].backward()
    assert wanted.keys() == value.masters.named.keys()
    for name, weight in value.masters.named.items():
        torch.testing.assert_close(weight.grad, wanted[name], atol=1e-6, rtol=1e-4)
    assert all(weight.grad is None for weight in policy.masters.values())


def test_a_fresh_role_says_zero_and_what_it_becomes_is_read_by_peft(tiny_path: str, tmp_path: Path) -> None:
    policy = policy_with(tiny_path, ScoredRole("value", None, trained=True, key="learner"), dtype="bfloat16")
    value = policy.scored["value"]
    assert last_score(policy, "value") == 0.0
    assert value.masters is not None
    torch.manual_seed(1)
    for weight in value.masters.named.values():
        torch.nn.init.normal_(weight, std=0.1)
    value.masters.sync()
    value.save(tmp_path, tiny_path)
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(str(tmp_path), num_labels=1)
    model.config.pad_token_id = 0
    wanted = model.eval()(input_ids=ROLES_IDS).logits[0, 0]
    torch.testing.assert_close(last_score(policy, "value").float(), wanted.float(), atol=0.05, rtol=0.05)  # bfloat16
    in_float32 = policy_with(tiny_path, ScoredRole("value", str(tmp_path), trained=False, key="learner"))
    torch.testing.assert_close(last_score(in_float32, "value"), wanted, atol=1e-5, rtol=1e-5)


def test_padding_is_the_base_s_or_that_of_the_tokenizer_beside_the_adapter(
    tiny_path: str, scored_path: str, tmp_path: Path
) -> None:
    """As TRL's RewardTrainer leaves it: a base without a padding token, and one that is the end token in the folder."""
    base, folder = (shutil.copytree(path, tmp_path / name) for path, name in ((tiny_path, "b"), (scored_path, "a")))
    role = ScoredRole("reward", str(folder), trained=False, key="rewards")
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    assert policy_with(tiny_path, role).scored["reward"].pad == 259
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    assert policy_with(str(base), role).scored["reward"].pad == tokenizer.eos_token_id != 259


def test_what_is_no_scalar_head_on_this_base_is_refused_by_name(
    tiny_path: str, adapter_path: str, scored_path: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongInput, match=r"^here: task_type of .* must be 'SEQ_CLS', got 'CAUSAL_LM'; give an"):
        read_scored(adapter_path, "here")
    theirs(tiny_path, outputs=2).save_pretrained(tmp_path / "two")
    with pytest.raises(WrongInput, match=r"^here: .*score.weight .* must be a head of one output, got 2 outputs"):
        read_scored(str(tmp_path / "two"), "here")
    theirs(tiny_path, modules_to_save=["embed_tokens"]).save_pretrained(tmp_path / "more")
    with pytest.raises(WrongInput, match=r"^here: modules_to_save of .* must be the head alone, got embed_tokens"):
        read_scored(str(tmp_path / "more"), "here")
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text((Path(scored_path) / "adapter_config.json").read_text())
    weights = load_file(Path(scored_path) / "adapter_model.safetensors")
    save_file(weights | {HEAD: torch.zeros(1, 3)}, other / "adapter_model.safetensors")
    assert json.loads((other / "adapter_config.json").read_text())["r"] == 8
    with pytest.raises(WrongInput, match=r"^here: .*other: must have the names and shapes of model.path, 1 differ"):
        policy_with(tiny_path, ScoredRole("reward", str(other), trained=False, key="here"))
