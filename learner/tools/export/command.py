"""Carries out gleaner export: it checks the inputs, writes the folder, verifies it, converts it to GGUF, and uploads
it."""

import logging
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import getproxies

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils._validators import validate_repo_id

from cluster import machine
from cluster.errors import WrongInput
from cluster.files import digest_of, writing
from cluster.memory.plan import gib
from learner.driver.checkpoint import ADAPTER_FILES, TRAINER, files_of
from learner.driver.failure import RunEnded
from learner.driver.input_checks import check_served
from learner.model.adapter_config import VLLM_FOLDER
from learner.tools.export import ExportRequest
from learner.tools.export.card import Exported, Scores, card, check_whose, read_scores
from learner.tools.export.source import Needed, Source, check_base, check_disk, find, needed, recorded
from learner.tools.reported import reported
from learner.tools.server import AsTrained, as_trained
from rollout.data import model_files
from rollout.data.model_files import CONFIG, read_json
from rollout.data.weight_names import check_model
from rollout.quantised import format_of

# Upload of an exported folder to the hub.

FAULTS = (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError, OSError)


def check_hub(repo: str) -> None:
    """Raises WrongInput if the hub cannot be reached, or does not accept the login. It creates nothing on the hub."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise WrongInput(f"--push-to: must be OWNER/NAME, got {repo[:100]}: {error}") from None
    if repo.count("/") != 1:
        raise WrongInput(f"--push-to: must be OWNER/NAME, got {repo[:100]}; put your name or organisation before it")
    if model_files.switched_off():
        raise WrongInput("--push-to: the hub is switched off by HF_HUB_OFFLINE; unset it, or leave --push-to out")
    if unreachable := _unreachable():
        raise WrongInput(f"--push-to: {unreachable}; try again when it can be reached, or leave --push-to out")
    if get_token() is None:
        raise WrongInput("--push-to: nobody is logged in to the hub; run: hf auth login")
    try:
        _api().whoami()
    except FAULTS as error:
        raise WrongInput(f"--push-to: the hub does not take the login: {_first_line(error)}; hf auth login") from None


def publish(folder: Path, repo: str, *, public: bool) -> str:
    """Uploads the folder and returns its address. A new repository is private, unless `public`. Raises RunEnded."""
    try:
        if unreachable := _unreachable():
            raise OSError(unreachable)
        _api().create_repo(repo, private=not public, exist_ok=True)
        found = _api().upload_folder(repo_id=repo, folder_path=folder, commit_message="gleaner export")
    except FAULTS as error:
        raise RunEnded(
            f"--push-to: {repo} was not uploaded: {_first_line(error)}; {folder} is whole and verified: hf upload "
            f"{repo} {folder}"
        ) from error
    return str(found.repo_url)


def _api() -> HfApi:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _unreachable() -> str:
    """Returns a sentence if the hub cannot be reached, else ''. Behind a proxy nothing is tried."""
    host = None if getproxies() else model_files.unreachable()
    return "" if host is None else f"{host} cannot be reached within {model_files.CONNECT_S:g} s"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


# Conversion of the weights to a GGUF file by llama.cpp's convert_hf_to_gguf.py.

SCRIPT = "convert_hf_to_gguf.py"
FOLDER = "LLAMA_CPP"  # environment variable
CLONE = "git clone https://github.com/ggml-org/llama.cpp"
LOOK_S = 120.0  # seconds for the converter to start; it imports torch


def find_converter() -> list[str]:
    """Returns the command that converts: this Python with the script in the folder that LLAMA_CPP names, else the
    script on the PATH. Raises WrongInput if there is none."""
    if folder := os.environ.get(FOLDER):
        script = Path(folder).expanduser() / SCRIPT
        if not script.is_file():
            raise WrongInput(f"{FOLDER}: must be the folder of llama.cpp, got {folder}, without {SCRIPT}; {CLONE}")
        return [sys.executable, str(script)]
    if found := shutil.which(SCRIPT) or shutil.which(SCRIPT.removesuffix(".py")):
        return [found]
    raise WrongInput(
        f"--gguf: needs {SCRIPT} of llama.cpp, which is not on the PATH; {CLONE}, and set {FOLDER} to that folder"
    )


def check_converter(command: Sequence[str], source: Source) -> None:
    """Raises WrongInput if the converter does not start, or does not know the model's architecture."""
    told = _called([*command, "--print-supported-models"], LOOK_S)
    if told.returncode:
        raise WrongInput(f"--gguf: {command[-1]} does not start: {_last_line(told)}; install what it asks for")
    known, path = (told.stdout + told.stderr).split(), source.config.model.source
    for name in read_json(path, CONFIG).get("architectures") or ():
        if name not in known:
            raise WrongInput(
                f"--gguf: {command[-1]} does not know {name}, the architecture of {path}; take a newer llama.cpp, or "
                "leave --gguf out"
            )


def convert(command: Sequence[str], folder: Path, outtype: str) -> Path:
    """Writes NAME-OUTTYPE.gguf into the folder of merged weights. Raises RunEnded."""
    file = folder / f"{folder.resolve().name}-{outtype}.gguf"
    whole = [*command, str(folder), "--outfile", str(file), "--outtype", outtype]
    told = _called(whole, None)
    if told.returncode or not file.is_file():
        file.unlink(missing_ok=True)
        raise RunEnded(
            f"--gguf: {' '.join(whole)} failed: {_last_line(told)}; the weights in {folder} are whole and verified"
        )
    return file


def _called(words: Sequence[str], seconds: float | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def _last_line(told: subprocess.CompletedProcess[str]) -> str:
    lines = (told.stderr or told.stdout).strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {told.returncode}"


CARD = "README.md"
OUTTYPE = "q8_0"  # default type of a GGUF file


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request for an export."""

    source: Source
    out: Path
    dtype: str | None  # dtype of merged weights; None: the adapter alone is exported
    size: Needed
    scores: Scores | None
    converter: list[str] | None  # command of the GGUF converter; None: no GGUF file is asked for
    outtype: str
    sampled: AsTrained | None  # how the run sampled; None for an adapter whose base is not on this machine


def run(asked: ExportRequest) -> int:
    """Carries out the command. Returns the exit code of `reported`."""
    machine.sleeping_threads()
    return reported(lambda: _export(asked), failed=(RunEnded,))


def _export(asked: ExportRequest) -> None:
    job = _checked(asked)
    source, size = job.source, job.size
    memory = f", {gib(size.memory)} of memory" if size.memory else ""
    print(f"export   {source.name}, step {source.step}: {gib(size.disk)} on the disk{memory}", flush=True)
    with _whole_or_not(job.out) as folder:
        try:
            exported = _written(job, folder, asked.push_to)
        except (OSError, ValueError) as error:
            if source.checkpoint.is_dir():
                raise
            raise RunEnded(
                f"RUN: {source.checkpoint.name} was deleted meanwhile, as the run went on (checkpoint.keep); try again"
            ) from error
        with writing(folder / CARD):
            (folder / CARD).write_text(card(exported), encoding="utf-8")
    print(f"folder   {job.out}", flush=True)
    if job.converter is not None:
        print(f"gguf     {convert(job.converter, job.out, job.outtype)}", flush=True)
    if asked.push_to is not None:
        print(f"hub      {publish(job.out, asked.push_to, public=asked.public)}")


def _checked(asked: ExportRequest) -> Job:
    """Checks the request. Raises WrongInput, or WrongInput for a tokenizer or template that cannot be read."""
    _check_options(asked)
    source = find(asked.run, asked.step, asked.model)
    if source.whole_model and asked.adapter_only:
        raise WrongInput(f"--adapter-only: {source.name} trained all weights and has no adapter; leave it out")
    scores = None if asked.scores is None else _scores(asked.scores, source)
    path, converter = source.config.model.path, None
    if not asked.adapter_only:
        model_files.settle([path])
    _check_weights(source, merges=not asked.adapter_only)
    _check_new(asked.out)
    if asked.push_to is not None:
        check_hub(asked.push_to)
    if not asked.adapter_only:
        _check_base(source)
    if asked.gguf:
        converter = find_converter()
        check_converter(converter, source)
    dtype, outtype = None if asked.adapter_only else asked.dtype or source.config.model.dtype, asked.outtype or OUTTYPE
    size = needed(source, dtype, outtype if asked.gguf else None)
    check_disk(size, asked.out)
    return Job(source, asked.out, dtype, size, scores, converter, outtype, _sampled(source, asked.adapter_only))


def _sampled(source: Source, adapter_only: bool) -> AsTrained | None:
    """Returns how the run sampled. If the base cannot be read it raises WrongInput, or returns None for an adapter that
    is exported alone."""
    try:
        return as_trained(source.config, str(source.learned) if source.whole_model else source.config.model.source)
    except WrongInput:
        if not adapter_only:
            raise
        return None


def _scores(file: Path, source: Source) -> Scores:
    scores = read_scores(file)
    if not check_whose(scores, source):
        print(f"scores   of {scores.adapter or scores.model}: not known to be those of {source.checkpoint.name}")
    return scores


def _check_options(asked: ExportRequest) -> None:
    """Raises WrongInput for options that do not go together."""
    merged = {"--dtype": asked.dtype is not None, "--gguf": asked.gguf}
    for name, given in merged.items():
        if given and asked.adapter_only:
            raise WrongInput(f"{name}: is for merged weights and does not go with --adapter-only; leave one out")
    if asked.outtype is not None and not asked.gguf:
        raise WrongInput("--outtype: goes with --gguf, which is not given; give both, or neither")
    if asked.public and asked.push_to is None:
        raise WrongInput("--public: goes with --push-to, which is not given; give both, or neither")


def _check_new(out: Path) -> None:
    if out.is_symlink() or out.is_mount():  # the folder is written under another name beside it, and then renamed
        raise WrongInput(f"OUT: must be a folder that can be made, and {out} is a link or a mount; give {out / 'NAME'}")
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
        if not taken:
            out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongInput(
            f"OUT: must be a folder that can be made, got {out} ({error.strerror}); give another"
        ) from None
    if taken:
        raise WrongInput(f"OUT: must be a new or empty folder, and {out} is not; give another")


def _check_weights(source: Source, *, merges: bool) -> None:
    """Raises WrongInput if what was learned, or the base that it is merged into, is not whole, or not finite."""
    base = source.config.model.source
    if source.whole_model:
        check_model(str(source.learned), "RUN")
        return
    known: str | None = base
    try:
        read_json(base, CONFIG)
    except WrongInput:
        if merges:
            raise
        known = None  # an adapter alone can be exported without its base
    check_served(str(source.learned), "RUN", known)
    if merges:
        check_model(base)


def _check_base(source: Source) -> None:
    """Raises WrongInput if the base is in MXFP4, or is not the one that the adapter was trained on; prints a line if
    that is not known."""
    path = source.config.model.source
    if source.whole_model:
        return
    packed = format_of(read_json(path, CONFIG), path)
    if packed is not None and packed.name == "MXFP4":
        raise WrongInput(
            f"model.path: {path} has experts in MXFP4, which are not written in 16 bits; give --adapter-only"
        )
    if not check_base(source):
        print(f"base     {path}: not known to be that of the run, one being a folder and one the hub's", flush=True)


def _written(job: Job, folder: Path, repo: str | None) -> Exported:
    """Writes and verifies everything but the card. Raises RunEnded."""
    source = job.source
    if job.dtype is None:
        _copy_adapter(source, folder)
        if job.sampled is not None:
            job.sampled.write(folder)
        print(f"verified every byte is that of checkpoint {source.checkpoint.name}", flush=True)
        copied = (folder / VLLM_FOLDER).is_dir()
        return Exported(source, None, job.scores, repo, job.sampled, VLLM_FOLDER if copied else None)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it logs advice about kernels
    from learner.tools.export.merge import write_merged  # imported here: it imports torch, which is slow

    shown = recorded(source.run / "rollouts", source.step)
    packed = None if source.whole_model else format_of(read_json(path := source.config.model.source, CONFIG), path)
    if packed is not None:
        print(f"merged   into the weights of {packed.name}, multiplied out to {job.dtype}: the policy that was trained")
    if source.config.model.base == "nf4":
        print(
            "merged   into the base as it was in 4 bits, multiplied out: the policy that was trained (docs/export.md)"
        )
    proof = write_merged(source, folder, job.dtype, shown, job.size)
    if job.sampled is not None:
        job.sampled.write(folder)
    moved = "" if proof.moved is None else f", where the adapter moves them by {proof.moved:.2g}"
    print(
        f"verified {proof.tokens} tokens: logprobs differ by {proof.rms:.2g} nats rms{moved}; {proof.greedy} of "
        f"{proof.tokens} greedy tokens are the same",
        flush=True,
    )
    return Exported(source, proof, job.scores, repo, job.sampled)


def _copy_adapter(source: Source, folder: Path) -> None:
    files = files_of(source.checkpoint)
    for name in ADAPTER_FILES:
        digest = files.get(f"{TRAINER}/{name}")
        if digest is None:  # few adapters have a copy under vLLM's names
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        with writing(folder / name):
            shutil.copyfile(source.learned / name, folder / name)
        if digest_of(folder / name) != digest:
            raise RunEnded(f"OUT: {name} is not what {source.checkpoint} has; the disk is at fault, try another")


@contextmanager
def _whole_or_not(out: Path) -> Iterator[Path]:
    """Yields a new folder beside `out`, which is renamed to `out` when the block ends, and deleted if it fails."""
    partial = out.absolute().with_name(f".{out.absolute().name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(out.absolute())
    finally:
        shutil.rmtree(partial, ignore_errors=True)
