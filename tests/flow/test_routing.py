"""Routing replay in the whole system: the rollouts have the experts of all tokens, and the learner goes by them."""

from pathlib import Path

import pytest

from examples.random_families import make_family
from rollout import ledger
from rollout.schema import experts_of
from tests.flow.run import Run

APART = 0.2  # nats, of any token in bfloat16; measured 0.04 to 0.06, and 0.09 to 0.66 where the learner chooses itself


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_learner_sends_tokens_where_the_sampler_sent_them(tmp_path: Path) -> None:
    make_family(tmp_path / "model", "qwen3_moe")
    run = Run(tmp_path / "run", tmp_path / "model", steps=2)
    adapted = ("learner.push=merged", "learner.lora.targets=[q_proj,k_proj,v_proj,o_proj,experts]")  # experts, too
    run.finish("model.dtype=bfloat16", "rollout.routing_replay=true", *adapted)
    steps = [line for line in run.metrics() if line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(0 < line["policy/mismatch_max"] < APART for line in steps)
    for file in ledger.steps(run.folder / "rollouts"):
        for experts in experts_of(ledger.read(file)):
            assert experts is not None
            assert experts.min() >= 0
