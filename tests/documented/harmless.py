"""Which documented commands must never run where tests do: they would change this environment, the machine, or what
others have on it."""

import re
from pathlib import PurePath

# They install, fetch, build, or end what belongs to others (`ray stop`: every Ray of the machine).
PROGRAMS = {
    "apt", "apt-get", "brew", "conda", "curl", "dnf", "docker", "dpkg", "git", "hf", "huggingface-cli", "kill", "make",
    "mamba", "npm", "npx", "pip", "pip3", "pipx", "pkill", "podman", "poetry", "ray", "snap", "source", "sudo", "uv",
    "uvx", "wget", "yum",
}  # fmt: skip
MODULES = {"ensurepip", "pip", "uv", "venv", "virtualenv"}  # behind `python -m`
PARTS = re.compile(r"&&|\|\||[;|()`]")


class Refused(AssertionError):
    """A command that is neither run nor declared."""


def check(command: str) -> None:
    """Raises Refused if the command must never run here."""
    if program := harm(command):
        raise Refused(
            f"{command}: {program} is not run in the environment of the tests; say in "
            "tests/documented/exceptions.yaml, under `not run`, why this command is not, or what runs it"
        )


def harm(command: str) -> str:
    """The program of the command that must not be run here, or ''."""
    return next(filter(None, map(_program, PARTS.split(command))), "")


def _program(part: str) -> str:
    """`part`: of a command line, with one program. Its name if it is one of those above."""
    words = part.split()
    while words and re.match(r"\w+=|(?:do|env|exec|export|nohup|then|time)$", words[0]):
        words = words[1:]
    if not words:
        return ""
    name = PurePath(words[0]).name
    if re.fullmatch(r"python[\d.]*", name) and "-m" in words[:-1]:
        name = words[words.index("-m") + 1]
        return name if name in MODULES else ""
    return name if name in PROGRAMS else ""
