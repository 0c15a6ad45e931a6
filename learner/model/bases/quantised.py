"""A frozen base whose files are quantised: the learner holds the packed numbers of the files, and computes the weights
of a layer only while the layer needs them, in the forward pass and again in the backward pass.

    W[o, i] = (q[o, i] - z[o, g]) s[o, g]        W4A16, GPTQ, AWQ: 4 bits; g is the group of inputs that i belongs to
    W[o, i] = q[o, i] s[block of o, block of i]  FP8: numbers of float8_e4m3fn
    W[o, i] = q[o, i] 2^(e[o, i // 32] - 127)    MXFP4: numbers of E2M1 (OCP Microscaling Formats 1.0, section 5.3)

z is 8 where the format is symmetric. Scales of W4A16, GPTQ and AWQ are first rounded to model.dtype, as vLLM rounds
them when it loads a layer: GPTQ's are float16 in the files, so that in bfloat16 both sides have other weights than the
files say, and the same. The product of 4 bits and a scale of 16 is exact in float32 and is rounded once; FP8's, with a
scale of 32 bits, is rounded to float32 first.

The layers are nn.Linear for PEFT, which puts the adapter beside them as beside any other. Their tensors are parameters,
so that they move with the model. `weight` is of whole numbers, FP8's as bytes: PEFT would give a floating type of it to
the adapter.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cluster.errors import WrongInput
from rollout.data.model_files import Stored, counted, header, same_content, shown
from rollout.data.weight_names import EMBEDDING, HEAD, misfits, two_heads
from rollout.quantised import MX_BLOCK, Format, plain
from rollout.weights import linear_layers

# Tensors of a layer that are not held, since rollout.quantised.plain has found in them what they must be.
KNOWN = {"W4A16": ("weight_shape",), "GPTQ": ("g_idx", "qzeros")}
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # number k of eight lies at this place of an AWQ word
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of 3 bits; the fourth is the sign
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")  # of gpt-oss, in the order in which they are used
TYPES = {"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}


def nibbles(words: Tensor) -> Tensor:
    """Returns the 4-bit numbers of each word, lowest bits first: [..., n] int32 -> [..., n, 8] uint8."""
    two = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # words are little-endian
    return torch.stack((two & 15, two >> 4), -1).flatten(-2)


def dequantised(found: Format, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the weight [out, in] of a linear layer in `dtype`. tensors: those of the files, by Format.tensors' names;
    float8 numbers may be given as their bytes."""
    numbers = tensors[found.main]
    if found.name == "FP8":
        wide = numbers.view(torch.float8_e4m3fn).float()
        scales = tensors[found.scale].float()
        rows, columns = (size or wide.shape[1] for size in found.block)
        scales = scales.repeat_interleave(rows, 0)[: wide.shape[0]].repeat_interleave(columns, 1)[:, : wide.shape[1]]
        return wide.mul_(scales).to(dtype)
    scales, zeros = tensors[found.scale].to(dtype), torch.tensor([[8]], device=numbers.device)
    if found.name == "W4A16":
        values = nibbles(numbers).flatten(1)
        if found.zeros:
            zeros = nibbles(tensors["weight_zero_point"].t()).flatten(1).t()  # packed along the outputs
    elif found.name == "GPTQ":
        values, scales = nibbles(numbers).transpose(1, 2).flatten(0, 1).t(), scales.t()
    else:
        order = torch.tensor(AWQ_ORDER, device=numbers.device)
        values = nibbles(numbers)[..., order].flatten(1).t()
        zeros, scales = nibbles(tensors["qzeros"])[..., order].flatten(1).t(), scales.t()
    grouped = values.to(dtype).reshape(*scales.shape, -1)  # [out, groups, inputs of a group]
    return grouped.sub_(zeros.to(dtype).unsqueeze(-1)).mul_(scales.unsqueeze(-1)).flatten(1)


def dequantised_blocks(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight [..., out, in] of MXFP4 blocks [..., out, in / 32, 16] uint8, two numbers a byte, the lower
    bits first, and exponents [..., out, in / 32] uint8."""
    values = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float32, device=blocks.device)
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [..., out, in / 32, 32]
    wide = torch.ldexp(values[numbers.int()], scales.int().unsqueeze(-1) - 127)
    return wide.flatten(-2).to(dtype)


class _Product(torch.autograd.Function):
    """x W' for a frozen weight that is computed for each pass and kept by none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Callable[[], Tensor]) -> Tensor:
        ctx.whole = whole
        return F.linear(x, whole())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.whole(), None


def product(x: Tensor, whole: Callable[[], Tensor]) -> Tensor:
    """Returns [..., out] for x [..., in] and the weight [out, in] that `whole` computes; differentiable once, in x."""
    output: Tensor = _Product.apply(x, whole)  # type: ignore[no-untyped-call]
    return output


class QuantisedLinear(nn.Linear):
    """A frozen linear layer on the tensors of a quantised checkpoint: `weight` is the tensor of its numbers, and the
    others have the files' names.

    Attributes:
        dtype: the type of the weights that it computes, and of its products.
    """

    def __init__(self, of: nn.Linear, found: Format, dtype: torch.dtype) -> None:
        super().__init__(of.in_features, of.out_features, bias=of.bias is not None, device="meta", dtype=dtype)
        self.dtype = dtype
        self.kind = found
        for part, (dtypes, shape) in found.tensors(self.out_features, self.in_features).items():
            if part not in KNOWN.get(found.name, ()):
                self.set(part, torch.empty(shape, dtype=TYPES.get(dtypes[0], dtype), device="meta"))

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights that are quantised, by their names in a layer of 16 bits."""
        return {"weight": (self.out_features, self.in_features)}

    def takes(self, part: str) -> bool:
        """Whether the layer holds a tensor of this name in the files."""
        return part == self.kind.main or (part != "weight" and part in self._parameters)

    def set(self, part: str, content: Tensor) -> None:
        """Gives the layer a tensor of the files, by its name there."""
        if part == self.kind.main:
            part = "weight"
            content = content.view(torch.uint8) if content.dtype == torch.float8_e4m3fn else content
        setattr(self, part, nn.Parameter(content, requires_grad=False))

    def whole(self) -> Tensor:
        """Returns the weight [out, in] in self.dtype."""
        tensors = dict(self.named_parameters(recurse=False))
        return dequantised(self.kind, tensors | {self.kind.main: tensors["weight"]}, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out] for x [..., in]."""
        output = product(x, self.whole)
        return output if self.bias is None else output.add_(self.bias)


class QuantisedExperts(nn.Module):
    """gpt-oss's experts on MXFP4 blocks. The weights of one expert are computed at a time, for the tokens that are sent
    to it.

    of: transformers' experts, whose activation and shapes it has.
    """

    def __init__(self, of: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._activated: Callable[[Tensor], Tensor] = of._apply_gate
        self._dtype = dtype
        for name in EXPERT_WEIGHTS:
            count, inputs, out = getattr(of, name).shape
            blocks = torch.empty(count, out, inputs // MX_BLOCK, MX_BLOCK // 2, dtype=torch.uint8, device="meta")
            self.set(f"{name}_blocks", blocks)
            self.set(f"{name}_scales", blocks[..., 0])
            self.set(f"{name}_bias", torch.empty(count, out, dtype=dtype, device="meta"))

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes [experts, in, out] of the weights that are quantised, by transformers' names."""
        shapes = {name: self._parameters[f"{name}_blocks"].shape for name in EXPERT_WEIGHTS}  # type: ignore[union-attr]
        return {name: (count, blocks * MX_BLOCK, out) for name, (count, out, blocks, _) in shapes.items()}

    def takes(self, part: str) -> bool:
        """Whether a tensor of this name in the files belongs to the blocks."""
        return part.endswith(("_blocks", "_scales"))

    def set(self, part: str, content: Tensor) -> None:
        """Gives the experts a tensor of the files, by its name there."""
        setattr(self, part, nn.Parameter(content, requires_grad=False))

    def whole(self, name: str, expert: int) -> Tensor:
        """Returns the weight [out, in] of an expert."""
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        return dequantised_blocks(blocks[expert], scales[expert], self._dtype)

    def forward(self, x: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """Returns [N, H] for x [N, H], the experts [N, k] of each token and their weights [N, k]."""
        output = torch.zeros_like(x)
        for expert in sorted(set(router_indices.flatten().tolist())):
            token, place = torch.where(router_indices == expert)
            rows = x[token]
            for name in EXPERT_WEIGHTS:
                rows = rows if name == EXPERT_WEIGHTS[0] else self._activated(rows)
                rows = product(rows, partial(self.whole, name, expert)) + getattr(self, f"{name}_bias")[expert]
            output = output.index_add(0, token, (rows * routing_weights[token, place, None]).to(output.dtype))
        return output


def with_layers(lm: Any, found: Format, dtype: torch.dtype) -> Any:
    """Returns the model, made without weights, with its quantised layers in place, which have none either."""
    for name in sorted(linear_layers(lm)):
        if found.covers(name):
            lm.set_submodule(name, QuantisedLinear(lm.get_submodule(name), found, dtype))
    if found.name == "MXFP4":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # imported here, since few runs use it

        for name in [name for name, module in lm.named_modules() if isinstance(module, GptOssExperts)]:
            lm.set_submodule(name, QuantisedExperts(lm.get_submodule(name), dtype))
    return lm


def plain_layers(lm: Any) -> Any:
    """Returns the model with a plain linear layer, of the weights that it computes with, for each QuantisedLinear."""
    for name in [name for name, module in lm.named_modules() if isinstance(module, QuantisedLinear)]:
        layer = lm.get_submodule(name)
        plain_layer = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain_layer.weight, plain_layer.bias = nn.Parameter(layer.whole(), requires_grad=False), layer.bias
        lm.set_submodule(name, plain_layer)
    return lm


QUANTISED = (QuantisedLinear, QuantisedExperts)


def fill(
    lm: Any, found: Format, files: Mapping[str, tuple[Path, str]], device: torch.device, *, path: str, key: str
) -> Any:
    """Returns the model of `with_layers` with the content of its files, in its own dtypes, on the device.

    files: (file, name there) of each tensor (learner.model.base.tensor_files). path, key: the model, and the setting
        that names it, for messages.

    Raises WrongInput if a tensor is missing or strange, or if other layers are quantised than config.json says.
    """
    stored: dict[str, Stored] = {}
    for file in sorted({file for file, _ in files.values()}):
        named = {there: name for name, (home, there) in files.items() if home == file}
        stored |= {named[there]: one for there, one in header(file, key).items() if there in named}
    unused = "|".join(lm._keys_to_ignore_on_load_unexpected or ()) or "(?!)"  # transformers passes over these, too
    stored = {name: one for name, one in stored.items() if not re.search(unused, name)}
    if wrong := wrong_layers(lm, stored, found, path, key):
        raise WrongInput("\n".join(wrong))
    own, modules, by_file = dict(lm.named_parameters()), dict(lm.named_modules()), defaultdict[Path, list[str]](list)
    for name, one in stored.items():
        by_file[one.file].append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                home, _, leaf = name.rpartition(".")
                layer = modules.get(home)
                there = files[name][1]
                if isinstance(layer, QUANTISED) and layer.takes(leaf):
                    layer.set(leaf, opened.get_tensor(there).to(device))
                elif layer is not None and name in own:
                    content = opened.get_tensor(there).to(device, own[name].dtype)
                    setattr(layer, leaf, nn.Parameter(content, requires_grad=False))
    lm.tie_weights()
    if left := [name for name, weight in lm.named_parameters() if weight.is_meta]:
        raise WrongInput(
            f"{key}: {path} lacks {counted(left)} of the model of its config.json, which would be random: "
            f"{shown(left)}; copy the weights again"
        )
    return lm.to(device)


def wrong_layers(lm: Any, stored: Mapping[str, Stored], found: Format, path: str, key: str) -> list[str]:
    """Returns a sentence for each way in which the files' tensors are not those of the model of `with_layers`.

    Raises WrongInput if tensors of a quantised layer are missing or not of the format (rollout.quantised.plain).
    """
    layers = {name: module for name, module in lm.named_modules() if isinstance(module, QUANTISED)}
    wanted = {f"{name}.{part}": size for name, layer in layers.items() for part, size in layer.sizes().items()}
    sizes = wanted | {
        name: tuple(weight.shape)
        for name, weight in lm.named_parameters()
        if name.rpartition(".")[0] not in layers or name.endswith("bias")
    }
    in_16_bits = plain(stored, found, path, key)
    wrong = misfits(path, key, in_16_bits, sizes)
    packed = {name for name, one in in_16_bits.items() if stored.get(name) is not one}
    if odd := sorted((packed ^ wanted.keys()) & in_16_bits.keys()):
        is_so = "is not" if odd[0] in wanted else "is"
        wrong.append(
            f"{key}: {odd[0]} of {path} {is_so} quantised in the files, and config.json says otherwise "
            f"(quantization_config; {len(odd)} such); give weights and config.json of one model"
        )
    if HEAD in stored and HEAD not in sizes and not same_content(stored[HEAD], stored[EMBEDDING]):
        wrong.append(two_heads(path, key))
    return wrong
