"""The learner's optimizer step against TRL's GRPOTrainer: the same tiny model, adapter, rows and advantages.

One optimizer step on one group of G completions: logprobs, loss, backward, AdamW. Nothing generates: TRL's trainer runs
its own training loop, but where it would generate and score it is handed the rows. Both take 4 completions a
micro-batch (gleaner by a token budget of one prompt and four completions), neither checkpoints activations.

    naive    Hugging Face model, whole group at once, all logits, log_softmax and gather: the reference for gradients
    TRL      GRPOTrainer, if installed
    gleaner  learner.trainer.trainer.Trainer

How to run it: see benchmarks/common.py. Errors are those of the gradient of all adapter weights, ||a - b|| / ||b||.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common import as_table, as_text, conditions, cpu_seconds, installed, peak_mib, relative_error, save
from benchmarks.learner.trl_step import TrlStep
from examples.random_model import make_tokenizer
from learner.algo.advantage import group
from learner.algo.surrogates import LossConfig
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig, OptimizerConfig
from learner.config.settings import LoraConfig as LoraSettings
from learner.trainer.trainer import Trainer, answer_of
from rollout.fakes import make_group
from rollout.types import Completion

PROMPT, COMPLETION, MICRO_BATCH = 64, 128, 4
BUDGET = PROMPT + MICRO_BATCH * (COMPLETION - 1)  # tokens; the last of a completion predicts nothing
TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
RANK: Final = 16
ALPHA: Final = 32
OURS_ONLY = 64  # completions; the others would take minutes or do not fit


class Rows:
    """One group of random tokens, as tensors and in gleaner's schema."""

    def __init__(self, vocab: int, generations: int) -> None:
        torch.manual_seed(generations)
        self.prompt = torch.randint(0, vocab, (PROMPT,))
        self.completions = torch.randint(0, vocab, (generations, COMPLETION))
        self.rewards = torch.randn(generations).tolist()
        self.advantages = torch.tensor(group([torch.tensor(self.rewards).numpy()])[0], dtype=torch.float32)

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.prompt.expand(len(self.completions), -1), self.completions], 1)

    def for_trl(self) -> dict[str, Tensor]:
        """What GRPOTrainer._generate_and_score_completions returns."""
        prompts = self.prompt.repeat(len(self.completions), 1)
        return {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": self.completions,
            "completion_mask": torch.ones_like(self.completions),
            "advantages": self.advantages,
            "num_items_in_batch": torch.tensor(self.completions.numel()),
        }


def make_model(folder: Path, vocab: int) -> None:
    """A random Qwen2 of four layers under folder/base, and under folder/adapter a random adapter with B != 0, so that
    all of its weights have a gradient."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(str(folder / "adapter"))


def load_peft(folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)


def gradients_of(model: Any) -> dict[str, Tensor]:
    """By the names that gleaner gives them."""
    named = ((name.replace(".default.", "."), weight.grad) for name, weight in model.named_parameters())
    return {name: grad.clone() for name, grad in named if grad is not None}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    a, b = (torch.cat([one[name].flatten() for name in sorted(wanted)]) for one in (found, wanted))
    return relative_error(a, b)


class Naive:
    def __init__(self, folder: Path) -> None:
        self.model = load_peft(folder)

    def logprobs(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, logits_to_keep=COMPLETION + 1, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None])[..., 0]

    def step(self, rows: Rows) -> None:
        """Loss and gradient; the update is left out, so that the gradient is always that of the first adapter."""
        self.model.zero_grad()
        logprobs = self.logprobs(rows.ids)
        objective = (logprobs - logprobs.detach()).exp() * rows.advantages[:, None]
        torch.autograd.backward(-objective.mean())


class Gleaner:
    """The gradient is not clipped, and the rows are recorded as sampled by the policy itself, as on-policy rows are."""

    def __init__(self, folder: Path, rows: Rows) -> None:
        self.trainer = Trainer(
            ModelConfig(path=str(folder / "base"), adapter=str(folder / "adapter"), dtype="float32"),
            LearnerConfig(
                lora=LoraSettings(rank=RANK, alpha=ALPHA, targets=TARGETS),
                loss=LossConfig(kind="dapo", ratio="clip", advantage="group"),
                optimizer=OptimizerConfig(max_grad_norm=1e9),
                learning_rate=1e-6,
                checkpointing="none",
                token_budget=BUDGET,
            ),
            temperature=1.0,
            max_completion_length=COMPLETION,
            total_steps=1000,
            seed=0,
            device="cpu",
        )
        assert self.trainer._policy.packed
        prompt = rows.prompt.tolist()
        completions = [self.as_sampled(prompt, ids) for ids in rows.completions.tolist()]
        self.group = make_group(completions=completions, rewards=rows.rewards, prompt_ids=[prompt] * len(completions))

    def as_sampled(self, prompt: list[int], completion: list[int]) -> Completion:
        """With the policy's own logprobs."""
        ids, zeros = np.array(completion, np.int32), np.zeros(len(completion), np.int32)
        told = answer_of(self.trainer._policy, 0, prompt + completion, merged=False)
        return Completion(ids, told.logprobs[len(prompt) - 1 :], "stop", zeros)

    def step(self) -> None:
        """What Trainer.step does in its own thread, in this one, where the allocations are seen."""
        self.trainer._step([self.group])

    def gradients(self) -> dict[str, Tensor]:
        masters = self.trainer._policy.masters.items()
        return {name: weight.grad.clone() for name, weight in masters if weight.grad is not None}


def measure(folder: Path, vocab: int, generations: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table. TRL and gleaner take turns, step by step; the best of the repeats counts."""
    rows = Rows(vocab, generations)
    ours = Gleaner(folder, rows)
    row: dict[str, Any] = {"vocab": vocab, "generations": generations, "gleaner_peak_mib": peak_mib(ours.step)}
    gradients = ours.gradients()
    if generations < OURS_ONLY:
        naive = Naive(folder)
        row["naive_peak_mib"] = peak_mib(lambda: naive.step(rows))
        wanted = gradients_of(naive.model)
        row["naive_cpu_seconds"] = cpu_seconds(lambda: naive.step(rows))
        row["gleaner_error"] = error(gradients, wanted)
        del naive
    seconds: list[float] = []

    def turn() -> None:
        seconds.append(cpu_seconds(ours.step))

    if options.with_trl and generations < OURS_ONLY:
        trl = TrlStep(
            load_peft(folder), make_tokenizer(), rows.for_trl(), MICRO_BATCH, gradients_of,
            completions_only=options.completions_only,
        )  # fmt: skip
        trl.run(options.repeats, between=turn)
        row["trl_cpu_seconds"], row["trl_peak_mib"] = min(trl.seconds), trl.peak_mib
        row["trl_error"] = error(trl.gradients, wanted)
    while len(seconds) < options.repeats:
        turn()
    row["gleaner_cpu_seconds"] = min(seconds)
    print(row, flush=True)
    return row


def about_trl(completions_only: bool) -> str:
    scored = (
        "TRL was made to score the completions alone (--completions-only), as it does on CUDA."
        if completions_only
        else "TRL runs as it comes: without Triton it scores every position, prompts too, here 1.5 times the tokens."
    )
    return (
        f"{scored} **TRL without Triton is not TRL on CUDA**: without it TRL 1.16 works on tiles of up to 4096 x 32768 "
        "logits with several float32 temporaries each; on CUDA a kernel folds one bfloat16 tile in its place. So its "
        "time and above all its memory here are not its on a GPU; naive is the fairer yardstick for memory."
    )


def report(rows: list[dict[str, Any]], told: dict[str, Any], options: argparse.Namespace) -> str:
    def cell(row: dict[str, Any], name: str, form: str) -> str:
        return format(row[name], form) if name in row else "-"

    def ratio(row: dict[str, Any], name: str, unit: str) -> str:
        return f"{row[f'{name}_{unit}'] / row[f'gleaner_{unit}']:.1f} x" if f"{name}_{unit}" in row else "-"

    ways = ("naive", "trl", "gleaner")
    cells = [
        [f"{row['vocab']}", f"{row['generations']}"]
        + [cell(row, f"{way}_cpu_seconds", ".2f") for way in ways]
        + [ratio(row, "trl", "cpu_seconds")]
        + [cell(row, f"{way}_peak_mib", ".1f") for way in ways]
        + [ratio(row, way, "peak_mib") for way in ("naive", "trl")]
        + [cell(row, f"{way}_error", ".0e") for way in ("trl", "gleaner")]
        for row in rows
    ]
    peaks = {(row["vocab"], row["generations"]): row["gleaner_peak_mib"] for row in rows}
    growth = [
        f"V = {vocab}: {peaks[vocab, OURS_ONLY] / peaks[vocab, 4]:.3f}"
        for vocab in sorted({vocab for vocab, _ in peaks})
        if {(vocab, 4), (vocab, OURS_ONLY)} <= peaks.keys()
    ]
    header = ["V", "G", "naive CPU-s", "TRL CPU-s", "gleaner CPU-s", "TRL / gleaner", "naive MiB", "TRL MiB",
              "gleaner MiB", "naive / gleaner", "TRL / gleaner", "TRL grad. error", "gleaner grad. error"]  # fmt: skip
    return (
        f"# One optimizer step, LoRA r = {RANK}: prompt {PROMPT}, {COMPLETION} completion tokens, one group of G\n\n"
        f"{as_table(header, cells)}\n\n"
        "Random Qwen2, H = 128, 4 layers, tied embeddings. TRL and gleaner: 4 completions a micro-batch, no "
        "checkpointing; naive: the whole group at once, without the update. MiB: most bytes of new tensors at once, in "
        f"the first step. CPU-s: the best of {options.repeats} later steps, in which TRL and gleaner took turns (naive "
        "one); generation is in none of them. Gradient errors are relative to naive's. gleaner's peak at "
        f"G = {OURS_ONLY} over its peak at G = 4: {', '.join(growth) or 'not measured'}.\n\n"
        f"Conditions: {as_text(told)}\n\n"
        f"{about_trl(options.completions_only) if options.with_trl else 'TRL was not installed.'} The model is tiny "
        "and its vocabulary is not, which weighs the head more than a real model does; all rows have one length, and "
        "the prompt is half as long as a completion.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--generations", type=int, nargs="+", default=[4, 8, 16, OURS_ONLY], help="multiples of 4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--completions-only", action="store_true", help="TRL scores no prompts, as where it has Triton")
    options = parser.parse_args()
    options.with_trl = installed("trl")
    torch.set_num_threads(1)
    told, rows = conditions(), []
    for vocab in options.vocab:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), vocab)
            rows += [measure(Path(folder), vocab, g, options) for g in options.generations]
    name = "learner_step_completions_only" if options.completions_only else "learner_step"
    save(name, {"conditions": told, "rows": rows}, report(rows, told, options))


if __name__ == "__main__":
    main()
