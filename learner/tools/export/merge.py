"""Merged weights: the base and its adapter as one model, written, loaded again and compared.

The merge is PEFT's own, in float32; then the weights are rounded once to the type that is asked for. An adapter that
was trained on a base in 4 bits is merged into that base multiplied out, since that is the policy that was trained: into
the weights before quantisation it would be another one.
"""

import gc
import shutil
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
from learner.tools.export.source import Needed, Proof, Said, Source, Window, ask, check, check_memory, compare, made_up
from learner.tools.server import GENERATION
from rollout.data.model_files import load_tokenizer, split

# The base's tokenizer, unchanged.
#
# transformers saves a tokenizer as it understands it: without the sentencepiece file that llama.cpp reads, and with
# settings of its own version. So what the base has lies over it, file by file.

SENTENCEPIECE = "tokenizer.model"
PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*.model",
    "*.tiktoken",
)  # fmt: skip


def write_tokenizer(path: str, out: Path) -> None:
    """path: of the base, a folder, a hub name or name@revision."""
    load_tokenizer(path).save_pretrained(out)
    folder = Path(path) if Path(path).is_dir() else _in_cache(path)
    for file in {file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, out / file.name)


def _in_cache(name: str) -> Path:
    """The folder of a hub model in the cache, with the sentencepiece file, which transformers does not ask for."""
    model, revision = split(name)
    with suppress(EntryNotFoundError, LocalEntryNotFoundError):  # it has none, or the hub cannot be reached
        hf_hub_download(model, SENTENCEPIECE, revision=revision)
    return Path(hf_hub_download(model, "config.json", revision=revision)).parent


SHARD = "5GB"  # of one file of weights
ROOM = 1.2  # of a card, for what its allocator does not give back


def write_merged(source: Source, out: Path, dtype: str, windows: Sequence[Window], size: Needed) -> Proof:
    """Writes a folder for transformers and vLLM.

    Args:
        dtype: of the weights. windows: of recorded completions; random tokens stand for none.

    Raises WrongInput: there is too little memory. RunEnded: what was written is not what was learned.
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
        wrapped = peft.PeftModel.from_pretrained(lm, str(source.learned)).eval()
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
    """A card, if it has the room."""
    if size.weights and torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > ROOM * size.memory:
        return torch.device("cuda")
    check_memory(size)
    return torch.device("cpu")


def _learned(source: Source, device: torch.device) -> Any:
    """The base as the learner computes with it, or the model that was trained as a whole."""
    model = source.config.model
    if source.whole_model:
        return load_base(ModelConfig(path=str(source.learned), dtype=model.dtype), device, lora=False)
    base = load_base(model, device, lora=True)
    return base if model.base == "none" else base.dequantize()


def _both(wrapped: Any, windows: Sequence[Window]) -> tuple[Said, Said]:
    """(with the adapter, without it)."""
    expected = ask(wrapped, windows)
    with wrapped.disable_adapter():
        return expected, ask(wrapped, windows)


def _round(lm: Any, kept: dict[str, torch.dtype], trained: torch.dtype, wanted: torch.dtype) -> None:
    """To the wanted type, but for what the model keeps in another than it was trained in."""
    for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
        own = kept.get(name, tensor.dtype)
        tensor.data = tensor.data.to(wanted if own == trained else own)


def _save(lm: Any, source: Source, out: Path) -> None:
    path = str(source.learned) if source.whole_model else source.config.model.source
    lm.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        lm.save_pretrained(out, max_shard_size=SHARD)
    except SafetensorError as error:  # of a full disk, say, without the path
        raise RunEnded(f"OUT: {out.parent} does not take the weights: {error}; nothing was written") from error
    (out / GENERATION).unlink()  # that of the training takes its place (learner.tools.server)
    write_tokenizer(path, out)
    for file in out.glob("*.safetensors"):  # which safetensors lets nobody but this user read
        file.chmod((out / "config.json").stat().st_mode)
