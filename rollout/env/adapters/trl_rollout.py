"""TRL's rollout functions (GRPOTrainer's `rollout_func`) as programs."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from rewards.loader import load_own
from rollout.env.adapters.trl import given, load_rewards
from rollout.env.loader import BadAnswer
from rollout.env.protocol import Model, OutOfBudget, Sampled
from rollout.schema import Problem

# What a TRL rollout_func is given for its trainer: a tokenizer, settings and the policy, and nothing else.


class NotHere(AttributeError):
    """Something of TRL's trainer that there is none of in a trajectory's process."""


class Offered:
    """An object with these attributes alone. Raises NotHere for any other, with what there is instead."""

    def __init__(self, name: str, attributes: Mapping[str, Any]) -> None:
        self._offered = dict(attributes)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._offered[name]
        except KeyError:
            raise NotHere(
                f"rollout_func: {self._name}.{name} is not here, where one trajectory is played in a process of its "
                f"own; there are {', '.join(sorted(self._offered))}; plain values go into env.args.settings"
            ) from None


def trainer_of(
    processing_class: Any, settings: Mapping[str, Any], ask: Callable[[Sequence[int], int | None], Sampled]
) -> Offered:
    """The stand-in. settings: attributes of the trainer's `args`, which TRL's trainer repeats as its own; a prompt has
    one completion, whatever they say. ask: continues ids, by at most so many.

    `vllm_generation.generate` is TRL 1.16's (trl/generation/vllm_generation.py): prompts as ids -> prompt_ids,
    completion_ids, logprobs and logprob_token_ids, the latter two [prompt][token][1]. Each turn may have
    `max_completion_length` tokens, if the settings have that.
    """
    most = settings.get("max_completion_length")

    def generate(prompts: Sequence[Sequence[int]], images: Any = None, num_generations: int = 1, profiler: Any = None,
                 ) -> tuple[list[Any], ...]:  # fmt: skip
        if images is not None and any(one is not None for one in images):
            raise NotHere("rollout_func: vllm_generation.generate takes no images here; leave them out")
        if (len(prompts), num_generations) != (1, 1):
            raise NotHere(
                "rollout_func: vllm_generation.generate must be asked for one completion of one prompt, since one "
                f"trajectory is played at a time, got {len(prompts)} prompts and num_generations {num_generations}; "
                "take trainer.num_generations, which is 1, and one prompt"
            )
        prompt = [int(token) for token in prompts[0]]
        sampled = ask(prompt, most)
        logprobs = [[logprob] for logprob in sampled.logprobs]
        return [prompt], [sampled.token_ids], [logprobs], [[[token] for token in sampled.token_ids]]

    own = dict(settings) | {"num_generations": 1, "num_generations_eval": 1, "use_vllm": True}
    generation = Offered("trainer.vllm_generation", {"generate": generate})
    parts = {"args": Offered("trainer.args", own), "processing_class": processing_class, "vllm_generation": generation}
    return Offered("trainer", own | parts)


REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class TrlRolloutFunc:
    """What TRL 1.16 does with rollout_func(prompts, trainer) (trl/trainer/grpo_trainer.py, _generate), for one prompt.

    It is called in a thread, with the problem's messages and a stand-in trainer (trl_trainer.py). What it samples is
    recorded where it is sampled; what it returns is compared with that and has to be the same: `prompt_ids`,
    `completion_ids`, and `env_mask` (1: sampled) where others wrote between the turns. `logprobs` must be there and are
    not looked at. Tokens behind the last sampled one are left out. Other fields go to the reward functions.

    function: the rollout function, as in `rewards[].use`.
    model: folder of the model, whose tokenizer is the `processing_class`.
    settings: what `trainer.args` is to hold, plain values.
    rewards: reward functions in TRL's convention, called with lists of one: `prompts`, `completions`, `completion_ids`,
        columns, and the other fields that the function returned. Each is a part of the reward with weight 1.
    cut: what each of them is where the trajectory's turns or tokens were over before the function returned.

    Python's and numpy's global random numbers are seeded with the group's seed.

    Raises WrongInput for a name that leads to nothing that can be called, and for two reward functions of one name.
    """

    def __init__(
        self,
        function: str,
        model: str,
        *,
        settings: Mapping[str, Any] | None = None,
        rewards: Sequence[str] = (),
        cut: float = 0.0,
    ) -> None:
        self._function = load_own(function, "my_rollout_func")
        self._rewards = load_rewards(rewards)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._settings, self._cut = dict(settings or {}), cut

    async def run(self, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
        """The function's rewards. Raises BadAnswer for an answer that differs from what was sampled."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        record, loop = _Record(model), asyncio.get_running_loop()

        def ask(token_ids: Sequence[int], most: int | None) -> Sampled:
            return asyncio.run_coroutine_threadsafe(record.generate(token_ids, most), loop).result()

        said = problem.messages
        prompt = said if isinstance(said, str) else [dict(message) for message in said]
        trainer = trainer_of(self._tokenizer, self._settings, ask)
        try:
            output = await loop.run_in_executor(ThreadPoolExecutor(1), self._function, [prompt], trainer)
        except OutOfBudget:
            return dict.fromkeys(self._rewards, self._cut)
        extra = _checked(output, record)
        have = {name: [value] for name, value in problem.columns.items()} | {
            "prompts": [prompt],
            "completions": [self._completion(record.ids, isinstance(prompt, list))],
            "completion_ids": [record.ids],
        }
        have |= {name: value[:1] if isinstance(value, list) else [value] for name, value in extra.items()}
        parts = {}
        for name, reward in self._rewards.items():
            told = reward(**given(reward, have))
            (parts[name],) = await told if isinstance(told, Awaitable) else told
        return {name: value for name, value in parts.items() if value is not None}

    def _completion(self, ids: Sequence[int], chat: bool) -> Any:
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return [{"role": "assistant", "content": text}] if chat else text


class _Record:
    """The policy, and what was asked and sampled. mask: [T], 1 where it was sampled."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.prompt: list[int] = []
        self.ids: list[int] = []
        self.mask: list[int] = []

    async def generate(self, token_ids: Sequence[int], most: int | None) -> Sampled:
        sampled = await self._model.generate(token_ids, most)  # answered only if the prompt extends what was before
        self.prompt = self.prompt or list(token_ids)
        between = token_ids[len(self.prompt) + len(self.ids) :]
        self.ids += [*between, *sampled.token_ids]
        self.mask += [0] * len(between) + [1] * len(sampled.token_ids)
        return sampled


def _checked(output: Any, record: _Record) -> dict[str, Any]:
    """The fields for the reward functions."""
    if not isinstance(output, Mapping) or (missing := [name for name in REQUIRED if name not in output]):
        lacks = f"lacks {', '.join(missing)}" if isinstance(output, Mapping) else f"is {type(output).__name__}"
        raise BadAnswer(f"rollout_func: must return a dict with {', '.join(REQUIRED)}, and what it returned {lacks}")
    ids, count = _one("completion_ids", output["completion_ids"]), len(record.ids)
    if "env_mask" not in output and 0 in record.mask:
        raise BadAnswer(
            "rollout_func: env_mask must be returned where others wrote between the turns, here "
            f"{record.mask.count(0)} tokens; return 1 for each sampled token and 0 for each other"
        )
    mask = _one("env_mask", output["env_mask"]) if "env_mask" in output else [1] * len(ids)
    _same("prompt_ids", _one("prompt_ids", output["prompt_ids"]), record.prompt)
    _same("completion_ids", ids[:count], record.ids)
    _same("env_mask", mask, record.mask + [0] * (len(ids) - count))
    return {name: value for name, value in output.items() if name not in (*REQUIRED, "env_mask")}


def _one(name: str, rows: Any) -> list[int]:
    if len(rows) != 1:
        raise BadAnswer(f"rollout_func: {name} must hold one completion, for its one prompt, got {len(rows)}")
    return [int(value) for value in rows[0]]


def _same(name: str, told: Sequence[int], recorded: Sequence[int]) -> None:
    if list(told) == list(recorded):
        return
    place = next((i for i, (a, b) in enumerate(zip(told, recorded, strict=False)) if a != b), None)
    differs = f"{told[place]} at {place}, not {recorded[place]}" if place is not None else f"{len(told)} of them"
    raise BadAnswer(
        f"rollout_func: {name} must be what was asked and sampled, {len(recorded)} values, got {differs}; return the "
        "ids that vllm_generation.generate gave, and what stood between them"
    )
