"""Checks of a configuration before a run that need vLLM, each in a process of its own. No engine is started.

    python -m rollout.vllm.trial engine | teacher | parser | form

The process reads a configuration as JSON on stdin and prints a JSON list of sentences, one for each error, as its last
line (see learner.driver.input_checks). `engine` checks that vLLM knows the model's architecture, LoRA for it, and
4 bits; `teacher` that it knows the teacher's; `parser` that some tool parser can read the model's calls; `form` that
rollout.structured_outputs compiles.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from cluster.errors import WrongInput
from rollout.architecture import text_of
from rollout.data.chat import Chat
from rollout.data.model_files import CONFIG, joined, read_json, split
from rollout.env.tools.parser import choose
from rollout.vllm.arguments import check_bitsandbytes, without_lora
from rollout.vllm.text_view import served_config


def wrong_with(config: dict[str, Any]) -> list[str]:
    """What vLLM lacks for the model: one sentence or none. config: the run's; only `model` and `learner` are read."""
    path, revision, learner = config["model"]["path"], config["model"]["revision"], config["learner"]
    adapts = learner["mode"] == "lora" and learner["push"] == "adapter"
    if config["model"]["base"] == "nf4":
        try:
            check_bitsandbytes()
        except ValueError as error:
            return [str(error)]
    return _wrong_with_model(path, revision, "model.path", adapts=adapts)


def wrong_with_teacher(config: dict[str, Any]) -> list[str]:
    """What vLLM lacks for model.teacher: one sentence or none."""
    path, revision = split(config["model"]["teacher"])
    return _wrong_with_model(path, revision, "model.teacher", adapts=False)


def _wrong_with_model(path: str, revision: str | None, key: str, *, adapts: bool) -> list[str]:
    """What vLLM lacks for a model. key: the setting that names it. adapts: whether vLLM is to serve it with LoRA."""
    try:
        from vllm import ModelRegistry
    except ImportError as error:
        return [f"rollout: vLLM cannot be imported ({error}); run make setup, or pip install 'gleaner-rl[gpu]'"]
    try:
        names = list(served_config(joined(path, revision), key).architectures or ())
    except WrongInput as error:
        return [str(error)]
    except Exception as error:  # transformers raises various errors for a wrong config.json
        return [f"{key}: vLLM cannot read the config.json of {path}: {' '.join(str(error).split())[:300]}"]
    known = [name for name in names if name in ModelRegistry.models]
    if not known:
        named = ", ".join(names) or "(config.json names none)"
        return [f"{key}: vLLM has no architecture {named}; give a model of one that it has, or a newer vLLM"]
    try:
        found: Any = ModelRegistry.models[known[0]].load_model_cls()
    except Exception as error:  # the module may need a package that is not installed, or another device
        return [f"{key}: vLLM cannot load its {known[0]} here: {' '.join(str(error).split())[:300]}"]
    if adapts and not getattr(found, "supports_lora", False):
        return [without_lora(known[0], path)]
    return []


def wrong_with_parser(config: dict[str, Any]) -> list[str]:
    """What is wrong if no parser reads the model's tool calls: one sentence or none. config: the run's; only the model,
    chat template and env.tool_parser are read."""
    model = joined(config["model"]["path"], config["model"]["revision"])
    chat = Chat.load(model, config["data"]["chat_template_kwargs"])
    try:
        choose(chat, config["env"]["tool_parser"])
    except WrongInput as error:
        return [str(error)]
    return []


def wrong_with_form(config: dict[str, Any]) -> list[str]:
    """What is wrong if the form of completions does not compile for the model: one sentence or none."""
    model = joined(config["model"]["path"], config["model"]["revision"])
    given = {name: value for name, value in config["rollout"]["structured_outputs"].items() if value is not None}
    vocabulary = int(text_of(read_json(model, CONFIG))["vocab_size"])
    from rollout.vllm.structured import Grammars

    try:
        Grammars(model, vocabulary).matcher(json.dumps(given), [vocabulary - 1])
    except WrongInput as error:
        return [str(error)]
    return []


KINDS = {"engine": wrong_with, "teacher": wrong_with_teacher, "parser": wrong_with_parser, "form": wrong_with_form}

if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    print(json.dumps(KINDS[sys.argv[1]](json.loads(sys.stdin.read()))))
