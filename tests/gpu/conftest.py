"""The option of `make smoke`, one row in its own process, and the table at the end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Found = dict[str, Any]
TABLE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse what a CPU can do")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write(config.stash.get(TABLE, ""))


@pytest.fixture(scope="session")
def options(request: pytest.FixtureRequest) -> argparse.Namespace:
    """Of the smoke run. Skips where there is no card, unless a rehearsal is asked for."""
    import torch  # here: slow to import

    from benchmarks.gpu import smoke
    from benchmarks.gpu.rows import options_of

    device = request.config.getoption("--device", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; the rehearsal: make smoke DEVICE=cpu")
    return options_of(smoke.__doc__, smoke.MINUTES, ["--device", device, *(["--tiny"] if device == "cpu" else [])])


@pytest.fixture(scope="session")
def run_row(options: argparse.Namespace, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Found]]:
    """Name of a row -> what it found, while the ten minutes last."""
    from benchmarks.gpu import smoke

    end = time.monotonic() + 60 * options.minutes
    found: dict[str, Found] = {}

    def run(name: str) -> Found:
        options.minutes = (end - time.monotonic()) / 60
        found.update(smoke.run_rows(options, [row for row in smoke.rows(options) if row.name == name]))
        return found.get(name, {"status": "cut off", "error": "no time left; the same command goes on"})

    yield run
    text = smoke.report(found)
    (options.folder / "smoke.md").write_text(text)
    request.config.stash[TABLE] = text
