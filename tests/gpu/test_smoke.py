"""The day a card is there: `make smoke`, at most ten minutes. Each test is a row of benchmarks.gpu.smoke, which fails
where a policy does not arrive, where sleep gives nothing back, and so on; figures go to benchmarks/results/gpu/."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

ROWS = (
    "engine", "slices", "kernels", "shared", "sleep", "merged", "nf4", "continue", "fp8", "w4a16", "gptq", "awq",
    "fp8_channel", "fp8_block", "mxfp4", "experts_qwen3_moe", "experts_gpt_oss", "oom", "alternating",
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
def test_on_a_card(row: str, run_row: Callable[[str], dict[str, Any]], options: argparse.Namespace) -> None:
    found = run_row(f"smoke-{row}")
    if found["status"] == "missing" and options.device == "cpu":
        pytest.skip(found["error"])
    assert found["status"] == "ok", found["error"]


def test_every_row_of_the_benchmark_is_a_test() -> None:
    from benchmarks.gpu import smoke
    from benchmarks.gpu.rows import options_of

    options = options_of(None, smoke.MINUTES, ["--device", "cpu", "--tiny"])
    assert tuple(row.name.removeprefix("smoke-") for row in smoke.rows(options)) == ROWS
