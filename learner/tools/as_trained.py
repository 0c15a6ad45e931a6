"""How a run's completions were sampled, for those who serve or export what it learned.

A base's generation_config.json is another's advice: a penalty or a temperature in it changes what the policy says,
greedily as well, and knows nothing of the stop tokens of the run.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.files import writing
from learner.config import RunConfig
from rollout.architecture import text_of
from rollout.data.chat import Chat
from rollout.data.hub import ChatError, read_json
from rollout.data.observation import USER

GENERATION = "generation_config.json"
OF_TOKENS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")  # what is kept of the base's


@dataclass(frozen=True, slots=True)
class AsTrained:
    """generation: content of a generation_config.json, as transformers and vLLM read it. stop: strings that ended
    completions, which have no place in it: transformers' generate refuses a file that has some. of_prompts: what was
    left out of prompts, in sentences. form: of completions, rollout.structured_outputs, which has no place in it
    either; "": any."""

    generation: dict[str, Any]
    stop: tuple[str, ...]
    of_prompts: tuple[str, ...]
    form: str = ""

    @property
    def tokens(self) -> str:
        """In words, which tokens may be sampled."""
        cut = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        told = [
            f"{name} {self.generation[name]:g}"
            for name, all_of in cut.items()
            if self.generation.get(name, all_of) != all_of
        ]
        whole = ", ".join(told) or "the whole distribution"
        return f"{whole} (in training of the form {self.form}, which a request must ask for)" if self.form else whole

    def write(self, folder: Path) -> None:
        """Into that folder, in the place of a file or link of that name. Raises OSError, with the path in it."""
        partial = folder / f".{GENERATION}.partial"
        with writing(folder / GENERATION):
            partial.unlink(missing_ok=True)  # in a folder of others it may be a link
            partial.write_text(json.dumps(self.generation, indent=2) + "\n")
            os.replace(partial, folder / GENERATION)


def as_trained(config: RunConfig, path: str) -> AsTrained:
    """path: of the base, or of the whole model that was learned. Raises ChatError: it cannot be read."""
    data = config.data
    chat = Chat.load(path, data.chat_template_kwargs, config.rollout.stop, template=data.chat_template)
    ids, strings = chat.stops(config.rollout.stop)
    with suppress(ChatError):  # asked for what is told of prompts alone
        chat.render([USER])
    own: Mapping[str, Any] = read_json(path, GENERATION) or text_of(chat.config)
    kept = {name: own[name] for name in OF_TOKENS if own.get(name) is not None}
    # Transformers cuts the distribution at 50 tokens unless told.
    rollout = config.rollout
    sampling = {"do_sample": True, "temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    if rollout.min_p:
        sampling["min_p"] = rollout.min_p
    return AsTrained(kept | {"eos_token_id": list(ids)} | sampling, strings, chat.left_out())
