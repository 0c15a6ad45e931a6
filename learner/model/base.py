"""Loads the base model with transformers and checks it: frozen, without dropout, in model.dtype or in 4 bits.

4 bits (model.base: nf4) is QLoRA (2305.14314): every linear layer except the output embedding is held as NormalFloat4
in blocks of 64 with doubly quantised scales, 0.52 bytes per weight, and dequantised to model.dtype layer by layer. vLLM
quantises the same checkpoint in the same way when it loads it (quantization="bitsandbytes"), so generator and learner
have the same policy. The files must be of model.dtype for that: the learner casts before it quantises, vLLM does not.
Generators that merged the adapter, or served the unquantised base, would not have the policy that is trained. With
memory.layout: shared the learner maps the generator's 4-bit weights, whose scales are not nested.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.hub import cached_file

from cluster.errors import WrongInput
from cluster.reading import read_mapping
from learner.config import ModelConfig
from learner.model.bases.empty import empty_model
from learner.model.bases.quantised import fill, with_layers
from learner.model.bases.shared import MappedBase
from learner.model.logprob import decoder_of
from rollout.architecture import check_architecture, other_inputs
from rollout.data.model_files import (
    CONFIG,
    EXPONENTS,
    INDEX,
    SINGLE,
    all_finite,
    header,
    infinite,
    read_json,
    split,
)
from rollout.data.weight_names import check_fit, loading_misfits, two_heads, without_table
from rollout.quantised import Format, check_base, format_of
from rollout.text_part import NAMES, of_text, text_name, text_part


def without_weights(config: Any, dtype: torch.dtype, quantization: BitsAndBytesConfig | None) -> Any:
    """Returns the causal language model of a transformers config on torch's meta device: its tensors have shape, dtype
    and size, but no content. It is quantised as `from_pretrained` would do it."""
    with torch.device("meta"), torch.no_grad():
        lm: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=False
        )
        if quantization is not None:
            _quantise(lm, quantization)
    return lm


def _quantise(lm: Any, quantization: BitsAndBytesConfig) -> None:
    # bitsandbytes is imported here since it is slow, and few runs use it.
    from bitsandbytes.functional import name2qmap, quantize_4bit
    from bitsandbytes.nn.modules import Params4bit
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    head = next(name for name, module in lm.named_modules() if module is lm.get_output_embeddings())
    dense = {name: module.weight for name, module in lm.named_modules() if isinstance(module, nn.Linear)}
    replace_with_bnb_linear(lm, modules_to_not_convert=[head], quantization_config=quantization)
    for name, weight in dense.items():
        if name == head:
            continue
        # These are the operations of Params4bit.to("cuda"), which does nothing with a meta tensor.
        packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        module = lm.get_submodule(name)
        module.weight = Params4bit(
            packed, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True, module=module
        )
        module.quant_state = state
    lm.is_loaded_in_4bit = True  # PEFT reads this flag
    name2qmap.pop("dynamic", None)  # this table of bitsandbytes was just made on the meta device, and is kept globally


def tensor_files(path: str) -> dict[str, tuple[Path, str]]:
    """Returns (safetensors file, name there) of each tensor of a model, by its name in the model, which differs from
    that in the file where the model is a text part. A model on the hub is downloaded if it is not in the cache.

    Raises WrongInput if files are missing, OSError if the hub has no such model or cannot be reached.
    """
    index = _file(path, INDEX)
    if index is not None:
        where: dict[str, str] = read_mapping(index)["weight_map"]
        files = {name: _file(path, name) for name in sorted(set(where.values()))}
        found = {tensor: files[name] for tensor, name in where.items()}
    else:
        single = _file(path, SINGLE)
        found = dict.fromkeys(header(single, "model.path"), single) if single is not None else {}
    there = {tensor: file for tensor, file in found.items() if file is not None}
    if not there or len(there) < len(found):
        raise WrongInput(f"model.path: {path} must have {SINGLE}, or {INDEX} and all files that it names")
    return of_text(read_json(path, CONFIG), {tensor: (file, tensor) for tensor, file in there.items()})


def _file(path: str, name: str) -> Path | None:
    model, revision = split(path)
    found = cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


# safetensors' names of dtypes.
LETTERS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}


def load_base(
    model: ModelConfig,
    device: torch.device,
    *,
    lora: bool,
    mapped: MappedBase | None = None,
    sharded: bool = False,
    trained: bool = True,
    key: str = "model.path",
) -> Any:
    """Returns the frozen causal language model of model.path in model.dtype, without dropout.

    Args:
        lora: whether the model will get an adapter; false: it is trained as a whole.
        mapped: the generator's weights, which are used instead of loading the files.
        sharded: whether the model is sharded over the ranks of the process group.
        trained: false for a frozen reference. The shards of a model that is trained as a whole are float32.
        key: the setting that names the model, for messages.

    Raises WrongInput if the model cannot be trained here, with an adapter or as a whole, or if its files do not have
    the weights of its architecture, or have numbers that are not finite.
    """
    config = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
    check_architecture(config.to_dict(), model.path, lora=lora)
    packed = format_of(config.to_dict(), model.path)
    if packed is not None:
        check_base(packed, model.path, {
            "learner.mode: full": not lora, "model.base: nf4": model.base == "nf4",
            "memory.layout: shared": mapped is not None, "memory.layout: sharded": sharded,
        })  # fmt: skip
    config, whole = _as_the_sampler_computes(text_part(config)), config
    dtype: torch.dtype = getattr(torch, model.dtype)
    options: dict[str, Any] = {}
    quantization = nf4(dtype) if model.base == "nf4" else None
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # sdpa would leave out the cap without an error
    if device.type == "meta":  # learner.tools.meta_run measures what a step of the model would need
        lm = without_weights(config, dtype, quantization)
        return (lm if packed is None else with_layers(lm, packed, dtype)).requires_grad_(False)
    if mapped is not None:
        lm = mapped.model(config, dtype, quantization, **options)
    elif sharded:
        from learner.model.bases.sharded import sharded_base  # imported here: slow, and few runs use it

        lm = sharded_base(model, config, device, trained=trained and not lora, key=key, **options)
    elif packed is not None:
        lm = _packed_base(model, config, packed, device, key, **options)
    elif quantization is not None:
        # Each weight is quantised when it is read, so the unquantised model is never in memory as a whole.
        options |= {"quantization_config": quantization, "device_map": {"": device}}
        lm = _loaded(model, key, outside=config is not whole, config=config, dtype=dtype, **options)
    else:
        lm = _loaded(model, key, outside=config is not whole, config=config, dtype=dtype, **options).to(device)
    check_finite(lm.named_parameters(), model.source, key)
    return lm.requires_grad_(False)


def _as_the_sampler_computes(config: Any) -> Any:
    """Returns the configuration without dropout, which the sampler has not, and without what transformers could not do:
    an attention that is not installed, and a quantisation, for which it would ask for the library that made it."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._attn_implementation = None
    for name, value in config.to_dict().items():
        if ("drop" in name or name == "router_jitter_noise") and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _packed_base(
    model: ModelConfig, config: Any, packed: Format, device: torch.device, key: str, **options: Any
) -> Any:
    """Loads a quantised checkpoint (learner.model.bases.quantised)."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    lm = with_layers(empty_model(config, dtype, model.source, **options), packed, dtype)
    return fill(lm, packed, tensor_files(model.source), device, path=model.source, key=key)


def _loaded(model: ModelConfig, key: str, *, outside: bool, **options: Any) -> Any:
    """Loads the model with transformers. Raises WrongInput if transformers has initialised weights that the files lack,
    or ignored weights of the files. outside: whether the files hold towers beside the model, which are not read."""
    if outside:
        options["key_mapping"] = NAMES
    auto: Any = AutoModelForCausalLM  # its methods have no annotations
    if "quantization_config" in options:  # transformers does not report wrong shapes of quantised weights
        check_fit(model.source, key)
    try:
        with without_table():
            lm, report = auto.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=False,
                output_loading_info=True, ignore_mismatched_sizes=True, **options,
            )  # fmt: skip
    except RuntimeError:  # tensors cannot be fused, and transformers' message does not name them
        check_fit(model.source, key)
        raise
    if outside:
        report["unexpected_keys"] = {name for name in report["unexpected_keys"] if text_name(name) is not None}
    if wrong := loading_misfits(model.source, key, report, None):
        check_fit(model.source, key)  # raises a message with the names in the files, which differ for fused tensors
        raise WrongInput("\n".join(wrong))
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    tied = options["config"].get_text_config().tie_word_embeddings and head is not None
    if tied and head.weight is not embedding.weight:  # transformers does not report it
        raise WrongInput(two_heads(model.source, key))
    return lm


def text_prefix(model: ModelConfig) -> str | None:
    """Returns what the names of the decoder's layers begin with in transformers' class of the whole checkpoint, as PEFT
    and vLLM name them, such as "model.language_model."; None for a model of text alone.

    Raises WrongInput if transformers has no such class, or its decoder is none of the names of rollout.text_part.
    """
    config = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
    if not other_inputs(config.to_dict()):
        return None
    named = ", ".join(config.architectures or ())
    kind: Any = getattr(transformers, named, None)
    block = "layers.0"
    if kind is not None:
        with torch.device("meta"):
            names = [name for name, _ in kind(config).named_modules()]
        if found := [name for name in names if text_name(f"{name}.") == f"model.{block}."]:
            return str(found[0].removesuffix(block))
    raise WrongInput(
        f"model.path: {model.path} ({named or 'no architectures in config.json'}) must be of a class of transformers "
        "whose decoder for text is its language_model, since an exported adapter has the names of the whole "
        "checkpoint; set learner.mode=full, or give another model (docs/models.md)"
    )


def check_finite(weights: Iterable[tuple[str, Tensor]], path: str, key: str) -> None:
    """Raises WrongInput, which names `key` and the weights of `path` that hold nan or inf."""
    if wrong := [name for name, weight in weights if not _finite(weight.detach())]:
        raise WrongInput(infinite(wrong, path, key))


def _finite(weight: Any) -> bool:
    weight = weight.to_local() if hasattr(weight, "to_local") else weight  # a sharded weight: this rank's shard
    if weight.dtype not in LETTERS:
        return True
    if weight.device.type == "cpu":  # torch's isfinite takes sixty times as long for 16 bits on a CPU
        width, exponent = EXPONENTS[LETTERS[weight.dtype]]
        whole: torch.dtype = getattr(torch, f"int{8 * width}")
        return all_finite(weight.contiguous().view(whole).numpy(), exponent)
    return bool(torch.isfinite(weight).all())


def nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Returns bitsandbytes' configuration of QLoRA's quantisation with products in `dtype`."""
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def to_eval(wrapped: Any) -> None:
    """Sets evaluation mode (no dropout), but leaves the flag `training` of 4-bit layers set.

    On a CPU a 4-bit layer in evaluation mode that gets an input without gradient rewrites its weights for a bfloat16
    kernel, which is less exact and cannot be differentiated afterwards. The layer decides by its own flag alone.
    """
    wrapped.eval()
    library = sys.modules.get("bitsandbytes")  # if it is not imported yet, the model has no 4-bit layer
    if library is None:
        return
    for module in wrapped.modules():
        if isinstance(module, library.nn.Linear4bit):
            module.training = True


def head_of(lm: Any, path: str) -> Tensor:
    """Returns the weight [V, H] of the output embedding. Raises ValueError if it has a bias or cannot be found, and
    WrongInput if the model's final hidden states cannot be had without its logits."""
    if decoder_of(lm) is lm:
        raise WrongInput(
            f"model.path: {path} (model_type {lm.config.model_type}) keeps its layers where transformers does not say, "
            "so that its final states cannot be had without its logits; give another architecture (docs/models.md)"
        )
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or not head.weight.is_floating_point():
        raise ValueError(f"model.path: {path} must end in a linear output embedding without bias, got {head}")
    return head.weight
