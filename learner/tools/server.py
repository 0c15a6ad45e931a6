"""vLLM's OpenAI-compatible server with what a run has learned, which samples as the run did."""

import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cluster import own_path
from cluster.errors import WrongInput
from cluster.files import writing
from learner.config import RunConfig, load
from learner.driver.checkpoint import ADAPTER, learned_in
from learner.driver.input_checks import check_served
from learner.model.adapter_config import CONFIG_FILE, MODEL, read_content, served
from learner.tools.served_stops import MOST, VARIABLE, TrainingStops
from rollout.architecture import has_experts, text_of
from rollout.data import model_files
from rollout.data.chat import Chat
from rollout.data.model_files import CONFIG, model_weights, read_json
from rollout.data.observation import USER
from rollout.data.weight_names import check_model, sizes_of
from rollout.vllm.served import SERVER

# How a run's completions were sampled, for those who serve or export what it learned.
#
# A base's generation_config.json is another's advice: a penalty or a temperature in it changes what the policy says,
# greedily as well, and knows nothing of the stop tokens of the run.

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
    """path: of the base, or of the whole model that was learned. Raises WrongInput: it cannot be read."""
    data = config.data
    chat = Chat.load(path, data.chat_template_kwargs, config.rollout.stop, template=data.chat_template)
    ids, strings = chat.stops(config.rollout.stop)
    with suppress(WrongInput):  # asked for what is told of prompts alone
        chat.render([USER])
    own: Mapping[str, Any] = read_json(path, GENERATION) or text_of(chat.config)
    kept = {name: own[name] for name in OF_TOKENS if own.get(name) is not None}
    # Transformers cuts the distribution at 50 tokens unless told.
    rollout = config.rollout
    sampling = {"do_sample": True, "temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    if rollout.min_p:
        sampling["min_p"] = rollout.min_p
    return AsTrained(kept | {"eos_token_id": list(ids)} | sampling, strings, chat.left_out())


QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}  # where the user's environment does not say
CHECKED_SERVER = "rollout.vllm.served"
CPU_CACHE_GIB = "1"  # of KV cache on a CPU, where VLLM_CPU_KVCACHE_SPACE does not say otherwise; vLLM's own takes half


def serve(run_dir: Path, host: str, port: int, more: Sequence[str]) -> NoReturn:
    """Becomes the server, so that signals reach it. Raises WrongInput, also for an address that cannot be had, and
    what is wrong with weights (WrongInput)."""
    _check_free(host, port)
    _check_weights(run_dir)
    server = server_of(run_dir, host, port, more)
    if _on_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.update({**server.environment, **own_path.environment()})
    for note in server.notes:
        print(note, flush=True)
    print(_how_to_ask(run_dir, f"http://{host}:{port}/v1"), flush=True)
    os.execv(server.command[0], server.command)


def _check_weights(run_dir: Path) -> None:
    """Whether what was learned, and its base, are whole and finite, and belong together."""
    config, learned = _run_in(run_dir)
    if learned.name == MODEL:
        check_model(str(learned), "RUN")
        return
    model_files.settle([config.model.path])
    check_model(config.model.source)
    check_served(str(learned), "RUN", config.model.source)


def _check_free(host: str, port: int) -> None:
    """vLLM would say so after half a minute, behind a traceback."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
            trial.bind((address[0], port))
    except (OSError, OverflowError, UnicodeError) as error:
        raise WrongInput(
            f"--host, --port: must be an address of this machine and a port that is free, got {host}:{port} ({error}); "
            "give another --port, or --host 127.0.0.1"
        ) from None


def _how_to_ask(run_dir: Path, address: str) -> str:
    name, route = run_dir.resolve().name, "chat/completions"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "..."}]}
    if _run_in(run_dir)[0].data.chat_template == "none":  # prompts as the training had them
        route, asked = "completions", {"prompt": "..."}
    body = json.dumps({"model": name, **asked})
    return (
        f"model {name} at {address}, once vLLM says: Application startup complete (VLLM_LOGGING_LEVEL=INFO shows all "
        f"that it says); then\n  curl {address}/{route} -H 'content-type: application/json' -d '{body}'"
    )


class Server(NamedTuple):
    """How it is started. environment: variables that it wants. notes: lines for the user."""

    command: list[str]
    environment: dict[str, str]
    notes: tuple[str, ...]


def server_of(run_dir: Path, host: str, port: int, more: Sequence[str]) -> Server:
    """What was learned has the run folder's name; `more` is for vLLM itself. Requests that do not say otherwise are
    sampled as the training was; its file is written into the run folder, where that can be.

    Raises WrongInput if the folder is not one of a run that has saved something.
    """
    config, learned = _run_in(run_dir)
    # The module, since vLLM's build for CPUs has no command `vllm serve`.
    command = [sys.executable, "-P", "-m", *_server(config, learned), "--host", host, "--port", str(port)]
    command += [*_model(config, learned), "--dtype", config.model.dtype]
    if config.data.chat_template_kwargs:
        command += ["--default-chat-template-kwargs", json.dumps(config.data.chat_template_kwargs)]
    if _on_cpu():
        # With LoRA a CPU compiles for half a minute and then does not use it.
        command += ["--enforce-eager", "--worker-extension-cls", "rollout.vllm.cpu.AmxWorker"]
    sampled = _as_trained(config, run_dir.resolve(), learned)
    return Server([*command, *sampled.command, *more], sampled.environment, sampled.notes)


def _run_in(run_dir: Path) -> tuple[RunConfig, Path]:
    """Its configuration, and the folder of what it has learned. Raises WrongInput."""
    file = run_dir / "config.yaml"
    if not file.exists():
        whole = (run_dir / "config.json").exists()
        next_step = f"a model is served by: vllm serve {run_dir}" if whole else "check the path"
        raise WrongInput(f"RUN: must be a run folder such as runs/demo-seed0, got {run_dir}; {next_step}")
    config = load.load_config(str(file), [])
    learned = learned_in(run_dir.resolve())
    if learned is None:
        raise WrongInput(f"RUN: {run_dir} has neither {ADAPTER}/ nor {MODEL}/ before its first checkpoint; wait for it")
    return config, learned


def _as_trained(config: RunConfig, run_dir: Path, learned: Path) -> Server:
    """The part of the command line that says how to sample. Without it where the model is not there: vLLM says so."""
    try:
        found = as_trained(config, str(learned) if learned.name == MODEL else config.model.source)
    except WrongInput:
        return Server([], {}, ())
    folder = run_dir
    try:
        found.write(folder)
    except OSError:  # a run folder that this user may only read
        folder = Path(tempfile.mkdtemp(prefix="gleaner-serve-"))
        found.write(folder)
    command, temperature = ["--generation-config", str(folder)], f"{config.rollout.temperature:g}"
    sampled = f"temperature {temperature}, {found.tokens}, no penalties"
    told = [f"sampled as in training unless a request says otherwise: {sampled}"]
    environment = {}
    if found.stop:
        command += ["--middleware", f"{TrainingStops.__module__}.{TrainingStops.__name__}"]
        environment = {VARIABLE: json.dumps(found.stop[:MOST])}
        told = [f"{told[0]}, stop {environment[VARIABLE]} (completions, chat completions and messages)"]
        if len(found.stop) > MOST:
            told.append(f"of {len(found.stop)} strings in rollout.stop the first {MOST}, since requests take no more")
    left_out = [f"{note}; the server does not: send token ids to /completions" for note in found.of_prompts]
    return Server(command, environment, (*told, *left_out))


def _server(config: RunConfig, learned: Path) -> list[str]:
    """The module that is the server, and what it takes before vLLM's options. One of ours, where whether the files have
    the model's tensors is not known without torch."""
    model = str(learned) if learned.name == MODEL else config.model.source
    try:
        known = model_weights(model) is None or sizes_of(read_json(model, CONFIG)) is not None
    except WrongInput:  # said by _check_weights
        known = True
    return [SERVER] if known else [CHECKED_SERVER, model]


def _model(config: RunConfig, learned: Path) -> list[str]:
    name = learned.parent.name
    if learned.name == MODEL:
        return ["--model", str(learned), "--served-model-name", name]
    if _on_cpu() and _with_experts(config.model.source):
        raise WrongInput(
            f"RUN: on a CPU vLLM serves no adapter of a model with experts, and {config.model.path} has them; merge it "
            f"(gleaner export {learned.parent} OUT), then python -m vllm.entrypoints.openai.api_server --model OUT"
        )
    arguments = ["--model", config.model.path, "--enable-lora", "--max-lora-rank", str(config.learner.lora.rank)]
    if (revision := config.model.revision) is not None:
        arguments += ["--revision", revision, "--tokenizer-revision", revision]
    arguments += ["--lora-target-modules", *_targets(served(learned))]  # else experts and head get LoRA layers, too
    if config.model.base == "nf4":
        arguments += ["--quantization", "bitsandbytes", "--load-format", "bitsandbytes"]
    module = f"{name}={served(learned)}"
    if "," in module:  # which vLLM takes for JSON
        module = json.dumps({"name": name, "path": str(served(learned))})
    return [*arguments, "--lora-modules", module]


def _targets(adapter: Path) -> list[str]:
    """The last part of the names of the layers that it changes."""
    names = read_content(str(adapter), "RUN").get("target_modules")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WrongInput(f"RUN: target_modules of {adapter / CONFIG_FILE} must be a list of layers; save it again")
    return sorted({name.rpartition(".")[2] for name in names})


def _with_experts(model: str) -> bool:
    try:
        return has_experts(read_json(model, CONFIG))
    except WrongInput:  # the model is not there: vLLM says so
        return False


def _on_cpu() -> bool:
    try:
        return distribution("vllm-cpu") is not None
    except PackageNotFoundError:
        return False
