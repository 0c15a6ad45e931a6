"""Writes merged weights for gleaner export: the base and its adapter as one model, which is then loaded again and
compared with base and adapter.

PEFT merges in float32; then the weights are rounded once to the wanted dtype. An adapter that was trained on a base in
4 bits is merged into the dequantised base, since that is the policy that was trained; merged into the weights before
quantisation it would be another policy.
"""

import gc
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import peft
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from learner.config import ModelConfig
from learner.driver.failure import RunEnded
from learner.model.base import load_base
from learner.model.bases.quantised import plain_layers
from learner.model.lora import NONE_EXCLUDED
from learner.tools.export.source import Needed, Proof, Said, Source, Window, ask, check, check_memory, compare, made_up
from learner.tools.server import GENERATION
from rollout.data.model_files import load_tokenizer, split
from rollout.text_part import NAMES

# The base's tokenizer is copied unchanged. transformers saves a tokenizer without the sentencepiece file, which
# llama.cpp reads, and with settings of its own version, so the base's files replace those that transformers wrote.

SENTENCEPIECE = "tokenizer.model"
PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
    "*.tiktoken",
)  # fmt: skip


def write_tokenizer(path: str, out: Path) -> None:
    """Writes the tokenizer of the base into `out`. path: the base's folder, hub name or name@revision."""
    load_tokenizer(path).save_pretrained(out)
    folder = Path(path) if Path(path).is_dir() else _in_cache(path)
    for file in {file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, out / file.name)


def _in_cache(name: str) -> Path:
    """Returns the cache folder of a hub model, after downloading the sentencepiece file, which transformers does not
    load."""
    model, revision = split(name)
    with suppress(EntryNotFoundError, LocalEntryNotFoundError):  # the model has none, or the hub cannot be reached
        hf_hub_download(model, SENTENCEPIECE, revision=revision)
    return Path(hf_hub_download(model, "config.json", revision=revision)).parent


SHARD = "5GB"  # largest size of a file of weights
ROOM = 1.2  # factor on the memory needed on a GPU, for what the allocator does not give back


def write_merged(source: Source, out: Path, dtype: str, windows: Sequence[Window], size: Needed) -> Proof:
    """Writes a folder of merged weights for transformers and vLLM, and returns the comparison with what was learned.

    Args:
        dtype: dtype of the written weights.
        windows: recorded tokens on which weights are compared; if empty, random tokens are used.
        size: the memory that the merge needs.

    Raises WrongInput if there is too little memory, RunEnded if the written weights are not what was learned.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = _device(size)
    lm = _learned(source, device)
    kept = {name: tensor.dtype for name, tensor in lm.state_dict().items()}
    lm.float()
    shown = list(windows) or made_up(lm.config.get_text_config().vocab_size)
    if source.whole_model:
        expected, base = ask(lm.eval(), shown), None
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NONE_EXCLUDED)
            wrapped = peft.PeftModel.from_pretrained(lm, str(source.learned), key_mapping=NAMES).eval()
        expected, base = _both(wrapped, shown)
        lm = wrapped.merge_and_unload(safe_merge=True)
        del wrapped
    _round(lm, kept, getattr(torch, source.config.model.dtype), getattr(torch, dtype))
    _save(lm, source, out)
    del lm
    gc.collect()
    again = load_base(ModelConfig(path=str(out), dtype="float32"), device, lora=not source.whole_model)
    proof = compare(expected, ask(again.eval(), shown), base, dtype, recorded=bool(windows))
    check(proof)
    return proof


def _device(size: Needed) -> torch.device:
    """Returns a GPU if it has enough free memory, else the CPU. Raises WrongInput if that has too little memory."""
    if size.weights and torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > ROOM * size.memory:
        return torch.device("cuda")
    check_memory(size)
    return torch.device("cpu")


def _learned(source: Source, device: torch.device) -> Any:
    """Returns the base as the learner computes with it, dequantised, or the model that was trained as a whole."""
    model = source.config.model
    if source.whole_model:
        return load_base(ModelConfig(path=str(source.learned), dtype=model.dtype), device, lora=False)
    base = load_base(model, device, lora=True)
    return plain_layers(base) if model.base == "none" else base.dequantize()


def _both(wrapped: Any, windows: Sequence[Window]) -> tuple[Said, Said]:
    """Returns (answers with the adapter, answers without it)."""
    expected = ask(wrapped, windows)
    with wrapped.disable_adapter():
        return expected, ask(wrapped, windows)


def _round(lm: Any, kept: dict[str, torch.dtype], trained: torch.dtype, wanted: torch.dtype) -> None:
    """Rounds the weights to the wanted dtype, except tensors that the model keeps in another dtype than `trained`."""
    for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
        own = kept.get(name, tensor.dtype)
        tensor.data = tensor.data.to(wanted if own == trained else own)


def _save(lm: Any, source: Source, out: Path) -> None:
    path = str(source.learned) if source.whole_model else source.config.model.source
    lm.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        lm.save_pretrained(out, max_shard_size=SHARD)
    except SafetensorError as error:  # for example a full disk; the message does not name the path
        raise RunEnded(f"OUT: {out.parent} does not take the weights: {error}; nothing was written") from error
    (out / GENERATION).unlink()  # replaced by the sampling of the training (learner.tools.server)
    write_tokenizer(path, out)
    for file in out.glob("*.safetensors"):  # safetensors makes them readable for this user alone
        file.chmod((out / "config.json").stat().st_mode)
