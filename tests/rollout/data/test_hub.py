"""Without a network, one quick try; with one, or where the hub is not needed, nothing changes."""

import os
import socket
import time
from pathlib import Path

import pytest

from rollout.data import model_files


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "")  # put back afterwards, also where settle() sets it
    for name in model_files.READERS:
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", False)


def offline() -> bool:
    return bool(os.environ.get("HF_HUB_OFFLINE"))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    model_files.settle(["org/model"])
    assert offline()
    assert constants.HF_HUB_OFFLINE is True


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "CONNECT_S", 0.3)

    def silent(*_: object, **__: object) -> None:
        time.sleep(30)
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", silent)
    begin = time.monotonic()
    model_files.settle(["model"])
    assert offline()
    assert time.monotonic() - begin < 25


def test_where_nothing_is_to_be_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        model_files.settle(["org/model"])
    assert not offline()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "org").mkdir()
    model_files.settle([None, "rg:chain_sum", "train.jsonl", "/a/b", "./a", str(tmp_path), "x/y/z"])
    assert not offline()
    monkeypatch.setenv("https_proxy", "http://proxy:8080")
    model_files.settle(["org/model"])
    assert not offline()


def test_name_and_revision_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = ("org/m", "b" * 250)
    for name, revision in (
        ("org/model", "main"),
        ("model", "refs/pr/1"),
        ("org/my-m.v2", "a@b"),
        ("org/m", None),
        long,
    ):
        assert model_files.split(model_files.joined(name, revision)) == (name, revision)
    monkeypatch.chdir(tmp_path)
    Path("here@v1").mkdir()
    for folder in ("here@v1", "/models@home/m", "./a@b", "~/a@b"):
        assert model_files.split(folder) == (folder, None)
