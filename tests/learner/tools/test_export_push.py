"""gleaner export --push-to: what goes to a hub, when, and what a hub that will not have it costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
from huggingface_hub import constants

from learner.tools.cli import main
from tests.learner.tools.exports import run_folder
from tests.learner.tools.fake_hub import FakeHub, fake_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


def test_a_verified_folder_is_uploaded_to_a_private_repository(
    tiny_path: str, tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_folder(tmp_path, tiny_path, None), tmp_path / "out"
    assert main(["export", str(run), str(out), "--adapter-only", "--push-to", "owner/name"]) == 0
    assert [(one["name"], one["organization"], one["visibility"]) for one in hub.created] == [
        ("name", "owner", "private")
    ]
    assert sorted(hub.files) == sorted(file.name for file in out.iterdir())
    assert f"hub      {hub.address}/owner/name" in capsys.readouterr().out
    assert "--lora-modules mine=owner/name" in (out / "README.md").read_text()


def test_what_is_not_verified_is_not_uploaded(
    tiny_path: str, tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skipped(self: Any, **_: Any) -> Any:
        return self.unload()

    monkeypatch.setattr(peft.PeftModel, "merge_and_unload", skipped, raising=False)
    run = run_folder(tmp_path, tiny_path, None)
    assert main(["export", str(run), str(tmp_path / "out"), "--push-to", "owner/name", "--public"]) == 1
    assert hub.asked == ["GET /api/whoami-v2"]


def test_a_hub_that_will_not_have_it_is_one_sentence_before_any_work(
    tiny_path: str, tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path, tiny_path, None)
    words = ["export", str(run), str(tmp_path / "out"), "--push-to", "owner/name"]
    hub.status = 401
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --push-to: the hub does not take the login: ")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: --push-to: 127.0.0.1 cannot be reached within 4 s; try again when it can be reached, or leave "
        "--push-to out"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine"]
