"""Reports and long runs: the pictures of docs/report.md, and what a report and the start of a run take where there is
much of it.

    PYTHONPATH=.:build/browser .venv/bin/python -m benchmarks.report pictures runs/demo-seed0
    PYTHONPATH=. .venv/bin/python -m benchmarks.report long [--steps 10000] [--lines 200000] [--rows 1000000]

pictures  They are made anew from a run (`make demo` is one), in 256 colours, below 150 kB each. This wants Debian's
          chromium, selenium (`make test-browser` fetches it) and textual.
long      `gleaner report` of a run of many steps, each with 64 completions (those of the demo's model, 1 to 60 tokens
          of text) and the metrics of the demo, and of one with many lines of such metrics; and the driver's part of
          `--dry-run` on a file of many JSON lines. Each is a process of its own, whose CPU-seconds and peak resident
          memory are told; processes that it starts are not in them.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import MIB, ROOT, as_table, conditions, parser_of, save, under

PROGRAMS = ("chromium", "chromedriver")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
PICTURES = ROOT / "docs" / "images"
MOST = 150_000  # bytes
SPREAD = "const o = document.getElementById('order'); o.value = 'spread'; o.dispatchEvent(new Event('input'));"
COLOUR = "const c = document.getElementById('colour'); c.value = arguments[0]; c.dispatchEvent(new Event('change'));"
OPEN = "document.querySelector('#list button').click();"
MODEL = ROOT / "examples" / "tiny-arithmetic"
SIZE, GROUPS, TOKENS = 8, 8, 30  # completions of a group, groups of a step, mean tokens of a completion
DIFFERENT, METRICS = 16, 58  # step files that are not copies; metrics of a step, as in the demo
COMMAND = (
    "import re, sys, time\nfrom importlib import import_module\n"
    "code = import_module(sys.argv[1]).main(sys.argv[2:])\n"
    # VmHWM: ru_maxrss would be this process's, which the child has been until it became another.
    "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
    "print('spent', time.process_time(), peak)\nsys.exit(code)\n"
)


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
    from learner.tools.terminal import RunApp

    app = RunApp(run)
    async with app.run_test(size=(128, 34)) as pilot:
        await pilot.pause()
        await pilot.press("enter", "o", "o", "o", "down", "down")
        await pilot.pause()
        return app.export_screenshot()


def small(png: bytes, file: Path) -> None:
    """In 256 colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(file, optimize=True)
    if file.stat().st_size > MOST:
        raise RuntimeError(f"{file} must be at most {MOST} bytes, got {file.stat().st_size}; show less of the page")
    print(f"{file.name}: {file.stat().st_size} bytes")


def pictures(args: argparse.Namespace) -> None:
    from learner.tools.report.write import report

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


def group(rng: np.random.Generator, tokenizer: Any, position: int) -> Any:
    from rollout.fakes import make_group
    from rollout.types import Completion

    ids = [rng.integers(0, tokenizer.get_vocab_size(), rng.integers(1, 2 * TOKENS + 1), np.int32) for _ in range(SIZE)]
    made = [
        Completion(one, -rng.exponential(0.5, len(one)).astype(np.float32), "stop", np.zeros(len(one), np.int32))
        for one in ids
    ]
    problem = {"messages": [{"role": "user", "content": f"{position} + {position} ="}], "columns": {"answer": "4"}}
    return make_group(
        position, completions=made, rewards=[float(r) for r in rng.integers(0, 7, SIZE) / 5],
        completion=tokenizer.decode_batch([one.tolist() for one in ids]), problem=[json.dumps(problem)] * SIZE,
    )  # fmt: skip


def make_run(folder: Path, steps: int, *, rollouts: bool) -> Path:
    """Metrics of so many steps, and their completions."""
    from tokenizers import Tokenizer

    from rollout import ledger

    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"steps: {steps}\nmodel: {{path: {MODEL}}}\nlearner: {{algorithm: grpo, loss: {{advantage: batch}}}}\n"
    )
    rng, tokenizer = np.random.default_rng(0), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    names = ["time/step", "reward/mean", "policy/entropy", *(f"time/part_{i}" for i in range(METRICS - 3))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = dict(zip(sorted(names), rng.random(METRICS).tolist(), strict=True))
            scores = {"eval/accuracy": float(rng.random())} if step % 10 == 0 else {}
            file.write(json.dumps({"step": step, "at": round(1.7e9 + step, 3), **scores, **values}) + "\n")
    for step in range(1, steps + 1 if rollouts else 1):
        if step <= DIFFERENT:
            ledger.write(folder / "rollouts", step, [group(rng, tokenizer, GROUPS * step + i) for i in range(GROUPS)])
        else:
            own = folder / "rollouts" / f"step-{step:06d}.parquet"
            os.link(own.with_name(f"step-{step % DIFFERENT + 1:06d}.parquet"), own)
    return folder


def make_rows(folder: Path, count: int) -> list[str]:
    """The words of a `--dry-run` on so many rows of data."""
    data = folder / "train.jsonl"
    with data.open("w") as file:
        for i in range(count):
            other = i * 7 % 1000
            row = {"question": f"State the final answer: {i} + {other} =", "answer": str(i + other)}
            file.write(json.dumps(row | {"number": i, "part": {"a": [i % 5, None, 0.5]}}) + "\n")
    return [
        "--config", "configs/local_cpu.yaml", "--dry-run", f"output_dir={folder}", f"data.path={data}", "data.args={}",
        "data.size=null", "data.eval.every=0", "rewards=[{use: number}]", "rollout.num_generations=64",
    ]  # fmt: skip


def spent(what: str, module: str, words: Sequence[str]) -> dict[str, Any]:
    """Seconds of CPU and of wall time, imports included, and the greatest resident memory, by `main` of a module given
    these words, in a process of its own. Raises RuntimeError if it fails."""
    begun = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", COMMAND, module, *words], capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - begun
    if ran.returncode != 0:
        raise RuntimeError(ran.stdout + ran.stderr)
    cpu, peak = ran.stdout.rpartition("spent ")[2].split()
    found = {"what": what, "cpu_s": float(cpu), "wall_s": wall_s, "peak_bytes": int(peak) * 1024}
    print(found, flush=True)
    return found


def long(args: argparse.Namespace) -> None:
    told = conditions(("pyarrow", "numpy", "transformers"))
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as name:
        place = Path(name)
        steps = make_run(place / "steps", args.steps, rollouts=True)
        lines = make_run(place / "lines", args.lines, rollouts=False)
        report = "learner.tools.cli"
        found = [
            spent(f"report of {args.steps:,} steps of 64 completions", report, ["report", str(steps)]),
            spent(f"report of {args.lines:,} lines of metrics.jsonl", report, ["report", str(lines)]),
            *(spent(f"start with {rows:,} rows of data", "learner.main", make_rows(place, rows)) for rows in args.rows),
        ]
    cells = [
        [one["what"], f"{one['cpu_s']:.1f}", f"{one['wall_s']:.1f}", f"{one['peak_bytes'] / MIB:.0f}"] for one in found
    ]
    table = as_table(["what", "CPU-s", "wall s", "peak memory, MiB"], cells)
    text = (
        f"# Reports of long runs, and the start of one with many rows\n\n{table}\n\n{under(told, 'One process each')}"
    )
    save("long_runs", {"conditions": told, "found": found}, text)


def main() -> None:
    parser = parser_of(__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    of_pictures = what.add_parser("pictures")
    of_pictures.add_argument("run", type=Path, help="a run's folder")
    of_pictures.add_argument("--out", type=Path, default=PICTURES)
    of_long = what.add_parser("long")
    of_long.add_argument("--steps", type=int, default=10_000)
    of_long.add_argument("--lines", type=int, default=200_000)
    of_long.add_argument("--rows", type=int, nargs="+", default=[1000, 1_000_000])
    args = parser.parse_args()
    {"pictures": pictures, "long": long}[args.what](args)


if __name__ == "__main__":
    main()
