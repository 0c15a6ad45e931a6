"""The wheel, made from the sdist, in an environment of its own, whose other packages are those of the tests. The
installations: what the lists pin is what pyproject.toml allows and the contracts know; the Dockerfiles run the
commands of the Makefile, on a Python and with the system packages that those ask for. No network, no Docker. What uv
is told of pip's configuration, from what pip itself prints of one. `import gleaner` is what `learner` has for
Python, whatever files lie beside the script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import gleaner
import learner
from learner.tools.cli import VERSIONS
from tests import licence_page
from tests.contracts.contract import contracts_of

ROOT = Path(__file__).parents[1]
OURS = ("cluster/", "gleaner/", "learner/", "rewards/", "rollout/")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")


def told(*words: str | Path, cwd: Path, code: int = 0) -> str:
    """What a command says, without our sources on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    told(sys.executable, "-c", build, folder, cwd=ROOT)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    told(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", sdist.parent, sdist, cwd=sdist.parent)
    (file,) = sdist.parent.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """The folder of its programs."""
    folder = wheel.parent / "env"
    venv.create(folder, symlinks=True)
    told(*PIP, "--python", folder, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.mark.long
def test_the_sdist_is_the_repository_and_the_wheel_its_packages(sdist: Path, wheel: Path) -> None:
    tracked = set(told("git", "ls-files", cwd=ROOT).splitlines())
    with tarfile.open(sdist) as files:
        held = {file.name.partition("/")[2] for file in files.getmembers() if file.isfile()}
    assert tracked - held == set()
    with zipfile.ZipFile(wheel) as packed:
        installed = {name for name in packed.namelist() if not name.startswith("gleaner_rl-")}
    assert {name for name in tracked if name.startswith(OURS)} - installed == set()


@pytest.mark.long
def test_the_commands_before_a_first_run(environment: Path, tmp_path: Path) -> None:
    """`make package` goes on to the run itself, with dependencies that pip has chosen."""
    gleaner = environment / "gleaner"
    assert [line.split()[0] for line in told(gleaner, "--version", cwd=tmp_path).splitlines()] == [*VERSIONS]
    version = "import gleaner; print(gleaner.__version__, gleaner.train.__module__)"
    assert told(environment / "python", "-c", version, cwd=tmp_path) == "0.1.0 learner.api.calls\n"
    told(gleaner, "init", "first", cwd=tmp_path)
    assert f'path: "{environment.parent}' in (tmp_path / "first" / "config.yaml").read_text()
    assert "cluster:" in told(gleaner, "plan", "--gpu", "24", "--model", "meta-llama/Llama-3.2-1B", cwd=tmp_path)
    assert "docs/trl.md says" in told(gleaner, "train", "num_generations=8", cwd=tmp_path, code=2)


def test_somebody_else_s_package_of_our_name_is_named(environment: Path, tmp_path: Path) -> None:
    gleaner = environment / "gleaner"
    (tmp_path / "rewards.py").write_text("")  # the user's, which no process takes for ours
    assert "cluster:" in told(gleaner, "plan", "--gpu", "24", "--model", "meta-llama/Llama-3.2-1B", cwd=tmp_path)
    info = "shop_rewards-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "shop_rewards-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("rewards/__init__.py", "POINTS = 3\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: shop-rewards\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"rewards/__init__.py,,\n{info}/RECORD,,\n")
    install = [*PIP, "--python", str(environment.parent), "install", "--no-deps", "--no-index"]
    told(*install, "shop_rewards-1.0-py3-none-any.whl", cwd=tmp_path)
    said = told(gleaner, "--version", cwd=tmp_path, code=2)
    assert "rewards/__init__.py is the distribution shop-rewards's, installed over gleaner's package rewards" in said


# The installations: what the lists pin is what pyproject.toml allows and the contracts know; the Dockerfiles run the
# commands of the Makefile, on a Python and with the system packages that those ask for. No network, no Docker.

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


# What uv is told of pip's configuration, from what pip itself prints of one.

SCRIPT = Path(__file__).parents[1] / "requirements" / "uv_settings.py"


def test_it_is_told_where_pip_looks(tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    several = "extra-index-url = https://b\n  https://c\ntimeout = 9\n"
    file.write_text(f"[global]\nindex-url = https://a/simple\n{several}[wheel]\nindex-url = https://d\n")
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True,
        env=others | {"PIP_CONFIG_FILE": str(file), "PIP_FIND_LINKS": "/x /y"},
    ).stdout  # fmt: skip
    found = subprocess.run([sys.executable, SCRIPT], input=told, capture_output=True, text=True, check=True).stdout
    wanted = {"UV_DEFAULT_INDEX=https://a/simple", "UV_INDEX=https://b https://c", "UV_FIND_LINKS=/x,/y"}
    assert wanted <= set(found.splitlines())
    assert "timeout" not in found


# `import gleaner` is what `learner` has for Python, whatever files lie beside the script.

IMPORT_GLEANER_SCRIPT = """
import gleaner, sys
heavy = [name for name in ("torch", "ray", "vllm", "yaml", "pyarrow") if name in sys.modules]
from gleaner import evaluate, plan, train
print(heavy, *[one.__module__ for one in (train, evaluate, plan)])
"""


def test_it_has_what_learner_has() -> None:
    for name in learner.HOMES:
        assert getattr(gleaner, name) is getattr(learner, name)
    assert {*learner.HOMES, "__version__"} <= set(dir(gleaner))
    assert gleaner.__version__
    for module in (gleaner, learner):
        with pytest.raises(AttributeError, match="has no attribute 'trian'; it has InputError, "):
            module.trian  # noqa: B018


@pytest.mark.parametrize(
    "program", [["script.py"], ["-c", IMPORT_GLEANER_SCRIPT]]
)  # the latter has '' on its path, as a notebook
def test_beside_files_of_our_names(program: list[str], tmp_path: Path) -> None:
    for name in ("cluster", "learner", "rewards", "rollout"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    (tmp_path / "script.py").write_text(IMPORT_GLEANER_SCRIPT)
    assert import_gleaner_told(program, tmp_path) == "[] learner.api.calls learner.api.calls learner.api.calls"


NAMES = ("cluster", "learner", "rewards", "rollout")
ORDERS = {
    "theirs first": "from {name} import mine\nimport gleaner",
    "ours first": "import gleaner\nfrom {name} import mine",
    "both": "import {name}\nmine = {name}.mine\nimport gleaner\nfrom {name} import mine as same\nassert same is mine",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_users_module_of_that_name_has(name: str, order: str, tmp_path: Path) -> None:
    """In whatever order, and gleaner has its own; it is sent to another process as other functions are."""
    place = tmp_path / (f"{name}.py" if order != "both" else f"{name}/__init__.py")
    place.parent.mkdir(exist_ok=True)
    place.write_text("ONE = 1\ndef mine():\n    return ONE\n")
    send = (
        "from rewards.functions import pack\nfrom pathlib import Path\n"
        "Path('f.pickle').write_bytes(pack(mine).content)\nprint(gleaner.train.__module__, mine())\n"
    )
    assert import_gleaner_told(["-c", f"{ORDERS[order].format(name=name)}\n{send}"], tmp_path) == "learner.api.calls 1"
    load = (
        "from rewards import functions\nfrom pathlib import Path\nprint(functions.load_pickled(Path('../f.pickle'))())"
    )
    (tmp_path / "elsewhere").mkdir()
    assert import_gleaner_told(["-c", load], tmp_path / "elsewhere") == "1"


@pytest.mark.parametrize("name", NAMES)
def test_what_it_has_not_is_not_found(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("def mine(): ...")
    code = f"import gleaner\nfrom {name} import yours"
    assert "cannot import name 'yours' from" in import_gleaner_told(["-c", code], tmp_path, code=1)


def import_gleaner_told(program: list[str], folder: Path, code: int = 0) -> str:
    """The last line that it prints."""
    ran = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return (ran.stdout + ran.stderr).splitlines()[-1]
