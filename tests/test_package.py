"""The wheel, made from the sdist, in an environment of its own, whose other packages are those of the tests."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from learner.tools.cli import VERSIONS

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
