"""vLLM as the engine of TRL's GRPOTrainer, through its `rollout_func`: the way TRL takes on a card where both share it.

One engine in the trainer's process, on all cores while the trainer waits. Before the first batch of a step the adapter
is merged into the weights and all of them are loaded into the engine, as TRL's own VLLMGeneration does. Prefix caching
is on, so that the completions of a group share their prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from learner.config import RunConfig

MOST_BATCHED = 8192  # tokens of a prefill


class BareVllm:
    """A `rollout_func`. expected: text of a prompt -> its token ids, by gleaner's chat template."""

    def __init__(self, config: RunConfig, expected: Mapping[str, list[int]]) -> None:
        rollout = config.rollout
        self._expected, self._generations, self._step = expected, rollout.num_generations, -1
        self._sampling = SamplingParams(
            n=rollout.num_generations,
            max_tokens=rollout.max_completion_length,
            temperature=rollout.temperature,
            logprobs=0,
            detokenize=False,
        )
        assert isinstance(rollout.kv_cache, int)
        self._llm = LLM(
            model=config.model.path,
            dtype=config.model.dtype,
            max_model_len=rollout.max_prompt_length + rollout.max_completion_length,
            max_num_seqs=config.learner.groups_per_step * rollout.num_generations,
            max_num_batched_tokens=MOST_BATCHED,
            kv_cache_memory_bytes=rollout.kv_cache,
            enable_prefix_caching=True,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            seed=config.seed,
        )

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        if trainer.state.global_step != self._step:
            self._load(trainer)
            self._step = trainer.state.global_step
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
