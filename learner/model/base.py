"""The base model as transformers gives it, checked: frozen, without dropout, in its own type or in 4 bits.

4 bits (model.base: nf4) is QLoRA (2305.14314): every linear layer but the output embedding is held as NormalFloat4 in
blocks of 64 with doubly quantised scales, 0.52 bytes per weight, and multiplied out to model.dtype layer by layer.
vLLM quantises the same checkpoint the same way as it loads it (quantization="bitsandbytes"), so generator and learner
hold the same policy, if the files are of model.dtype: the learner casts before it quantises, vLLM does not. Merging the
adapter, or serving the unquantised base, would not be the policy that is trained.
With memory.layout: shared the learner computes with the generator's 4 bits, whose scales are not nested.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.hub import cached_file

from cluster.errors import WrongInput
from cluster.reading import read_mapping
from learner.config import ModelConfig
from learner.model.shared_base import MappedBase
from rollout.architecture import check_architecture, check_unquantised
from rollout.data.model_files import (
    EXPONENTS,
    INDEX,
    SINGLE,
    all_finite,
    header,
    infinite,
    split,
)
from rollout.data.weight_names import check_fit, loading_misfits, two_heads, without_table

# A base model without weights: every tensor has its shape, type and bytes, and no content (torch's meta device).


def without_weights(config: Any, dtype: torch.dtype, quantization: BitsAndBytesConfig | None) -> Any:
    """The causal language model of a transformers config, quantised as `from_pretrained` would do it."""
    with torch.device("meta"), torch.no_grad():
        lm: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=False
        )
        if quantization is not None:
            _quantise(lm, quantization)
    return lm


def _quantise(lm: Any, quantization: BitsAndBytesConfig) -> None:
    # Here: slow to import, and few runs use it.
    from bitsandbytes.functional import name2qmap, quantize_4bit
    from bitsandbytes.nn.modules import Params4bit
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    head = next(name for name, module in lm.named_modules() if module is lm.get_output_embeddings())
    dense = {name: module.weight for name, module in lm.named_modules() if isinstance(module, nn.Linear)}
    replace_with_bnb_linear(lm, modules_to_not_convert=[head], quantization_config=quantization)
    for name, weight in dense.items():
        if name == head:
            continue
        # The operations behind Params4bit.to("cuda"), which a meta tensor does not go through.
        packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        module = lm.get_submodule(name)
        module.weight = Params4bit(
            packed, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True, module=module
        )
        module.quant_state = state
    lm.is_loaded_in_4bit = True  # what PEFT goes by
    name2qmap.pop("dynamic", None)  # bitsandbytes' table for this process, which was just made without content


# In which file of a model each of its tensors lies.


def tensor_files(path: str) -> dict[str, Path]:
    """Name of each tensor -> its safetensors file. A hub's model is downloaded where it is not in the cache.

    Raises WrongInput if there is none, OSError if the hub has no such model or cannot be reached.
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
    return there


def _file(path: str, name: str) -> Path | None:
    model, revision = split(path)
    found = cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


LETTERS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}  # of safetensors


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
    """The frozen causal language model of model.path in model.dtype, without dropout; on the weights of `mapped`, which
    are the generator's, instead of those that are loaded; or in shards over the ranks of the process group, which are
    float32 where a whole model is to be `trained`.

    key: the setting that names it, for messages.

    Raises WrongInput if it cannot be trained here: with an adapter (`lora`), or as a whole. WrongInput: what
    the files hold is not what the model wants, or no finite numbers.
    """
    config = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=False)
    check_architecture(config.to_dict(), model.path, lora=lora)
    check_unquantised(config.to_dict(), model.path)
    config._attn_implementation = None  # of config.json, which may want what is not installed: transformers' choice
    for name, value in config.to_dict().items():
        if ("drop" in name or name == "router_jitter_noise") and isinstance(value, float):
            setattr(config, name, 0.0)  # the sampler has none, so neither may the learner
    dtype: torch.dtype = getattr(torch, model.dtype)
    options: dict[str, Any] = {}
    quantization = nf4(dtype) if model.base == "nf4" else None
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # sdpa leaves the cap out without a word
    if device.type == "meta":  # no weights: learner.tools.meta_run asks what a step of this model would need
        return without_weights(config, dtype, quantization).requires_grad_(False)
    if mapped is not None:
        lm = mapped.model(config, dtype, quantization, **options)
    elif sharded:
        from learner.model.sharded_base import sharded_base  # here: slow to import, and few runs use it

        lm = sharded_base(model, config, device, trained=trained and not lora, key=key, **options)
    elif quantization is not None:
        # Quantised weight by weight as the files are read: the whole model is never there in full.
        options |= {"quantization_config": quantization, "device_map": {"": device}}
        lm = _loaded(model, key, config=config, dtype=dtype, **options)
    else:
        lm = _loaded(model, key, config=config, dtype=dtype, **options).to(device)
    check_finite(lm.named_parameters(), model.source, key)
    return lm.requires_grad_(False)


def _loaded(model: ModelConfig, key: str, **options: Any) -> Any:
    """As transformers loads it. Raises WrongInput: it has made up weights that the files lack, or left out others."""
    auto: Any = AutoModelForCausalLM  # its methods carry no annotations
    if "quantization_config" in options:  # of whose shapes transformers says nothing
        check_fit(model.source, key)
    try:
        with without_table():
            lm, report = auto.from_pretrained(
                model.path, revision=model.revision, trust_remote_code=False,
                output_loading_info=True, ignore_mismatched_sizes=True, **options,
            )  # fmt: skip
    except RuntimeError:  # of tensors that cannot be put together, of which it says no name
        check_fit(model.source, key)
        raise
    if wrong := loading_misfits(model.source, key, report, None):
        check_fit(model.source, key)  # which knows the names in the files, where these are put together
        raise WrongInput("\n".join(wrong))
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    tied = options["config"].get_text_config().tie_word_embeddings and head is not None
    if tied and head.weight is not embedding.weight:  # which transformers says to nobody
        raise WrongInput(two_heads(model.source, key))
    return lm


def check_finite(weights: Iterable[tuple[str, Tensor]], path: str, key: str) -> None:
    """Raises WrongInput, which names `key` and those weights of `path` that hold nan or inf."""
    if wrong := [name for name, weight in weights if not _finite(weight.detach())]:
        raise WrongInput(infinite(wrong, path, key))


def _finite(weight: Any) -> bool:
    weight = weight.to_local() if hasattr(weight, "to_local") else weight  # of shards this rank's
    if weight.dtype not in LETTERS:
        return True
    if weight.device.type == "cpu":  # torch takes sixty times as long for 16 bits there
        width, exponent = EXPONENTS[LETTERS[weight.dtype]]
        whole: torch.dtype = getattr(torch, f"int{8 * width}")
        return all_finite(weight.contiguous().view(whole).numpy(), exponent)
    return bool(torch.isfinite(weight).all())


def nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    """QLoRA's quantisation, computing in dtype."""
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def to_eval(wrapped: Any) -> None:
    """Evaluation mode (no dropout) without what bitsandbytes makes of it on a CPU.

    A 4-bit layer in evaluation mode that meets an input without gradient rewrites its weights for a bfloat16 kernel,
    which is less exact and cannot be differentiated afterwards. It knows that mode by its own flag alone.
    """
    wrapped.eval()
    library = sys.modules.get("bitsandbytes")  # slow to import; if it is not imported yet, there is no such layer
    if library is None:
        return
    for module in wrapped.modules():
        if isinstance(module, library.nn.Linear4bit):
            module.training = True


def head_of(lm: Any, path: str) -> Tensor:
    """[V, H] weight of the output embedding; ValueError if it has a bias or none can be found."""
    if lm.base_model is lm:
        raise WrongInput(
            f"model.path: {path} (model_type {lm.config.model_type}) keeps its layers where base_model_prefix does not "
            "say, so that its final states cannot be had without its logits; give another architecture (docs/models.md)"
        )
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or not head.weight.is_floating_point():
        raise ValueError(f"model.path: {path} must end in a linear output embedding without bias, got {head}")
    return head.weight
