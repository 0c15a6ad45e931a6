"""gleaner export: what it writes is what was learned, and a fault of it is noticed. gleaner export --push-to: what
goes to a hub, when, and what a hub that will not have it costs. Each thing that an export is refused for, by itself.
What gleaner export refuses, in one sentence each, and that nothing is left behind.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import peft
import pyarrow as pa
import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.files import digests_in
from examples.quantised_checkpoints import make_quantised
from examples.random_families import make_family
from learner.config.settings import LoraConfig
from learner.driver import checkpoint
from learner.driver.checkpoint import name_of
from learner.driver.failure import RunEnded
from learner.tools.cli import main
from learner.tools.export import command, source
from learner.tools.export.card import shortened
from learner.tools.export.source import Proof, Said, Window, check, compare
from rollout.data.model_files import WEIGHTS_FILE
from tests.learner.tools.exports import STEP, run_folder
from tests.learner.tools.fake_hub import FakeHub, fake_hub

# gleaner export --push-to: what goes to a hub, when, and what a hub that will not have it costs.


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


# Each thing that an export is refused for, by itself.

GOOD = Proof("bfloat16", tokens=9, recorded=True, moved=0.2, rms=0.05, worst=0.5, greedy=8, flipped=0)


def test_what_is_within_passes() -> None:
    check(GOOD)
    check(replace(GOOD, moved=None, rms=0.1, worst=1.0))
    check(replace(GOOD, dtype="float32", moved=1e-5, rms=1e-4, worst=1e-3))  # nothing was learned that could be lost


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"rms": 0.11, "moved": 9.0}, "must say what the adapter says"),
        ({"worst": 1.1}, "must say what the adapter says"),
        ({"flipped": 1}, "with 1 other greedy tokens"),
        ({"rms": nan}, "must say what the adapter says"),
        ({"worst": nan}, "must say what the adapter says"),
        ({"rms": 0.02, "dtype": "float32"}, "must say what the adapter says, within 0.0001 nats rms"),
        ({"moved": 0.09}, "rounding takes away 0.05 nats rms of the 0.09"),
    ],
)
def test_each_fault_alone_is_refused(fault: dict[str, float], told: str) -> None:
    with pytest.raises(RunEnded, match=told):
        check(replace(GOOD, **fault))  # type: ignore[arg-type]


def test_another_likeliest_token_counts_where_it_was_not_about_as_likely() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    expected = Said(logprobs, torch.tensor([4, 5, 6]), torch.tensor([0.5, 0.0005, 0.5]))
    found = Said(logprobs + torch.tensor([3e-4, 0.0, -4e-4]), torch.tensor([7, 8, 6]), torch.zeros(3))
    base = Said(logprobs - 2.0, expected.likeliest, expected.margin)
    proof = compare(expected, found, base, "float32", recorded=False)
    assert (proof.tokens, proof.greedy, proof.flipped, proof.recorded) == (3, 1, 1, False)
    assert proof.rms == pytest.approx(5e-4 / 3**0.5, rel=1e-2)
    assert proof.worst == pytest.approx(4e-4, rel=1e-2)
    assert proof.moved == pytest.approx(2.0)


# What gleaner export refuses, in one sentence each, and that nothing is left behind.

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


IDS = torch.tensor([[5, 9, 200, 33, 71, 8]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(IDS).logits)


def adapted(base: str, run: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """By PEFT, from the run's own checkpoint."""
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).float()
    return logits(peft.PeftModel.from_pretrained(lm, run / "checkpoints" / name_of(STEP) / "trainer"))


def loaded(out: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))


ENDS = {"eos_token_id": [258, 256], "pad_token_id": 259}


def advising(model: str, folder: Path, template: str | None = None, **advice: Any) -> str:
    """The model, whose generation_config.json has other ends and advice of its own."""
    shutil.copytree(model, folder)
    own = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(own | advice))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def test_merged_weights_a_tokenizer_and_a_card(
    tiny_path: str, groups: list[pa.Table], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's embeddings are tied."""
    base = advising(tiny_path, tmp_path / "base", repetition_penalty=1.6, max_new_tokens=9, temperature=0.1)
    run, out = (
        run_folder(tmp_path, base, groups, rollout={"temperature": 0.7, "stop": ["</a>"]}),
        tmp_path / "deep" / "out",
    )
    assert main(["export", str(run), str(out)]) == 0
    told = capsys.readouterr().out
    assert "export   mine, step 8: " in told
    assert "verified 111 tokens: logprobs differ by " in told
    assert "111 of 111 greedy tokens are the same" in told
    torch.testing.assert_close(loaded(out), adapted(tiny_path, run), rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(tiny_path).chat_template
    assert {file.stat().st_mode & 0o044 for file in out.iterdir()} == {0o044}
    assert sorted(file.name for file in out.parent.iterdir()) == ["out"]
    card = ModelCard.load(out / "README.md")
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": 0}
    assert json.loads((out / "generation_config.json").read_text()) == ENDS | sampling
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.to_diff_dict().items() >= sampling.items()
    assert "samples as the training did: temperature 0.7, the whole distribution, no penalties, and an end" in card.text
    assert 'give them as `stop`: `["</a>"]`' in card.text
    (result,) = card.data.eval_results
    assert (card.data.library_name, card.data.tags[0], result.metric_value) == ("transformers", "gleaner", 0.8)
    assert "| eval/accuracy | 0.000 | 0.800 |" in card.text
    assert f"digest of the data | {'d' * 64} |" in card.text
    assert "use: my.py:good" in card.text
    assert "```\nBe | brief.\n```" in card.text
    assert "very-secret" not in card.content
    assert str(tmp_path) not in card.content  # nobody's concern


def test_a_base_that_is_elsewhere_now(tiny_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, moved = shutil.copytree(tiny_path, tmp_path / "base"), tmp_path / "moved"
    run = run_folder(tmp_path, str(base), None)
    base.rename(moved)
    words = ["export", str(run), str(tmp_path / "out")]
    assert main(words) == 2
    assert "model.path: folder must exist, got" in capsys.readouterr().err
    assert main([*words, "--model", str(moved)]) == 0
    torch.testing.assert_close(loaded(tmp_path / "out"), adapted(tiny_path, run), rtol=1e-4, atol=1e-4)
    assert "1008 random tokens (the run's own are gone)" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(tiny_path: str, groups: list[pa.Table], tmp_path: Path, dtype: Any) -> None:
    run, out = run_folder(tmp_path, tiny_path, groups, model={"dtype": dtype}), tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    kind = getattr(torch, dtype)
    assert {weight.dtype for weight in model.parameters()} == {kind}
    found, expected = logits(model.float()).log_softmax(-1), adapted(tiny_path, run, kind).log_softmax(-1)
    assert float((found - expected).square().mean().sqrt()) < {"bfloat16": 0.1, "float16": 0.02}[dtype]


def test_a_base_in_four_bits_is_merged_as_it_was_trained(
    tiny_path: str, groups: list[pa.Table], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_folder(tmp_path, tiny_path, groups, model={"base": "nf4", "dtype": "bfloat16"}), tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    assert "the base as it was in 4 bits" in capsys.readouterr().out
    apart = loaded(out).log_softmax(-1) - adapted(tiny_path, run, torch.bfloat16).log_softmax(-1)
    assert float(apart.square().mean().sqrt()) > 0.05  # the weights before quantisation make another policy
    assert "trained in 4 bits (nf4)" in (out / "README.md").read_text()


def test_a_quantised_base_is_multiplied_out(
    groups: list[pa.Table], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defined = make_quantised(tmp_path / "base", "awq")
    run = run_folder(tmp_path, str(tmp_path / "base"), groups, model={"dtype": "bfloat16"})
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--dtype", "float32"]) == 0
    assert "merged   into the weights of AWQ, multiplied out to float32" in capsys.readouterr().out
    assert "whose weights in AWQ are multiplied out here" in (out / "README.md").read_text()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    written = load_file(out / "model.safetensors")
    learned = load_file(run / "checkpoints" / name_of(STEP) / "trainer" / WEIGHTS_FILE)
    scale = LoraConfig().alpha / LoraConfig().rank
    for name, weight in defined.items():
        a, b = (learned[f"base_model.model.{name.removesuffix('weight')}lora_{half}.weight"].float() for half in "AB")
        moved = torch.from_numpy(weight).float() + scale * b @ a
        assert float((written[name] - moved).abs().max()) < 0.01 * float(moved.abs().max())


def test_a_model_that_was_trained_whole(groups: list[pa.Table], tmp_path: Path) -> None:
    """Of a family whose attention transformers does not compute in full where it is left the choice."""
    base = make_family(tmp_path / "base", "gemma2")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, "top_p": 0.5, "bos_token_id": 5}))
    run = run_folder(tmp_path, str(base), groups, scale=0.01, learner={"mode": "full"})
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (kept["eos_token_id"], kept["bos_token_id"], kept["top_p"], kept["temperature"]) == ([258, 256], 5, 1.0, 1.0)
    trained = run / "checkpoints" / name_of(STEP) / "trainer" / "model"
    assert torch.equal(loaded(tmp_path / "out"), loaded(trained))
    assert not torch.equal(loaded(trained), loaded(base))
    assert main(["export", str(run), str(tmp_path / "a"), "--adapter-only"]) == 2


def test_the_adapter_alone_byte_for_byte(tiny_path: str, tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|endoftext|>{% endfor %}<|im_start|>"
    base = advising(tiny_path, tmp_path / "base", template, eos_token_id=258, repetition_penalty=1.2)
    run, out = run_folder(tmp_path, base, None), tmp_path / "out"
    out.mkdir()
    assert main(["export", str(run), str(out), "--adapter-only"]) == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
    ]
    sampled = json.loads((out / "generation_config.json").read_text())
    assert sampled["eos_token_id"] == [258, 256]  # the template's end is none of the base's
    assert "repetition_penalty" not in sampled
    assert torch.equal(logits(peft.AutoPeftModelForCausalLM.from_pretrained(out)), adapted(tiny_path, run))
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "peft"
    assert "--enable-lora --max-lora-rank 16 --lora-modules mine=" in card.text
    assert " --generation-config path/to/this/folder\n" in card.text
    shutil.rmtree(base)  # without its base nothing is known of its ends
    assert main(["export", str(run), str(tmp_path / "alone"), "--adapter-only"]) == 0
    assert not (tmp_path / "alone" / "generation_config.json").exists()


def skipped(self: Any, **_: Any) -> Any:
    return self.unload()


def one_layer_wrong(self: Any, **_: Any) -> Any:
    merged = self.base_model.merge_and_unload()
    merged.model.layers[0].self_attn.q_proj.weight.data[0] += 0.5
    return merged


@pytest.mark.parametrize("fault", [skipped, one_layer_wrong])
def test_a_fault_of_the_merge_is_noticed_and_nothing_stays(
    tiny_path: str, groups: list[pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], fault: Callable[..., Any],
) -> None:  # fmt: skip
    monkeypatch.setattr(peft.PeftModel, "merge_and_unload", fault, raising=False)
    run = run_folder(tmp_path, tiny_path, groups)
    assert main(["export", str(run), str(tmp_path / "out")]) == 1
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "error: " in one]
    assert "must say what the adapter says, within 0.0001 nats rms" in line
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine"]


def test_rounding_that_takes_away_what_was_learned_is_refused(
    tiny_path: str, groups: list[pa.Table], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path, tiny_path, groups, scale=0.003)
    words = ["export", str(run), str(tmp_path / "out"), "--dtype"]
    assert main([*words, "bfloat16"]) == 1
    assert "--dtype: bfloat16 weights must hold what was learned, and rounding takes away" in capsys.readouterr().err
    assert main([*words, "float32"]) == 0


@pytest.fixture
def scored(made: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command with scores of the run's adapter, but for what is given."""

    def words(**other: object) -> list[str]:
        trainer = made / "checkpoints" / name_of(STEP) / "trainer"
        digest = hashlib.sha256((trainer / "adapter_model.safetensors").read_bytes()).hexdigest()
        whose = {"model": "somewhere/base", "adapter": "runs/mine/adapter", "adapter_digest": digest}
        interval = {"value": 0.75, "low": 0.6, "high": 0.9}
        scores = {"data": "hub/sums", "reward": "number", "problems": 40, "unscored": 2}
        scores["metrics"] = {"mean@8": interval, "pass@8": interval | {"problems": 31}}  # the first as it was before
        (tmp_path / "scores.json").write_text(json.dumps(scores | whose | other))
        return [
            "export", str(made), str(tmp_path / "out"), "--adapter-only", "--scores", str(tmp_path / "scores.json"),
        ]  # fmt: skip

    return words


def test_what_gleaner_eval_measured_is_in_the_card(
    scored: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(scored()) == 0
    assert "not known" not in capsys.readouterr().out
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "number on `hub/sums`, 40 problems, intervals of 95 %" in card.text
    assert (
        "| mean@8 | 0.750 | 0.600 to 0.900 | bootstrap | 38 |\n| pass@8 | 0.750 | 0.600 to 0.900 | bootstrap | 31 |"
        in card.text
    )
    assert [(one.dataset_name, one.metric_value) for one in card.data.eval_results] == [
        ("train.jsonl", 0.8),
        ("hub/sums", 0.75),
        ("hub/sums", 0.75),
    ]


def test_scores_of_something_else_are_refused(
    scored: Callable[..., list[str]], made: Path, tiny_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(tiny_path)
    (other / "checkpoints").mkdir(parents=True)
    old = {"adapter_digest": None}
    for whose, told in (
        ({"adapter_digest": "0" * 64}, "another adapter (runs/mine/adapter), or of another step of it; leave them out"),
        ({"model": str(link), "adapter": None, **old}, f"the base alone ({link})"),
        ({"adapter": str(other / "adapter"), **old}, str(other / "adapter")),
    ):
        assert main(scored(**whose)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --scores: must be of mine, step-000008, and are of {told}")
        assert line.endswith(f"gleaner eval --run {made} --adapter {made}/checkpoints/step-000008/trainer --json")
        assert not (tmp_path / "out").exists()
    (tmp_path / "own").symlink_to(made)
    assert main(scored(adapter=str(tmp_path / "own" / "adapter"), **old)) == 0  # as older versions wrote it
    assert f"of {tmp_path}/own/adapter: not known to be those of step-000008" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/john doe/proj/my_rewards.py:acc", "my_rewards.py:acc"),
        ("file:///home/me/x", "x"),
        ("~/x/y", "y"),
        ("model=/home/me/private/x", "model=x"),
        ("/home/me/data/", "data"),
        ("adapter:/home/me/judge", "adapter:judge"),
        ("--a /home/me/x --b ['/home/me/y']", "--a x --b ['y']"),
        ("/usr/bin/python -m srv --data my/data", "python -m srv --data my/data"),
        ("/home/me/a.txt has data. What is 1/2?", "a.txt has data. What is 1/2?"),
        ("/home/me/x|/home/me/y, `/home/me/z`", "x|y, `z`"),
        ("/no_think Give km/h and/or m/s", "/no_think Give km/h and/or m/s"),
        ("https://host/v1/chat", "https://host/v1/chat"),
        ("org/name", "org/name"),
    ],
)
def test_of_a_path_the_last_part_stays(text: str, left: str) -> None:
    assert shortened(text) == left


CONVERTER = """
import sys
if sys.argv[1:] == ["--print-supported-models"]:
    print("  - {known}")
elif "{fault}":
    sys.exit("{fault}")
else:
    folder, outfile, file, outtype, kind = sys.argv[1:]
    assert (outfile, outtype) == ("--outfile", "--outtype")
    open(file, "w").write(kind)
"""


def test_gguf_by_the_converter_of_llama_cpp(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    script, out = tmp_path / "convert_hf_to_gguf.py", tmp_path / "out"
    script.write_text(CONVERTER.format(known="LlamaForCausalLM", fault=""))
    assert main(["export", str(made), str(out), "--gguf"]) == 2
    assert "does not know Qwen2ForCausalLM, the architecture of" in capsys.readouterr().err
    assert not out.exists()
    script.write_text(CONVERTER.format(known="Qwen2ForCausalLM", fault=""))
    assert main(["export", str(made), str(out), "--gguf", "--outtype", "f16"]) == 0
    assert (out / "out-f16.gguf").read_text() == "f16"
    script.write_text(CONVERTER.format(known="Qwen2ForCausalLM", fault="no such tokenizer"))
    capsys.readouterr()
    assert main(["export", str(made), str(tmp_path / "two"), "--gguf"]) == 1
    assert re.search(r"--gguf: .* failed: no such tokenizer; the weights in .*two are whole", capsys.readouterr().err)
    assert (tmp_path / "two" / "model.safetensors").is_file()
