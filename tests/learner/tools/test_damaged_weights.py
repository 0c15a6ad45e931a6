"""Every command that reads weights refuses, by name, those that are not whole, and starts and writes nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from cluster.files import digests_in
from examples.random_families import make_family
from learner.config.load import load_config
from learner.driver import checkpoint
from learner.tools.cli import main
from learner.tools.server import server_of
from tests.learner.tools.exports import STEP
from tests.rollout.data.test_weight_names import Change, changed, having, without

NORM = "model.norm.weight"
SHORT = ["rollout.max_completion_length=64"]  # the tiny model has a context of 512
DAMAGES: dict[str, tuple[Change, str]] = {
    "lost": (without("model.layers.0.mlp.up_proj.weight"), "lacks 1 tensor .*: model.layers.0.mlp.up_proj.weight;"),
    "no numbers": (having(model__norm__weight=torch.full((64,), -torch.inf)), "in 1 tensor: model.norm.weight;"),
}


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, tiny_path: str, tmp_path: Path) -> tuple[Path, str]:
    change, message = DAMAGES[request.param]
    return changed(Path(shutil.copytree(tiny_path, tmp_path / "damaged")), change), message


def refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert re.search(message, said[0]), said


def test_of_a_base(
    damaged: tuple[Path, str], made: Path, adapter_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, message = damaged
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    run = tmp_path / "mine"
    shutil.copytree(made, run)
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["model"]["path"] = str(base)
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(adapter_path, run / "adapter", dirs_exist_ok=True)
    data, out = ["--data", "rg:chain_sum", "--limit", "2", *SHORT], str(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    for words, key in (
        (["eval", "--model", str(base), *data, "--reward", "format"], "model.path"),
        (["export", str(run), out, "--model", str(base)], "model.path"),
        (["serve", str(run), "--port", "0"], "model.path"),
        (["reward-model", "train", str(tmp_path / "pairs.jsonl"), "--model", str(base), "--out", out], "--model"),
    ):
        refused(words, f"^error: {key}: {base} .*{message}", capsys)
        assert sorted(tmp_path.rglob("*")) == before


def test_of_an_adapter(made: Path, tiny_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "mine"
    shutil.copytree(made, run)
    folder = run / "checkpoints" / checkpoint.name_of(STEP)
    file = folder / "trainer" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file(tensors | {name: tensors[name] * torch.nan}, file)
    (folder / checkpoint.MANIFEST).unlink()
    (folder / checkpoint.MANIFEST).write_text(json.dumps({"step": STEP, "files": digests_in(folder)}))
    shutil.copytree(folder / "trainer", run / "adapter", dirs_exist_ok=True)
    message, out = f"not finite .nan or inf. in 1 tensor: {name};", str(tmp_path / "out")
    data = ["--data", "rg:chain_sum", "--limit", "2", "--reward", "format", *SHORT]
    refused(["export", str(run), out], f"^error: RUN: .*{message}", capsys)
    refused(["export", str(run), out, "--adapter-only"], f"^error: RUN: .*{message}", capsys)
    refused(["serve", str(run), "--port", "0"], f"^error: RUN: .*{message}", capsys)
    words = ["eval", "--model", tiny_path, "--adapter", str(run / "adapter"), *data]
    refused(words, f"^error: --adapter: .*{message}", capsys)
    assert not Path(out).exists()


def test_the_server_of_a_model_that_transformers_knows_asks_it(made: Path, tmp_path: Path) -> None:
    """What the server itself then says of it: tests/rollout/data/test_weight_names.py."""
    run = tmp_path / "mine"
    shutil.copytree(made, run)
    shutil.copytree(run / "checkpoints" / checkpoint.name_of(STEP) / "trainer", run / "adapter", dirs_exist_ok=True)
    assert "vllm.entrypoints.openai.api_server" in server_of(run, "127.0.0.1", 1, []).command
    content = load_config(str(run / "config.yaml"), []).model_dump(mode="json")
    content["model"]["path"] = str(make_family(tmp_path / "granite", "granite"))
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    command = server_of(run, "127.0.0.1", 1, []).command
    assert command[2:5] == ["-m", "rollout.vllm.served", str(tmp_path / "granite")]
