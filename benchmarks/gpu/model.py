"""A Trainer on random weights of a real shape, made on the device: peaks and speeds do not depend on the values.

The folder that the Trainer is given holds a config.json and nothing else. Where it would read weights from there it is
handed a model that transformers makes from that config; all that follows is the code that trains.

    PYTHONPATH=. python -m benchmarks.gpu.model SHAPE.json FOLDER --tokenizer FOLDER --device cuda

makes a whole folder with such weights for a run, in a process of its own, so that the card is empty again when the run
begins that is measured.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import parser_of
from benchmarks.gpu.rows import Missing
from cluster.memory.shape import Shape
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.model import packing_check
from learner.model import policy as policy_module
from learner.model.base import nf4
from learner.trainer.trainer import Trainer
from rollout.fakes import make_group
from rollout.types import Completion

# bfloat16 with float32 sums, without sparsity; from the makers' data sheets
PEAK_FLOPS = {"H100 80GB HBM3": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "A100": 312e12, "L40S": 362e12}


def random_base(model: ModelConfig, device: torch.device, **_: Any) -> Any:
    """As learner.model.base.load_base, with transformers' own initialisation in place of files; nothing is checked."""
    config = AutoConfig.from_pretrained(model.path)
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, model.dtype))
    if model.base == "nf4":
        _quantise(lm, device)
    return lm.requires_grad_(False)


def _quantise(lm: Any, device: torch.device) -> None:
    from bitsandbytes.nn.modules import Params4bit
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    head = next(name for name, module in lm.named_modules() if module is lm.get_output_embeddings())
    dense = {name: module.weight.data for name, module in lm.named_modules() if isinstance(module, nn.Linear)}
    replace_with_bnb_linear(lm, modules_to_not_convert=[head], quantization_config=nf4(torch.bfloat16))
    for name in [name for name in dense if name != head]:
        weight: Any = Params4bit(dense.pop(name).cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4")
        lm.get_submodule(name).weight = weight.to(device)
    lm.is_loaded_in_4bit = True  # what PEFT goes by


def make_trainer(
    shape: Shape, learner: LearnerConfig, device: str, *, base: str = "none", completion: int, packed: bool = True
) -> Trainer:
    """Raises Missing where the settings need bitsandbytes and it is not installed."""
    if (base == "nf4" or learner.optimizer.kind != "adamw") and find_spec("bitsandbytes") is None:
        raise Missing("bitsandbytes is not installed")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / "config.json").write_text(json.dumps(shape.to_config()))
        stack.enter_context(mock.patch.object(policy_module, "load_base", random_base))
        if not packed:
            stack.enter_context(mock.patch.object(packing_check, "enable", return_value=False))
        return Trainer(
            ModelConfig.model_validate({"path": folder, "base": base}), learner, temperature=1.0,
            max_completion_length=completion, total_steps=1000, seed=0, device=device,
        )  # fmt: skip


def group(seed: int, prompt: int, lengths: Sequence[int], vocab: int) -> pa.Table:
    """Random tokens; rewards differ, so that all completions train."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab, prompt).tolist()] * len(lengths)
    sampled = [
        Completion(
            rng.integers(0, vocab, length).astype(np.int32),
            np.full(length, -np.log(vocab), np.float32),
            "length",
            np.zeros(length, np.int32),
        )
        for length in lengths
    ]
    rewards = [float(i % 2) for i in range(len(lengths))]
    return make_group(seed, prompt_ids=prompts, completions=sampled, rewards=rewards)


def steps(trainer: Trainer, groups: list[pa.Table], count: int, device: str) -> dict[str, Any]:
    """Peaks over `count` optimizer steps after two to warm up (bytes; reserved only on CUDA), median seconds."""
    seconds, peak, reserved = [], 0.0, 0
    for index in range(count + 2):
        started = time.perf_counter()
        metrics = trainer._step(groups)
        if device == "cuda":
            torch.cuda.synchronize()
            reserved = max(reserved, torch.cuda.max_memory_reserved())
        if index >= 2:
            seconds.append(time.perf_counter() - started)
        peak = max(peak, metrics["memory/learner_peak"])
    return {
        "allocated": peak, "reserved": reserved or None, "step_seconds": float(np.median(seconds)),
        "token_budget": metrics["memory/token_budget"], "oom_retries": trainer._budget.retries,
        "packed": trainer._policy.packed, "attention": trainer._policy._lm.config._attn_implementation,
        "loss": metrics["loss/total"],
    }  # fmt: skip


def utilisation(shape: Shape, tokens: int, seconds: float, *, full: bool, device: str) -> dict[str, float | None]:
    """Model FLOPs of linear layers and head (attention left out, so it is a lower bound): 6 per weight and token when
    all weights train, 4 with an adapter (no gradient of frozen weights); recomputation is no useful work."""
    weights = shape.linear_params + shape.vocab * shape.hidden
    rate = (6 if full else 4) * weights * tokens / seconds
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    peak = next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)
    return {"tflops": rate / 1e12, "mfu": None if peak is None else rate / peak}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("shape", type=Path, help="the config.json of a model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True, help="folder; its ids come first in the model's vocabulary")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options = parser.parse_args()
    shape = Shape.from_config(json.loads(options.shape.read_text()))
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
