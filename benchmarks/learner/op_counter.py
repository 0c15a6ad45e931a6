"""What a step of the learner consists of: operations by part, with their floating-point work and the bytes they move.

Entered around the step on tensors without content (learner.tools.meta_run). A part is the kind of module whose forward
pass an operation belongs to; in the backward pass that of the forward operation it differentiates, by autograd's
sequence numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from learner.batch.layout import Segment
from learner.model.policy import Policy

HEAD, SUMS, REST, ROTARY = "head", "sums of gradients", "update and the rest", "attention: rotary embedding, copies"
# By the name of a module's class; the innermost module that has one counts.
KINDS = {"Norm": "norms", "Rotary": ROTARY, "Attention": "attention", "MLP": "SwiGLU", "Linear": "linear"}
THIN = 64 * 3  # a product one of whose sizes is at most this is an adapter's; no width of a model is as small
FREE = ("empty", "new_empty", "_local_scalar_dense")  # launch nothing; nor do views
GATHERS = ("embedding", "index_select", "gather", "index")  # read what they give, not all that they are given


class Op(NamedTuple):
    part: str
    name: str
    flops: float
    bytes: int


class OpCounter(TorchDispatchMode):
    """`ops`: how often each operation was launched while it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[Op] = Counter()
        self.pairs = 0  # of query and key, that attention of this micro-batch needs
        self._inside: list[str] = []
        self._parts: dict[int, str] = {}  # autograd's sequence number -> part

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around a step."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            # Also where a pass ends by an exception, as one that is computed again for its activations does.
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(mock.patch.object(Policy, "predicting", self._watch(Policy.predicting)))
            for plain in (Policy.logprobs, Policy.token_logprobs):
                stack.enter_context(mock.patch.object(Policy, plain.__name__, self._as_head(plain)))
            stack.enter_context(self)
            yield
            assert not self._inside, "every module that was entered was left"

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = self._part()
        result = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if not name.startswith(FREE) and not _is_view(op, args, result):
            flops = self._flops(name, args)
            self.ops[Op(_finer(part, name, flops, args), name, flops, _bytes(op, args, kwargs or {}, result))] += 1
        return result

    def _part(self) -> str:
        node = torch._C._current_autograd_node()
        if self._inside or (node is None and torch._C._current_graph_task_id() == -1):
            part = self._inside[-1] if self._inside else REST
            self._parts.setdefault(torch.autograd._get_sequence_nr() - 1, part)  # type: ignore[attr-defined]
            return part
        return SUMS if node is None else self._parts.get(node._sequence_nr(), REST)

    def _flops(self, name: str, args: Sequence[Any]) -> float:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if name in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
            a, b = tensors[-2:]
            return 2.0 * a.numel() * b.shape[-1]
        if name == "gemm_4bit":  # x, and a packed weight of that shape
            return 2.0 * tensors[0].numel() * int(args[2][0])
        if "varlen" in name:  # the first matrix after the gradient is the queries'
            width = tensors[0].shape[1] * tensors[0].shape[2]
            return (10.0 if "backward" in name else 4.0) * width * self.pairs
        if "scaled_dot_product" in name:
            query, key = (tensors[1], tensors[2]) if "backward" in name else tensors[:2]
            causal = 0.5 if any(x is True for x in args) else 1.0
            return (10.0 if "backward" in name else 4.0) * causal * query.numel() * key.shape[2]
        return 0.0

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = type(module).__name__
        outer = self._inside[-1] if self._inside else "sums of the residual stream"
        self._inside.append(next((kind for ending, kind in KINDS.items() if ending in name), outer))

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def _as_head(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(HEAD)
            try:
                return plain(*args, **kwargs)
            finally:
                self._inside.pop()

        return counted

    def _watch(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def predicting(policy: Policy, batch: Any) -> Any:
            self.pairs = sum(map(_pairs, batch.layout.segments))
            return plain(policy, batch)

        return predicting


def _pairs(own: Segment) -> int:
    length = own.stop - own.start
    return length * (own.prefix_stop - own.prefix_start) + length * (length + 1) // 2


def _finer(part: str, name: str, flops: float, args: Sequence[Any]) -> str:
    if part == "linear":
        if name in ("gemm_4bit", "dequantize_4bit", "dequantize_blockwise"):
            return "base: products" if flops else "base: multiplied out"
        if not flops:
            return "adapters: scale, add, cast"
        sizes = [size for x in args if isinstance(x, Tensor) for size in x.shape]
        return "adapters: products" if min(sizes) <= THIN else "base: products"
    if part == "attention":
        return "attention: products, softmax" if flops or "softmax" in name else ROTARY
    return part


def _is_view(op: Any, args: Any, result: Any) -> bool:
    if op._schema.is_mutable:
        return False
    given = {x.untyped_storage()._cdata for x in tree_iter(args) if isinstance(x, Tensor)}
    made = [x for x in tree_iter(result) if isinstance(x, Tensor)]
    return bool(made) and all(x.untyped_storage()._cdata in given for x in made)


def _bytes(op: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Read and written, each tensor once; what is expanded, as it lies in memory."""
    written = [x for x in tree_iter(result) if isinstance(x, Tensor)]
    if result is None:  # what it overwrites is what it gives
        slots = zip(args, op._schema.arguments, strict=False)
        changed = [value for value, slot in slots if slot.alias_info is not None and slot.alias_info.is_write]
        written = [x for x in tree_iter(changed) if isinstance(x, Tensor)]
    if op.overloadpacket.__name__ in GATHERS:
        return 2 * sum(map(_size, written))
    read = [x for x in tree_iter(args) if isinstance(x, Tensor)]
    if kwargs.get("beta") == 0:  # what is there is not read
        read = read[1:]
    return sum(map(_size, [*read, *written]))


def _size(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
