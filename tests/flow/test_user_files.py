"""Files of the user's that are called as packages of ours, in the folder where a run is started: they are theirs, and
no process of the run takes one for ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.random_model import make_tiny_model
from tests.flow.run import REWARD, Run

ROOT = Path(__file__).parents[2]
TAKEN = """
from pathlib import Path

if __name__ in ("cluster", "learner", "rewards", "rollout"):
    with open(Path(__file__).with_name("taken"), "a") as file:
        file.write(f"{__name__}\\n")
"""
ENVIRONMENT = """
from rollout.env.protocol import Start, Step


class Once:
    async def reset(self, problem, seed):
        return Start(({"role": "user", "content": str(problem.columns["question"])},))

    async def step(self, turn):
        return Step(done=True)

    async def score(self):
        return {}

    async def close(self):
        pass
"""
SCRIPT = "from rewards import vowels\nfrom gleaner import train\n\ntrain(config='config.yaml', rewards=[vowels])\n"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "program",
    [["-m", "gleaner", "train", "--config", "config.yaml"], pytest.param(["script.py"], marks=pytest.mark.long)],
)
def test_a_run_beside_files_of_our_names(program: list[str], tmp_path: Path) -> None:
    """In a generator's own processes, in Ray workers that are not prestarted, and in those of environments."""
    more = {"cluster": {"rewards": {"processes": 1}}} if program[0] == "-m" else {"env": {"use": "rollout.py:Once"}}
    run = Run(tmp_path, make_tiny_model(tmp_path / "model"), steps=1, rewards=[{"use": "rewards.py:vowels"}], **more)
    for name, text in {"cluster": "", "learner": "", "rewards": REWARD, "rollout": ENVIRONMENT}.items():
        (tmp_path / f"{name}.py").write_text(TAKEN + text)
    (tmp_path / "script.py").write_text(SCRIPT)
    env = run.environment() | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [line["step"] for line in run.metrics()] == [0, 1]
    assert 0 <= run.metrics()[-1]["reward/vowels"] <= 1
    taken = (tmp_path / "taken").read_text() if (tmp_path / "taken").exists() else ""
    assert taken == ("" if program[0] == "-m" else "rewards\n")  # by the script itself
