"""The notebooks of examples/, cell by cell in a kernel of their own, one after the other as their text says."""

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("first_run", "inside_a_run")


def run(name: str, folder: Path) -> list[Any]:
    """The outputs of its cells of code."""
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
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
    first, inside = (run(name, tmp_path) for name in NOTEBOOKS)
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


def test_they_are_committed_without_outputs() -> None:
    files = sorted((ROOT / "examples").glob("*.ipynb"))
    assert [file.stem for file in files] == list(NOTEBOOKS)
    for file in files:
        cells = [cell for cell in nbformat.read(file, as_version=4)["cells"] if cell["cell_type"] == "code"]
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
