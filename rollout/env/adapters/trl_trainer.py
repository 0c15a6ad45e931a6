"""What a TRL rollout_func is given for its trainer: a tokenizer, settings and the policy, and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.env.program import Sampled


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
