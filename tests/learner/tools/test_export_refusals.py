"""What gleaner export refuses, in one sentence each, and that nothing is left behind."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.files import digests_in
from learner.driver import checkpoint
from learner.tools.cli import main
from learner.tools.export import command, source
from learner.tools.export.source import Window
from tests.learner.tools.exports import STEP

STEP_FOLDER = f"checkpoints/{checkpoint.name_of(STEP)}"


def nothing(run: Path) -> None: ...


def cut(run: Path) -> None:
    file = run / STEP_FOLDER / "trainer" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def of_another_version(run: Path) -> None:
    file = run / STEP_FOLDER / "config.json"
    file.write_text(file.read_text().replace('"seed":0', '"sead":0'))
    _seal(run)


def without_config(run: Path) -> None:
    (run / STEP_FOLDER / "trainer" / "adapter_config.json").unlink()
    _seal(run)


def _seal(run: Path) -> None:
    manifest = run / STEP_FOLDER / checkpoint.MANIFEST
    manifest.unlink()
    manifest.write_text(json.dumps({"step": STEP, "files": digests_in(run / STEP_FOLDER)}))


def of_another_base(run: Path) -> None:
    file = run / STEP_FOLDER / "inputs.json"
    inputs = json.loads(file.read_text())
    inputs["base"]["model.safetensors"] = "f" * 64
    file.write_text(json.dumps(inputs))
    _seal(run)


def taken(run: Path) -> None:
    (run.parent / "out" / "mine").mkdir(parents=True)


def linked(run: Path) -> None:
    (run.parent / "elsewhere").mkdir()
    (run.parent / "out").symlink_to(run.parent / "elsewhere")


REFUSED: list[tuple[Callable[[Path], object], list[str], str]] = [
    (lambda run: (run / "config.yaml").unlink(), [], "RUN: must be a run folder such as .*; check the path$"),
    (lambda run: shutil.rmtree(run / "checkpoints"), [], "RUN: .* has no checkpoint yet; wait for its first"),
    (cut, [], r"RUN: no checkpoint in .* is whole \(step-000008: trainer/adapter_model.safetensors has .* bytes"),
    (cut, ["--step", "8"], "--step: .*step-000008 is not whole .*; give another step"),
    (nothing, ["--step", "4"], r"--step: must be one whose checkpoint is kept \(8\), got 4; raise checkpoint.keep"),
    (of_another_version, [], r"another version of gleaner, .* cannot read all \(sead: unknown key.*go on with the run"),
    (without_config, [], "holds no adapter_config.json, as those of an older version of gleaner"),
    (of_another_base, [], "model.path: .* must be the base that .*, and has another model.safetensors; put the same"),
    (taken, [], "OUT: must be a new or empty folder, and .*/out is not; give another"),
    (linked, [], "OUT: must be a folder that can be made, and .*/out is a link or a mount; give .*/out/NAME"),
    (nothing, ["--adapter-only", "--dtype", "float32"], "--dtype: is for merged weights and does not go with --ad"),
    (nothing, ["--adapter-only", "--gguf"], "--gguf: is for merged weights and does not go with --adapter-only"),
    (nothing, ["--outtype", "f16"], "--outtype: goes with --gguf, which is not given"),
    (nothing, ["--public"], "--public: goes with --push-to, which is not given"),
    (nothing, ["--scores", "absent.json"], "--scores: must be a file of what gleaner eval --json printed, got absent"),
    (nothing, ["--push-to", "mine"], "--push-to: must be OWNER/NAME, got mine; put your name"),
    (nothing, ["--push-to", "a/b c"], "--push-to: must be OWNER/NAME, got a/b c: Repo id must"),
    (nothing, ["--push-to", "a/b"], "--push-to: the hub is switched off by HF_HUB_OFFLINE; unset it"),
    (nothing, ["--gguf"], "LLAMA_CPP: must be the folder of llama.cpp, got .*, without convert_hf_to_gguf.py; git"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "options", "told"), REFUSED)
def test_what_is_wrong_is_one_sentence_before_anything_is_written(
    made: Path, tmp_path: Path, change: Callable[[Path], object], options: list[str], told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    run = tmp_path / "mine"
    shutil.copytree(made, run)
    change(run)
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(run), str(tmp_path / "out"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(told, line)
    assert sorted(tmp_path.rglob("*")) == before


def test_too_little_room_is_told_in_bytes(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(made), str(tmp_path / "out")]
    monkeypatch.setattr(source, "available_memory", lambda: 2**20)
    assert main(words) == 2
    assert "merging in float32 needs 1.9 GiB of memory, 1 MiB are free; give --adapter-only" in capsys.readouterr().err
    monkeypatch.setattr(source, "available_memory", lambda: 2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20))
    assert main(words) == 2
    assert f"OUT: needs 48 MiB on the disk of {tmp_path}, which has 1 MiB left" in capsys.readouterr().err


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_named(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "mine"
    shutil.copytree(made, run)

    def pruned(*_: object) -> list[Window]:
        shutil.rmtree(run / STEP_FOLDER)
        return []

    monkeypatch.setattr(command, "recorded", pruned)
    assert main(["export", str(run), str(tmp_path / "out")]) == 1
    assert "RUN: step-000008 was deleted meanwhile, as the run went on" in capsys.readouterr().err


def test_a_disk_that_is_full_meanwhile_is_one_sentence(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # bytes of a file
    try:
        assert main(["export", str(made), str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "Loading weights" not in one]
    assert line.startswith(f"error: OUT: {tmp_path} does not take the weights: ")
    assert list(tmp_path.iterdir()) == []
