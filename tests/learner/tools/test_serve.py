"""gleaner serve: what vLLM is told, and a real server that a real client asks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
import yaml

from examples.random_families import make_family
from learner.driver.config_io import ConfigError
from learner.tools.serve import serve, server_command

ROOT = Path(__file__).parents[3]


def run_folder(folder: Path, model: str, **learner: object) -> Path:
    folder.mkdir()
    tree = {"model": {"path": model}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "number"}], "learner": learner}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def write_adapter(folder: Path, targets: list[str]) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"target_modules": targets}))


def test_an_adapter_of_a_model_with_experts_is_for_a_card(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", str(make_family(tmp_path / "base", "qwen3_moe")))
    write_adapter(run / "adapter", ["q_proj"])
    with pytest.raises(ConfigError, match=f"RUN: on a CPU .* merge it .gleaner export {run} OUT., then python -m vllm"):
        server_command(run, "127.0.0.1", 1, [])


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [("127.0.0.1", None, "in use"), ("127.0.0.1", 70000, "0-65535"), ("192.0.2.1", 8000, "Cannot assign")],
)
def test_an_address_that_cannot_be_had_is_said_before_vllm_starts(
    tmp_path: Path, host: str, port: int | None, why: str
) -> None:
    run = run_folder(tmp_path / "mine", "hub/name")
    write_adapter(run / "adapter", ["q_proj"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        asked = port or taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^--host, --port: .* got {host}:{asked} .*{why}.*; give"):
            serve(run, host, asked, [])


def test_what_the_server_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RUN: must be a run folder such as .*, got .*nothing; check the path"):
        server_command(tmp_path / "nothing", "127.0.0.1", 1, [])
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=f"got {tmp_path}; a model is served by: vllm serve {tmp_path}$"):
        server_command(tmp_path, "127.0.0.1", 1, [])
    run = run_folder(tmp_path / "mine", "hub/name", lora={"rank": 32})
    with pytest.raises(ConfigError, match="mine has neither adapter/ nor model/ before its first checkpoint"):
        server_command(run, "127.0.0.1", 1, [])
    write_adapter(run / "adapter", ["model.layers.0.self_attn.q_proj", "o_proj", "q_proj"])
    command = " ".join(server_command(run, "::1", 8123, ["--max-model-len", "64"]))
    assert " --host ::1 --port 8123 --model hub/name --enable-lora --max-lora-rank 32 --lora-target-modules " in command
    assert f" --lora-target-modules o_proj q_proj --lora-modules mine={run}/adapter --dtype bfloat16 " in command
    assert command.endswith(" --max-model-len 64")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["revision"] = "v1"
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    command = " ".join(server_command(run, "::1", 8123, []))
    assert " --revision v1 --tokenizer-revision v1 --lora-target-modules " in command
    write_adapter(run / "adapter" / "vllm", ["gate_proj"])
    assert f" --lora-target-modules gate_proj --lora-modules mine={run}/adapter/vllm " in " ".join(
        server_command(run, "::1", 8123, [])
    )
    whole = run_folder(tmp_path / "whole", "hub/name", mode="full")
    (whole / "model").mkdir()
    command = " ".join(server_command(whole, "127.0.0.1", 8123, []))
    assert f" --model {whole}/model --served-model-name whole " in command
    assert "lora" not in command


def test_a_client_is_answered_by_the_adapter(tiny_path: str, adapter_path: str, tmp_path: Path) -> None:
    """Greedy tokens of the base and of the adapter differ, and the server has both. The base is asked first: then no
    LoRA layer has asked Linux for AMX."""
    run = run_folder(tmp_path / "mine", tiny_path)
    shutil.copytree(adapter_path, run / "adapter")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "learner.tools.cli", "serve", str(run), "--port", str(port)]
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ) as server:
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            deadline = time.monotonic() + 240
            while True:
                assert server.poll() is None, Path(log.name).read_text()[-3000:]
                assert time.monotonic() < deadline
                try:
                    names = {model.id for model in client.models.list()}
                    break
                except openai.APIConnectionError:
                    time.sleep(0.2)
            assert names == {"mine", tiny_path}
            ask = client.completions.create
            base, learned = (
                ask(model=name, prompt=[5, 6, 7], max_tokens=8, temperature=0).choices[0].text
                for name in (tiny_path, "mine")
            )
            assert learned != base
        finally:
            server.terminate()
