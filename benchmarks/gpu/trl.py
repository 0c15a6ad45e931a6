"""Checklist C: one optimizer step of TRL's GRPOTrainer and of gleaner on a card, on the same rows and shape.

TRL runs its own training loop with bfloat16 weights and its defaults for checkpointing; its generation is off, since
where it would generate and score it is handed the rows, so neither side's time has generation in it.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from benchmarks.gpu.model import group, make_trainer, steps
from benchmarks.gpu.rows import Found, Missing, Row
from cluster.memory.plan import Workload
from cluster.memory.shape import LINEAR, SHAPES, Shape
from learner.config.settings import LearnerConfig


def rows(tiny: Shape | None) -> list[Row]:
    shape = SHAPES["Llama-3.2-1B"] if tiny is None else tiny
    work = Workload(generations=8, prompt=256, completion=786) if tiny is None else Workload(4, 16, 24)
    count = 10 if tiny is None else 2
    return [Row("c-gleaner", partial(ours, shape, work, count)), Row("c-trl", partial(theirs, shape, work, count))]


def ours(shape: Shape, work: Workload, count: int, device: str) -> Found:
    """Micro-batches of four completions and all layers twice, as TRL is set below."""
    budget = work.prompt + 4 * (work.completion - 1)
    learner = LearnerConfig.model_validate({"checkpointing": "full", "token_budget": budget})
    trainer = make_trainer(shape, learner, device, completion=work.completion)
    return steps(trainer, [group(0, work.prompt, [work.completion] * work.generations, shape.vocab)], count, device)


def theirs(shape: Shape, work: Workload, count: int, device: str) -> Found:
    if find_spec("trl") is None or find_spec("datasets") is None:
        raise Missing("trl and datasets are not installed")
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import GRPOConfig, GRPOTrainer

    settings = shape.to_config()
    with torch.device(device):
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEAR), task_type="CAUSAL_LM")
    watch = _Watch(device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=work.generations // 4,
            num_generations=work.generations, max_completion_length=work.completion, max_steps=count + 2,
            beta=0.0, learning_rate=1e-6, bf16=device == "cuda", use_cpu=device == "cpu", logging_strategy="no",
            save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=get_peft_model(model, adapter),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
            processing_class=_tokenizer(),
            callbacks=[watch],
        )
        trainer._generate_and_score_completions = lambda _: _rows(shape, work, device)
        trainer.train()
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else None
    allocated = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"allocated": allocated, "reserved": reserved, "step_seconds": float(np.median(watch.seconds[2:]))}


def _rows(shape: Shape, work: Workload, device: str) -> dict[str, Any]:
    """What GRPOTrainer._generate_and_score_completions returns."""
    torch.manual_seed(0)
    prompts = torch.randint(0, shape.vocab, (1, work.prompt), device=device).repeat(work.generations, 1)
    completions = torch.randint(0, shape.vocab, (work.generations, work.completion), device=device)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1, 1, work.generations, device=device),
        "num_items_in_batch": torch.tensor(completions.numel(), device=device),
    }


def _tokenizer() -> Any:
    """A tokenizer of one word: TRL asks it for the ids of padding and end."""
    import transformers
    from tokenizers import Tokenizer, models

    hf: Any = transformers
    core = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


class _Watch(TrainerCallback):
    def __init__(self, device: str) -> None:
        self.seconds: list[float] = []
        self._device, self._started = device, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)


def table(found: dict[str, Found]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for name, one in found.items():
        peaks = [one.get(key) for key in ("allocated", "reserved")]
        cells = [f"{one['step_seconds']:.3f}"] if one["status"] == "ok" else [one["status"]]
        lines.append([name, *cells, *("" if peak is None else f"{peak / 1e9:.2f}" for peak in peaks)])
    return ["row", "s / step", "allocated GB", "reserved GB"], lines
