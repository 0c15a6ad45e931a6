"""The environments of gem, TextArena and gymnasium in docs/adapters.md: their commands, with a tiny model on a CPU."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.documented.blocks import ROOT
from tests.documented.workspace import Workspace
from tests.others.games import write

PACKAGES = ROOT / "build" / "games"
SMALL = {
    "steps": 2,
    "rollout": {"num_generations": 4, "max_prompt_length": 640, "max_completion_length": 256, "kv_cache": "64MiB"},
    "learner": {"groups_per_step": 2},
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (PACKAGES / "gem").is_dir(), reason="make test-docs installs requirements/games.txt")
def test_the_commands(tmp_path: Path) -> None:
    space = Workspace(tmp_path, model=ROOT / "examples" / "tiny-tools", packages=PACKAGES)
    commands = write(tmp_path)
    config = yaml.safe_load((tmp_path / "game.yaml").read_text())
    config["model"]["dtype"], config["data"]["eval"] = "float32", {"size": 2, "every": 2}
    (tmp_path / "game.yaml").write_text(yaml.safe_dump(config | SMALL))
    assert len(commands) == 5
    for command in commands:
        assert not (told := space.run(command)), told
    for name in ("gem", "arena", "lake"):
        run = tmp_path / "runs" / name
        assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
        rows = [row for file in sorted((run / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
        ends = {row["finish_reason"] for row in rows}
        assert ends <= {"done", "turns", "length", "unclosed"}, (name, ends)  # no fault
        assert ends & {"done", "turns"}, (name, ends)  # the game has answered
        assert all(row["reward"] is not None for row in rows), name
