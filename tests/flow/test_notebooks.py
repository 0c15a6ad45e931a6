"""The notebooks of examples/, cell by cell in a kernel of their own, one after the other as their text says."""

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from learner.api import settings as api_settings

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("first_run", "inside_a_run")
# In place of the cell with the settings of examples/colab.ipynb: what two CPU cores do in half a minute.
SMALL = """
MODEL = {"path": "tiny-arithmetic", "dtype": "float32"}
EVAL = {"path": "gsm8k/heldout-sample.jsonl", "size": 4, "every": 2}
DATA = {"path": "gsm8k/train-sample.jsonl", "prompt": "question", "eval": EVAL}
CARD, OUT, STEPS = "t4", "runs", 2
LENGTHS = {"num_generations": 4, "max_prompt_length": 512, "max_completion_length": 32, "kv_cache": "64MiB"}
LEARNER = {"learning_rate": 2e-5, "groups_per_step": 2}
"""


def of_colab() -> Any:
    return nbformat.read(ROOT / "examples" / "colab.ipynb", as_version=4)


def run(notebook: Any, folder: Path) -> list[Any]:
    """The outputs of its cells of code."""
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(outputs: list[Any]) -> str:
    """What a cell has printed, and its value."""
    return "".join(one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in outputs)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_both_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shutil.copytree(ROOT / "examples" / "tiny-arithmetic", tmp_path / "tiny-arithmetic")
    first, inside = (
        run(nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4), tmp_path) for name in NOTEBOOKS
    )
    _, trained, plotted, scored, reported = first
    assert "step 8/8" in text_of(trained)
    assert any("image/png" in one.get("data", {}) for one in plotted)
    assert "Estimate(value=" in text_of(scored)
    assert "IFrame" in text_of(reported)
    assert "</html>" in (tmp_path / "runs" / "notebook" / "report.html").read_text()
    shown, alike, _, answered, planned = inside
    assert "<answer>" in text_of(shown)
    assert "groups without a difference" in text_of(alike)
    assert "per_device_train_batch_size: unknown key; docs/trl.md says of TRL's" in text_of(answered)
    assert "QLoRA" in text_of(planned)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_notebook_for_colab_without_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("tiny-arithmetic", "gsm8k"):
        shutil.copytree(ROOT / "examples" / name, tmp_path / name)
    notebook = of_colab()
    installing, settings, plan_cell, *_ = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert installing["source"].startswith("%%bash")
    assert settings["source"].startswith("MODEL = ")
    cloned = re.search(r"git clone -q <this repository> (\S+)", installing["source"])
    assert cloned is not None
    (tmp_path / cloned[1] / "gleaner").mkdir(parents=True)  # must not hide the package that is installed
    # On this machine's CPU a plan of a card is refused for a model in float32, and is made in the test below.
    installing["source"], settings["source"], plan_cell["source"] = "", SMALL, "None"
    _, _, _, _, trained, scored, packed = run(notebook, tmp_path)
    assert "step 2/2" in text_of(trained)
    assert any("<svg" in one.get("data", {}).get("text/html", "") for one in trained)
    assert text_of(scored).count("Estimate(value=") == 2
    assert "adapter.zip" in text_of(packed)


def test_the_settings_for_colab_are_valid_and_fit_its_card() -> None:
    _, settings, planned, rewards, trained, *_ = (c["source"] for c in of_colab()["cells"] if c["cell_type"] == "code")
    given: dict[str, Any] = {}
    names: dict[str, Any] = {"train": lambda model, **settings: given.update(settings, model=model)}
    exec("\n".join([settings, rewards, trained.removeprefix("from gleaner import train\n")]), names)
    tree = api_settings.tree_of(None, given.pop("model"), given.pop("rewards"), {}, given, api_settings.Inputs())
    config = api_settings.checked(tree)
    assert (config.model.dtype, config.steps, config.data.eval.split) == ("float16", names["STEPS"], "test")
    exec(planned.replace("plan(MODEL", "found = plan(MODEL"), names)
    assert names["found"][0]["fits"]


def test_the_rewards_for_colab() -> None:
    names: dict[str, Any] = {}
    exec(next(cell["source"] for cell in of_colab()["cells"] if cell["source"].startswith("import re")), names)
    right = ["so <answer>1,234</answer>", "<answer>42</answer>, no, <answer> $1234.00 </answer>"]
    wrong = ["<answer>1235</answer>", "1234", "<answer>1234.5</answer>", "<answer>1234 + 1</answer>", "<answer>1234"]
    completions = [[{"role": "assistant", "content": text}] for text in right + wrong]
    assert names["right"](completions, answer=["#### 1,234"] * 7) == [1.0] * 2 + [0.0] * 5
    assert names["tagged"](completions) == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def test_they_are_committed_without_outputs() -> None:
    files = sorted((ROOT / "examples").glob("*.ipynb"))
    assert [file.stem for file in files] == sorted([*NOTEBOOKS, "colab"])
    for file in files:
        cells = [cell for cell in nbformat.read(file, as_version=4)["cells"] if cell["cell_type"] == "code"]
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
