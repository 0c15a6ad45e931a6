"""The hub's cache as huggingface_hub lays it out, with a model of several commits: made on the spot, read without a
hub."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.random_model import make_tiny_model

NAME = "org/tiny"
SEEDS = {"old": 1, "main": 2}  # of the weights of a branch


def write(cache: Path, name: str, branches: Mapping[str, Path]) -> dict[str, str]:
    """Branch -> its commit, from branch -> the folder that it holds."""
    root = cache / f"models--{name.replace('/', '--')}"
    for part in ("blobs", "refs"):
        (root / part).mkdir(parents=True)
    commits = {branch: hashlib.sha1(f"{name} {branch}".encode()).hexdigest() for branch in branches}
    for branch, folder in branches.items():
        (root / "refs" / branch).write_text(commits[branch])
        snapshot = root / "snapshots" / commits[branch]
        snapshot.mkdir(parents=True)
        for file in folder.iterdir():
            content = file.read_bytes()
            blob = root / "blobs" / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return commits


def two_commits(cache: Path, folder: Path) -> dict[str, str]:
    """Commits of the branches old and main of NAME, which differ in their weights, their context and their template."""
    models = {
        branch: make_tiny_model(folder / branch, seed=seed, max_length=256 * seed) for branch, seed in SEEDS.items()
    }
    template = models["old"] / "chat_template.jinja"
    template.write_text("{# old #}" + template.read_text())
    return write(cache, NAME, models)


def use(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process, in which the library has read its environment already, and for those that it starts."""
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
