"""The whole system on quantised checkpoints: three steps, with each push proven, and how far sampler and learner are
apart."""

from pathlib import Path

import pytest

from examples.quantised_checkpoints import make_quantised
from tests.flow.run import Run

MISMATCH = 0.2  # nats, of any token in bfloat16; measured 0.06 to 0.085, and 0.085 with the same weights in 16 bits


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "towers"), [("w4a16", None), ("gptq", None), ("awq", None), ("w4a16", "gemma3")])
def test_a_run_on_a_quantised_checkpoint(tmp_path: Path, kind: str, towers: str | None) -> None:
    make_quantised(tmp_path / "model", kind, towers=towers)
    run = Run(tmp_path / "run", tmp_path / "model", steps=3)
    run.finish("model.dtype=bfloat16")
    steps = [line for line in run.metrics() if line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(0 < line["policy/mismatch_max"] < MISMATCH for line in steps)
    assert all(line["time/push_probe"] > 0 for line in steps)  # both sides were asked about the same tokens
    assert (run.folder / "adapter" / "adapter_model.safetensors").is_file()
