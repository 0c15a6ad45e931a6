"""The environments of gem, TextArena and gymnasium in docs/adapters.md: their commands, with a tiny model on a CPU."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from examples.random_model import make_tiny_model
from tests.documented.blocks import ROOT
from tests.documented.workspace import Workspace
from tests.others.games import write

PACKAGES = ROOT / "build" / "games"
SMALL = {
    "steps": 2,
    "rollout": {"num_generations": 4, "max_prompt_length": 1024, "max_completion_length": 640, "kv_cache": "64MiB"},
    "learner": {"groups_per_step": 2},
}


def brief_model(folder: Path) -> Path:
    """A random model whose turns are of ten tokens or so: one channel of its states is large whatever it reads, and the
    row of the end token in its head reads that channel."""
    file = make_tiny_model(folder, max_length=2048, tied=False) / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] += 10
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][AutoTokenizer.from_pretrained(folder).eos_token_id, 0] = 0.45
    save_file(weights, file)
    return folder


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (PACKAGES / "gem").is_dir(), reason="make test-docs installs requirements/games.txt")
def test_the_commands(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = brief_model(tmp_path_factory.mktemp("model") / "brief")
    space = Workspace(tmp_path, model=model, packages=PACKAGES)
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
        assert name == "gem" or max(len(row["turns"]) for row in rows) > 1, name  # which ends at a turn without a guess
        assert ends & {"done", "turns"}, (name, ends)
        assert all(row["reward"] is not None for row in rows), name
