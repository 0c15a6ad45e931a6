"""A generator's node is killed in a run of real Ray and vLLM, and comes back: `make test-nodes`."""

import os

import pytest

from benchmarks.system.lost_node import AFTER, BEFORE, lost

pytestmark = pytest.mark.skipif("NODES" not in os.environ, reason="two minutes; make test-nodes runs it")


def test_a_generator_whose_node_is_killed_costs_no_group_and_is_taken_back() -> None:
    """`lost` returns only when the fresh generator has taken part in steps."""
    found = lost("generator-1", away_s=8.0)
    assert found["steps_while_away"] > 0
    assert found["lost"] == found["doubled"] == 0
    assert found["reissued"] > 0
    assert found["trained"] == 8 * found["steps"] >= 8 * (BEFORE + AFTER)
