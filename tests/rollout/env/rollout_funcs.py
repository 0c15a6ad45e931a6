"""Rollout functions as TRL's users write them. Loaded by their file."""

from typing import Any

SEEN = [8, 9]


def two_turns(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Asks, appends an observation, asks again."""
    prompt = trainer.processing_class.encode(prompts[0][-1]["content"], add_special_tokens=False)
    one = _ask(trainer, prompt)
    other = _ask(trainer, [*prompt, *one, *SEEN])
    return {
        "prompt_ids": [prompt],
        "completion_ids": [[*one, *SEEN, *other, *SEEN]],
        "logprobs": [[0.0] * (len(one) + len(other) + 4)],
        "env_mask": [[1] * len(one) + [0, 0] + [1] * len(other) + [0, 0]],
        "env_reward": [len(one) * trainer.args.bonus],
        "steps": 2,
    }


def _ask(trainer: Any, ids: list[int]) -> list[int]:
    _, (completion,), ((first, *_),), _ = trainer.vllm_generation.generate(
        prompts=[ids], images=None, num_generations=trainer.num_generations
    )
    assert first == [-0.5]
    return list(completion)


def without_mask(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return {name: value for name, value in two_turns(prompts, trainer).items() if name != "env_mask"}


def observed_counts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    output = two_turns(prompts, trainer)
    return output | {"env_mask": [[1] * len(output["completion_ids"][0])]}


def encoded_again(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    output = two_turns(prompts, trainer)
    (ids,) = output["completion_ids"]
    return output | {"completion_ids": [[ids[0] + 1, *ids[1:]]]}


def several(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return {name: value * 2 for name, value in two_turns(prompts, trainer).items() if isinstance(value, list)}


def lacking(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return {"prompt_ids": two_turns(prompts, trainer)["prompt_ids"]}


def accelerated(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    assert not hasattr(trainer, "rollout_func")
    two_turns(prompts, trainer)
    return {"device": trainer.accelerator.device}


def endless(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    ids = trainer.processing_class.encode("1 + 2", add_special_tokens=False)
    while True:
        ids += _ask(trainer, ids)


def reward_from_env(completions: list[Any], env_reward: list[float], steps: list[int], **columns: Any) -> list[float]:
    ((message,),) = completions
    assert message["role"] == "assistant"
    return [reward + count for reward, count in zip(env_reward, steps, strict=True)]
