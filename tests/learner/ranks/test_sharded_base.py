"""A whole model that is trained in shards, over real processes: what one rank computes, and checkpoints of it. A
base in shards over real processes: the bits of a whole base, whatever the model and the settings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from cluster.errors import WrongInput
from cluster.memory.learner import FILE_BYTES
from examples.random_families import FAMILIES, TINY, make_family
from examples.random_model import make_tiny_model
from learner.algo.surrogates import LossConfig
from learner.config import ModelConfig, RunConfig
from learner.config.settings import OptimizerConfig
from learner.driver.input_checks import check_weights
from learner.model.logprob import begin_anew
from learner.model.reference import ShardedReference
from learner.model.trial import wrong_with
from learner.trainer import state
from rollout.weights import unpack
from tests.learner.adapters import written_adapter
from tests.learner.rank_processes import Failed, rank_processes, steps
from tests.learner.rollouts import make_groups, random_logs, said, uniform
from tests.learner.trainers import make_trainer
from tests.model_rows import ROWS

pytestmark = pytest.mark.usefixtures("one_thread")

FULL: dict[str, Any] = {"mode": "full", "reduce": "fast", "learning_rate": 1e-3, "token_budget": 300}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def ragged() -> list[pa.Table]:
    """Five groups of 80 to 240 tokens: ranks have different numbers of micro-batches."""
    rng = np.random.default_rng(0)
    return make_groups([rng.normal(size=6).tolist() for _ in range(5)], uniform, max_completion=40)


async def trained(
    trainer: Any, groups: list[pa.Table], count: int, packed: bool = True
) -> tuple[dict[str, Tensor], list[float], Any]:
    """The weights that generators get after so many steps, the norms of the gradients, and the answer to a probe."""
    trainer._policy.packed &= packed
    norms = [(await trainer.step(groups))["loss/grad_norm"] for _ in range(count)]
    (shared, _), answer = await trainer.outgoing(), await trainer.probe(TEXT)
    weights = {} if shared.value is None else dict(unpack(shared.value.payload))
    return weights, norms, answer.logprobs


async def after_a_failed_pass(trainer: Any, groups: list[pa.Table], count: int) -> Any:
    """As `trained`, after a backward pass that ended in an error, as in a trial of learner.model.packing_check."""
    embedded = []

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("no kernel")

    def watch(module: Any, inputs: Any, output: Tensor) -> None:
        embedded.extend(inputs)
        output.register_hook(fail)

    handle = trainer._policy._lm.base_model.layers[0].register_forward_hook(watch)
    with pytest.raises(RuntimeError, match="no kernel"):
        torch.autograd.grad(trainer._policy.hidden(torch.tensor([TEXT])).sum(), embedded)
    handle.remove()
    begin_anew(trainer._policy._lm)
    return await trained(trainer, groups, count)


async def save(trainer: Any, folder: Path, file_bytes: int = FILE_BYTES) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "FILE_BYTES", file_bytes)
        return await trainer.save(folder)


async def load(trainer: Any, folder: Path) -> None:
    await trainer.load(folder)


async def raised(trainer: Any, folder: Path) -> Failed:
    with pytest.raises(ValueError) as error:
        await trainer.load(folder / "saved")
    return Failed("ValueError", str(error.value))


LARGER: dict[str, Any] = {"model": {"teacher": "x"}, "algorithm": "distill", "loss": LossConfig(beta=1, teacher_top=3)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("tied", "settings", "ranks"),
    [
        (False, {"checkpointing": "full"}, 3),
        (True, {}, 2),
        (False, {"dtype": "bfloat16", "optimizer": OptimizerConfig(max_grad_norm=1e-2)}, 2),
        (False, {"checkpointing": "mlp", "updates_per_batch": 2, "loss": LossConfig(ratio="clip")}, 2),
        (True, LARGER, 2),
    ],
    ids=["checkpointing", "tied", "bfloat16, clipped", "padded, two updates", "a teacher's likeliest tokens"],
)
async def test_it_learns_what_one_rank_learns(
    tmp_path: Path, ragged: list[pa.Table], tied: bool, settings: dict[str, Any], ranks: int
) -> None:
    path = str(make_tiny_model(tmp_path / "model", tied=tied))
    packed = "updates_per_batch" not in settings
    if settings is LARGER:
        ragged = [said(group, random_logs, 3) for group in ragged]
    wanted, norms, answer = await trained(make_trainer(path, **FULL, **settings), ragged, 3, packed)
    with rank_processes(ranks, path, sharded=True, **FULL, **settings) as processes:
        answers = processes.all(trained, ragged, 3, packed)
    (weights, _, logprobs), *others = answers
    assert weights.keys() == wanted.keys()
    assert all(weights[name].dtype == wanted[name].dtype for name in wanted)
    apart = max(float((weights[name].float() - wanted[name].float()).abs().max()) for name in wanted)
    # Float32 sums in another order; of bfloat16 one number in thousands is rounded to the next one.
    bound = 2e-6 if "dtype" not in settings else 2e-4
    assert apart <= bound
    assert all(found == pytest.approx(norms, rel=1e-5) for _, found, _ in answers)
    np.testing.assert_allclose(logprobs, answer, atol=bound * 50)
    assert all(gathered == {} and np.array_equal(own, logprobs) for gathered, _, own in others)


@pytest.mark.long
async def test_a_failed_pass_leaves_no_trace(tmp_path: Path, ragged: list[pa.Table]) -> None:
    path = str(make_tiny_model(tmp_path / "model", tied=False))
    wanted, norms, _ = await trained(make_trainer(path, **FULL), ragged, 2)
    with rank_processes(2, path, sharded=True, **FULL) as processes:
        weights, found, _ = processes.all(after_a_failed_pass, ragged, 2)[0]
    assert found == pytest.approx(norms, rel=1e-5)
    assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) <= 2e-6


@pytest.mark.long
@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
async def test_a_checkpoint_goes_on_with_any_number_of_ranks(
    tmp_path: Path, ragged: list[pa.Table], tied: bool, dtype: str
) -> None:
    """Written by two ranks it is read by three and by one process; written by one process, by three ranks."""
    path, by_two, by_one = str(make_tiny_model(tmp_path / "model", tied=tied)), tmp_path / "two", tmp_path / "one"
    settings = FULL | {"dtype": dtype}
    with rank_processes(2, path, sharded=True, **settings) as processes:
        before, *_ = processes.all(trained, ragged, 2)[0]
        first, second = processes.all(save, by_two, 100_000 if tied else FILE_BYTES)
        (wanted, norms, _), _ = processes.all(trained, ragged, 1)
    files = {file.relative_to(by_two).as_posix() for file in by_two.rglob("*") if file.is_file()}
    assert files == first.keys() | second.keys()
    assert all(name.startswith("shards/shard-00002-model-") for name in second)
    assert (len(second) > 3) == tied
    published = load_file(by_two / "model" / "model.safetensors")
    assert all(torch.equal(published[name], before[name]) for name in before)
    assert GenerationConfig.from_pretrained(by_two / "model").eos_token_id == [258, 256]
    alone = make_trainer(path, **settings)
    await load(alone, by_two)
    await save(alone, by_one)
    found = [await trained(alone, ragged, 1)]
    with rank_processes(3, path, sharded=True, **settings) as processes:
        for folder in (by_one, by_two):
            assert processes.all(load, folder) == [None] * 3
            found.append(processes.all(trained, ragged, 1)[0])
    for weights, again, _ in found:
        assert again == pytest.approx(norms, rel=1e-6 if tied else 1e-4)
        apart = max(float((weights[name].float() - wanted[name].float()).abs().max()) for name in wanted)
        assert apart <= (1e-6 if tied else 2e-4)


@pytest.mark.long
async def test_states_in_8_bits_go_on_with_as_many_ranks(tmp_path: Path, ragged: list[pa.Table]) -> None:
    path = str(make_tiny_model(tmp_path / "model", hidden_size=128, heads=4))
    settings = FULL | {"optimizer": OptimizerConfig(kind="adamw_8bit")}
    with rank_processes(2, path, sharded=True, **settings) as processes:
        processes.all(trained, ragged, 2)
        processes.all(save, tmp_path / "saved")
        (wanted, norms, _), _ = processes.all(trained, ragged, 1)
    with rank_processes(2, path, sharded=True, **settings) as processes:
        assert processes.all(load, tmp_path / "saved") == [None] * 2
        weights, again, _ = processes.all(trained, ragged, 1)[0]
    refused = [await raised(make_trainer(path, **settings), tmp_path)]
    with rank_processes(3, path, sharded=True, **settings) as processes:
        refused += processes.all(load, tmp_path / "saved")
    assert all(one.kind == "ValueError" and "cluster.learners: must be 2, as when" in one.text for one in refused)
    assert again == norms
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


async def test_a_full_disk_is_every_ranks_error(tmp_path: Path) -> None:
    path = str(make_tiny_model(tmp_path / "model"))
    with rank_processes(2, path, sharded=True, **FULL) as processes:
        for full in ("model/model.safetensors", "shards/shard-00002-model-00001-of-00001.safetensors"):
            file = tmp_path / full.replace("/", "-") / full
            file.parent.mkdir(parents=True)
            file.symlink_to("/dev/full")
            failed = processes.all(save, file.parents[1])
            assert [(one.kind, "No space left" in one.text.splitlines()[-1]) for one in failed] == [
                ("WriteFailed", True)
            ] * 2
        assert all(processes.all(save, tmp_path / "elsewhere"))  # no rank waits for another


# A whole model that two ranks train in shards is the one that a single process trains, for many architectures, each
# held to what it began with.
#
# FAMILIES=all: all of KINDS (three minutes); else some that differ most.

FEW = ("gemma3", pytest.param("lfm2", marks=pytest.mark.long))
KINDS = (
    "llama", "mistral", "gemma", "gemma2", "gemma3", "qwen3", "cohere", "glm4", "granite", "olmo2", "olmo3", "phi3",
    "apertus", "exaone4", "starcoder2", "helium", "smollm3", "lfm2", "nemotron",
)  # fmt: skip
APART = {"float32": 1e-5, "bfloat16": 1e-3}  # AdamW moves a weight by up to 3e-3 in three steps


def written(kind: str, folder: Path) -> str:
    if kind in FAMILIES:
        return str(make_family(folder, kind))
    torch.manual_seed(0)
    hf: Any = transformers
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **(TINY | ROWS[kind])))
    model.float().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS if os.environ.get("FAMILIES") == "all" else FEW)
async def test_two_ranks_train_what_one_process_trains(tmp_path: Path, kind: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    groups = make_groups([rng.normal(size=6).tolist() for _ in range(5)], uniform, max_completion=40)
    path, settings = written(kind, tmp_path / kind), FULL | {"dtype": dtype, "loss": LossConfig(beta=0.3)}
    wanted, *_ = await trained(make_trainer(path, **settings), groups, 3)
    with rank_processes(2, path, sharded=True, **settings) as processes:
        found, *_ = processes.all(trained, groups, 3)[0]
    assert found.keys() == wanted.keys()
    assert max(float((found[name].float() - wanted[name].float()).abs().max()) for name in wanted) <= APART[dtype]


# The reference of a whole model in shards, over real processes: the KL, the loss and the weights of one process.

HELD: dict[str, Any] = FULL | {"loss": LossConfig(beta=0.3)}
MOVED = 1e-2  # nats: the least KL of a policy that has learned for a step, or that starts from other weights


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
    with pytest.raises(WrongInput, match=r"model.reference: must be a whole model, .* is an adapter"):
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
    with pytest.raises(WrongInput, match=r"^model.reference: .* must hold model.safetensors"):
        check_weights(config, followed=True)


# A base in shards over real processes: the bits of a whole base, whatever the model and the settings.

EXACT: dict[str, Any] = {"reduce": "exact", "learning_rate": 1e-2, "token_budget": 300}
SEVERAL = {"updates_per_batch": 2, "loss": LossConfig(ratio="clip", beta=0.1)}


@pytest.mark.parametrize(
    ("tied", "settings", "packed", "ranks"),
    [
        pytest.param(False, SEVERAL | {"checkpointing": "full"}, True, 3, marks=pytest.mark.long),
        (True, {}, False, 2),
        pytest.param(False, LARGER, True, 2, marks=pytest.mark.long),
        pytest.param(
            False, {"algorithm": "ppo", "dtype": "bfloat16", "checkpointing": 1}, True, 2, marks=pytest.mark.long
        ),
    ],
    ids=["packed", "tied, padded", "a teacher's likeliest tokens", "PPO"],
)
async def test_a_base_in_shards_changes_no_bit(
    tmp_path: Path, ragged: list[pa.Table], tied: bool, settings: dict[str, Any], packed: bool, ranks: int
) -> None:
    path = str(make_tiny_model(tmp_path / "model", tied=tied))
    adapter = written_adapter(path, tmp_path, seed=1)
    if settings is LARGER:
        ragged = [said(group, random_logs, 3) for group in ragged]
    alone = await steps(make_trainer(path, adapter=adapter, **EXACT, **settings), ragged, 2, packed)
    assert len({digest for digest, _ in alone}) == 2
    with rank_processes(ranks, path, sharded=True, adapter=adapter, **EXACT, **settings) as processes:
        assert processes.all(steps, ragged, 2, packed) == [alone] * ranks
