"""Whole weights of a model that is spread over several processes (rollout.vllm.shards): which part of a weight each
holds. Read in vLLM 0.32 (layers/linear.py, layers/vocab_parallel_embedding.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import all_reduce

from rollout.tensor_digests import columns_of


class Spread(NamedTuple):
    """Where the rows and columns of a weight that this worker holds lie in the whole of it.

    rows: [R] int64, of the whole, which has `height` rows and `width` columns. column: the first here.
    """

    rows: Tensor
    height: int
    width: int
    column: int = 0

    def whole(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """[height, count] of the whole weight, in host memory, from what each worker has of it. All workers have to
        call this, in the same order.

        values: [R, C]. places: [C] int64, the column of the result that each is.
        """
        from vllm.distributed import get_tp_group

        whole = torch.zeros(self.height, count, dtype=values.dtype)
        whole[self.rows[:, None], places] = values.cpu()
        # Each byte comes from one worker and is zero in the others, so the sum is what that one has, bit for bit.
        all_reduce(whole.view(torch.uint8), group=get_tp_group().cpu_group)
        return whole


class Place(NamedTuple):
    """Where a weight of the checkpoint is in this worker: in the rows `here` of a module's weight, which may be fused
    of several. spread: None if that is the whole of it."""

    module: Any
    here: slice
    spread: Spread | None = None

    def bias(self) -> Tensor:
        """[out], of the whole layer."""
        own: Tensor = self.module.bias[self.here].to(self.module.weight.dtype)  # some CPU kernels take it in float32
        if self.spread is None:
            return own
        return self.spread.whole(own[:, None], torch.zeros(1, dtype=torch.int64), 1)[:, 0]

    def columns(self, version: int, width: int, read: Callable[[Tensor], Tensor]) -> Tensor:
        """[out, COLUMNS] of the whole weight: those that columns_of names.

        width: of the module's weight. read: some of its columns -> [all its rows, as many columns].
        """
        if self.spread is None:
            return read(columns_of(version, width))[self.here]
        chosen = columns_of(version, self.spread.width) - self.spread.column
        found = (chosen >= 0) & (chosen < width)
        own = self.module.weight.new_empty(len(self.spread.rows), 0)  # none of them is here
        if found.any():
            own = read(chosen[found])[self.here]
        return self.spread.whole(own, found.nonzero()[:, 0], len(chosen))


def place_of(module: Any, kind: str, part: int | None) -> Place | None:
    """The place of a module's weight or bias (`kind`) as the checkpoint has it: part number `part` of those that are
    fused in the module, or all of it. None if it is not known."""
    sizes = getattr(module, "output_partition_sizes", ())
    first = sum(sizes[:part]) if part else 0
    here = slice(first, getattr(module, "org_vocab_size", None) if part is None else first + sizes[part])
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    if get_tp_group().world_size == 1 or getattr(module, "tp_size", 0) == 1:
        return Place(module, here)
    if not hasattr(module, "tp_size"):  # a norm, the same in all workers; of heads that they divide it is a matrix
        return Place(module, here) if module.weight.dim() == 1 else None
    kind_of_module = type(module)
    if kind_of_module in (vocab_parallel_embedding.VocabParallelEmbedding, vocab_parallel_embedding.ParallelLMHead):
        spread = _of_vocabulary(module)
        return Place(module, slice(0, len(spread.rows)), spread)
    if kind_of_module is linear.RowParallelLinear:
        return Place(module, here, _by_inputs(module) if kind == "weight" else None)
    if kind_of_module in (linear.ColumnParallelLinear, linear.MergedColumnParallelLinear, linear.QKVParallelLinear):
        return Place(module, here, _by_outputs(module, range(len(sizes)) if part is None else [part]))
    return Place(module, here) if kind_of_module is linear.ReplicatedLinear else None


def _of_vocabulary(embedding: Any) -> Spread:
    vocabulary = embedding.shard_indices
    rows = torch.arange(vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index)
    return Spread(rows, embedding.org_vocab_size, embedding.embedding_dim)


def _by_inputs(divided: Any) -> Spread:
    """Of a layer whose inputs the workers divide."""
    column = divided.tp_rank * divided.input_size_per_partition
    return Spread(torch.arange(divided.output_size), divided.output_size, divided.input_size, column)


def _by_outputs(divided: Any, parts: Iterable[int]) -> Spread:
    """Of a layer whose outputs the workers divide, each of its parts by itself; of key and value heads each has its own
    (rollout.architecture.check_shards)."""
    rows, height = [], 0
    for part in parts:
        size = divided.output_partition_sizes[part]
        rows.append(height + divided.tp_rank * size + torch.arange(size))
        height += size * divided.tp_size
    return Spread(torch.cat(rows), height, divided.input_size)
