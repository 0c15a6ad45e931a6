"""Python that comes with a model is never run, by nobody, and a model that needs some is refused by name."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from examples.random_model import make_tokenizer
from rollout.data.chat import Chat
from rollout.engine import EngineSettings
from rollout.vllm.arguments import engine_arguments

ROOT = Path(__file__).parents[2]
PACKAGES = ("gleaner", "learner", "rollout", "rewards", "cluster")


def _loads_without_saying_so(tree: ast.AST) -> list[str]:
    """Calls that load something of a model by its name and do not pass trust_remote_code=False (PEFT has no such
    argument, and runs no code that comes with an adapter)."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = ast.unparse(node.func.value)
        plain = owner.rpartition(".")[2]
        loads = node.func.attr == "from_pretrained" and not plain.startswith(("Peft", "LoraConfig"))
        builds = node.func.attr == "from_config" and plain.startswith("Auto")
        refused = any(k.arg == "trust_remote_code" and ast.unparse(k.value) == "False" for k in node.keywords)
        if (loads or builds) and not refused:
            found.append(f"{node.lineno}: {ast.unparse(node.func)}")
    return found


def test_every_call_that_loads_a_model_refuses_its_code() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    texts = {file: file.read_text() for file in files}
    assert sum(text.count("trust_remote_code=False") for text in texts.values()) >= 6
    assert {
        str(file): found for file, text in texts.items() if (found := _loads_without_saying_so(ast.parse(text)))
    } == {}


@pytest.mark.parametrize("call", ["AutoConfig.from_pretrained(p)", "t.AutoModel.from_config(c, trust_remote_code=yes)"])
def test_a_call_that_does_not_is_seen(call: str) -> None:
    assert len(_loads_without_saying_so(ast.parse(call))) == 1


def test_the_engine_is_told_too() -> None:
    room: dict[str, Any] = {
        "max_model_len": 8,
        "kv_cache_bytes": 1,
        "max_num_seqs": 1,
        "max_lora_rank": 8,
        "adapter_window": 2,
    }
    settings = EngineSettings(model="m", dtype="float32", seed=0, **room)
    assert engine_arguments(settings, cuda=False)["trust_remote_code"] is False


def _model(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> Path:
    """A folder whose code leaves a file behind as soon as it is imported."""
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 4096, "model_type": "llama", **config}))
    written = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(written | tokenizer))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    return folder


@pytest.mark.parametrize(
    ("config", "tokenizer", "sentence"),
    [
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}},
            {},
            r"needs Python code that comes with the model \(own.Own for model_type .mine.\), .* never run; give",
        ),
        (
            {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.Own"}},  # known, but it writes no text
            {},
            r"own.Own for model_type 'vit'",
        ),
        (
            {},
            {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}},
            "tokenizer of .* needs Python code .* never run; save it as a tokenizer.json",
        ),
    ],
)
def test_a_model_that_needs_its_code_is_refused(
    tmp_path: Path, config: dict[str, Any], tokenizer: dict[str, Any], sentence: str
) -> None:
    folder = _model(tmp_path / "model", config, tokenizer)
    with pytest.raises(WrongInput, match=sentence):
        Chat.load(str(folder))
    assert not (folder / "ran").exists()


def test_a_model_that_brings_code_and_does_not_need_it_is_loaded_without(tmp_path: Path) -> None:
    brought = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    folder = _model(tmp_path / "model", {"auto_map": brought}, {})
    Chat.load(str(folder))
    assert not (folder / "ran").exists()
