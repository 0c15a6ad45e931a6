"""TRL's GRPOTrainer in its own training loop, on rows that are given instead of generated."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from benchmarks.common import MIB, Peak


class TrlStep:
    """After `run`: `seconds` of CPU time and `peak_mib` of an optimizer step, from its first micro-batch to the end of
    the update; the peak and `gradients` are those of the first step.

    Args:
        rows: what GRPOTrainer._generate_and_score_completions returns.
        gradients_of: model -> its gradients.
        completions_only: score the completions alone, as TRL does where it has Triton; elsewhere it scores the prompts
            too, and throws that away.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rows: dict[str, Tensor],
        micro_batch: int,
        gradients_of: Callable[[Any], Any],
        *,
        completions_only: bool,
    ) -> None:
        self.seconds: list[float] = []
        self.peak_mib = 0.0
        self.gradients: Any = None
        self._model, self._tokenizer, self._rows = model, tokenizer, rows
        self._micro_batch, self._gradients_of = micro_batch, gradients_of
        self._completions_only = completions_only

    def run(self, repeats: int, *, between: Callable[[], None]) -> None:
        """A first step for gradients and peak, then the timed ones; `between` after each of those."""
        warnings.filterwarnings("ignore", category=UserWarning, module="trl")
        from trl import GRPOConfig, GRPOTrainer
        from trl.trainer import utils

        generations = len(self._rows["completion_ids"])
        with tempfile.TemporaryDirectory() as folder:
            settings = GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=self._micro_batch,
                gradient_accumulation_steps=generations // self._micro_batch,
                num_generations=generations,
                max_completion_length=self._rows["completion_ids"].shape[1],
                max_steps=1 + repeats,
                loss_type="dapo",
                beta=0.0,
                learning_rate=1e-6,
                max_grad_norm=1e9,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            trainer = GRPOTrainer(
                model=self._model,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=settings,
                train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
                processing_class=self._tokenizer,
                callbacks=[_Watch(self, between)],
            )
            trainer._generate_and_score_completions = lambda _: dict(self._rows)
            # In that module it decides on what is scored, and on nothing else.
            scored = (
                patch.object(utils, "_use_triton", lambda device: True) if self._completions_only else nullcontext()
            )
            with scored:
                trainer.train()


class _Watch(TrainerCallback):
    def __init__(self, step: TrlStep, between: Callable[[], None]) -> None:
        self._step, self._between = step, between
        self._peak, self._started = Peak(), 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._peak.__enter__()
        self._started = time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            self._step.gradients = self._step._gradients_of(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.process_time() - self._started
        if state.global_step == 1:
            self._peak.__exit__(None, None, None)
            self._step.peak_mib = self._peak.bytes / MIB
        else:
            self._step.seconds.append(seconds)
            self._between()
