"""Measures the exact memory peak of the learner's step for any model shape, in seconds, without weights, data or a GPU.

It runs the code that trains: learner.trainer.trainer.Trainer makes an optimizer step over a batch of given lengths. Its
tensors are on torch's meta device, so they have shapes and dtypes but no memory. Every operation, forward and backward,
passes a ledger that knows which storages are alive and how many bytes they have. Nothing is modelled or fitted, so a
change of the learner changes the result.

It does not see memory that kernels allocate inside (that of FlashAttention's backward pass is added by its formula),
the CUDA context, cuBLAS' workspace, and fragmentation; the learner's figures in cluster.memory add them.
"""

import gc
import json
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cluster.memory.shape import Shape
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.model.attention import SEGMENTS, VARLEN
from learner.trainer.trainer import Trainer
from rollout.fakes import make_group
from rollout.types import Completion

CUDA_BLOCK = 512  # bytes; torch's caching allocator allocates multiples of it (c10/cuda/CUDACachingAllocator.h)

Lengths = tuple[int, Sequence[int]]  # P of a group, and T of each of its completions
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a learner. The first four are alive between two steps."""

    weights: int  # base or whole model, with buffers and 4-bit scales, and the reference of a whole model
    adapters: int  # the copies that the model computes with, a frozen reference, heads, and all float32 masters
    gradients: int  # the gradients of the masters
    optimizer: int  # the optimizer's states
    peak: int  # the highest number of bytes within a step

    @property
    def static(self) -> int:
        return self.weights + self.adapters + self.gradients + self.optimizer

    @property
    def dynamic(self) -> int:
        """The bytes that a step needs in addition: activations, and gradients in the base's dtype."""
        return self.peak - self.static


def footprint(
    shape: Shape,
    learner: LearnerConfig,
    groups: Sequence[Lengths],
    *,
    dtype: str = "bfloat16",
    base: str = "none",
    reference_dtype: str = "auto",
    cuda: bool = True,
) -> Footprint:
    """Returns the footprint of an optimizer step over `groups` that is not the first of a run: the optimizer has
    states.

    Args:
        shape: the shape of the model.
        learner: the run's configuration; checkpointing and token_budget must not be auto, and the optimizer must be
            adamw or adamw_rounded (the 8-bit kernels do not accept meta tensors).
        cuda: whether the step is as on a GPU, else as on a CPU (other attention kernels, float32 products in the head,
            exact bytes).

    Raises:
        ValueError: the learner refuses the model or the settings.
    """
    settings: dict[str, Any] = {"dtype": dtype, "base": base, "reference_dtype": reference_dtype}
    top = learner.loss.teacher_top
    settings["teacher"] = "what it says is recorded" if top else None
    attention = VARLEN if cuda and dtype == "bfloat16" else SEGMENTS  # GPUs that need float16 have no FlashAttention
    with tempfile.TemporaryDirectory() as folder, Ledger(CUDA_BLOCK if cuda else 1) as ledger, _as_on(cuda):
        (Path(folder) / "config.json").write_text(json.dumps(shape.to_config()))
        with torch.device("meta"):  # so that the adapters that peft makes are meta tensors, too
            trainer = Trainer(
                ModelConfig(path=folder, **settings),
                learner,
                temperature=1.0,
                max_completion_length=max(max(completions) for _, completions in groups),
                total_steps=2,
                seed=0,
                device="meta",
                attention=attention,
            )
        built = ledger.now
        _warm(trainer)
        gc.collect()
        ledger.peak = ledger.now
        trainer._step([_table(*lengths, top) for lengths in groups])
        return _read(trainer, ledger, built)


def _warm(trainer: Trainer) -> None:
    """Gives AdamW the states that it would make in its first step, since they are part of every later peak; and sets
    the fused kernel, which the constructor refuses for meta tensors."""
    for optimizer in _optimizers(trainer):
        for group in optimizer.param_groups:
            group["fused"] = True
            for weight in group["params"]:
                optimizer.state[weight] = {
                    "step": torch.zeros((), device="meta"),
                    "exp_avg": torch.zeros_like(weight, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(weight, dtype=torch.float32),
                }


def _optimizers(trainer: Trainer) -> list[torch.optim.Optimizer]:
    return [optimizer for updater in trainer._updates.updaters for optimizer in updater.optimizers]


def _read(trainer: Trainer, ledger: "Ledger", built: int) -> Footprint:
    policy = trainer._policy
    named = dict(policy._peft.named_parameters())
    model = {id(weight) for weight in named.values()}
    roles = [role.masters.named for role in policy.scored.values() if role.masters is not None]
    masters = [master for named_masters in (policy.masters, *roles) for master in named_masters.values()]
    own = [weight for name, weight in named.items() if "lora_" in name]
    adapters = ledger.bytes_of([*own, *(master for master in masters if id(master) not in model)])
    states = [state for optimizer in _optimizers(trainer) for state in optimizer.state.values()]
    return Footprint(
        weights=built - adapters,
        adapters=adapters,
        gradients=ledger.bytes_of([m.grad for m in masters if m.grad is not None]),
        optimizer=ledger.bytes_of([tensor for state in states for tensor in state.values()]),
        peak=ledger.peak,
    )


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living meta storages while it is entered, and answers operations that need the content of
    tensors with fixed values.

    granule: sizes are rounded up to multiples of so many bytes.
    """

    def __init__(self, granule: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._granule = granule
        self._living: dict[int, int] = {}  # storage -> bytes

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is aten._local_scalar_dense.default and args[0].is_meta:
            return 0.0  # a difference is 0, a norm is finite
        if (
            op is aten._to_copy.default
            and args[0].is_meta
            and torch.device(kwargs.get("device") or "meta").type == "cpu"
        ):
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)  # ones, since counts divide
        result = op(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.is_meta:
                self._see(value)
        inside = KERNEL_BYTES.get(op)
        if inside is not None:
            self.peak = max(self.peak, self.now + inside(*args, **kwargs))
        return result

    def bytes_of(self, tensors: Sequence[Tensor]) -> int:
        """Returns the bytes of the tensors' storages, each counted once. bitsandbytes' lookup table of 1 KiB counts 0,
        since no operation makes it."""
        return sum(self._living.get(key, 0) for key in {t.untyped_storage()._cdata for t in tensors if t.is_meta})

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._living:
            self._living[key] = -(-storage.nbytes() // self._granule) * self._granule
            self.now += self._living[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._living.pop(key)


def _flash_backward_bytes(grad: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    """Returns the bytes that FlashAttention's variable-length backward pass allocates inside: the gradient of the
    queries in float32, and with fewer key than query heads the gradients of keys and values for each query head
    (mha_varlen_bwd in flash_api.cpp)."""
    tokens, heads, width = query.shape
    expanded = 2 * key.shape[0] * heads * width * key.element_size() if key.shape[1] != heads else 0
    return 4 * tokens * heads * width + expanded


def _dequantised_bytes(states: Tensor, packed: Tensor, shape: Sequence[int], *_: Any, **__: Any) -> int:
    """Returns the bytes of a 4-bit weight that bitsandbytes dequantises to multiply many tokens by it
    (backends/cuda)."""
    return shape[0] * shape[1] * states.element_size()


KERNEL_BYTES: dict[Any, Callable[..., int]] = {
    torch.ops.torch_attn._varlen_attn_backward.default: _flash_backward_bytes,
    torch.ops.bitsandbytes.gemm_4bit.default: _dequantised_bytes,
}


@contextmanager
def _as_on(cuda: bool) -> Iterator[None]:
    """Inside this block meta tensors take the branches that tensors on a GPU, or on a CPU, would take. All tensors of
    the process say the same, those of other threads as well."""
    with ExitStack() as entered:
        # Layers that are computed again call the replaced operation, too.
        library = entered.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl("scaled_dot_product_attention", _cpu_attention, "AutogradMeta")
        if cuda:  # of the class, since layers that are computed again are outside of a TorchFunctionMode
            Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment]
            entered.callback(delattr, Tensor, "is_cuda")
        yield


def _cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Calls the CPU's flash kernel, which torch would not choose for meta tensors. A GPU's memory-efficient kernel
    keeps as many bytes."""
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


def _table(prompt: int, completions: Sequence[int], top: int) -> pa.Table:
    """Returns a group of rollouts of these lengths, whose rewards differ, so that all completions are trained on. top:
    tokens that a teacher told for each token; 0: there is no teacher."""
    sampled = [
        Completion(np.zeros(n, np.int32), np.full(n, -1.0, np.float32), "stop", np.zeros(n, np.int32))
        for n in completions
    ]
    rewards = [float(i % 2) for i in range(len(completions))]
    said = (("teacher_logprobs", 1), ("teacher_top_ids", top), ("teacher_top_logprobs", top)) if top else ()
    columns: dict[str, Any] = {name: [np.zeros(width * n, np.int32) for n in completions] for name, width in said}
    return make_group(prompt_ids=[[0] * prompt] * len(completions), completions=sampled, rewards=rewards, **columns)
