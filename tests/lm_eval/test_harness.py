"""lm-evaluation-harness on an exported folder, by the command of docs/export.md: `make test-lm-eval`. No network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from learner.tools.cli import main
from tests.learner.tools.exports import run_folder

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^lm_eval (run --model hf .*) --tasks \w+ (.*)$", re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="make test-lm-eval installs it")
def test_the_documented_command_scores_what_was_exported(tmp_path: Path) -> None:
    run = run_folder(tmp_path, str(ROOT / "examples" / "tiny-arithmetic"), None, scale=1e-3)
    assert main(["export", str(run), str(tmp_path / "my-model")]) == 0
    found = COMMAND.search((ROOT / "docs" / "export.md").read_text())
    assert found is not None
    for file in (ROOT / "tests" / "lm_eval").glob("sums.*"):
        shutil.copy(file, tmp_path)
    words = [*found[1].split(), "--tasks", "sums", "--include_path", ".", *found[2].split(), "--output_path", "scores"]
    subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, "--device", "cpu"],
        cwd=tmp_path, check=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    (scores,) = (tmp_path / "scores").rglob("results_*.json")
    result = json.loads(scores.read_text())["results"]["sums"]
    assert result["sample_len"] == 4
    assert result["exact_match,answer"] > 0  # the model knows sums
