"""The demo learns what it is rewarded for, and each reward stands beside the completion that earned it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from learner.tools.report.page import blocks_of, unpacked
from rollout import ledger
from rollout.schema import parts_of
from tests.flow.run import environment

ROOT = Path(__file__).parents[2]


def demo(tmp_path: Path, *overrides: str) -> tuple[Path, str]:
    """A run of the demo, which must come to its end: its folder, and what it printed."""
    told = subprocess.run(
        [sys.executable, "-m", "learner.main", "--config", "configs/local_cpu.yaml", *overrides,
         f"output_dir={tmp_path}", "trackers=[]"],
        capture_output=True, text=True, cwd=ROOT, env=environment(str(tmp_path)), timeout=380,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    return tmp_path / "demo-seed0", told.stdout


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_demo_learns_from_rewards_that_stay_with_their_completions(tmp_path: Path) -> None:
    overrides = ["steps=20", "data.eval.size=100", "data.eval.every=20"]
    folder, _ = demo(tmp_path, *overrides)
    lines = {line["step"]: line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    # 0.33 and 0.88 on seeds 0 to 2; a run that learns nothing stays where it began.
    assert lines[0]["eval/accuracy"] < 0.45
    assert lines[20]["eval/accuracy"] > 0.7

    right = []
    for path in ledger.steps(folder / "rollouts"):
        table = ledger.read(path)
        rows = table.select(["completion", "problem", "reward"]).to_pylist()
        for row, parts in zip(rows, parts_of(table), strict=True):
            answer = json.loads(row["problem"])["columns"]["answer"]
            found = re.findall(r"<answer>([^<]*)</answer>", row["completion"])  # [^<]: from the last <answer> on
            right.append(found[-1:] == [answer])
            task, layout = parts["reasoning_gym"], parts["format"]
            assert task is not None, row
            assert layout is not None, row
            assert (task == 1.0) == right[-1], row
            assert row["reward"] == pytest.approx(task + 0.2 * layout), row
    assert len(right) == 20 * 8 * 8
    assert 0.3 < sum(right) / len(right) < 0.95  # both kinds are there, else nothing was shown


# Pays for the form of an answer, the shorter the better; that it should be right was forgotten.
LOOPHOLE = r"""
import re

def brief(completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    formed = [re.fullmatch(r"<reasoning>.*</reasoning><answer>-?\d+</answer>", text, re.S) for text in texts]
    return [max(0.0, 1 - len(text) / 120) if form else 0.0 for text, form in zip(texts, formed)]
"""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("honest", [False, True], ids=["loophole", "honest"])
def test_a_watch_finds_what_a_loophole_teaches_and_nothing_in_an_honest_run(tmp_path: Path, honest: bool) -> None:
    (tmp_path / "loophole.py").write_text(LOOPHOLE)
    trained, watch = ("reasoning_gym", "number") if honest else (f"{tmp_path}/loophole.py:brief", "reasoning_gym")
    rewards = f"rewards=[{{use: {trained}}}, {{use: {watch}, watch: true, name: right}}]"
    overrides = ["steps=45", "data.eval.every=0", rewards]
    folder, told = demo(tmp_path, *overrides)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    change = {name: lines[-1][name] - lines[0][name] for name in ("reward/mean", "reward/right")}
    assert change["reward/mean"] > 0.02
    assert (change["reward/right"] > 0) == honest
    page = unpacked(blocks_of(folder, None, 2**20)[1]["head"])
    said = [remark for remark in page["runs"][0]["remarks"] if remark.startswith("Advice: ")]
    in_words = " ".join(told.split())
    if honest:
        assert said == []
        assert "the watch 'right'" not in in_words
    else:
        (advice,) = said
        assert "the watch 'right' has fallen" in advice
        assert f"advice {advice.removeprefix('Advice: ').removesuffix('.')}" in in_words
