"""A whole run whose generator is spread over two processes."""

import os
import re
import signal
from pathlib import Path

import pytest

from examples.random_model import make_tiny_model
from rollout import ledger
from tests.flow.run import Run, wait_until


def shared() -> set[Path]:
    """Memory that vLLM's processes share: of torch's collectives on a CPU, and of its queues."""
    return {*Path("/dev/shm").glob("vllm*"), *Path("/dev/shm").glob("psm_*")}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_shard_is_a_lost_generator(tmp_path: Path) -> None:
    """Another generator takes its place; each policy, here the whole weights, is proven on both shards, before and
    after."""
    model = make_tiny_model(tmp_path / "tiny", family="Llama", kv_heads=2)
    steps = 12  # so many that it is still going on when the kill comes, on a busy machine too
    run = Run(tmp_path, model, steps=steps, cluster={"tensor_parallel": 2})
    before = shared()
    with run.watched() as (_, addresses):
        process = run.start("data.eval.every=0", "learner.mode=full")
        wait_until(lambda: len(run.metrics()) > 1, "two steps", 240, process)
        (lost,) = (pid for pid, command in run.processes().items() if "Worker_TP1" in command)
        os.kill(lost, signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert re.search(r"generator-0: .*the engine died.*; restart", output), output
    assert [line["step"] for line in run.metrics()] == list(range(1, steps + 1))
    rows = [ledger.read(path) for path in ledger.steps(run.folder / "rollouts")]
    places = [place for step in rows for place in dict.fromkeys(step.column("position").to_pylist())]
    assert places == list(range(3 * steps))
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)
    wait_until(
        lambda: shared() <= before, "its shared memory to go", seconds=30
    )  # a test beside this one may have some
