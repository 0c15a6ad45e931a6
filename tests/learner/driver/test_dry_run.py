"""--dry-run: everything that config, files and torch's meta device know, all of it at once."""

import asyncio
import json
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from cluster.config import Deadlines
from cluster.errors import WrongInput
from examples.random_model import make_adapter, make_tiny_model
from learner.config import RunConfig
from learner.driver.input_checks import Trial
from learner.driver.memory import Cards, cards_of
from learner.main import main
from learner.model.trial import wrong_with
from rollout.data import model_files
from rollout.data.model_files import adapter_weights, model_weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("dry") / "tiny")


@pytest.fixture
def model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(source, tmp_path / "tiny"))


def config_of(model: Path, /, **changes: Any) -> dict[str, Any]:
    Path("data.jsonl").write_text("".join(json.dumps({"question": f"Say {i}"}) + "\n" for i in range(20)))
    Path("mine.py").write_text(
        "def ok(completions, **columns):\n    return [0.5] * len(completions)\n"
        "def one(completions, **columns):\n    return [1.0]\n"
    )
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": "data.jsonl", "eval": {"every": 0}},
        "rewards": [{"use": "mine.py:ok"}],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
        **changes,
    }


def refused(config: dict[str, Any], *words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the refusal; nothing may be written."""
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert main(["--config", "config.yaml", *words]) == 2
    assert not Path("runs").exists()
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


def test_whatever_may_be_a_name_of_the_hub_is_known_before_the_hub_is_asked(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def settle(paths: list[str | None]) -> None:
        asked.extend(paths)
        raise InterruptedError

    monkeypatch.setattr(model_files, "settle", settle)
    config = config_of(model, learner={"mode": "full", "loss": {"beta": 0.1}})
    config["model"]["reference"], config["data"]["eval"] = "org/reference", {"path": "org/questions"}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InterruptedError):
        main(["--config", "config.yaml"])
    assert asked == [str(model), "org/reference", None, "data.jsonl", "org/questions"]  # None: no teacher


def test_everything_at_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No check hides another: first of those that cost nothing (cards, folder, rewards), then of the others (weights,
    LoRA target, what vLLM knows)."""
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"architectures": ["NobodysForCausalLM"]}))
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    wrong = config_of(model, rewards=[{"use": "mine.py:one"}, {"use": "mine.py:two"}])
    first = (
        "output_dir: ~nosuchuser is no folder",
        "(placement|cluster.gpus): the run needs .*1 GPU",
        "returned 1 values for 2 completions",
        "mine.py has no function 'two'; functions there: ok, one",
    )
    others = (
        "model.path: .*model.safetensors must have [0-9]+ bytes by its header, got",
        "learner.lora.targets: .*got 'q_prj'",
        "model.path: vLLM has no architecture NobodysForCausalLM",
    )
    given = ["--dry-run", "learner.lora.targets=[q_prj]"]
    for patterns, config, more in (
        (first, wrong, ["cluster.gpus.learner=1", "output_dir=~nosuchuser"]),
        (others, config_of(model), []),
    ):
        lines = refused(config, *given, *more, capsys=capsys)
        said = "\n".join(lines)
        for pattern in patterns:
            assert re.search(f"^error: .*{pattern}", said, flags=re.MULTILINE), (pattern, said)
        assert len(lines) == len(patterns)


def test_a_model_that_is_not_there_is_said_once(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refused(config_of(model), "--dry-run", "model.path=/nowhere", capsys=capsys)
    assert (
        line == "error: model.path: folder must exist, got /nowhere; check the path, or give a hub name like org/model"
    )


@pytest.mark.usefixtures("no_trials")
def test_a_gpu_config_on_a_laptop(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    halves = {"gpus": {"generator": 0.5, "learner": 0.5}}
    config = config_of(model, cluster=halves, model={"path": str(model), "dtype": "bfloat16"})
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert main(["--config", "config.yaml", "--dry-run", "--assume-gpus", "80GiB"]) == 0
    brief = capsys.readouterr().out
    assert brief.startswith("run folder ")
    assert main(["--config", "config.yaml", "--dry-run", "--verbose", "--assume-gpus", "80GiB"]) == 0
    out = capsys.readouterr().out
    assert out.endswith(brief)
    assert "assumed      1 cards of 80.0 GiB" in out
    assert "memory: slices on 80.0 GiB: learner " in out
    assert "device: null" in out  # the configuration itself is as it was given
    (line,) = refused(config, "--dry-run", "--assume-gpus", "1x900MiB", capsys=capsys)
    assert re.search("memory.device: .* needs .* MiB", line)
    (line,) = refused(config, "--dry-run", "--assume-gpus", "80GiB", "rollout.workers=3", capsys=capsys)
    assert "placement: the run needs" in line
    (line,) = refused(config, "--dry-run", capsys=capsys)
    assert "cluster.gpus: the run needs 1 GPU, and no NVIDIA driver answers; install one" in line
    # Beside wrong settings (lines that begin with "config:") not a word of the cards that this machine has.
    assert refused(config, "--dry-run", "--assume-gpus", "80GiB", "model.dtype=float32", capsys=capsys) == []
    (line,) = refused(config, "--verbose", capsys=capsys)
    assert line.startswith("error: --verbose: is of --dry-run; a run writes its settings to config.yaml")
    (line,) = refused(config, "--assume-gpus", "80GiB", capsys=capsys)
    assert line == "error: --assume-gpus: a run needs the cards themselves; give it with --dry-run"
    on_cpus = config_of(model, cluster={"gpus": {"generator": 0, "learner": 0}})
    (line,) = refused(on_cpus, "--dry-run", "--assume-gpus", "80GiB", capsys=capsys)
    assert "--assume-gpus: this configuration runs on CPUs alone" in line


@pytest.mark.usefixtures("no_trials")
def test_settings_that_name_no_card_take_the_assumed_ones(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text(yaml.safe_dump(config_of(model, model={"path": str(model), "dtype": "bfloat16"})))
    for cards, each in (("80GiB", "0.5"), ("2x80GiB", "1")):
        assert main(["--config", "config.yaml", "--dry-run", "--assume-gpus", cards]) == 0
        out = capsys.readouterr().out
        assert f"placement    generator-0: 1 CPU, {each} GPU\nplacement    learner: 1 CPU, {each} GPU\n" in out
    hours = ["--dry-run", "--assume-gpus", "rtx4090", "steps=50", "data.eval.every=20"]
    assert main(["--config", "config.yaml", *hours, "data.eval.size=2"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("time: about "))
    assert re.search(r" for 50 steps on rtx4090, if all completions have 16 tokens; 4 evaluations of 0 s each", line)


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("80GiB", Cards(1, 80 * 2**30)),
        ("2x24GB", Cards(2, 24 * 10**9)),
        ("2xrtx4090", Cards(2, (24564 - 640) * 2**20)),
        ("24", Cards(1, (23028 - 640) * 2**20)),
        (" 1x 1GiB", None),
    ],
)
def test_cards(text: str, cards: Cards | None) -> None:
    if cards is not None:
        assert replace(cards_of(text), kind=None) == cards
    for wrong in ("", "79", "a100", "0x24GiB", "x24GiB", "2x", "2y24GiB", "9999x1GiB"):
        with pytest.raises(WrongInput, match="^--assume-gpus: "):
            cards_of(wrong)


def spoil(model: Path, how: str) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    if how == "absent":
        file.unlink()
    elif how == "pickled":
        file.rename(model / "pytorch_model.bin")
    elif how == "lfs":
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n")
    elif how == "garbage":
        file.write_bytes(b"\xff" * 1000)
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "cut":
        file.write_bytes(whole[:-1])
    elif how == "longer":
        file.write_bytes(whole + b"\0")
    elif how == "header":
        file.write_bytes(struct.pack("<Q", 20) + b'{"a": [[[[[[[[[[[[[[' + whole)
    else:
        tensors = load_file(file)
        file.unlink()
        names = sorted(tensors)
        save_file({name: tensors[name] for name in names[::2]}, model / "a.safetensors")
        save_file({name: tensors[name] for name in names[1::2]}, model / "b.safetensors")
        where = {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(names)}
        if how == "swapped":
            where[names[0]] = "b.safetensors"
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        if how == "shard":
            (model / "b.safetensors").unlink()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("absent", "must hold model.safetensors or model.safetensors.index.json, and has neither"),
        ("pickled", r"holds pickled weights alone \(pytorch_model.bin\)"),
        ("lfs", "is a pointer of git-lfs, not the weights; run: git lfs pull"),
        ("garbage", r"is no safetensors file \(1000 bytes\)"),
        ("empty", r"is no safetensors file \(0 bytes\)"),
        ("cut", "must have [0-9]+ bytes by its header, got"),
        ("longer", "must have [0-9]+ bytes by its header, got"),
        ("header", "the header of .* is damaged"),
        ("shard", "names 1 files that are not there, first b.safetensors"),
        ("swapped", "lies in b.safetensors, and it does not"),
    ],
)
def test_weights_that_are_not_whole(model: Path, how: str, sentence: str) -> None:
    assert len(model_weights(str(model)) or {}) > 10
    spoil(model, how)
    with pytest.raises(WrongInput, match=f"^model.path: .*{sentence}"):
        model_weights(str(model))


def test_weights_in_shards_and_of_the_hub(model: Path) -> None:
    single = load_file(model / "model.safetensors")
    spoil(model, "shards")
    stored = model_weights(str(model)) or {}
    assert {name: one.shape for name, one in stored.items()} == {name: tuple(one.shape) for name, one in single.items()}
    assert model_weights("nobody/nothing") is None


def trial_of(folder: Path, /, **changes: Any) -> list[str]:
    return wrong_with(RunConfig.model_validate(config_of(folder, **changes)))


def test_the_learner_s_own_code_on_the_meta_device(model: Path) -> None:
    weights, content = make_adapter(model, seed=0)
    adapter = Path("adapter")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    (adapter / "adapter_model.safetensors").write_bytes(weights)
    with_adapter = {"path": str(model), "dtype": "float32", "adapter": "adapter"}
    assert trial_of(model) == []
    assert trial_of(model, model=with_adapter) == []
    shape = json.loads((model / "config.json").read_text())

    (model / "config.json").write_text(json.dumps(shape | {"intermediate_size": 64}))
    base, fit = trial_of(model, model=with_adapter)
    assert re.search("6 tensors of .* have not the shape of its config.json, first model.layers.0.mlp", base)
    assert re.search("model.adapter: .* weights of adapter have another shape than the model's", fit)

    (model / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 1, "layer_types": None}))
    base, fit = trial_of(model, model=with_adapter)
    assert "holds 12 tensors that the model of its config.json has no place for: model.layers.1" in base
    assert "model.adapter: adapter has weights that the model has no place for: 14, first" in fit

    (model / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 300}))
    (kind,) = trial_of(model)
    assert kind.startswith("model.path: ")
    assert len(kind.splitlines()) == 1


def test_an_adapter_that_is_not_there(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    (line,) = refused(config_of(model), "model.adapter=empty", capsys=capsys)
    assert "model.adapter" in line
    with pytest.raises(WrongInput, match=r"^model.adapter: .* which has no adapter_model.safetensors"):
        adapter_weights("empty", "model.adapter")


def test_a_trial_has_a_deadline(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    Path("sleeper.py").write_text("import time\ntime.sleep(600)\n")
    Path("dies.py").write_text("raise SystemExit('no memory for that')\n")
    late = RunConfig.model_validate(config_of(model))
    config = late.model_copy(update={"cluster": late.cluster.waiting(Deadlines(start=0.5))})
    with pytest.raises(WrongInput, match="sleeper did not come to an end within 0.5 s"):
        Trial("sleeper", config).finish()
    config = RunConfig.model_validate(config_of(model))
    with pytest.raises(WrongInput, match="dies could not try the model: no memory for that"):
        Trial("dies", config).finish()


def test_a_trial_s_notes_reach_the_log(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    Path("notes.py").write_text(
        "import sys\nfrom learner.model.trial import tell\nprint('a library', file=sys.stderr)\n"
        "tell('not tried:\\nno card')\nprint('[]')\n"
    )
    Trial("notes", RunConfig.model_validate(config_of(model))).finish()
    assert caplog.messages == ["not tried: no card"]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyboardInterrupt, "stopped before the run began"),
        (asyncio.CancelledError, "stopped at once; the same command goes on from its last checkpoint"),  # the second
    ],
)
def test_ctrl_c_is_no_traceback(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: type[BaseException],
    said: str,
) -> None:
    def interrupted(config: RunConfig) -> None:
        raise raised

    monkeypatch.setattr("learner.main._train", interrupted)
    Path("config.yaml").write_text(yaml.safe_dump(config_of(model)))
    assert main(["--config", "config.yaml"]) == 130
    assert capsys.readouterr().err.endswith(f"{said}\n")
