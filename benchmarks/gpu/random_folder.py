"""A model folder with random weights of a shape, in bfloat16. A process of its own, so that the card is empty again
when the run begins that is measured.

    PYTHONPATH=. python -m benchmarks.gpu.random_folder SHAPE.json FOLDER --tokenizer FOLDER --device cuda
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cluster.memory.shape import Shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="a cluster.memory.shape.Shape as JSON")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True, help="folder; its ids come first in the model's vocabulary")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options = parser.parse_args()
    shape = Shape(**json.loads(options.shape.read_text()))
    tokenizer: Any = AutoTokenizer.from_pretrained(options.tokenizer)
    settings = replace(shape, vocab=max(shape.vocab, len(tokenizer))).to_config()
    torch.manual_seed(0)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    with torch.device(options.device):
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lm.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    (options.folder / "done").touch()


if __name__ == "__main__":
    main()
