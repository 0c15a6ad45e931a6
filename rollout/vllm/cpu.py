"""Changes vLLM's CPU build in a process that computes with it: LoRA, RMSNorm and sampling use faster, exact operations,
AMX is requested, and layers in 4 bits are computed without AVX-512, too. prepare_cpu_process makes all changes."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.vllm.experts import renew_packed_experts
from rollout.vllm.gated_delta import install_float32_gated_delta

# AMX, the matrix instructions of newer Intel CPUs.
#
# Linux lets a process use AMX only after the process has asked. vLLM's attention in bfloat16 uses AMX without asking,
# so the process ends with "Illegal instruction" if nothing has asked before. Therefore importing this module asks.


class AmxWorker:
    """A class without content for `--worker-extension-cls` of a server: vLLM imports this module for it."""


def ask_for_amx() -> None:
    """Asks Linux for AMX by a product in bfloat16, for which torch's oneDNN asks for all that the CPU has."""
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones)


ask_for_amx()


# LoRA on vLLM's CPU backend: a fast and exact op replaces upstream's reference op.
#
# Upstream's op (vllm/lora/ops/torch_ops/lora_ops.py, the same in 0.31 and 0.32) gathers a copy of the adapter for every
# token, tokens x rank x width floats per layer, and applies the adapter in the last slot to rows without an adapter
# (index -1). vLLM already sorts a step's tokens into runs of one adapter. The op here computes each run with two matrix
# products, and leaves rows without an adapter alone. In decode there is nearly always one run.
#
# Slots are held and multiplied in float32 whatever the model's dtype (LORA_DTYPE, of vllm.EngineArgs). For products as
# thin as an adapter's, torch's CPU kernels for 16 bits are slower than those for 32 bits (15 times slower on a
# processor without instructions for them), and rounding comes last. An adapter in 16 bits is exact in float32.
#
# For a bfloat16 model on a processor with bfloat16 instructions (AVX512_BF16, AMX), vLLM's own kernel for small packed
# weights needs half the time. The A of a layer's slices are stacked to one product there. Their B are blocks on the
# diagonal of one matrix, as long as all ranks together fit into one block of the kernel; beyond that, the matrix's
# zeros cost more than another call.
#
# Head and embedding get no LoRA kernels (rollout.vllm.arguments.lora_arguments), for speed, and because the head's LoRA
# kernel assumes one row per sequence of the step: a probe, whose prompt logprobs need one row per token, would kill the
# engine in a step that it shares with completions.

log = logging.getLogger(__name__)

# Releases whose punica_cpu.py was read and found to be the same. Other releases keep upstream's op, which is correct
# for gleaner's batches, in which every row has an adapter, but 2 to 3 times slower.
_KNOWN = ((0, 31), (0, 32))
# Greatest error in the self-check, whose numbers reach 64, so that three roundings to bfloat16 are 0.4 at most.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.5}
LORA_DTYPE = torch.float32
_PACKED_COLUMNS, _PACKED_OUTPUTS = 32, 16  # inputs and outputs of packed weights must be multiples of these

_Run = tuple[int, int, int]  # first row, past the last row, adapter slot


class _Packed(NamedTuple):
    """An adapter's matrices of one layer, packed for vLLM's kernel.

    columns: how many of A's outputs each B takes. widths: how many outputs each B gives.
    """

    a: torch.Tensor
    b: list[torch.Tensor]
    columns: tuple[int, ...]
    widths: tuple[int, ...]


class _Buffers(NamedTuple):
    """Buffers for the outputs of A (`inner`) and of all B (`product`), and for each B its part of both."""

    inner: torch.Tensor
    product: torch.Tensor
    of_each: list[tuple[torch.Tensor, torch.Tensor]]


# (rows, columns, widths) -> buffers, which all layers of a step share, since an allocation takes as long as a product.
_Scratch = dict[tuple[int, tuple[int, ...], tuple[int, ...]], _Buffers]


def install_fast_cpu_lora() -> bool:
    """Replaces upstream's op for every engine of this process. Returns whether the new op is in place.

    To be called before the engine is built. In an unknown release, or if the new op does not agree with a dense
    computation, upstream's op stays and a warning is logged.
    """
    import vllm
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper: Any = PunicaWrapperCPU
    release = _release(vllm.__version__)
    if not _KNOWN[0] <= release <= _KNOWN[1]:
        log.warning(
            "fast CPU LoRA is known for vllm %s to %s, this is %s: keeping upstream's op (2-3 times slower). "
            "Read its punica_cpu.py, then widen _KNOWN in rollout/vllm/cpu.py",
            *(".".join(map(str, bound)) for bound in _KNOWN),
            vllm.__version__,
        )
        return False
    upstream = (wrapper._update_prefill_metadata, wrapper.add_lora_linear)
    if upstream[1] is _add_lora_linear:
        return True
    _patch(wrapper, upstream[0])
    for dtype, tolerance in _TOLERANCES.items():
        error = _self_check(wrapper, dtype)
        if not error <= tolerance:
            wrapper._update_prefill_metadata, wrapper.add_lora_linear = upstream
            log.warning(
                "fast CPU LoRA is off by %.2e from a dense computation (at most %.0e allowed in %s) under vllm %s: "
                "keeping upstream's op (2-3 times slower). Compare rollout/vllm/cpu.py with its punica_cpu.py",
                error,
                tolerance,
                dtype,
                vllm.__version__,
            )
            return False
    return True


def serve_experts() -> None:
    """Lets every engine of this process compute mixtures of experts on a CPU with LoRA enabled.

    With LoRA vLLM chooses its Triton kernels for experts, which a CPU lacks, whether experts have adapters or not.
    gleaner sends it none for experts (learner.push), so vLLM's kernels for a CPU are right.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    method: Any = unquantized_fused_moe_method
    upstream = getattr(method, "select_unquantized_moe_backend", None)
    if upstream is None:
        log.warning("this vllm chooses kernels for experts in another way; on a CPU models with experts may not start")
    elif not hasattr(upstream, "gleaner"):

        def select(moe_config: Any, **others: Any) -> Any:
            return upstream(moe_config=replace(moe_config, is_lora_enabled=False), **others)

        select.gleaner = True  # type: ignore[attr-defined]
        method.select_unquantized_moe_backend = select


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _patch(wrapper: Any, upstream_metadata: Any) -> None:
    def update_prefill_metadata(self: Any, token_lora_tensor: torch.Tensor) -> None:
        upstream_metadata(self, token_lora_tensor)
        # This is done once per step; otherwise each of the model's layers would read three tensors.
        self.gleaner_runs = _runs(self)
        self.gleaner_scratch = {}

    wrapper._update_prefill_metadata = update_prefill_metadata
    wrapper.add_lora_linear = _add_lora_linear


def _runs(wrapper: Any) -> list[_Run]:
    starts, lengths, slots = (part.tolist() for part in wrapper.prefill_metadata[:3])
    triples = zip(starts, lengths, slots, strict=True)
    return [(start, start + length, slot) for start, length, slot in triples if slot >= 0]


def _add_lora_linear(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    *,
    buffer: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """y[rows, slice] += scale * (x[rows] @ A[slot].T) @ B[slot].T, in place, for every run of rows and every slice.

    x [tokens, in], y [tokens, sum(output_slices)], A per slice [slots, 1, rank, in], B [slots, 1, width, rank].
    buffer is upstream's scratch space and not used. An argument that upstream adds later raises a TypeError.
    """
    packs = _packs(x, lora_a_stacked[0], output_slices) and y.shape[1] == sum(output_slices)
    for start, stop, slot in self.gleaner_runs:
        whole = start == 0 and stop == len(y)
        rows, target = (x, y) if whole else (x[start:stop], y[start:stop])
        if packs:
            packed = _packed(lora_a_stacked, lora_b_stacked, slot)
            _add_packed(target, rows, packed, scale, self.gleaner_scratch)
        else:
            parts = [(a[slot, 0], b[slot, 0]) for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)]
            _add_in_float32(target, rows, parts, scale)


def _add_in_float32(
    target: torch.Tensor, rows: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]], scale: float
) -> None:
    rows = rows.to(LORA_DTYPE)
    total = target.to(LORA_DTYPE)  # the target itself, if the model is in float32
    offset = 0
    for a, b in parts:
        total[:, offset : offset + len(b)].addmm_(torch.mm(rows, a.t()), b.t(), alpha=scale)
        offset += len(b)
    if total is not target:
        target.copy_(total)  # the sum in float32 is rounded once


def _add_packed(target: torch.Tensor, rows: torch.Tensor, packed: _Packed, scale: float, scratch: _Scratch) -> None:
    key = (len(rows), packed.columns, packed.widths)
    buffers = scratch.get(key)
    if buffers is None:
        buffers = scratch[key] = _buffers(rows, packed)
    multiply = torch.ops._C.weight_packed_linear.default
    multiply(buffers.inner, rows, packed.a, None, True)
    for b, (inner, product) in zip(packed.b, buffers.of_each, strict=True):
        multiply(product, inner, b, None, True)
    target.add_(buffers.product, alpha=scale)


def _buffers(rows: torch.Tensor, packed: _Packed) -> _Buffers:
    inner, product = (rows.new_empty(len(rows), sum(widths)) for widths in (packed.columns, packed.widths))
    parts = zip(torch.split(inner, [*packed.columns], 1), torch.split(product, [*packed.widths], 1), strict=True)
    return _Buffers(inner, product, list(parts))


def _packed(a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...], slot: int) -> _Packed:
    """The packed matrices of all slices of a layer.

    They are kept as an attribute of the first stack, since the op is given no other object of the layer. They are
    packed again after any of the stacks was written to, which torch counts (_version).
    """
    holder: Any = a_stacked[0]
    writes = tuple(stack._version for stack in (*a_stacked, *b_stacked))
    kept: tuple[tuple[int, ...], dict[int, _Packed]] | None = getattr(holder, "gleaner_packed", None)
    if kept is None or kept[0] != writes:
        kept = holder.gleaner_packed = (writes, {})
    found = kept[1].get(slot)
    if found is None:
        found = kept[1][slot] = _pack([a[slot, 0] for a in a_stacked], [b[slot, 0] for b in b_stacked])
    return found


def forget_packed(a_stacked: tuple[torch.Tensor, ...]) -> None:
    """Has the next product pack the slots of this layer anew."""
    vars(a_stacked[0]).pop("gleaner_packed", None)


def _pack(a_parts: list[torch.Tensor], b_parts: list[torch.Tensor]) -> _Packed:
    slices, rank = len(a_parts), len(a_parts[0])
    apart = slices * rank > _PACKED_COLUMNS and all(len(b) % _PACKED_OUTPUTS == 0 for b in b_parts)
    of_one_product = 1 if apart else slices
    in_blocks: Any = torch.block_diag  # the function carries no annotations
    matrices = []
    for start in range(0, slices, of_one_product):
        a = torch.cat(a_parts[start : start + of_one_product])
        b = in_blocks(*b_parts[start : start + of_one_product])
        missing = -len(a) % _PACKED_COLUMNS
        matrices.append((pad(a, (0, 0, 0, missing)).bfloat16(), pad(b, (0, missing)).bfloat16()))
    pack = torch.ops._C.convert_weight_packed
    return _Packed(
        a=pack(torch.cat([a for a, _ in matrices])),
        b=[pack(b) for _, b in matrices],
        columns=tuple(len(a) for a, _ in matrices),
        widths=tuple(len(b) for _, b in matrices),
    )


def _packs(x: torch.Tensor, slots: torch.Tensor, widths: tuple[int, ...]) -> bool:
    return (
        x.dtype == torch.bfloat16  # comes first, so that a float32 model costs no more checks
        and len(x) > 0
        and x.is_contiguous()
        and x.shape[1] % _PACKED_COLUMNS == 0
        and sum(widths) % _PACKED_OUTPUTS == 0
        # torch does not count the writes to tensors made in inference mode; vLLM's slots are not.
        and not slots.is_inference()
        and _bfloat16_is_fast()
    )


@cache
def _bfloat16_is_fast() -> bool:
    """Whether the processor has bfloat16 instructions, and this vLLM the kernel for packed weights."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16")) and hasattr(torch.ops._C, "weight_packed_linear")


def _self_check(wrapper_class: Any, dtype: torch.dtype = torch.float32) -> float:
    """The op's greatest difference from a dense computation, on a batch with two adapters and rows without adapter, for
    a layer with inputs and outputs in `dtype`."""
    from vllm.lora.layers import LoRAMapping

    width_in, widths, rank = 32, (12, 20), 8
    # Adapter id of each row; 0 means none. vLLM's packed kernel computes more than 4 rows in another way than fewer.
    ids = (0, 0, 7, 7, 7, 0, 3, 7, 3, 3, 3, 3, 3, 3)
    rows = len(ids)
    slot_of = {7: 0, 3: 1}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width_in, generator=generator).to(dtype)
    y = torch.randn(rows, sum(widths), generator=generator).to(dtype)
    a = tuple(torch.randn(2, 1, rank, width_in, generator=generator).to(dtype).float() for _ in widths)
    b = tuple(torch.randn(2, 1, width, rank, generator=generator).to(dtype).float() for width in widths)
    expected = y.double()
    for row, adapter_id in enumerate(ids):
        if adapter_id:
            slot = slot_of[adapter_id]
            parts = [b[i][slot, 0].double() @ (a[i][slot, 0].double() @ x[row].double()) for i in range(len(widths))]
            expected[row] += torch.cat(parts)
    wrapper = wrapper_class(rows, max_batches=rows, device=torch.device("cpu"))
    mapping = LoRAMapping(ids, ids, is_prefill=True)
    wrapper.update_metadata(mapping, lora_index_to_id=[7, 3], max_loras=2, vocab_size=32)
    wrapper.add_lora_linear(y, x, a, b, 1.0, widths)
    return float((y.double() - expected).abs().max())


# RMSNorm on a CPU by vLLM's own kernel, which vLLM itself uses on cards only.
#
# On a CPU vLLM uses up to eleven operations of torch instead, for a small model a tenth of an engine step. In 16 bits
# these round before the multiplication with the weight, as transformers and so the learner do. The kernel does not. So
# in 16 bits the kernel computes in float32 without a weight, and the code here rounds and multiplies. vLLM 0.33 says
# that version 0.34 will drop this way of choosing kernels.

PROVIDER = "gleaner_cpu"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
PRIORITY = dict.fromkeys(("rms_norm", "fused_add_rms_norm"), PROVIDER)  # for ir_op_priority of vllm.EngineArgs


def install_cpu_norm() -> None:
    """Registers the kernel with vLLM in this process, for engines that are started with PRIORITY."""
    from vllm.ir.op import IrOp
    from vllm.platforms import current_platform

    norm, norm_of_sum = IrOp.registry["rms_norm"], IrOp.registry["fused_add_rms_norm"]
    if PROVIDER in norm.impls:
        return
    current_platform.import_kernels()
    norm.register_impl(PROVIDER, supports_args=_fits)(_rms_norm)
    norm_of_sum.register_impl(PROVIDER, supports_args=_fits_sum, inplace=True)(_fused_add_rms_norm)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    if x.dtype == torch.float32:
        normed = torch.empty_like(x)
        torch.ops._C.rms_norm(normed, x, weight, epsilon)
        return normed
    assert weight is not None, "see _fits"
    wide = x.float()
    torch.ops._C.rms_norm(wide, wide, _ones(x.shape[-1]), epsilon)
    return wide.to(x.dtype).mul_(weight)


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float32:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual
    assert weight is not None, "see _fits"
    wide, total = x.float(), x_residual.float()
    torch.ops._C.fused_add_rms_norm(wide, total, _ones(x.shape[-1]), epsilon)
    return wide.to(x.dtype).mul_(weight), total.to(x.dtype)


@cache
def _ones(width: int) -> Tensor:
    return torch.ones(width, dtype=torch.float32)


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype in _TYPES and _in_rows(x)


def _fits_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype and _in_rows(x_residual)


def _in_rows(x: Tensor) -> bool:
    """Whether x is laid out as the kernel assumes: contiguous rows of whole vectors (16 numbers with AVX-512)."""
    return x.is_contiguous() and x.shape[-1] % 16 == 0


# Sampling on a CPU with one random number for each token, instead of one for each entry of the vocabulary.
#
# vLLM takes the largest of the logits plus Gumbel noise, which needs two logarithms for each entry: a tenth of an
# engine step of SmolLM2-135M, whose vocabulary has 49,152 entries. Here the sampled token is the one at which the
# cumulative probability passes a number that is uniform in [0, 1) (inversion: Devroye, Non-Uniform Random Variate
# Generation, 1986, chapter III.2). float32 probabilities are summed in float64.

# Entries in a block. The sums of blocks are searched first, then the block: of 49,152 entries 384 sums, then 128
# entries.
_BLOCK = 128
_SMALL = 1024  # vocabulary up to which a search without blocks is no slower
_BELOW_1 = torch.tensor(1 - 2**-52, dtype=torch.float64)  # the product of x with this number is less than x


def install_cpu_sampling() -> None:
    """Replaces vLLM's sampling on a CPU for every engine of this process."""
    from vllm.v1.sample.ops import topk_topp_sampler

    sampler: Any = topk_topp_sampler.TopKTopPSampler
    upstream = sampler.forward_cpu
    if not hasattr(upstream, "gleaner"):

        def forward_cpu(
            self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            if self.logprobs_mode not in ("processed_logprobs", "raw_logprobs"):
                answer: tuple[Tensor, Tensor | None] = upstream(self, logits, generators, k, p)
                return answer
            kept = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
            logprobs = kept.log_softmax(dim=-1, dtype=torch.float32)
            uniform = torch.rand(len(logits), 1, dtype=torch.float64)
            rows = uniform.unbind()  # done once, since indexing a row takes as long as drawing its random number
            for row, generator in generators.items():
                rows[row].uniform_(generator=generator)
            return draw(logprobs, uniform), logprobs if self.logprobs_mode == "processed_logprobs" else None

        forward_cpu.gleaner = True  # type: ignore[attr-defined]
        sampler.forward_cpu = forward_cpu


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """[rows] the tokens drawn from logprobs [rows, vocabulary] with uniform numbers [rows, 1] in [0, 1), float64.

    A token of probability 0 is never drawn. From a row with NaN some token is drawn.
    """
    probabilities = logprobs.exp()
    vocabulary = probabilities.shape[1]
    if vocabulary <= _SMALL:
        ends = probabilities.cumsum(-1, dtype=torch.float64)
        found = torch.searchsorted(ends, torch.minimum(uniform, _BELOW_1) * ends[:, -1:], right=True)
        return found.clamp_(max=vocabulary - 1).squeeze(1)
    whole = vocabulary // _BLOCK * _BLOCK
    sums = probabilities[:, :whole].view(len(probabilities), -1, _BLOCK).sum(-1)
    rest = probabilities[:, whole:].sum(-1, keepdim=True)
    ends = torch.cat([sums, rest], 1).cumsum(-1, dtype=torch.float64)
    point = torch.minimum(uniform, _BELOW_1) * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[1] - 1)
    point -= torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    entries = block * _BLOCK + torch.arange(_BLOCK)
    missing = entries >= vocabulary
    within = probabilities.gather(1, entries.clamp_(max=vocabulary - 1)).masked_fill_(missing, 0.0)
    inner = within.cumsum(-1, dtype=torch.float64)
    # The block's sum in float32 may exceed the sum of its entries in float64.
    point = torch.minimum(point, _BELOW_1 * inner[:, -1:])
    return entries.gather(1, torch.searchsorted(inner, point, right=True).clamp_(max=_BLOCK - 1)).squeeze(1)


# Linear layers in 4 bits (W4A16, GPTQ, AWQ: rollout.quantised).
#
# vLLM's kernel for them is in its build for AVX-512 alone; elsewhere the first step would end the engine. The weights
# are computed there when they are loaded, by the same formula, and held in 16 bits.


def serve_four_bits() -> None:
    """Lets every engine of this process compute with checkpoints in 4 bits on a processor without AVX-512."""
    from vllm.model_executor.kernels.linear.mixed_precision import cpu as kernels
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        kernel: Any = kernels.CPUWNA16LinearKernel
        kernel.process_weights_after_loading = _widen
        kernel.apply_weights = _apply_wide


def _widen(kernel: Any, layer: Any) -> None:
    """Replaces the packed numbers of a layer of vLLM by its weight [out, in] in the dtype of its scales:
    (q - z) s, where q, z and s are those of an output and a group of inputs."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32

    kind = kernel.config.weight_type
    unpack: Any = unpack_quantized_values_into_int32
    packed, scales = getattr(layer, kernel.w_q_name), getattr(layer, kernel.w_s_name)
    numbers = unpack(packed.data, kind, packed.packed_dim)
    numbers = numbers if packed.output_dim == 0 else numbers.t()
    steps = scales.data if scales.output_dim == 0 else scales.data.t()
    middle: Any = kind.bias  # the middle of symmetric numbers
    if kernel.config.zero_points:
        zeros = getattr(layer, kernel.w_zp_name)
        middle = unpack(zeros.data, kind, zeros.packed_dim)
        middle = (middle if zeros.output_dim == 0 else middle.t()).unsqueeze(-1)
    grouped = (numbers.unflatten(1, (steps.shape[1], -1)) - middle).to(steps.dtype)
    weight = grouped.mul_(steps.unsqueeze(-1)).flatten(1)
    setattr(layer, kernel.w_q_name, torch.nn.Parameter(weight, requires_grad=False))


def _apply_wide(kernel: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, getattr(layer, kernel.w_q_name), bias)


def prepare_cpu_process() -> None:
    """Makes all changes of this module in a process that computes: the engine's, or that of a shard.

    To be called before the model is built. A second call changes nothing.
    """
    ask_for_amx()
    install_fast_cpu_lora()
    serve_experts()
    renew_packed_experts()
    serve_four_bits()
    install_cpu_norm()
    install_cpu_sampling()
    install_float32_gated_delta()
