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
from typing import Any

import httpx
import openai
import peft
import pytest
import torch
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.errors import WrongInput
from examples.quantised_checkpoints import make_quantised
from examples.random_families import make_family
from examples.random_towers import make_checkpoint
from learner.tools import server
from learner.tools.served_stops import TrainingStops
from learner.tools.server import serve, server_of

ROOT = Path(__file__).parents[3]


def run_folder(folder: Path, model: str, rollout: dict[str, object] | None = None, **learner: object) -> Path:
    folder.mkdir()
    tree = {
        "model": {"path": model, "dtype": "float32"},
        "data": {"path": "d.jsonl"},
        "rewards": [{"use": "number"}],
        "learner": learner,
    }
    tree["rollout"] = rollout or {}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def write_adapter(folder: Path, targets: list[str]) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"target_modules": targets}))


def test_an_adapter_of_a_model_with_experts_is_for_a_card(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", str(make_family(tmp_path / "base", "qwen3_moe")))
    write_adapter(run / "adapter", ["q_proj"])
    with pytest.raises(
        WrongInput, match=f"RUN: on a CPU .* has them; merge the adapter .gleaner export {run} OUT., then python"
    ):
        server_of(run, "127.0.0.1", 1, [])


def test_an_adapter_of_a_quantised_model_is_for_a_card(tmp_path: Path) -> None:
    make_quantised(tmp_path / "base", "gptq", layers=1)
    run = run_folder(tmp_path / "mine", str(tmp_path / "base"))
    write_adapter(run / "adapter", ["q_proj"])
    with pytest.raises(
        WrongInput, match=f"RUN: on a CPU .* are quantised; merge the adapter .gleaner export {run} OUT., then python"
    ):
        server_of(run, "127.0.0.1", 1, [])


def test_an_adapter_of_a_text_part_is_served_without_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "mine", str(make_checkpoint(tmp_path / "base", "gemma3")))
    write_adapter(run / "adapter", ["q_proj"])
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(WrongInput, match=r"RUN: on a CPU .* beside torchvision: install its CPU build .*; merge the"):
        server_of(run, "127.0.0.1", 1, [])
    monkeypatch.setattr(server, "_on_cpu", lambda: False)
    assert "--language-model-only" in server_of(run, "127.0.0.1", 1, []).command


def test_a_checkpoint_of_which_vllm_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own class of GLM-4V; that of its text part, as a run and a merged export have it, is right."""
    run = run_folder(tmp_path / "mine", str(make_checkpoint(tmp_path / "base", "glm4v")))
    write_adapter(run / "adapter", ["q_proj"])
    monkeypatch.setattr(server, "_on_cpu", lambda: False)
    with pytest.raises(WrongInput, match=f"^RUN: vLLM's class of the whole GLM-4V .* merge the adapter .* {run} OUT"):
        server_of(run, "127.0.0.1", 1, [])


def test_adapted_experts_are_served_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "mine", str(make_family(tmp_path / "base", "qwen3_moe")))
    write_adapter(run / "adapter", ["q_proj"])
    content = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(content))
    monkeypatch.setattr(server, "_on_cpu", lambda: False)
    with pytest.raises(WrongInput, match="^RUN: must leave the experts as they are, .* adapts them; merge it "):
        server_of(run, "127.0.0.1", 1, [])


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
        with pytest.raises(WrongInput, match=f"^--host, --port: .* got {host}:{asked} .*{why}.*; give"):
            serve(run, host, asked, [])


def test_what_the_server_is_told(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="RUN: must be a run folder such as .*, got .*nothing; check the path"):
        server_of(tmp_path / "nothing", "127.0.0.1", 1, [])
    (tmp_path / "config.json").touch()
    with pytest.raises(WrongInput, match=f"got {tmp_path}; a model is served by: vllm serve {tmp_path}$"):
        server_of(tmp_path, "127.0.0.1", 1, [])
    run = run_folder(tmp_path / "mine", "hub/name", lora={"rank": 32})
    with pytest.raises(WrongInput, match="mine has neither adapter/ nor model/ before its first checkpoint"):
        server_of(run, "127.0.0.1", 1, [])
    write_adapter(run / "adapter", ["model.layers.0.self_attn.q_proj", "o_proj", "q_proj"])
    command = " ".join(server_of(run, "::1", 8123, ["--max-model-len", "64"]).command)
    assert " --host ::1 --port 8123 --model hub/name --enable-lora --max-lora-rank 32 --lora-target-modules " in command
    assert f" --lora-target-modules o_proj q_proj --lora-modules mine={run}/adapter --dtype float32 " in command
    assert command.endswith(" --max-model-len 64")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["revision"] = "v1"
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    command = " ".join(server_of(run, "::1", 8123, []).command)
    assert " --revision v1 --tokenizer-revision v1 --lora-target-modules " in command
    write_adapter(run / "adapter" / "vllm", ["gate_proj"])
    assert f" --lora-target-modules gate_proj --lora-modules mine={run}/adapter/vllm " in " ".join(
        server_of(run, "::1", 8123, []).command
    )
    whole = run_folder(tmp_path / "whole", "hub/name", mode="full")
    (whole / "model").mkdir()
    command = " ".join(server_of(whole, "127.0.0.1", 8123, []).command)
    assert f" --model {whole}/model --served-model-name whole " in command
    assert "lora" not in command


def with_advice(tiny_path: str, folder: Path, **advice: object) -> str:
    """The model, whose generation_config.json has advice of its own."""
    model = shutil.copytree(tiny_path, folder)
    own = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(own | advice))
    return str(model)


def test_requests_are_sampled_as_the_training_was_and_not_as_the_base_advises(tiny_path: str, tmp_path: Path) -> None:
    model = with_advice(
        tiny_path, tmp_path / "base", repetition_penalty=1.6, temperature=0.3, max_new_tokens=5, top_k=3
    )
    run = run_folder(tmp_path / "mine", model, {"temperature": 0.8, "stop": ["</answer>", "<|endoftext|>"]})
    write_adapter(run / "adapter", ["q_proj"])
    server = server_of(run, "127.0.0.1", 1, ["--generation-config", "auto"])
    assert server.command[-2:] == ["--generation-config", "auto"]  # the user's own counts, being last
    assert server.command[server.command.index("--generation-config") + 1] == str(run)
    written = json.loads((run / "generation_config.json").read_text())
    assert {name: written[name] for name in ("temperature", "top_p", "top_k", "do_sample")} == {
        "temperature": 0.8, "top_p": 1.0, "top_k": 0, "do_sample": True
    }  # fmt: skip
    assert written["eos_token_id"] == [258, 256]
    assert not {"repetition_penalty", "max_new_tokens"} & set(written)
    assert server.command[server.command.index("--middleware") + 1] == "learner.tools.served_stops.TrainingStops"
    assert json.loads(server.environment["GLEANER_STOP"]) == ["</answer>"]
    assert server.notes[0].startswith(
        "sampled as in training unless a request says otherwise: temperature 0.8, the whole distribution, no"
    )
    formed = run_folder(tmp_path / "formed", model, {"structured_outputs": {"choice": ["yes", "no"]}})
    write_adapter(formed / "adapter", ["q_proj"])
    assert (
        '(in training of the form {"choice": ["yes", "no"]}, which a request must ask for)'
        in server_of(formed, "127.0.0.1", 1, []).notes[0]
    )
    plain = run_folder(tmp_path / "plain", model)
    write_adapter(plain / "adapter", ["q_proj"])
    (plain / "generation_config.json").mkdir()  # as one that this user may not write
    elsewhere = server_of(plain, "127.0.0.1", 1, [])
    folder = Path(elsewhere.command[elsewhere.command.index("--generation-config") + 1])
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 1.0
    assert ("--middleware" in elsewhere.command, elsewhere.environment) == (False, {})
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("path", "asked", "given"),
    [
        ("/v1/completions", {"prompt": "a"}, {"stop": ["</a>"], "include_stop_str_in_output": True}),
        ("/v1/chat/completions", {"stop": []}, {"stop": ["</a>"], "include_stop_str_in_output": True}),
        ("/v1/chat/completions", {"stop": "x", "n": 2}, {}),
        ("/v1/chat/completions/batch", {"n": 1}, {"stop": ["</a>"], "include_stop_str_in_output": True}),
        ("/v1/responses", {"input": "a"}, {"stop": ["</a>"], "include_stop_str_in_output": True}),
        ("/v1/completions", {"include_stop_str_in_output": False}, {"stop": ["</a>"]}),
        ("/v1/messages", {"stop_sequences": None}, {"stop_sequences": ["</a>"]}),
        ("/v1/models", {"prompt": "a"}, {}),
    ],
)
async def test_requests_without_stop_strings_get_those_of_the_training(
    path: str, asked: dict[str, object], given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLEANER_STOP", '["</a>"]')

    async def echo(request: Request) -> Response:
        return Response(await request.body(), headers={"length": request.headers["content-length"]})

    app = TrainingStops(Starlette(routes=[Route(path, echo, methods=["POST"])]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        answer = await client.post(path, json=asked)
        assert answer.json() == asked | given
        assert int(answer.headers["length"]) == len(answer.content)
        bad = await client.post(path, content=b"{no json")
        assert bad.content == b"{no json"


def ending_of(model: str, adapter: str) -> str:
    """A letter of what the adapter says greedily to 5, 6, 7, neither its first nor its last."""
    lm: Any = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype="float32"), adapter)
    said = lm.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    text = str(AutoTokenizer.from_pretrained(model).decode(said[0, 3:], skip_special_tokens=True))
    return next(letter for letter in text[4:] if letter.isascii() and letter.isprintable())


@pytest.mark.long
def test_a_client_is_answered_by_the_adapter(tiny_path: str, adapter_path: str, tmp_path: Path) -> None:
    """Greedy tokens of the base and of the adapter differ, and the server has both. The base is asked first: then no
    LoRA layer has asked Linux for AMX. A penalty that the base advises is none of the training's, and its stop strings
    end what asks for no others."""
    model = with_advice(tiny_path, tmp_path / "base", repetition_penalty=1.6)
    end = ending_of(tiny_path, adapter_path)
    run = run_folder(tmp_path / "mine", model, {"stop": [end, "never a", "never b", "never c", "never d"]})
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
            assert names == {"mine", model}
            ask = client.completions.create
            base, learned = (
                ask(model=name, prompt=[5, 6, 7], max_tokens=8, temperature=0).choices[0].text
                for name in (model, "mine")
            )
            assert learned != base
            plain, penal = (
                ask(
                    model="mine", prompt=[5, 6, 7], max_tokens=24, temperature=0, stop=["never"],
                    extra_body={"repetition_penalty": penalty},
                ).choices[0].text
                for penalty in (1.0, 1.6)
            )  # fmt: skip
            none = ask(model="mine", prompt=[5, 6, 7], max_tokens=24, temperature=0, stop=["never"]).choices[0].text
            assert (none == plain, none == penal) == (True, False)
            ended = ask(model="mine", prompt=[5, 6, 7], max_tokens=24, temperature=0).choices[0]
            assert (ended.finish_reason, ended.text) == ("stop", plain[: plain.index(end) + 1])
        finally:
            server.terminate()
