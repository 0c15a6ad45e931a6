"""`make test-browser`: the report in Debian's Chromium. Without selenium on the path nothing here is collected; without
Chromium it is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import browser, missing

collect_ignore_glob = [] if find_spec("selenium") else ["test_*.py"]
SECONDS = 20


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A selenium driver."""
    if (wants := missing()) is not None:
        pytest.skip(wants)
    with browser() as driver:
        driver.set_script_timeout(SECONDS)
        yield driver


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[[Path | str], Any]]:
    """Opens a file or an address and waits for its list. At the end nothing may stand in the console."""

    def go(where: Path | str) -> Any:
        chromium.get(where if isinstance(where, str) else where.as_uri())
        chromium.execute_async_script(
            "const look = () => document.body.dataset.drawn ? arguments[0]() : setTimeout(look, 5); look();"
        )
        return chromium

    chromium.get_log("browser")
    yield go
    assert chromium.get_log("browser") == []
