"""A whole model that is trained in shards, over real processes: what one rank computes, and checkpoints of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig

from cluster.memory.learner import FILE_BYTES
from examples.random_model import make_tiny_model
from learner.algo.surrogates import LossConfig
from learner.config.settings import OptimizerConfig
from learner.model.logprob import begin_anew
from learner.trainer import state
from rollout.weights import unpack
from tests.learner.rank_processes import Failed, rank_processes
from tests.learner.rollouts import make_groups, uniform
from tests.learner.trainers import make_trainer

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


@pytest.mark.long
@pytest.mark.parametrize(
    ("tied", "settings", "ranks"),
    [
        (False, {"checkpointing": "full"}, 3),
        (True, {}, 2),
        (False, {"dtype": "bfloat16", "optimizer": OptimizerConfig(max_grad_norm=1e-2)}, 2),
        (False, {"checkpointing": "mlp", "updates_per_batch": 2, "loss": LossConfig(ratio="clip")}, 2),
    ],
    ids=["checkpointing", "tied", "bfloat16, clipped", "padded, two updates"],
)
async def test_it_learns_what_one_rank_learns(
    tmp_path: Path, ragged: list[pa.Table], tied: bool, settings: dict[str, Any], ranks: int
) -> None:
    path = str(make_tiny_model(tmp_path / "model", tied=tied))
    packed = "updates_per_batch" not in settings
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
