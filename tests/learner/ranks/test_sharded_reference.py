"""The reference of a whole model in shards, over real processes: the KL, the loss and the weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from examples.random_model import make_tiny_model
from learner.algo.surrogates import LossConfig
from learner.config import ModelConfig, RunConfig
from learner.driver.failure import PreflightError
from learner.driver.input_checks import check_weights
from learner.model.adapter_config import ReferenceConfigError
from learner.model.reference import ShardedReference
from learner.model.trial import wrong_with
from tests.learner.rank_processes import rank_processes
from tests.learner.ranks.test_divided_weights import FULL, TEXT, load, save, trained
from tests.learner.rollouts import make_groups, uniform
from tests.learner.trainers import make_trainer

HELD: dict[str, Any] = FULL | {"loss": LossConfig(beta=0.3)}
MOVED = 1e-2  # nats: the least KL of a policy that has learned for a step, or that starts from other weights


@pytest.fixture(scope="module")
def ragged() -> list[pa.Table]:
    """Five groups of 80 to 240 tokens: ranks have different numbers of micro-batches."""
    rng = np.random.default_rng(0)
    return make_groups([rng.normal(size=6).tolist() for _ in range(5)], uniform, max_completion=40)


async def held_to(trainer: Any, groups: list[pa.Table], count: int, packed: bool = True) -> Any:
    """Of each of so many steps the KL and the loss; and what `trained` tells after them."""
    trainer._policy.packed &= packed
    told = [await trainer.step(groups) for _ in range(count)]
    weights, *_ = await trained(trainer, groups, 0)
    return [one["policy/kl"] for one in told], [one["loss/total"] for one in told], weights


async def kept(trainer: Any) -> tuple[int, set[torch.dtype]]:
    """Elements of the reference that this rank has, and their types. It is fused as the policy is."""
    lm, frozen = trainer._policy._lm, trainer._policy._roles["reference"].__self__._frozen
    fused, wanted = ([name for name, part in one.named_modules() if "forward" in vars(part)] for one in (frozen, lm))
    assert fused == wanted != []
    own = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in frozen.parameters()]
    assert not any(weight.requires_grad for weight in own)
    return sum(weight.numel() for weight in own), {weight.dtype for weight in own}


async def after_an_error(trainer: Any) -> tuple[list[float], list[float]]:
    """What the policy says of a text before and after an error within a pass of its reference."""
    before = await trainer.probe(TEXT)
    with pytest.raises(ZeroDivisionError), trainer._policy.acting_as("reference"):
        raise ZeroDivisionError
    return list(before.logprobs), list((await trainer.probe(TEXT)).logprobs)


@pytest.mark.parametrize(
    ("given", "tied", "settings", "packed"),
    [
        (False, False, {}, True),
        pytest.param(True, True, {"checkpointing": "full"}, False, marks=pytest.mark.long),
        pytest.param(True, False, {"dtype": "bfloat16"}, True, marks=pytest.mark.long),
    ],
    ids=["the start", "another, tied, padded", "another, bfloat16"],
)
async def test_ranks_are_held_to_what_one_process_is_held_to(
    tmp_path: Path, ragged: list[pa.Table], given: bool, tied: bool, settings: dict[str, Any], packed: bool
) -> None:
    path, other = (str(make_tiny_model(tmp_path / f"{seed}", tied=tied, seed=seed)) for seed in (0, 5))
    model = {"reference": other if given else None}
    wanted, losses, weights = await held_to(make_trainer(path, model=model, **HELD, **settings), ragged, 3, packed)
    with rank_processes(2, path, sharded=True, model=model, **HELD, **settings) as ranks:
        (found, *rest), (again, *_) = ranks.all(held_to, ragged, 3, packed)
        whole = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(path).parameters())
        embedding = len(weights["model.embed_tokens.weight"].flatten()) if tied else 0
        shares, types = zip(*ranks.all(kept), strict=True)
        (before, after), _ = ranks.all(after_an_error)
    exact = "dtype" not in settings
    near = 1e-5 if exact else 1e-2
    assert found == again == pytest.approx(wanted, rel=near)
    assert rest[0] == pytest.approx(losses, rel=near)
    apart = max(float((rest[1][name].float() - weights[name].float()).abs().max()) for name in weights)
    assert apart <= (5e-6 if exact else 2e-4)  # the KL moves weights by 3e-3 and more
    assert (found[0] > MOVED) == given  # at first it is the policy itself
    assert min(found[1:]) > MOVED
    assert sum(shares) == whole + embedding  # no rank has more than its rows, and the tied embedding
    assert max(shares) - min(shares) <= 0.01 * whole
    assert types == ({torch.float32 if exact else torch.bfloat16},) * 2
    assert before == after


@pytest.mark.long
@pytest.mark.parametrize("given", [False, True])
async def test_a_resumed_run_is_held_to_the_same(tmp_path: Path, ragged: list[pa.Table], given: bool) -> None:
    """To the start's files, and not to what was learned by the time of the checkpoint; in one process, too."""
    path, other = (str(make_tiny_model(tmp_path / f"{seed}", tied=False, seed=seed)) for seed in (0, 5))
    model, saved = {"reference": other if given else None}, tmp_path / "saved"
    with rank_processes(2, path, sharded=True, model=model, **HELD) as ranks:
        ranks.all(held_to, ragged, 2)
        ranks.all(save, saved)
        (wanted, losses, weights), _ = ranks.all(held_to, ragged, 1)
    with rank_processes(2, path, sharded=True, model=model, **HELD) as ranks:
        assert ranks.all(load, saved) == [None] * 2
        (kl, loss, again), _ = ranks.all(held_to, ragged, 1)
    assert (kl, loss) == (wanted, losses)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert wanted[0] > MOVED
    alone = make_trainer(path, model=model, **HELD)
    await load(alone, saved)
    kl, loss, _ = await held_to(alone, ragged, 1)
    assert kl == pytest.approx(wanted, rel=1e-5)
    assert loss == pytest.approx(losses, rel=1e-5)


def test_what_cannot_be_a_reference_is_refused(tiny_path: str, adapter_path: str) -> None:
    model = ModelConfig(path=tiny_path, dtype="float32", reference=adapter_path)
    with pytest.raises(ReferenceConfigError, match=r"model.reference: must be a whole model, .* is an adapter"):
        ShardedReference(None, model, torch.device("cpu"))


def test_files_that_cannot_be_read_in_parts_are_found_at_the_start(tiny_path: str, tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path / "other", seed=5)
    config = RunConfig.model_validate(
        {
            "model": {"path": tiny_path, "reference": str(reference)},
            "data": {"path": "d"},
            "rewards": [{"use": "format"}],
            "learner": {"mode": "full", "loss": {"beta": 0.1}},
            "cluster": {"learners": 2},
            "memory": {"layout": "sharded"},
        }
    )
    check_weights(config, followed=True)
    assert wrong_with(config) == []
    file = reference / "model.safetensors"
    save_file({f"other.{name}": weight for name, weight in load_file(file).items()}, file)
    lacks, holds = wrong_with(config)
    assert lacks.startswith(f"model.reference: {reference} lacks 27 tensors")
    assert holds.startswith(f"model.reference: {reference} holds 26 tensors that the model of its config.json")
    file.unlink()
    with pytest.raises(PreflightError, match=r"^model.reference: .* must hold model.safetensors"):
        check_weights(config, followed=True)
