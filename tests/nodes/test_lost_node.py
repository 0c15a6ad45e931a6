"""A node is killed in a run of real Ray and vLLM: a generator's, which comes back, and that of a reward process:
`make test-nodes`."""

import os
from pathlib import Path

import pytest

from benchmarks.system.lost_node import AFTER, BEFORE, NAMES, EmulatedNodes, Run, lost
from benchmarks.system.system_run import counted

pytestmark = pytest.mark.skipif("NODES" not in os.environ, reason="two minutes; make test-nodes runs it")


# A reward function that waits: in a synchronous run of it each generator has groups under way for 1.5 s after a push.
WAITS = """
import asyncio

async def waits(completions, **columns):
    await asyncio.sleep(1.5)
    return [0.0 for _ in completions]
"""


def test_a_generator_whose_node_is_killed_costs_no_group_and_is_taken_back(tmp_path: Path) -> None:
    """`lost` returns only when the fresh generator has taken part in steps."""
    (tmp_path / "waits.py").write_text(WAITS)
    rewards = f"rewards=[{{use: reasoning_gym}}, {{use: '{tmp_path}/waits.py:waits', weight: 0}}]"
    found = lost("generator-1", 8.0, rewards, "max_staleness=0", "data.eval.every=3000", after_s=0.8)
    assert found["steps_while_away"] > 0
    assert found["lost"] == found["doubled"] == 0
    assert found["reissued"] > 0
    assert found["trained"] == 8 * found["steps"] >= 8 * (BEFORE + AFTER)


def test_a_reward_process_whose_node_is_killed_goes_on_elsewhere_and_costs_no_group(tmp_path: Path) -> None:
    names = [*NAMES, "spare"]
    with EmulatedNodes() as nodes:
        for name in names:
            nodes.start(name)
            nodes.until_joined(name)
        run = Run(nodes, tmp_path, "rollout.workers=1", "cluster.rewards.processes=1")
        try:
            run.until(lambda: len(run.rows()) >= BEFORE, f"{BEFORE} steps")
            victim = nodes.node_of("rewards-0", names)
            nodes.kill(victim)
            left, before = [name for name in names if name != victim], len(run.rows())
            run.until(lambda: any("rewards-0" in nodes.roles(name) for name in left), "a fresh rewards-0")
            # The batches that were begun before, and more.
            run.until(lambda: len(run.rows()) >= before + AFTER, f"{AFTER} steps with it")
            run.finish()
        finally:
            run.end()
        found = counted(run.folder)
    assert (found["lost"], found["doubled"], found["reissued"]) == (0, 0, 0), found
