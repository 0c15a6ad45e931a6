"""The base's tokenizer, unchanged.

transformers saves a tokenizer as it understands it: without the sentencepiece file that llama.cpp reads, and with
settings of its own version. So what the base has lies over it, file by file.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from rollout.data.hub import split
from rollout.data.model_files import load_tokenizer

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
