"""Whatever files and settings hold: exit code 2, one line for each problem, nothing written, and never a wait."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.random_model import make_tiny_model
from learner.main import main
from rollout.data import sources

Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hostile") / "tiny")


@pytest.fixture
def model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that may be spoiled, and the rest of a run that is in order, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "PROBE_S", 0.2)
    monkeypatch.setattr("learner.driver.input_checks.TEMPLATE_S", 3.0)
    folder = tmp_path / "tiny"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    Path("data.jsonl").write_text("".join(json.dumps({"question": f"Say {i}"}) + "\n" for i in range(20)))
    Path("mine.py").write_text(
        "def ok(completions, **columns):\n    return [0.5] * len(completions)\n"
        "def lazy(completions, **columns):\n"
        "    import time\n    if not hasattr(lazy, 'loaded'):\n        time.sleep(5)\n"
        "    lazy.loaded = True\n    return [0.5] * len(completions)\n"
    )
    config: dict[str, Any] = {
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"path": "data.jsonl"},
        "rewards": [{"use": "mine.py:ok"}],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return folder


def template(text: str) -> Spoil:
    def spoil(model: Path) -> None:
        (model / "chat_template.jinja").write_text(text)

    return spoil


def several(*spoils: Spoil) -> Spoil:
    def spoil(model: Path) -> None:
        for one in spoils:
            one(model)

    return spoil


def replaced(name: str, content: bytes) -> Spoil:
    def spoil(model: Path) -> None:
        (model / name).write_bytes(content)

    return spoil


def changed(name: str, **values: Any) -> Spoil:
    def spoil(model: Path) -> None:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | values))

    return spoil


def nothing(model: Path) -> None: ...


DEEP = b"[" * 100_000
HOSTILE: dict[str, tuple[Spoil, list[str], str]] = {
    "a config.json that is cut": (replaced("config.json", b'{"vocab'), [], "config.json must be JSON: Unterm"),
    "a config.json that is a list": (replaced("config.json", b"[1]"), [], "config.json must hold a mapping, got list"),
    "a deep config.json": (replaced("config.json", DEEP), [], "config.json must be nested at most 200 deep"),
    "a vocabulary in words": (changed("config.json", vocab_size="many"), [], "vocab_size of .* whole numbers"),
    "a context in words": (changed("config.json", max_position_embeddings="x"), [], "max_position_embeddings of"),
    "a text_config in words": (changed("config.json", text_config="x"), [], "text_config in config.json"),
    "heads of no size": (changed("config.json", num_attention_heads=0), ["memory.device=8GiB"], "num_attention_heads"),
    "a generation_config.json that is no JSON": (
        replaced("generation_config.json", b"\xe9"), [], "generation_config.json must be UTF-8 text, got"),
    "an end token in words": (changed("generation_config.json", eos_token_id="</s>"), [], "eos_token_id of .* whole"),
    "a tokenizer that is none": (replaced("tokenizer.json", b"{}"), [], "must hold a tokenizer that transformers can"),
    "a template that divides by zero": (template("{{ 1 // 0 }}"), [], "chat template .* says: ZeroDivisionError"),
    "a template that refuses": (template("{{ raise_exception('no') }}"), [], "chat template .* says: no"),
    "a template that is no jinja": (template("{% for %}"), [], "chat template .* says: "),
    "a template that counts": (template("{{ 9 ** (9 ** 9) }}"), [], "chat template did not come to an end within 3 s"),
    "a hundred million problems": (nothing, ["data.path=rg:chain_sum", "data.size=100000000"], "data.size: .* so"),
    "a home folder of nobody": (nothing, ["output_dir=~nosuchuser/x"], "output_dir: ~nosuchuser/x is no folder"),
    "a checkpoint in the home of nobody": (nothing, ["resume=~nosuchuser/x"], "resume: must be auto, none or .* write"),
    "a run in the home of nobody": (nothing, ["output_dir=~nosuchuser", "resume=none"], "output_dir: ~nosuchuser is"),
    "a model in the home of nobody": (nothing, ["model.path=~nosuchuser/x"], "model.path: folder must exist"),
    "a name that is too long": (nothing, ["model.path=" + "x" * 5000], "model.path: "),
    "a data file of nobody": (nothing, ["data.path=~nosuchuser/x.jsonl"], "data.path: must be a path or a hub name"),
    "a bare number as memory": (nothing, ["memory.device=24"], "config: memory.device: must be a size of at least"),
    "arguments that hold themselves": (nothing, ["data.args={a: &x [*x]}"], "config: data.args: .* nested at most 32"),
    "a number of 10,000 digits": (nothing, ["steps=" + "9" * 10_000], "config: steps: "),
    "an import within a reward function": (
        nothing, ["rewards=[{use: 'mine.py:lazy', timeout_s: 3}]"], "timeout: .* Only its first call is late"),
    "two mistakes": (
        several(template("{{ 1 // 0 }}"), replaced("model.safetensors", b"")), [],
        "model.safetensors(.|\n)*chat template .* ZeroDiv"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_one_line_for_each_problem(case: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, overrides, pattern = HOSTILE[case]
    spoil(model)
    before = {path for path in Path().rglob("*") if "__pycache__" not in path.parts}
    begin = time.monotonic()
    assert main(["--config", "config.yaml", *overrides]) == 2
    assert time.monotonic() - begin < 240  # seconds; a few on a quiet machine
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error: ", "config: "))]
    assert len(lines) == (2 if case == "two mistakes" else 1), lines
    assert re.search(pattern, "\n".join(lines)), lines
    assert max(map(len, lines)) < 700
    assert {path for path in Path().rglob("*") if "__pycache__" not in path.parts} == before
