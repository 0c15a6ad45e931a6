"""A GGUF file beside the weights, by llama.cpp's own convert_hf_to_gguf.py."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from learner.tools.export.errors import ExportError, ExportFailed
from learner.tools.export.source import Source
from rollout.data.model_files import read_json

SCRIPT = "convert_hf_to_gguf.py"
FOLDER = "LLAMA_CPP"  # environment variable
CLONE = "git clone https://github.com/ggml-org/llama.cpp"
LOOK_S = 120.0  # for the converter to start; it imports torch


def converter() -> list[str]:
    """The command that converts: the script in the folder that LLAMA_CPP names, in this Python, else the one on the
    PATH. Raises ExportError."""
    if folder := os.environ.get(FOLDER):
        script = Path(folder).expanduser() / SCRIPT
        if not script.is_file():
            raise ExportError(f"{FOLDER}: must be the folder of llama.cpp, got {folder}, without {SCRIPT}; {CLONE}")
        return [sys.executable, str(script)]
    if found := shutil.which(SCRIPT) or shutil.which(SCRIPT.removesuffix(".py")):
        return [found]
    raise ExportError(
        f"--gguf: needs {SCRIPT} of llama.cpp, which is not on the PATH; {CLONE}, and set {FOLDER} to that folder"
    )


def check_converter(command: Sequence[str], source: Source) -> None:
    """Whether it starts, and knows the architecture. Raises ExportError."""
    told = _called([*command, "--print-supported-models"], LOOK_S)
    if told.returncode:
        raise ExportError(f"--gguf: {command[-1]} does not start: {_last_line(told)}; install what it asks for")
    known, path = (told.stdout + told.stderr).split(), source.config.model.source
    for name in read_json(path, "config.json").get("architectures") or ():
        if name not in known:
            raise ExportError(
                f"--gguf: {command[-1]} does not know {name}, the architecture of {path}; take a newer llama.cpp, or "
                "leave --gguf out"
            )


def convert(command: Sequence[str], folder: Path, outtype: str) -> Path:
    """Writes NAME-OUTTYPE.gguf into the folder of merged weights. Raises ExportFailed."""
    file = folder / f"{folder.resolve().name}-{outtype}.gguf"
    whole = [*command, str(folder), "--outfile", str(file), "--outtype", outtype]
    told = _called(whole, None)
    if told.returncode or not file.is_file():
        file.unlink(missing_ok=True)
        raise ExportFailed(
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
