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
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from benchmarks.common import (
    LEARNER_PACKAGES,
    MIB,
    Peak,
    as_table,
    conditions,
    cpu_seconds,
    installed,
    parser_of,
    peak_mib,
    relative_error,
    save,
    under,
)
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
                optimizer=OptimizerConfig(max_grad_norm=1e9), learning_rate=1e-6, checkpointing="none",
                token_budget=BUDGET,
            ),
            temperature=1.0, max_completion_length=COMPLETION, total_steps=1000, seed=0, device="cpu",
        )  # fmt: skip
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


def trl_trainer(
    model: Any, rows: dict[str, Tensor], micro_batch: int, steps: int, watch: TrainerCallback, **settings: Any
) -> Any:  # fmt: skip
    """GRPOTrainer in its own training loop, where it would generate and score handed one group of rows."""
    warnings.filterwarnings("ignore", category=UserWarning, module="trl")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    generations, longest = rows["completion_ids"].shape
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            per_device_train_batch_size=micro_batch, gradient_accumulation_steps=generations // micro_batch,
            num_generations=generations, max_completion_length=longest, max_steps=steps, beta=0.0, learning_rate=1e-6,
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
        processing_class=make_tokenizer(),
        callbacks=[watch],
    )  # fmt: skip
    trainer._generate_and_score_completions = lambda _: dict(rows)
    return trainer


class TrlStep(TrainerCallback):
    """After `run`: `seconds` of CPU time and `peak_mib` of an optimizer step, from its first micro-batch to the end of
    the update; the peak and `gradients` are those of the first step. `between` is called after each of the others."""

    def __init__(self, folder: Path, rows: Rows, between: Callable[[], None]) -> None:
        self.seconds: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        self._model, self._rows, self._between = load_peft(folder), rows.for_trl(), between
        self._peak, self._started = Peak(), 0.0

    @property
    def peak_mib(self) -> float:
        return self._peak.bytes / MIB

    def run(self, repeats: int) -> None:
        """A first step for gradients and peak, then the timed ones."""
        with tempfile.TemporaryDirectory() as folder:
            trl_trainer(
                self._model, self._rows, MICRO_BATCH, 1 + repeats, self, output_dir=folder, loss_type="dapo",
                max_grad_norm=1e9, gradient_checkpointing=False, bf16=False, use_cpu=True,
            ).train()  # fmt: skip

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._peak.__enter__()
        self._started = time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            self.gradients = gradients_of(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.process_time() - self._started
        if state.global_step == 1:
            self._peak.__exit__(None, None, None)
        else:
            self.seconds.append(seconds)
            self._between()


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
        trl = TrlStep(folder, rows, turn)
        trl.run(options.repeats)
        row["trl_cpu_seconds"], row["trl_peak_mib"] = min(trl.seconds), trl.peak_mib
        row["trl_error"] = error(trl.gradients, wanted)
    while len(seconds) < options.repeats:
        turn()
    row["gleaner_cpu_seconds"] = min(seconds)
    print(row, flush=True)
    return row


ABOUT_TRL = (
    "TRL runs as it comes: without Triton it scores every position, prompts too, here 1.5 times the tokens. **TRL "
    "without Triton is not TRL on CUDA**: without it TRL 1.16 works on tiles of up to 4096 x 32768 logits with several "
    "float32 temporaries each; on CUDA a kernel folds one bfloat16 tile in its place. So its time and above all its "
    "memory here are not its on a GPU; naive is the fairer yardstick for memory."
)


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
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
        f"{ABOUT_TRL if options.with_trl else 'TRL was not installed.'} The model is tiny "
        "and its vocabulary is not, which weighs the head more than a real model does; all rows have one length, and "
        "the prompt is half as long as a completion."
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--generations", type=int, nargs="+", default=[4, 8, 16, OURS_ONLY], help="multiples of 4")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    options.with_trl = installed("trl")
    torch.set_num_threads(1)
    told, rows = conditions(LEARNER_PACKAGES), []
    for vocab in options.vocab:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), vocab)
            rows += [measure(Path(folder), vocab, g, options) for g in options.generations]
    how = under(told, "CPU time of one thread, float32")
    save("learner_step", {"conditions": told, "rows": rows}, f"{report(rows, options)}\n\nConditions: {how}")


if __name__ == "__main__":
    main()
