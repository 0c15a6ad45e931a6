"""Debian's Chromium without a window, driven by selenium, which lies in build/browser (`make test-browser`)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

PROGRAMS = ("chromium", "chromedriver")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


def missing() -> str | None:
    """What there is not, and how to get it; None where a browser can be started."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"needs {' and '.join(absent)}: apt-get install chromium chromium-driver"
    return None if find_spec("selenium") else "needs selenium: make test-browser puts it into build/browser"


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A selenium driver with a profile of its own, whose console is recorded."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        for option in (*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(option)
        options.binary_location = str(shutil.which(PROGRAMS[0]))
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=Service(str(shutil.which(PROGRAMS[1]))))
        try:
            yield driver
        finally:
            driver.quit()
