"""Quantised checkpoints as a frozen base: which formats are trained on, and which tensors a layer has in the files.

| format | in config.json | a weight [out, in] in the files |
|---|---|---|
| W4A16 | compressed-tensors, pack-quantized | weight_packed [out, in/8] int32, weight_scale [out, groups] |
| GPTQ | gptq | qweight [in/8, out] int32, scales [groups, out], qzeros, g_idx [in] |
| AWQ | awq, version gemm | qweight [in, out/8] int32, qzeros [groups, out/8] int32, scales [groups, out] |
| FP8 | fp8, or compressed-tensors, float-quantized | weight float8_e4m3fn, and a scale for each row or block |
| MXFP4 | mxfp4 (gpt-oss) | blocks [experts, out, in/32, 16] uint8, scales [experts, out, in/32] uint8 |

learner.model.bases.quantised computes weights from these tensors. vLLM reads the same files. Of a checkpoint with
towers these are the layers of its text part, by a text model's names (rollout.text_part).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.errors import WrongInput
from rollout.architecture import has_experts, other_inputs, text_of
from rollout.data.model_files import Stored, counted
from rollout.text_part import KEPT, text_quantisation

NIBBLES = 8  # numbers of 4 bits in a word of 32
MX_BLOCK = 32  # numbers of an MXFP4 block, which share an exponent (OCP Microscaling Formats 1.0, section 5.2)
FLOATS = ("BF16", "F16", "F32")
ORDERED = (None, "static", "weight")  # values of compressed-tensors' actorder with which columns keep their places
# GPTQ stores the zero point less one in its first format, which AutoGPTQ wrote, and the zero point itself in the
# second. With symmetric numbers it is 8 everywhere.
SYMMETRIC_ZEROS = {"gptq": 0x77777777, "gptq_v2": 0x88888888}
NEXT = "give the 16-bit model that it was made from, with model.base=nf4 for 4 bits (docs/models.md)"

# Tensors of a layer by name: (safetensors' dtypes of which it must have one, its shape).
Wanted = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Format:
    """How the linear layers of a checkpoint are quantised.

    Attributes:
        name: W4A16, GPTQ, AWQ, FP8 or MXFP4.
        block: (outputs, inputs) that share a scale; 0 inputs: all of them.
        zeros: whether groups have zero points of their own in the files.
        scale: name of the tensor of scales.
        kept: pattern of the names of layers that are not quantised.
        chosen: pattern of the names of layers that are quantised; "": all but those of `kept`.
        zero_word: GPTQ: what each word of the tensor of zero points must be.
    """

    name: str
    block: tuple[int, int]
    scale: str
    zeros: bool = False
    kept: str = "(?!)"
    chosen: str = ""
    zero_word: int = 0

    @property
    def main(self) -> str:
        """Name of the tensor that holds the numbers."""
        mains = {"W4A16": "weight_packed", "GPTQ": "qweight", "AWQ": "qweight", "FP8": "weight", "MXFP4": "blocks"}
        return mains[self.name]

    def covers(self, layer: str) -> bool:
        """Whether the linear layer of this name is quantised, by config.json."""
        return re.search(self.chosen, layer) is not None and re.search(self.kept, layer) is None

    def tensors(self, out: int, inputs: int) -> Wanted:
        """The tensors of a linear layer."""
        groups = math.ceil(inputs / (self.block[1] or inputs))
        rows, words = math.ceil(out / self.block[0]), ("I32",)
        if self.name == "W4A16":
            zeros = {"weight_zero_point": (words, (out // NIBBLES, groups))} if self.zeros else {}
            return {
                "weight_packed": (words, (out, inputs // NIBBLES)), "weight_scale": (FLOATS, (out, groups)), **zeros,
                "weight_shape": (("I64", "I32"), (2,)),
            }  # fmt: skip
        if self.name == "GPTQ":
            return {
                "qweight": (words, (inputs // NIBBLES, out)), "scales": (FLOATS, (groups, out)),
                "qzeros": (words, (groups, out // NIBBLES)), "g_idx": (words, (inputs,)),
            }  # fmt: skip
        if self.name == "AWQ":
            return {
                "qweight": (words, (inputs, out // NIBBLES)), "scales": (FLOATS, (groups, out)),
                "qzeros": (words, (groups, out // NIBBLES)),
            }  # fmt: skip
        return {"weight": (("F8_E4M3",), (out, inputs)), self.scale: (FLOATS, (rows, groups))}

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        """(out, in) of a linear layer, from the shape of its tensor `main`."""
        rows, columns = stored
        if self.name == "FP8":
            return rows, columns
        if self.name == "W4A16":
            return rows, columns * NIBBLES
        return (columns, rows * NIBBLES) if self.name == "GPTQ" else (columns * NIBBLES, rows)


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a model's weights are quantised by its config.json, in whatever format."""
    return bool(config.get("quantization_config") or text_of(config).get("quantization_config"))


def format_of(config: Mapping[str, Any], path: str) -> Format | None:
    """The format of a model's weights by its config.json; None if they are numbers of 16 or 32 bits.

    Raises WrongInput for a format that cannot be trained on: an unknown one, one with reordered columns (act-order), or
    one that differs from layer to layer.
    """
    told = config.get("quantization_config") or text_of(config).get("quantization_config")
    if not told:
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else told
    if not isinstance(told, Mapping) or method not in READERS:
        _refuse(path, str(method), f"are of a kind that is not read ({', '.join(READERS)} are)")
    if other_inputs(config):
        told = text_quantisation(told)
        named = [one for key in KEPT for one in _names(told.get(key), path, str(method)) if "language_model" in one]
        if named:
            _refuse(
                path, str(method), f"leave out layers of text by the regular expression {named[0]!r:.80}, which is for "
                "the names of the whole checkpoint, where names of layers are read"
            )  # fmt: skip
    found = READERS[method](told, path)
    if has_experts(config) != (found.name == "MXFP4"):
        what = "are experts', which are read in MXFP4 alone" if found.name != "MXFP4" else "are not of gpt-oss"
        _refuse(path, found.name, what)
    if found.name == "MXFP4" and text_of(config).get("model_type") != "gpt_oss":
        _refuse(path, found.name, "are not of gpt-oss, whose layout alone is known")
    return found


def _refuse(path: str, kind: str, what: str) -> None:
    raise WrongInput(f"model.path: the quantised weights of {path} ({kind}) {what}; {NEXT}")


def _check(path: str, kind: str, wrong: Mapping[str, object]) -> None:
    """wrong: what the weights do, to be refused -> whether it is so."""
    for what, is_so in wrong.items():
        if is_so:
            _refuse(path, kind, what)


def _compressed(told: Mapping[str, Any], path: str) -> Format:
    kind, groups = "compressed-tensors", _settings(told.get("config_groups"))
    _check(path, kind, {
        f"are of {len(groups)} different kinds for different layers": len(groups) > 1,
        "have no kind (config_groups)": not groups,
        f"have a transform or sparsity ({', '.join(_beside(told))})": _beside(told),
    })  # fmt: skip
    (group,) = map(_settings, groups.values())
    weights, inputs = _settings(group.get("weights")), group.get("input_activations")
    targets, form = group.get("targets"), group.get("format") or told.get("format")
    bits, number, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    known = {"pack-quantized": (4, "int", ("group", "channel")), "float-quantized": (8, "float", ("channel", "block"))}
    wanted = known.get(str(form))
    _check(path, kind, {
        f"have the format {form}, which is not read ({', '.join(known)} are)": wanted is None,
        f"are for the layers {targets}, where Linear is read: all linear layers but those of ignore": targets
        != ["Linear"],
    })  # fmt: skip
    assert wanted is not None
    _check(path, kind, {
        f"have numbers of {bits} bits, {number}, by {strategy}, where {form} is read with {wanted[0]} bits, "
        f"{wanted[1]}, by {' or '.join(wanted[2])}": (bits, number) != wanted[:2] or strategy not in wanted[2],
        "have reordered columns (actorder), which are not unpacked": weights.get("actorder") not in ORDERED,
        "are computed anew in each pass (dynamic)": weights.get("dynamic"),
        "go with activations of few bits": inputs is not None and form == "pack-quantized",
        "go with outputs of few bits": group.get("output_activations") is not None,
        "go with activations whose scales are in the files": inputs is not None
        and not _settings(inputs).get("dynamic"),
    })  # fmt: skip
    zeros = not weights.get("symmetric", True)
    kept = _patterns(told.get("ignore"), path, kind, whole=True)
    if form == "float-quantized":
        _check(path, kind, {"are FP8 with zero points": zeros})
        if strategy == "channel":
            return Format("FP8", (1, 0), "weight_scale", kept=kept)
        return Format("FP8", _pair(weights.get("block_structure"), path, kind), "weight_scale", kept=kept)
    size = 0 if strategy == "channel" else _group_size(weights.get("group_size"), path, kind)
    return Format("W4A16", (1, size), "weight_scale", zeros=zeros, kept=kept)


def _settings(found: Any) -> Mapping[str, Any]:
    """An object of config.json; for anything else one without settings, which is then refused for what it lacks."""
    return found if isinstance(found, Mapping) else {}


def _beside(told: Mapping[str, Any]) -> list[str]:
    """Settings of compressed-tensors that change what a layer computes."""
    found = {name: told.get(name) for name in ("transform_config", "kv_cache_scheme")}
    sparse = _settings(told.get("sparsity_config"))
    found["sparsity_config"] = sparse if sparse.get("format", "dense") != "dense" else None
    return [name for name, value in found.items() if value]


def _gptq(told: Mapping[str, Any], path: str) -> Format:
    bits, form = told.get("bits"), str(told.get("checkpoint_format") or "gptq")
    _check(path, "gptq", {
        f"have numbers of {bits} bits, where 4 are read": bits != 4,
        "have reordered columns (desc_act, act-order), which are not unpacked": told.get("desc_act") is not False,
        "have zero points of their own (sym: false), which vLLM does not read either": told.get("sym") is not True,
        "are of different kinds for different layers (dynamic)": told.get("dynamic"),
        "include the output embedding (lm_head)": told.get("lm_head"),
        f"have the format {form}, which is not read ({', '.join(SYMMETRIC_ZEROS)} are)": form not in SYMMETRIC_ZEROS,
    })  # fmt: skip
    chosen = _names(told.get("modules_in_block_to_quantize"), path, "gptq")
    ends = "|".join(map(re.escape, chosen))
    size = _group_size(told.get("group_size"), path, "gptq", whole=-1)
    return Format(
        "GPTQ", (1, size), "scales", chosen=rf"(^|\.)({ends})$" if chosen else "", zero_word=SYMMETRIC_ZEROS[form]
    )  # fmt: skip


def _awq(told: Mapping[str, Any], path: str) -> Format:
    bits, version = told.get("bits", told.get("w_bit")), str(told.get("version") or "gemm").lower()
    _check(path, "awq", {
        f"have numbers of {bits} bits, where 4 are read": bits != 4,
        f"have the layout {version}, where gemm is read": version != "gemm",
        "have no zero points (zero_point: false), a kind that is not read": told.get("zero_point") is not True,
        "include the output embedding (lm_head)": told.get("lm_head"),
    })  # fmt: skip
    size = _group_size(told.get("group_size", told.get("q_group_size")), path, "awq", whole=-1)
    kept = _patterns(told.get("modules_to_not_convert"), path, "awq", whole=False)
    return Format("AWQ", (1, size), "scales", zeros=True, kept=kept)


def _fp8(told: Mapping[str, Any], path: str) -> Format:
    block, scheme, kind = told.get("weight_block_size"), told.get("activation_scheme"), told.get("fmt", "e4m3")
    _check(path, "fp8", {
        "have one scale for a whole layer, where one for each block is read (weight_block_size)": not block,
        "go with activations whose scales are in the files": scheme != "dynamic",
        f"are {kind}, where e4m3 is read": kind != "e4m3",
        "have scales of a kind that is not read": told.get("scale_fmt") not in (None, "float"),
    })  # fmt: skip
    kept = _patterns(told.get("ignored_layers") or told.get("modules_to_not_convert"), path, "fp8", whole=True)
    return Format("FP8", _pair(block, path, "fp8"), "weight_scale_inv", kept=kept)


def _mxfp4(told: Mapping[str, Any], path: str) -> Format:
    return Format("MXFP4", (1, MX_BLOCK), "scales", chosen=r"(?!)")  # experts alone, which are no linear layers


READERS: dict[Any, Callable[[Mapping[str, Any], str], Format]] = {
    "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _fp8, "mxfp4": _mxfp4,
}  # fmt: skip


def _group_size(found: Any, path: str, kind: str, whole: int | None = None) -> int:
    """Inputs that share a scale; 0 for all of a row, which `whole` stands for."""
    if whole is not None and found == whole:
        return 0
    if type(found) is not int or found < NIBBLES or found % NIBBLES:
        _refuse(path, kind, f"must have groups of a multiple of {NIBBLES} inputs, and have {found!r:.40}")
    return int(found)


def _pair(found: Any, path: str, kind: str) -> tuple[int, int]:
    if not isinstance(found, list) or len(found) != 2 or not all(type(one) is int and one > 0 for one in found):
        _refuse(path, kind, f"must have blocks of two numbers, and have {found!r:.40}")
    return int(found[0]), int(found[1])


def _names(found: Any, path: str, kind: str) -> list[str]:
    """The names in a list of config.json, which may hold lists of names."""
    flat = [name for one in found or () for name in (one if isinstance(one, list) else [one])]
    if not isinstance(found or [], list) or not all(isinstance(name, str) for name in flat):
        _refuse(path, kind, f"must have lists of names of layers, and have {found!r:.40}")
    return flat


def _patterns(found: Any, path: str, kind: str, *, whole: bool) -> str:
    """A pattern of the layers that a list in config.json names: by whole names, or by parts of names; re:<expression>
    stands for a regular expression at the beginning of a name."""
    patterns = []
    for name in _names(found, path, kind):
        plain_name = f"^{re.escape(name)}$" if whole else re.escape(name)
        patterns.append(f"^(?:{name[3:]})" if name.startswith("re:") else plain_name)
    pattern = "|".join(patterns) or "(?!)"
    try:
        re.compile(pattern)
    except re.error:
        _refuse(path, kind, f"must have regular expressions that compile, and have {found!r:.80}")
    return pattern


# What a run with a frozen base of few bits cannot have, and what to do.

NOT_WITH = {
    "learner.mode: full": "numbers of few bits cannot be trained; set learner.mode=lora",
    "learner.push: merged": "the sampler has no place for weights of 16 bits; set learner.push=adapter",
    "model.base: nf4": "it would be quantised twice; set model.base=none",
    "memory.layout: shared": "vLLM packs its numbers anew, in an order of its own; set memory.layout=auto",
    "memory.layout: sharded": "no rank divides packed numbers; set memory.layout=auto",
    "cluster.tensor_parallel": "groups divided among processes were not tried; give each generator one card",
}


def check_base(found: Format, path: str, uses: Mapping[str, bool]) -> None:
    """Raises WrongInput if the settings of a run do not go with a quantised checkpoint. uses: a key of NOT_WITH ->
    whether the run has it."""
    for what, is_so in uses.items():
        if is_so:
            raise WrongInput(
                f"{what} is not for a quantised checkpoint, which {path} is ({found.name}): {NOT_WITH[what]}"
            )


# Where a format runs. vLLM has no weight-only kernel for FP8 and MXFP4 on a CPU; its W8A8 kernels round the activations
# to 8 bits, too: on a tiny model the logprobs then differed by 0.29 nats from the weights' own.

ON_CPU = ("W4A16", "GPTQ", "AWQ")
NO_KERNEL = {
    "FP8": "rounds activations to 8 bits for it on a CPU, so that sampler and learner would differ",
    "MXFP4": "has no kernel for it on a CPU",
}


def check_kernel(found: Format, path: str, dtype: str, *, cuda: bool) -> None:
    """Raises WrongInput if vLLM does not compute with weights of this format as the learner does."""
    if not cuda and found.name not in ON_CPU:
        raise WrongInput(
            f"model.path: {path} has weights in {found.name}, and vLLM {NO_KERNEL[found.name]}; give the generator a "
            "card (cluster.gpus.generator), or another model (docs/models.md)"
        )
    types = ("bfloat16", "float16") if cuda else ("bfloat16",)
    if dtype not in types:
        raise WrongInput(
            f"model.dtype: must be {' or '.join(types)} for {path}, with whose weights ({found.name}) vLLM computes in "
            f"no other type{'' if cuda else ' on a CPU'}, got {dtype}; set model.dtype={types[0]}"
        )


def plain(stored: Mapping[str, Stored], found: Format, path: str, key: str) -> dict[str, Stored]:
    """The tensors of the same model in 16 bits, by name: a quantised layer's are replaced by its weight's shape alone.

    Raises WrongInput, with a line for each error, which names `key` and the first of the tensors: one that is missing
    or has another dtype or shape than the format's, columns out of order, or zero points of an unknown kind.
    """
    weights, taken, wrong = dict[str, Stored](), set[str](), dict[str, list[str]]()
    for name, one in stored.items():
        layer, dot, leaf = name.rpartition(found.main)
        if leaf or not dot or (found.name == "FP8" and one.dtype != "F8_E4M3"):
            continue
        if found.name == "MXFP4":
            wanted, weight, size = _experts(layer, one)
        elif len(one.shape) == 2:
            weight, size = f"{layer}weight", found.shape(one.shape)
            wanted = {layer + part: what for part, what in found.tensors(*size).items()}
            if found.name != "FP8" and size[1] % (found.block[1] or 1):
                wrong.setdefault(f"have rows that groups of {found.block[1]} do not divide", []).append(name)
        else:
            wrong.setdefault("are no matrices", []).append(name)
            continue
        sound = True
        for part, (dtypes, shape) in wanted.items():
            there = stored.get(part)
            if there is None or there.dtype not in dtypes or there.shape != shape:
                shaped = f"must be {' or '.join(dtypes)} of the shape {list(shape)}"
                wrong.setdefault("are missing" if there is None else shaped, []).append(part)
                sound = False
        for what, part in _contents(found, layer, size, stored) if sound else ():
            wrong.setdefault(what, []).append(part)
        taken |= wanted.keys()
        weights[weight] = Stored("BF16", size, one.file, one.begin)
    if wrong:
        raise WrongInput("\n".join(
            f"{key}: {counted(names)} of {path} ({found.name}) {what}, first {names[0]}; copy the weights again, or "
            f"{NEXT}" for what, names in wrong.items()
        ))  # fmt: skip
    return {name: one for name, one in stored.items() if name not in taken} | weights


def _experts(layer: str, one: Stored) -> tuple[Wanted, str, tuple[int, ...]]:
    """(tensors, name of the weight, its shape) of gpt-oss's experts, whose weights transformers holds as
    [experts, in, out]."""
    count, out, blocks, _ = one.shape if len(one.shape) == 4 else (0, 0, 0, 0)
    wanted: Wanted = {
        f"{layer}blocks": (("U8",), (count, out, blocks, MX_BLOCK // 2)),
        f"{layer}scales": (("U8",), (count, out, blocks)),
    }
    return wanted, layer.removesuffix("_"), (count, blocks * MX_BLOCK, out)


def _contents(
    found: Format, layer: str, size: tuple[int, ...], stored: Mapping[str, Stored]
) -> Iterator[tuple[str, str]]:
    """Yields (what is wrong, the tensor's name) for small tensors of a layer whose numbers are known beforehand."""
    if found.name == "W4A16":
        name = f"{layer}weight_shape"
        if _numbers(stored[name]).tolist() != list(size):
            yield f"must hold the numbers {list(size)}", name
    if found.name == "GPTQ":
        inputs = size[1]
        order = np.arange(inputs) // (found.block[1] or inputs)
        if not np.array_equal(_numbers(stored[f"{layer}g_idx"]), order):
            yield "have reordered columns (act-order), which are not unpacked", f"{layer}g_idx"
        if not (_numbers(stored[f"{layer}qzeros"]).view("u4") == found.zero_word).all():
            yield f"must hold {found.zero_word:#x} alone, as symmetric weights do", f"{layer}qzeros"
    if found.name == "MXFP4" and (_numbers(stored[f"{layer}scales"]) == 0xFF).any():
        yield "hold exponents that are not numbers (255)", f"{layer}scales"


def _numbers(one: Stored) -> npt.NDArray[Any]:
    kinds = {"I32": "<i4", "I64": "<i8", "U8": "u1"}
    return np.fromfile(one.file, kinds[one.dtype], math.prod(one.shape), offset=one.begin)
