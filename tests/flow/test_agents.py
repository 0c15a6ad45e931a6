"""An unmodified program that asks by OpenAI's client learns in a whole run, as docs/agents.md has it: the tool demo."""

from pathlib import Path

import pytest

from cluster.reading import read_yaml
from rollout import ledger
from tests.flow.run import Run

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(2400)  # a program takes a second to start, and there are 560
def test_the_calculator_s_agent_learns_to_call(tmp_path: Path) -> None:
    demo = read_yaml(ROOT / "configs" / "tools_cpu.yaml")
    run = Run(
        tmp_path, ROOT / "examples" / "tiny-tools", steps=8, rewards=demo["rewards"], rollout=demo["rollout"],
        learner=demo["learner"], cluster=demo["cluster"], checkpoint={"every": 8},
        data=demo["data"] | {"eval": {"size": 24, "every": 8}},
        env={
            "use": "program", "max_turns": 3, "concurrency": 6, "step_timeout_s": 60,
            "args": {"command": ["python", str(ROOT / "examples" / "calculator_agent.py")]},
        },
    )  # fmt: skip
    run.finish(limit=2300)
    first, *_, last = run.metrics()
    assert first["eval/accuracy"] < 0.4
    assert last["eval/accuracy"] > 0.7
    assert max(line.get("env/errors", 0) for line in run.metrics()) == 0
    rows = [row for file in ledger.steps(run.folder / "rollouts") for row in ledger.read(file).to_pylist()]
    assert len(rows) == 8 * 64
    assert {len(row["turns"]) for row in rows} <= {1, 2, 3}
