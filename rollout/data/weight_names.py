"""Checks that the tensors of a model's files are those of its config.json, before a run. Libraries that load a model
silently make missing tensors random, and leave out tensors for which the model has no place.

For architectures in cluster.memory.shape, names and shapes follow from config.json, in a millisecond and without torch.
For all others transformers is asked: it loads tensors without content (torch's meta device) into a model without
content, and knows which names in files mean which of its own.
"""

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from cluster.errors import WrongInput
from cluster.memory.shape import LINEAR, Shape
from rollout.architecture import EXPERTS, text_of
from rollout.data.model_files import (
    CONFIG,
    Stored,
    adapter_weights,
    check_finite,
    counted,
    model_weights,
    read_json,
    same_content,
    shown,
    split,
)
from rollout.quantised import format_of, plain
from rollout.text_part import text_part

Sizes = Mapping[str, tuple[int, ...]]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE = "base_model.model.score.weight"  # [1, H], in the file of an adapter with a scalar head
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# Settings that config.json must have for a check here, since transformers' classes differ in the defaults.
EXPLICIT = {"llama": ()} | dict.fromkeys(["mistral", "qwen2"], ("num_key_value_heads",))
HEAD_DIM_TOO = ("num_key_value_heads", "head_dim")
WITHOUT_BIAS = ("mistral", "qwen2")  # model types whose classes do not read attention_bias
# Tensors that older versions of transformers computed and saved, so that old checkpoints still have them.
ROTATIONS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)rotary_emb\.original_inv_freq$")
MASKS = re.compile(r"\.(attn|attention)\.(masked_)?bias$")  # [1, 1, L, L] or a number
HALF = re.compile(r"(.*\.lora_(?:embedding_)?)([AB])(|\.weight)")  # A or B of a LoRA pair
EXPERTS_PAIR = re.compile(r"\.experts(\.base_layer)?\.lora_[AB]\.")  # PEFT's names of an adapter of fused experts
EXPERTS_BLOCKS = (".mlp.experts", ".block_sparse_moe.experts")  # the ends of names in transformers, and in some of vLLM
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
PREDICTORS = re.compile(r"(^|\.)mtp(\.|_)")  # layers for multi-token prediction


def check_model(path: str, key: str = "model.path", *, finite: bool = True) -> dict[str, Stored] | None:
    """Returns a model's tensors by name, after all checks; None for a hub model whose weights are not in the cache.

    Checked are the files themselves, that all numbers are finite (if `finite`), and for known architectures names and
    shapes. Raises WrongInput with a line for each error, which names `key` and the tensors.
    """
    stored = model_weights(path, key)
    if stored is None:
        return None
    config = read_json(path, CONFIG, key)
    sizes, plain_names = sizes_of(config), in_16_bits(stored, config, path, key)
    wrong = [] if sizes is None else misfits(path, key, plain_names, sizes)
    wrong += _untied(path, key, stored, config)
    try:
        if finite:
            check_finite(stored, path, key)
    except WrongInput as error:
        wrong.append(str(error))
    if wrong:
        raise WrongInput("\n".join(wrong))
    return stored


def check_adapter(folder: str, key: str, content: Mapping[str, Any], base: Sizes | None) -> None:
    """Raises WrongInput, with a line for each error, if an adapter's file is damaged, holds numbers that are not
    finite, or does not fit its adapter_config.json.

    content: the adapter_config.json. base: sizes_of the base model, to which weights are compared; None: only pairs and
    ranks are checked.
    """
    stored = adapter_weights(folder, key)
    wanted = None if base is None else _adapted(content, base)
    if wanted is None:
        wrong = _unpaired(content, stored, key, folder)
    else:
        if SCORE in stored:
            wanted[SCORE] = (1, base[EMBEDDING][1] if base else 0)
        wrong = adapter_misfits(wanted, stored, key, folder)
    try:
        check_finite(stored, folder, key)
    except WrongInput as error:
        wrong.append(str(error))
    if wrong:
        raise WrongInput("\n".join(wrong))


def _adapted(content: Mapping[str, Any], base: Sizes) -> dict[str, tuple[int, ...]] | None:
    """The shapes, by PEFT's names, of a plain LoRA adapter's weights; None if it has layers beyond LINEAR."""
    targets, rank = content.get("target_modules"), content.get("r", 8)
    if not isinstance(targets, list) or not isinstance(rank, int):
        return None
    if not {str(name).rpartition(".")[2] for name in targets} <= LINEAR.keys():
        return None
    found: dict[str, tuple[int, ...]] = {}
    for name, size in base.items():
        module = name.removesuffix(".weight")
        if len(size) == 2 and any(module == target or module.endswith(f".{target}") for target in targets):
            found[f"base_model.model.{module}.lora_A.weight"] = (rank, size[1])
            found[f"base_model.model.{module}.lora_B.weight"] = (size[0], rank)
    return found


def _unpaired(content: Mapping[str, Any], stored: Mapping[str, Stored], key: str, folder: str) -> list[str]:
    """The errors that an adapter's own files show: missing halves of pairs, and wrong ranks."""
    rank, halves = content.get("r", 8), {name: match for name in stored if (match := HALF.fullmatch(name))}
    if type(rank) is not int or rank < 1:
        return [f"{key}: r of {folder} must be a whole number from 1, got {rank!r:.80}; save the adapter again"]
    if not halves:
        return [f"{key}: {folder} must hold weights of a LoRA adapter, and has none; save the adapter again"]
    found = []
    others = {f"{one[1]}{'B' if one[2] == 'A' else 'A'}{one[3]}" for one in halves.values()}
    if lacking := sorted(others - stored.keys(), key=_in_order):
        found.append(
            f"{key}: {folder} lacks {counted(lacking)} beside which the other half of a pair is there, first "
            f"{lacking[0]}; save the adapter again"
        )
    wrong = [name for name, half in halves.items() if not _has_rank(name, half[2], stored[name].shape, rank)]
    if wrong:
        name = min(wrong, key=_in_order)
        found.append(
            f"{key}: {counted(wrong)} of {folder} must have the rank of its adapter_config.json, {rank}, first {name}: "
            f"got the shape {list(stored[name].shape)}; give weights and adapter_config.json of one adapter"
        )
    return found


def _has_rank(name: str, half: str, shape: tuple[int, ...], rank: int) -> bool:
    """Whether A or B (`half`) of a LoRA pair has this rank. In an adapter of fused experts it is the number of experts
    times the rank."""
    found = shape[(at := "AB".index(half)) : at + 1]
    return found == (rank,) or (EXPERTS_PAIR.search(name) is not None and found > (0,) and found[0] % rank == 0)


def check_copy(folder: str, copy: str, key: str, content: Mapping[str, Any], copied: Mapping[str, Any]) -> None:
    """Raises WrongInput if an adapter's copy under vLLM's names has other layers, or is a copy of another adapter: of
    an earlier one in this folder, for example. In the copy a fused layer may be two, of which each has its A, a layer
    of keys may be there a second time, as that of values, experts may be in a block of another name, and the rows of a
    B may be in another order.

    content, copied: the adapter_config.json of the adapter and of its copy.
    """
    stored = adapter_weights(copy, key)
    here, there = ({str(name).rpartition(".")[2] for name in one["target_modules"]} for one in (content, copied))
    wanted: dict[str, tuple[int, ...]] = {}
    differing = []
    own = adapter_weights(folder, key)
    for name, one in own.items():
        if (half := HALF.fullmatch(name)) is None:
            continue
        if EXPERTS_PAIR.search(name):
            served = name if name in stored else name.replace(*EXPERTS_BLOCKS)
            wanted[served] = one.shape
            if served in stored and _differ(one, stored[served]):
                differing.append(served)
            continue
        layer, lora, kind = half[1].rpartition(".lora_")
        block, _, leaf = layer.rpartition(".")
        same = leaf in there
        parts = [leaf] if same else sorted(there - here)
        values = [f"{block}.v_proj{lora}{kind}{letter}{half[3]}" for letter in "AB"]
        if leaf == "k_proj" and values[0] not in own and any(value in stored for value in values):
            parts.append("v_proj")
        for part in parts:
            served = f"{block}.{part}{lora}{kind}{half[2]}{half[3]}"
            wanted[served] = one.shape if same or half[2] == "A" or served not in stored else stored[served].shape
            if (same or half[2] == "A") and served in stored and _differ(one, stored[served]):
                differing.append(served)
    if wrong := adapter_misfits(wanted, stored, key, copy):
        raise WrongInput("\n".join(wrong))
    if differing:
        raise WrongInput(
            f"{key}: {copy} must be a copy of the adapter in {folder}, and has other numbers in "
            f"{counted(differing)}, first {differing[0]}; copy both again from one run's adapter/, or wait until the "
            "run has written its next checkpoint"
        )


def _differ(own: Stored, copied: Stored) -> bool:
    """Whether two tensors of one dtype and shape hold other numbers, in any order."""
    if (own.dtype, own.shape) != (copied.dtype, copied.shape):
        return False  # another shape is refused by its shape; of another dtype are numbers that somebody rounded
    size = own.nbytes // max(math.prod(own.shape), 1)
    first, second = (
        np.sort(np.fromfile(one.file, f"u{size}", math.prod(one.shape), offset=one.begin)) for one in (own, copied)
    )
    return not np.array_equal(first, second)


def adapter_misfits(wanted: Sizes, stored: Mapping[str, Stored], key: str, folder: str) -> list[str]:
    """One sentence for each way in which an adapter's weights differ from `wanted`."""
    missing, strange = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    found = [
        f"{key}: {folder} {what}: {len(names)}, first {names[0]}; give an adapter of this model"
        for names, what in ((strange, "has weights that the model has no place for"), (missing, "lacks weights"))
        if names
    ]
    wrong = [name for name in wanted if name in stored and stored[name].shape != wanted[name]]
    if wrong:
        name = wrong[0]
        found.append(
            f"{key}: {len(wrong)} weights of {folder} have another shape than the model's, first {name}: must be "
            f"{list(wanted[name])}, got {list(stored[name].shape)}; give an adapter of this model"
        )
    return found


def check_fit(path: str, key: str = "model.path") -> bool:
    """Checks a model's tensors against its config.json, in a process that may import torch. False if its files are not
    on this machine. Raises WrongInput if the tensors differ."""
    stored = model_weights(path, key)
    if stored is None:
        return False
    config = read_json(path, CONFIG, key)
    sizes = sizes_of(config)
    if sizes is None:
        wrong = transformers_misfits(path, key, stored)
    else:
        wrong = misfits(path, key, in_16_bits(stored, config, path, key), sizes)
    if wrong:
        raise WrongInput("\n".join(wrong))
    return True


def in_16_bits(stored: Mapping[str, Stored], config: Mapping[str, Any], path: str, key: str) -> Mapping[str, Stored]:
    """The tensors as the files would have them in 16 bits; those of a checkpoint that is not quantised as they are."""
    found = format_of(config, path)
    return stored if found is None else plain(stored, found, path, key)


def sizes_of(config: Mapping[str, Any]) -> Sizes | None:
    """The shapes of all tensors of a model with this config.json, by the names of transformers and vLLM. A head that is
    tied to the input embedding is left out. None if the architecture is not known here."""
    kind = config.get("model_type")
    try:
        shape = Shape.from_config(config)
    except (ValueError, TypeError):
        return None
    if shape.mixed:
        return None
    explicit = EXPLICIT.get(shape.kind, HEAD_DIM_TOO)
    biased = bool(config.get("attention_bias")) and kind in WITHOUT_BIAS
    if kind != shape.kind or biased or (shape.mlp_bias and kind != "llama"):
        return None
    if not all(isinstance(config.get(name), int) for name in explicit):
        return None
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab, shape.hidden), "model.norm.weight": (shape.hidden,)}
    for layer in range(shape.layers):
        found |= {f"model.layers.{layer}.{name}": size for name, size in _layer(shape).items()}
    return found if shape.tied else found | {HEAD: (shape.vocab, shape.hidden)}


def _layer(shape: Shape) -> dict[str, tuple[int, ...]]:
    biased = {"q_proj": shape.attention_bias, "o_proj": shape.output_bias, "gate_proj": shape.mlp_bias}
    biased |= dict.fromkeys(("k_proj", "v_proj"), shape.attention_bias)
    biased |= dict.fromkeys(("up_proj", "down_proj"), shape.mlp_bias)
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    wide, narrow = shape.norms
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": (shape.hidden,) for name in norms[:wide]}
    if narrow:
        found |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    for name in LINEAR:
        inputs, outputs = shape.linear(name)
        module = f"{'self_attn' if name in ATTENTION else 'mlp'}.{name}"
        found[f"{module}.weight"] = (outputs, inputs)
        if biased[name]:
            found[f"{module}.bias"] = (outputs,)
    return found


def misfits(path: str, key: str, stored: Mapping[str, Stored], sizes: Sizes) -> list[str]:
    """One sentence for each way in which the tensors are not those of `sizes`."""
    if EMBEDDING not in stored and EMBEDDING.removeprefix("model.") in stored:  # the model was saved without its head
        stored = {name if name == HEAD else f"model.{name}": one for name, one in stored.items()}
    others = {HEAD: sizes[EMBEDDING]} if HEAD not in sizes and HEAD in stored else {}
    wanted = {**sizes, **others}
    shapes = {
        name: (size, stored[name].shape)
        for name, size in wanted.items()
        if name in stored and stored[name].shape != size
    }
    return sentences(path, key, wanted.keys() - stored.keys(), stored.keys() - wanted.keys(), shapes, stored)


def transformers_misfits(path: str, key: str, stored: Mapping[str, Stored], lm: Any = None) -> list[str]:
    """One sentence for each way in which the tensors are not those of transformers' model.

    lm: the causal language model of config.json without content, if it exists already; None: it is built. Raises
    whatever transformers raises for a wrong config.json.
    """
    import torch  # imported here, since the driver's process imports neither torch nor transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = in_16_bits(stored, content := read_json(path, CONFIG, key), path, key)
    lost, surplus = _other_experts(stored, content)
    if lost or surplus:  # transformers would not name these tensors
        return sentences(path, key, lost, surplus, {}, stored)
    name, revision = split(path)
    config = text_part(AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False), key)
    if hasattr(config, "quantization_config"):  # transformers would ask for the library that made the checkpoint
        del config.quantization_config
    auto: Any = AutoModelForCausalLM  # the class's methods carry no annotations
    with torch.device("meta"):
        lm = auto.from_config(config, trust_remote_code=False) if lm is None else lm
    empty = {name: torch.empty(one.shape, device="meta", dtype=_type(one)) for name, one in stored.items()}
    try:
        with without_table(progress=False):
            _, found = type(lm).from_pretrained(
                None, config=config, state_dict=empty, dtype=torch.float32, device_map={"": "meta"},
                output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False,
            )  # fmt: skip
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
        return [f"{key}: transformers cannot put the tensors of {path} together ({said}); copy the weights again"]
    return loading_misfits(path, key, found, stored)


@contextmanager
def without_table(*, progress: bool = True) -> Iterator[None]:
    """A context in which transformers prints no table of missing tensors when it loads a model, since gleaner reports
    them in a sentence. progress: whether transformers may show a progress bar."""
    from transformers.utils import logging as of_transformers

    said: Any = of_transformers  # the module's functions carry no annotations
    hides = not progress and said.is_progress_bar_enabled()
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_no_table)
    if hides:
        said.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(_no_table)
        if hides:
            said.enable_progress_bar()


def _no_table(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _other_experts(stored: Iterable[str], config: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Returns (missing tensors of experts, tensors of surplus experts), for files that hold each expert by itself."""
    text = text_of(config)
    count = max((number for name in EXPERTS if isinstance(number := text.get(name), int)), default=0)
    found = [match for name in stored if (match := EXPERT.fullmatch(name)) and count > 0]
    wanted = {f"{match[1]}{number}{match[3]}" for match in found for number in range(count)}
    return wanted.difference(stored), {match[0] for match in found if int(match[2]) >= count}


def loading_misfits(path: str, key: str, found: Mapping[str, Any], stored: Mapping[str, Stored] | None) -> list[str]:
    """One sentence for each error in output_loading_info (`found`), which transformers gives when it loads a model.

    stored: the files' tensors, if they are known.
    """
    shapes = {name: (tuple(wanted), tuple(got)) for name, got, wanted in found["mismatched_keys"]}
    return sentences(path, key, found["missing_keys"], found["unexpected_keys"], shapes, stored or {})


def _type(one: Stored) -> Any:
    import torch

    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(one.dtype, torch.float32)


def sentences(
    path: str,
    key: str,
    missing: Collection[str],
    unexpected: Collection[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    stored: Mapping[str, Stored],
) -> list[str]:
    """The error messages for wrong tensors. shapes: name -> (the shape that the tensor must have, its own shape)."""
    found, strange = [], sorted(name for name in unexpected if not _computed(name, stored.get(name)))
    if missing:
        lacking = sorted(missing, key=_in_order)
        found.append(
            f"{key}: {path} lacks {counted(lacking)} of the model of its config.json, which would be random: "
            f"{shown(lacking)}; copy the weights again, or give weights and config.json of one model"
        )
    if strange:
        found.append(
            f"{key}: {path} holds {counted(strange)} that the model of its config.json has no place for: "
            f"{shown(sorted(strange, key=_in_order))}; give weights and config.json of one model, or save it anew with "
            "transformers, which leaves such tensors out"
        )
    if shapes:
        name = min(shapes, key=_in_order)
        wanted, got = shapes[name]
        found.append(
            f"{key}: {counted(shapes)} of {path} {'have' if len(shapes) > 1 else 'has'} not the shape of its "
            f"config.json, first {name}: must be {list(wanted)}, got {list(got)}; give weights and config.json of one "
            "model"
        )
    return found


def _in_order(name: str) -> list[tuple[int, str]]:
    """A sort key for names by which layer 2 comes before layer 10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


def _computed(name: str, one: Stored | None) -> bool:
    """Whether a tensor for which the model has no place may be left out without harm."""
    mask = MASKS.search(name) is not None and (one is None or len(one.shape) in (0, 4))
    return mask or ROTATIONS.search(name) is not None or PREDICTORS.search(name) is not None


def _untied(path: str, key: str, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> Iterator[str]:
    """An error message if the head is tied by config.json, but the files hold another matrix for it: transformers would
    use that matrix, vLLM would not."""
    sizes = sizes_of(config)
    if sizes is None or HEAD in sizes or HEAD not in stored or EMBEDDING not in stored:
        return
    if not same_content(stored[HEAD], stored[EMBEDDING]):
        yield two_heads(path, key)


def two_heads(path: str, key: str) -> str:
    """The error message for a model whose head is tied by config.json, and whose files hold two different matrices."""
    return (
        f"{key}: config.json of {path} says that the output embedding is the input embedding (tie_word_embeddings), "
        "and the files hold two different ones; set tie_word_embeddings to false there, or take one of them away"
    )
