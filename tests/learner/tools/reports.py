"""A run folder as a report reads it, without a run, and what a page holds."""

import json
import re
from pathlib import Path
from typing import Any

from learner.tools.report.page import unpacked
from rollout import ledger
from rollout.fakes import make_group

MODEL = Path(__file__).parents[3] / "examples" / "tiny-arithmetic"
PHASES = """{"at": 2.0, "wall": 2.0, "Ray": 1.5, "training": 0.5}
{"at": 4.0, "wall": 1.5, "Ray": 0.5, "end": 1.0}
{"at": 5.0, "wa"""
HOSTILE = "</script><script>alert(1)</script>\x00\u202e<img src=x onerror=alert(2)>"


def report_run(tmp_path: Path) -> Path:
    """Two steps of two groups, with the loss that divides by nothing."""
    folder = tmp_path / "a<b>run"
    folder.mkdir()
    scores = {"reward/ms": 3.0, "env/turns": 2.0, "eval/turns": 2.0, "eval/vowels": 0.5}
    lines = [{"step": s, "at": s + 0.5, "reward/mean": s / 4, "time/step": 2.0} | scores for s in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(
        f"steps: 9\nmodel: {{path: {MODEL}}}\nlearner: {{algorithm: grpo, loss: {{advantage: none}}}}\n"
    )
    (folder / "plan.json").write_text('{"learner": {"planned": 200, "measured": 150, "parts": {"weights": 200}}}')
    for step in (1, 2):
        ledger.write(folder / "rollouts", step, [make_group(2 * step + i, completion=[HOSTILE, "4"]) for i in (0, 1)])
    return folder


def blocks(text: str) -> dict[str, Any]:
    found = re.findall(r'<script type="text/plain" id="block-([^"]+)">([^<]*)</script>', text)
    return {name: unpacked(block) for name, block in found}
