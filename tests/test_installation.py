"""The installations: what the lists pin is what pyproject.toml allows and the contracts know; the Dockerfiles run the
commands of the Makefile, on a Python and with the system packages that those ask for. No network, no Docker."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests import licence_page
from tests.contracts.contract import contracts_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("cpu", "nf4", "demo", "dev"), "gpu": ("gpu", "nf4", "demo", "dev")}
DOCKERFILES = {"cpu": "docker/cpu.Dockerfile", "gpu": "docker/cuda.Dockerfile"}


def pinned(kind: str) -> dict[str, Version]:
    lines = (ROOT / "requirements" / f"{kind}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def wanted(kind: str) -> list[Requirement]:
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in EXTRAS[kind] for line in PROJECT["optional-dependencies"][extra]),
    ]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("kind", EXTRAS)
def test_a_list_pins_what_the_project_asks_for(kind: str) -> None:
    found = pinned(kind)
    makefile = (ROOT / "Makefile").read_text()
    if kind == "cpu":  # which the Makefile installs by itself
        (version,) = re.findall(r"^TORCH := torch==(.+)$", makefile, re.MULTILINE)
        found["torch"] = Version(version)
    for one in wanted(kind):
        assert found[canonicalize_name(one.name)] in one.specifier, one
    assert {"pip", "setuptools"} <= found.keys()


def test_the_cuda_list_is_of_versions_with_a_contract() -> None:
    found = pinned("gpu")
    for package in ("vllm", "torch", "ray", "bitsandbytes", "vllm-bnb-plugin", "liger-kernel"):
        assert str(found[package]) in [one.version for one in contracts_of(package)], package
    (vllm,) = [one for one in contracts_of("vllm") if one.version == str(found["vllm"])]
    for name, specifier in vllm.requires.items():
        assert found[canonicalize_name(name)] in Requirement(f"{name}{specifier}").specifier, name
    assert f"VLLM := vllm=={found['vllm']}\n" in (ROOT / "Makefile").read_text()


def commands(kind: str) -> list[list[str]]:
    """RUN and CMD of a Dockerfile that call make."""
    lines = (ROOT / DOCKERFILES[kind]).read_text().splitlines()
    run = [line.removeprefix("RUN ").split() for line in lines if line.startswith("RUN make")]
    (last,) = [re.findall(r'"(\S+?)"', line) for line in lines if line.startswith("CMD")]
    return [*run, last]


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_a_dockerfile_runs_what_the_makefile_has(kind: str) -> None:
    (first, last), text = commands(kind), (ROOT / DOCKERFILES[kind]).read_text()
    assert first == ["make", "setup", *(["GPU=1"] if kind == "gpu" else [])]
    for command in (first, last):
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not of `make test`
        told = subprocess.run([*command, "-n"], cwd=ROOT, capture_output=True, text=True, check=False, env=env)
        assert told.returncode == 0, told.stderr
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim", text, re.MULTILINE)
    assert Version(python) in Requirement(f"x{PROJECT['requires-python']}").specifier
    if kind == "gpu":
        assert f"for Python {python} " in (ROOT / "requirements" / "gpu.txt").read_text()
    assert re.search(r"apt-get install .* gcc .*\bmake\b", text)  # what `make setup` asks for
    hosts = re.findall(r"https?://\S+", text)
    assert hosts == []


def test_the_page_of_licences_is_of_what_is_pinned() -> None:
    assert licence_page.DOCUMENT.read_text() == licence_page.document(), "run python -m tests.licence_page"


def test_a_citation_names_the_version() -> None:
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


# What pip would take from PyPI, where the name without -rl is other people's.
THEIRS = re.compile(
    r"(?<![\w./-])gleaner(?:\[|[=<>~]=)|gleaner-\d+\.\d|\bpip3? install\b[^\n`&;|]*[\s'\"]gleaner(?![\w./-])"
)


def test_no_text_has_other_people_s_package_installed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {name: (ROOT / name).read_bytes().decode(errors="replace") for name in tracked.splitlines()}
    assert {name: found[0] for name, text in texts.items() if (found := THEIRS.search(text))} == {}
    assert any("gleaner-rl[" in text for text in texts.values())


@pytest.mark.parametrize(
    "words", ["pip install {}", "pip install -U '{}[wandb]'", "{}>=0.1", "needs {}[plan]", "{}-0.1.0.tar.gz"]
)
def test_such_a_text_is_seen(words: str) -> None:
    assert THEIRS.search(words.format("gleaner"))
    assert not THEIRS.search(words.format("gleaner-rl" if "tar" not in words else "gleaner_rl"))


def test_the_installed_command_is_of_the_distribution_that_the_code_looks_up() -> None:
    from learner.driver import process
    from learner.tools.cli import VERSIONS

    assert VERSIONS["gleaner"] == (PROJECT["name"],) == (process.OURS,) == ("gleaner-rl",)
