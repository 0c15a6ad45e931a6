"""TRL's GRPOTrainer on a configuration of gleaner: same model, LoRA, problems in the same order, rewards, update.

    python -m benchmarks.system.trl_system CONFIG.yaml OUT.json --micro-batch 16        (started by
    benchmarks.system.system_vs_trl)

TRL generates with Hugging Face's generate, since its own vLLM route is made for GPUs, with as many threads as the
machine has cores; with --engine vllm by BareVllm, which does that route's work here. It is left as it comes but for
logging and saving, which are off, and for the learning rate of each step, which follows gleaner's schedule. Held-out
problems are answered greedily by HF generate, in one batch, and scored by the same reward function.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import parser_of
from learner.config import RunConfig
from learner.config import load as config_io
from learner.config.settings import rate_factor
from learner.driver.evaluate import accuracy_reward
from rewards.call import Group
from rewards.call import score as score_group
from rewards.config import RewardConfig, resolved_names
from rewards.loader import BUILT_INS, load
from rollout.data import problems
from rollout.data.chat import Chat
from rollout.schema import Problem
from rollout.vllm.environment import required_env

MOST_BATCHED = 8192  # tokens of a prefill


class Scorer:
    """One of the configuration's rewards, in this process, with the arguments that gleaner would give it."""

    def __init__(self, config: RewardConfig, name: str) -> None:
        self._config, self.__name__, self._reward = config, name, load(config.use)

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float | None]:
        lists = {key: value for key, value in columns.items() if isinstance(value, list)}  # not TRL's own extras
        group = Group(prompts, completions, completion_ids, lists)
        verdict = score_group(self._reward, group, self._config.args, built_in=self._config.use in BUILT_INS)
        if verdict.status == "error":
            raise RuntimeError(f"{self.__name__}: {verdict.problem}")
        return verdict.values


class Clock:
    """Seconds of the step that is under way, by part, and what was sampled in it."""

    def __init__(self, stop_ids: Sequence[int]) -> None:
        self.steps: list[dict[str, float]] = []
        self.lengths: list[int] = []
        self.ended = 0
        self._stop_ids = set(stop_ids)
        self.parts = {"generate": 0.0, "train": 0.0, "left_out": 0.0}
        self._sampled: list[int] = []
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()
        self.parts, self._sampled = dict.fromkeys(self.parts, 0.0), []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] += time.perf_counter() - started

    def sampled(self, completions: Sequence[Sequence[int]]) -> None:
        """Fails if TRL went on after an end token: then the work compared would not be the same."""
        for ids in completions:
            if self._stop_ids.intersection(ids[:-1]):
                raise RuntimeError("TRL kept tokens behind the end token")
            self.ended += ids[-1] in self._stop_ids
            self._sampled.append(len(ids))

    def end(self) -> None:
        seconds = time.perf_counter() - self._began - self.parts["left_out"]
        told = {"seconds": seconds, "generate": self.parts["generate"], "train": self.parts["train"], "overlap": 0.0}
        self.steps.append(told | {"samples": len(self._sampled), "tokens": sum(self._sampled)})
        self.lengths += self._sampled
        self.begin()


class Trainer(GRPOTrainer):  # type: ignore[misc] # whose library has no types
    """TRL's, with a clock around its parts and gleaner's learning rates."""

    clock: Clock
    config: RunConfig
    expected: dict[str, list[int]]  # text of a prompt -> gleaner's token ids of it

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        def factor(step: int) -> float:
            return rate_factor(step, num_training_steps, self.config.learner.schedule)

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler

    def _generate(self, prompts: list[Any]) -> Any:
        with self.clock.part("generate"):
            told = super()._generate(prompts)
        prompt_ids, completion_ids = told[:2]
        if any(self.expected[json.dumps(text)] != ids for text, ids in zip(prompts, prompt_ids, strict=True)):
            raise RuntimeError("TRL and gleaner tokenise a prompt differently")
        self.clock.sampled(completion_ids)
        return told

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        rows: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if int(rows["completion_mask"].sum()) != sum(self.clock._sampled):
            raise RuntimeError("TRL's completion_mask does not cover just the tokens that were sampled")
        return rows

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        started = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)
        self.clock.parts["train"] -= time.perf_counter() - started  # it lies within training_step
        return inputs

    def training_step(self, *args: Any, **named: Any) -> Any:
        with self.clock.part("train"):
            return super().training_step(*args, **named)


class Watch(TrainerCallback):
    """Steps, updates and evaluations of a run of Trainer."""

    def __init__(self, clock: Clock, every: int, evaluate: Callable[[Any], float]) -> None:
        self.accuracy: list[tuple[int, float]] = []
        self.began_at = 0.0
        self._clock, self._every, self._evaluate = clock, every, evaluate
        self._update = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.began_at = time.time()
        self._clock.begin()
        self._score(model, state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._update = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.parts["train"] += time.perf_counter() - self._update

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._clock.end()
        print(state.global_step, self._clock.steps[-1], flush=True)
        self._score(model, state)

    def _score(self, model: Any, state: Any) -> None:
        if self._every and (state.global_step % self._every == 0 or state.global_step == state.max_steps):
            with self._clock.part("left_out"):
                self.accuracy.append((state.global_step, self._evaluate(model)))


class BareVllm:
    """A `rollout_func`: vLLM as the engine of GRPOTrainer, the way that TRL takes on a card where both share it.

    One engine in the trainer's process, on all cores while the trainer waits. Before the first batch of a step the
    adapter is merged into the weights and all of them are loaded into the engine, as TRL's own VLLMGeneration does.
    Prefix caching is on, so that the completions of a group share their prompt. expected: text of a prompt -> its token
    ids, by gleaner's chat template.
    """

    def __init__(self, config: RunConfig, expected: Mapping[str, list[int]]) -> None:
        # The environment of an engine must be there before vLLM is imported; the threads are the trainer's, all cores.
        os.environ |= required_env(cuda=False) | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        from vllm import LLM, SamplingParams

        rollout = config.rollout
        self._expected, self._generations, self._step = expected, rollout.num_generations, -1
        self._sampling = SamplingParams(
            n=rollout.num_generations, max_tokens=rollout.max_completion_length, temperature=rollout.temperature,
            logprobs=0, detokenize=False,
        )  # fmt: skip
        assert isinstance(rollout.kv_cache, int)
        self._llm = LLM(
            model=config.model.path, dtype=config.model.dtype, seed=config.seed,
            max_model_len=rollout.max_prompt_length + rollout.max_completion_length,
            max_num_seqs=config.learner.groups_per_step * rollout.num_generations,
            max_num_batched_tokens=MOST_BATCHED, kv_cache_memory_bytes=rollout.kv_cache, enable_prefix_caching=True,
            enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=True,
        )  # fmt: skip

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        if trainer.state.global_step != self._step:
            self._load(trainer)
            self._step = trainer.state.global_step
        from vllm import TokensPrompt

        ids = [self._expected[json.dumps(prompt)] for prompt in prompts]
        unique = ids[:: self._generations]
        if any(one != unique[index // self._generations] for index, one in enumerate(ids)):
            raise RuntimeError("the completions of a group do not lie side by side")
        done = self._llm.generate(
            [TokensPrompt(prompt_token_ids=one) for one in unique], self._sampling, use_tqdm=False
        )
        sampled = [completion for request in done for completion in request.outputs]
        return {
            "prompt_ids": ids,
            "completion_ids": [list(one.token_ids) for one in sampled],
            "logprobs": [[next(iter(token.values())).logprob for token in one.logprobs or []] for one in sampled],
        }

    def _load(self, trainer: Any) -> None:
        """The merged weights of the policy, under the names of the model's own checkpoint."""
        policy = trainer.accelerator.unwrap_model(trainer.model)
        policy.merge_adapter()
        weights = [
            (name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.data)
            for name, parameter in policy.named_parameters()
            if "lora_" not in name
        ]

        def load(worker: Any) -> None:
            worker.model_runner.reload_weights(weights_iterator=iter(weights), is_checkpoint_format=True)

        self._llm.llm_engine.collective_rpc(load)
        policy.unmerge_adapter()
        self._llm.reset_prefix_cache()


def heldout_score(config: RunConfig, chat: Chat, heldout: Sequence[Problem]) -> Callable[[Any], float]:
    """model -> mean of the accuracy reward function over greedy completions, as learner.driver.evaluate does it."""
    name = accuracy_reward(config.rewards, config.data.eval.reward)
    assert name is not None  # only an environment's rewards have none, and none of TRL's runs here has one
    names = resolved_names(config.rewards)
    score = Scorer(config.rewards[names.index(name)], name)
    pad = chat.stop_ids[0]

    @torch.no_grad()
    def evaluate(model: Any) -> float:
        longest = max(len(problem.prompt_ids) for problem in heldout)
        ids = torch.full((len(heldout), longest), pad)
        mask = torch.zeros_like(ids)
        for row, problem in enumerate(heldout):
            ids[row, longest - len(problem.prompt_ids) :] = torch.tensor(problem.prompt_ids)
            mask[row, longest - len(problem.prompt_ids) :] = 1
        model.eval()
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, eos_token_id=list(chat.stop_ids), pad_token_id=pad,
            max_new_tokens=config.rollout.max_completion_length,
        )[:, longest:].tolist()  # fmt: skip
        model.train()
        texts = [[{"role": "assistant", "content": chat.decode(row)}] for row in out]
        columns = {key: [problem.columns[key] for problem in heldout] for key in heldout[0].columns}
        scores = score([problem.messages for problem in heldout], texts, out, **columns)
        return sum(value or 0.0 for value in scores) / len(scores)

    return evaluate


def arguments(config: RunConfig, folder: str, micro_batch: int) -> GRPOConfig:
    """TRL's settings for the same update: one a batch, no KL, no checkpointing of activations."""
    learner, rollout = config.learner, config.rollout
    samples = learner.groups_per_step * rollout.num_generations
    return GRPOConfig(
        output_dir=folder, seed=config.seed, max_steps=config.num_steps, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch, num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length, temperature=rollout.temperature, shuffle_dataset=False,
        loss_type=learner.loss.kind, scale_rewards=learner.loss.advantage, beta=learner.loss.beta,
        reward_weights=[reward.weight for reward in config.rewards], learning_rate=learner.learning_rate,
        adam_beta1=learner.optimizer.betas[0], adam_beta2=learner.optimizer.betas[1],
        weight_decay=learner.optimizer.weight_decay, max_grad_norm=learner.optimizer.max_grad_norm,
        model_init_kwargs={"dtype": config.model.dtype}, bf16=config.model.dtype == "bfloat16",
        gradient_checkpointing=False, use_cpu=True, logging_strategy="no", save_strategy="no", report_to=[],
        disable_tqdm=True,
    )  # fmt: skip


def run(config: RunConfig, micro_batch: int, engine: str) -> dict[str, Any]:
    """Trains; returns what benchmarks.system.system_run.Record needs."""
    chat = Chat.load(config.model.path, config.data.chat_template_kwargs)
    stream, heldout = problems.load(config.data, chat, config.rollout.max_prompt_length, config.seed)
    assert config.num_steps is not None
    needed = [stream.at(i) for i in range(config.num_steps * config.learner.groups_per_step)]
    rows = [{"prompt": list(problem.messages), **problem.columns} for problem in needed]
    lora = config.learner.lora
    alpha: Any = lora.alpha  # peft divides by the rank, so that any number will do
    expected = {json.dumps(list(problem.messages)): list(problem.prompt_ids) for problem in needed}
    watch = Watch(clock := Clock(chat.stop_ids), config.data.eval.every, heldout_score(config, chat, heldout))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=config.model.path,
            reward_funcs=[Scorer(r, n) for r, n in zip(config.rewards, resolved_names(config.rewards), strict=True)],
            args=arguments(config, folder, micro_batch),
            train_dataset=Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast.from_pretrained(config.model.path),
            peft_config=LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=lora.targets, task_type="CAUSAL_LM"),
            callbacks=[watch],
            rollout_func=BareVllm(config, expected) if engine == "vllm" else None,
        )
        trainer.clock, trainer.config = clock, config
        trainer.expected = expected
        trainer.train()
    told = {"steps": clock.steps, "lengths": clock.lengths, "ended": clock.ended / len(clock.lengths)}
    return told | {"accuracy": watch.accuracy, "began_at": watch.began_at, "threads": torch.get_num_threads()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", help="YAML of gleaner")
    parser.add_argument("out", type=Path, help="JSON to write")
    parser.add_argument("--micro-batch", type=int, default=16, help="completions; must divide those of a step")
    parser.add_argument("--engine", choices=("generate", "vllm"), default="generate")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="trl")
    options.out.write_text(
        json.dumps(run(config_io.load_config(options.config, []), options.micro_batch, options.engine))
    )


if __name__ == "__main__":
    main()
