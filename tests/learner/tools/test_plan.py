"""gleaner plan, as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import machine
from cluster.machine import Card
from cluster.memory.plan import Plan, Wish, Workload
from cluster.memory.search import plan
from cluster.memory.seconds import Pace, Rates, step_seconds
from cluster.memory.shape import SHAPES, SPARSE
from learner.config import RunConfig
from learner.driver import memory
from learner.driver.memory import settle
from learner.tools import plan as plan_tool
from learner.tools.cli import main
from learner.tools.plan import FIVE
from learner.trainer import float32_products

CARDS = Path(__file__).parents[3] / "docs" / "cards.md"


@pytest.mark.parametrize(
    ("words", "names"), [([], list(FIVE)), pytest.param(["--all"], list(SHAPES), marks=pytest.mark.long)]
)
def test_models_in_one_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], names: list[str]
) -> None:
    png = tmp_path / "plan.png"
    assert main(["plan", "--gpu", "16GiB", *words, "--png", str(png)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names)
    assert "Qwen2.5-14B needs" in out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_one_model_as_json_at_once() -> None:
    """Imports included, and nothing heavy among them."""
    code = (
        "import sys; from learner.tools.cli import main; code = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules); sys.exit(code)"
    )
    words = ["plan", "--gpu", "24GiB", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--json"]
    started = time.perf_counter()
    told = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert time.perf_counter() - started < 20  # 2 on a quiet machine
    (one,) = json.loads(told.stdout)
    assert one["chosen"]["fits"]
    assert one["chosen"]["device_peak"] <= 24 * 2**30
    assert not one["least"]["full"]["fits"]


def test_one_base_for_both_roles(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpu", "24GiB", "--model", "Llama-3.1-8B"]
    (own,), (shared,) = (_json(capsys, [*words, "--base", base]) for base in ("own", "shared"))
    assert (own["chosen"]["base"], shared["chosen"]["base"]) == ("nf4", "none")
    assert shared["chosen"]["learner"]["weights"] == 0
    for method in ("LoRA", "LoRA + ckpt"):
        assert own["least"][method]["learner"]["weights"] == shared["least"][method]["generator"]["weights"] > 16e9
        assert shared["least"][method]["learner"]["weights"] == 0
    assert shared["least"]["QLoRA"]["learner"]["weights"] == 0
    assert own["least"]["QLoRA"]["learner"]["weights"] < shared["least"]["QLoRA"]["generator"]["weights"] < 6.1e9
    assert own["least"]["full"] == shared["least"]["full"]
    assert main([*words, "--base", "shared"]) == 0
    assert "LoRA with one base for both roles" in capsys.readouterr().out
    assert main([*words, "--base", "shared", "--cards", "2"]) == 2
    assert "needs both on one card" in capsys.readouterr().err


def _json(capsys: pytest.CaptureFixture[str], words: list[str]) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_misfit_and_a_mistake_have_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--gpu", "8GiB", "--model", "Qwen2.5-14B"]) == 1
    assert "Instead: " in capsys.readouterr().out
    assert main(["plan", "--gpu", "8GiB", "--model", "GPT-9"]) == 2
    assert "not in the table" in capsys.readouterr().err
    assert main(["plan", "--gpu", "lots", "--model", "Qwen2.5-14B"]) == 2
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["Qwen3-0.6B"].to_config()))
    assert main(["plan", "--gpu", "24GB", "--model", str(tmp_path)]) == 0


def test_an_architecture_that_is_not_known_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bloom = {"model_type": "bloom", "hidden_size": 2048, "n_layer": 24}
    (tmp_path / "config.json").write_text(json.dumps(bloom))
    assert main(["plan", "--gpu", "16GiB", "--model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "memory of model_type 'bloom' is not known; known: llama" in line


def test_a_card_that_there_is_not_and_a_number_out_of_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "rtx490"]) == 2
    assert capsys.readouterr().err == (
        "error: --gpu: must be a card or its size, for example 24GiB, 24 (GB as cards are sold) or rtx4090, got "
        "'rtx490'; did you mean rtx4090 or a40?\n"
    )
    assert main(["plan", "--gpu", "t4", "--kv-cache-dtype", "fp8"]) == 2
    assert "fp8 needs a card of compute capability 8.9, t4 has 7.5; set auto" in capsys.readouterr().err
    assert main(["plan", "--gpu", "t4", "--model", "Gemma-2-2B"]) == 2
    assert "Gemma-2-2B is not computed in float16 (vLLM), and the card has no bfloat16" in capsys.readouterr().err
    assert main(["plan", "--gpu", "24GiB", "--generations", "1"]) == 2
    assert "--generations: GRPO compares the completions of a group, so at least 2" in capsys.readouterr().err
    for file in ("/nonexistent/x.png", "x.foo"):
        assert main(["plan", "--gpu", "24GiB", "--model", "Llama-3.2-1B", "--png", file]) == 2
        assert f"error: --png: {file} cannot be written: " in capsys.readouterr().err
    assert main(["plan", "--gpu", "24GiB", "--generations", "0"]) == 2
    assert "must be a whole number from 1 to 999999999, got '0'" in capsys.readouterr().err


CHOSEN = [
    ("16", "Llama-3.2-1B", []),
    ("t4", "Qwen2.5-0.5B", []),
    ("rtx4090", "Llama-3.1-8B", []),
    ("24GiB", "Llama-3.1-8B", ["--cards", "2", "--kv-cache-dtype", "fp8", "--staleness", "1"]),
    ("16GiB", "Llama-3.1-8B", ["--rank", "8"]),
    ("24GiB", "Llama-3.1-8B", ["--base", "shared"]),
]


@pytest.mark.parametrize(("card", "model", "words"), CHOSEN)
def test_the_block_to_paste_is_the_plan(
    card: str, model: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of this configuration plans the same, and finds that it fits."""
    asked = ["plan", "--gpu", card, "--model", model, *words]
    assert main(asked) == 0
    block = yaml.safe_load(capsys.readouterr().out.partition("to paste into a configuration:\n")[2])
    assert main([*asked, "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)[0]["chosen"]
    config = RunConfig.model_validate(block | {"data": {"path": "x.jsonl"}, "rewards": [{"use": "format"}]})
    assert config.model.dtype == ("float16" if card == "t4" else "bfloat16")
    assert config.model.path == f"{'Qwen' if model.startswith('Qwen') else 'meta-llama'}/{model}-Instruct"
    found = settle(config, SHAPES[model].to_config()).plan
    assert found is not None
    for name in ("layout", "base", "checkpointing", "token_budget", "kv_bytes", "sequences", "device_bytes"):
        assert getattr(found, name) == chosen[name], name


@pytest.mark.parametrize(
    ("model", "size", "faster"),
    [
        ("Llama-3.1-8B", "8", ""), ("Llama-3.1-8B", "24", ""), ("Qwen2.5-7B", "40", ", shared"),
        ("Qwen2.5-14B", "24", ""), ("Gemma-2-9B", "16", ""),
    ],
)  # fmt: skip
def test_what_the_page_about_cards_says_fits_is_chosen(
    model: str, size: str, faster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """faster: what is chosen beside what the page says, as it takes a tenth less."""
    (head,) = (line for line in CARDS.read_text().splitlines() if line.startswith("| model | 8 GB |"))
    row = next(line for line in CARDS.read_text().splitlines() if line.startswith(f"| {model} |"))
    told = row.split(" | ")[head.split(" | ").index(f"{size} GB")].strip(" |")
    fits = main(["plan", "--gpu", size, "--model", model, "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)[0]["chosen"]
    found = f"{'QLoRA' if chosen['base'] == 'nf4' else 'LoRA'}{', shared' * chosen['shared']}" if fits else "-"
    assert found == told + faster


def test_one_base_for_both_roles_where_two_leave_little_room(capsys: pytest.CaptureFixture[str]) -> None:
    """A 3B on 16 GiB: with two bases the generator sleeps in turn and holds 3 sequences."""
    chosen = {}
    for base in ("own", "auto"):
        assert main(["plan", "--gpu", "16GiB", "--model", "Llama-3.2-3B", "--base", base, "--json"]) == 0
        chosen[base] = json.loads(capsys.readouterr().out)[0]["chosen"]
    assert (chosen["own"]["layout"], chosen["own"]["shared"]) == ("alternating", False)
    assert (chosen["auto"]["layout"], chosen["auto"]["base"], chosen["auto"]["shared"]) == ("slices", "none", True)
    assert chosen["auto"]["sequences"] > 10 * chosen["own"]["sequences"]


def test_the_longest_completion_and_the_time_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--gpu", "rtx4090", "--model", "Llama-3.1-8B"]
    assert main([*asked, "--longest"]) == 0
    out = capsys.readouterr().out
    longest = int(re.search(r"max_completion_length: (\d+)", out)[1])  # type: ignore[index]
    assert longest > 10_000
    told = re.search(r"longest: (\d+) tokens with the prompt; (\d+) with learner.checkpointing=offloaded", out)
    assert told is not None
    assert int(told[1]) == longest + 256
    assert int(told[2]) > 1.5 * int(told[1])
    assert f"all completions of {longest} tokens" in " ".join(out.split())
    for beyond, code in ((0, 0), (1, 1)):
        assert main([*asked, "--completion", str(longest + beyond), "--json"]) == code
    capsys.readouterr()
    assert main(["plan", "--gpu", "24GiB", "--model", "Llama-3.1-8B"]) == 0
    assert re.search(r"time: about [0-9.]+ s a step on rtx4090 to [0-9.]+ s on l4, ", capsys.readouterr().out)
    assert main(["plan", "--gpu", "60GiB", "--model", "Llama-3.1-8B"]) == 0
    assert "time: not known, as the card is not (--gpu rtx4090)" in capsys.readouterr().out
    assert main(["plan", "--gpu", "t4", "--model", "Qwen2.5-1.5B", "--longest"]) == 0
    out = capsys.readouterr().out
    assert "longest: the model's own context, 32768 tokens with the prompt" in out
    assert "max_completion_length: 32512\n" in out
    assert main(["plan", "--gpu", "24GiB", "--longest"]) == 2
    assert "--longest: is asked of one model; name it with --model" in capsys.readouterr().err


def test_the_card_that_is_here_and_the_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "visible_cards", list)
    assert main(["plan"]) == 2
    assert "--gpu: no card is visible here; name one, or its size" in capsys.readouterr().err
    here = Card("NVIDIA H100 80GB HBM3", "a", 81559 * 2**20, 40 * 2**30, (9, 0))
    monkeypatch.setattr(memory, "visible_cards", lambda: [here])
    assert main(["plan", "--model", "Llama-3.1-8B"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3: 40.0 GiB of 79.6 GiB are free" in out
    assert "time: about " in out
    assert main(["plan", "--cpu", "--model", "SmolLM2-135M", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["fits"]
    assert row["seconds"]["step"] > row["seconds"]["generate"] > 0
    assert main(["plan", "--cpu", "--model", "SmolLM2-135M", "--steps", "7"]) == 0
    assert "for 7 steps; 8 groups of 8" in capsys.readouterr().out
    monkeypatch.setattr(machine, "main_memory", lambda: 2**30)
    assert main(["plan", "--cpu", "--model", "Qwen2.5-14B"]) == 1
    capsys.readouterr()
    assert main(["plan", "--cpu", "--model", "SmolLM2-135M", "--algorithm", "ppo", "--ram", "8GiB"]) == 2
    assert "--cpu: goes without --algorithm, --ram; leave out what is of cards" in capsys.readouterr().err
    assert main(["plan", "--cpu"]) == 2
    assert "--cpu: is asked of one model" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "steps"), [("float32", ["choose", "measure", "default"]), ("bfloat16", ["measure"])])
def test_a_cpu_is_measured_with_the_library_of_a_run(
    dtype: str, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rates = Rates(1e11, 1e10)

    def measured(dtype: str, threads: int) -> Rates:
        done.append("measure")
        return rates

    def chosen() -> bool:
        done.append("choose")
        return True

    monkeypatch.setattr(plan_tool, "measured_rates", measured)
    monkeypatch.setattr(float32_products, "choose_library", chosen)
    monkeypatch.setattr(float32_products, "use_library", done.append)
    wish = Wish(
        dtype=dtype,
        kv_dtype=dtype,
        base="none",
        checkpointing="none",
        token_budget=4096,
        layouts=("slices",),
        cuda=False,
    )
    work, pace = Workload(completion=80, prompt=128, groups=4), Pace(4, 80.0)
    found = plan(SHAPES["SmolLM2-135M"], 2**60, work, wish)
    assert isinstance(found, Plan)
    assert plan_tool.seconds_on_cpu(found, wish, work, pace) == step_seconds(found, wish, work, pace, rates)
    assert done == steps


def test_main_memory_is_planned_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "48GiB", "--model", "Qwen2.5-7B", "--ram", "8GiB"]) == 0
    out = capsys.readouterr().out
    assert "passing 14.2" in out
    assert "the machine has 8.0: the kernel would end a process" in out
    assert main(["plan", "--gpu", "48GiB", "--model", "Qwen2.5-7B", "--ram", "64GiB"]) == 0
    assert "the machine has" not in capsys.readouterr().out


def test_one_unit_in_one_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "24GB"]) == 0
    out = capsys.readouterr().out
    assert "22.4 GiB" in out
    assert " GB" not in out


def test_a_checkpoint_with_a_tower_experts_and_4_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As Qwen3.5-35B-A3B is laid out, in MXFP4 for its experts: one way to train it, from config.json alone."""
    config = {"model_type": "qwen3_5_moe", "text_config": dict(SPARSE["Qwen3.5-35B-A3B"].settings), "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--gpu", "141", "--model", str(tmp_path)]
    (plain,) = _json(capsys, words)
    assert set(plain["least"]) == {"LoRA", "LoRA + ckpt", "QLoRA", "LoRA, FP8", "LoRA, W4A16"}
    in_16, in_8, in_4 = (plain["least"][way]["learner"]["weights"] for way in ("LoRA", "LoRA, FP8", "LoRA, W4A16"))
    assert 2 * plain["params"] == in_16 > 1.8 * in_8 > 3 * in_4
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    (packed,) = _json(capsys, words)
    assert set(packed["least"]) == {"LoRA", "LoRA + ckpt"}
    assert packed["chosen"]["base"] == "none"
    assert packed["params"] == plain["params"] > 9 * packed["active_params"]
    assert packed["chosen"]["learner"]["weights"] < in_4 * 1.2
    assert main(words) == 0
    assert "weights: 34.7 billion in MXFP4, 3.5 of them at work for a token" in capsys.readouterr().out
    assert main([*words, "--base", "shared"]) == 2
    assert "--base shared: needs weights that both roles can read, and " in capsys.readouterr().err


def test_what_config_json_lacks_is_named_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {key: value for key, value in SPARSE["Qwen3-30B-A3B"].settings.items() if key != "moe_intermediate_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--gpu", "24", "--model", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    wanted = "config.json must give moe_intermediate_size as whole numbers of at least 1"
    assert told == f"error: {tmp_path.name}: {wanted}\n"


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "24", "--model", "nobody/Qwen9"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: --model: nobody/Qwen9 is neither a folder here nor a hub model in the cache, and ")
    assert told.count("\n") == 1
