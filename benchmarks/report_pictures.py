"""The pictures of docs/report.md, made anew from a run.

    PYTHONPATH=.:build/browser .venv/bin/python -m benchmarks.report_pictures runs/demo-seed0

Wants Debian's chromium, selenium (`make test-browser` fetches it) and textual. The run: `make demo` is one. In 256
colours, below 150 kB each.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from benchmarks.browser import browser, missing
from learner.tools.report.write import report
from learner.tools.terminal import RunApp

PICTURES = Path(__file__).parents[1] / "docs" / "images"
MOST = 150_000  # bytes
SPREAD = "const o = document.getElementById('order'); o.value = 'spread'; o.dispatchEvent(new Event('input'));"
COLOUR = "const c = document.getElementById('colour'); c.value = arguments[0]; c.dispatchEvent(new Event('change'));"
OPEN = "document.querySelector('#list button').click();"


class View(NamedTuple):
    """How a page is looked at. width, height: CSS pixels. colour: what a group's tokens are coloured by; None: no
    group is opened. to: the element that is scrolled to the top."""

    width: int
    height: int
    scheme: str
    colour: str | None = None
    to: str | None = None


VIEWS = {
    "report-curves": View(1280, 760, "light"),
    "report-time": View(1280, 260, "light", to="#time"),
    "report-group": View(1280, 760, "light", colour="logprob", to="#completions"),
    "report-mismatch": View(1280, 760, "dark", colour="mismatch", to="#completions"),
    "report-phone": View(390, 800, "light", colour="text", to="#group"),
}


def looked_at(driver: Any, page: Path, view: View) -> bytes:
    """A PNG of the page."""
    size = {"width": view.width, "height": view.height, "deviceScaleFactor": 1, "mobile": view.width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": view.scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    driver.get(page.as_uri())
    until(lambda: driver.execute_script("return document.body.dataset.drawn"))
    if view.colour is not None:
        driver.execute_script(SPREAD + OPEN)
        until(lambda: driver.execute_script("return document.querySelector('.card')"))
        driver.execute_script(COLOUR, view.colour)
    driver.execute_script("document.activeElement.blur();")
    if view.to is not None:
        driver.execute_script("document.querySelector(arguments[0]).scrollIntoView();", view.to)
    time.sleep(0.3)  # for what is drawn once it is visible
    return bytes(driver.get_screenshot_as_png())


def until(what: Callable[[], object]) -> None:
    for _ in range(600):
        if what():
            return
        time.sleep(0.05)
    raise RuntimeError("the page was not drawn within 30 s")


async def terminal(run: Path) -> str:
    """An SVG of `gleaner report --terminal` with the groups of the newest step in hand."""
    app = RunApp(run)
    async with app.run_test(size=(128, 34)) as pilot:
        await pilot.pause()
        await pilot.press("enter", "o", "o", "o", "down", "down")
        await pilot.pause()
        return app.export_screenshot()


def small(png: bytes, file: Path) -> None:
    """In 256 colours."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(file, optimize=True)
    if file.stat().st_size > MOST:
        raise RuntimeError(f"{file} must be at most {MOST} bytes, got {file.stat().st_size}; show less of the page")
    print(f"{file.name}: {file.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--out", type=Path, default=PICTURES)
    args = parser.parse_args()
    if (wants := missing()) is not None:
        raise SystemExit(wants)
    with tempfile.TemporaryDirectory() as folder, browser() as driver:
        driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        page, drawn = Path(folder) / "report.html", Path(folder) / "terminal.svg"
        if code := report(args.run, page, None, 2**26):
            raise SystemExit(code)
        for name, view in VIEWS.items():
            small(looked_at(driver, page, view), args.out / f"{name}.png")
        drawn.write_text(asyncio.run(terminal(args.run)))
        size = {"width": 1100, "height": 640, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(drawn.as_uri())
        small(driver.get_screenshot_as_png(), args.out / "report-terminal.png")


if __name__ == "__main__":
    main()
