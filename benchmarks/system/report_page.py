"""How soon a browser shows the report of a long run.

    PYTHONPATH=.:build/browser .venv/bin/python -m benchmarks.system.report_page [--tokens 60 400]

Makes a run folder of 100,000 completions (random tokens of the demo's model, in groups of 8, 64 groups a step), its
report with the default limit, and opens it in Chromium. Opened: time from the start of the navigation to the
end of loading or to the list being drawn, whichever comes later. A group: from the click to its cards. Medians; each
time in a new browser with an empty profile. Wants Debian's chromium, and selenium (`make test-browser` fetches it).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.browser import browser, missing
from benchmarks.common import MIB, as_table, conditions, save, under
from learner.tools.report.page import blocks_of, page
from rollout import ledger
from rollout.fakes import make_group
from rollout.types import Completion

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-arithmetic"
SIZE, GROUPS, LIMIT = 8, 64, 64 * MIB  # completions of a group, groups of a step, bytes in a page
PROMPT = "State the final answer to the following arithmetic problem: {} + {} ="


def make_run(folder: Path, completions: int, tokens: int) -> None:
    """A run folder whose completions have 1 to 2 * tokens tokens."""
    rng, tokenizer = np.random.default_rng(0), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    steps = -(-completions // (SIZE * GROUPS))
    left = completions // SIZE
    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"steps: {steps}\nmodel: {{path: {MODEL}}}\nlearner: {{algorithm: grpo, loss: {{advantage: batch}}}}\n"
    )
    names = [f"time/part_{i}" for i in range(40)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: round(float(rng.random()), 6) for name in [*names, "reward/mean", "policy/entropy"]}
            file.write(json.dumps({"step": step, "at": 1.7e9 + step, **values}) + "\n")
    for step in range(1, steps + 1):
        made = [group(rng, tokenizer, GROUPS * step + i, tokens) for i in range(min(GROUPS, left))]
        left -= len(made)
        ledger.write(folder / "rollouts", step, made)


def group(rng: np.random.Generator, tokenizer: Tokenizer, position: int, tokens: int) -> Any:
    ids = [rng.integers(0, tokenizer.get_vocab_size(), rng.integers(1, 2 * tokens + 1), np.int32) for _ in range(SIZE)]
    made = [
        Completion(one, -rng.exponential(0.5, len(one)).astype(np.float32), "stop", np.zeros(len(one), np.int32))
        for one in ids
    ]
    problem = {"messages": [{"role": "user", "content": PROMPT.format(position, tokens)}], "columns": {"answer": "4"}}
    return make_group(
        position, completions=made, rewards=[float(r) for r in rng.integers(0, 7, SIZE) / 5],
        completion=tokenizer.decode_batch([one.tolist() for one in ids]), problem=[json.dumps(problem)] * SIZE,
    )  # fmt: skip


def opened(file: Path) -> dict[str, float]:
    """Milliseconds of one visit."""
    with browser() as driver:
        driver.set_script_timeout(60)
        driver.get(file.as_uri())
        drawn, loaded = driver.execute_async_script(
            "const done = arguments[0]; const look = () => { const drawn = document.body.dataset.drawn;"
            "const end = performance.getEntriesByType('navigation')[0].loadEventEnd;"
            "drawn && end ? done([Number(drawn), end]) : setTimeout(look, 5); }; look();"
        )
        group = driver.execute_async_script(
            "const done = arguments[0], begin = performance.now(), cards = () => document.querySelector('.card');"
            "document.querySelectorAll('#list button')[20].click();"
            "const look = () => cards() ? done(performance.now() - begin) : setTimeout(look, 2); look();"
        )
        wrong = driver.get_log("browser")
    if wrong:
        raise RuntimeError(f"the console must stay empty, got {wrong}")
    return {"list_ms": drawn, "opened_ms": max(drawn, loaded), "group_ms": group}


def measure(folder: Path, completions: int, tokens: int, repeats: int) -> dict[str, Any]:
    run = folder / f"tokens-{tokens}"
    make_run(run, completions, tokens)
    begin = time.perf_counter()
    title, blocks = blocks_of(run, None, LIMIT)
    file = run / "report.html"
    with file.open("w") as stream:
        stream.writelines(page(title, blocks))
    took = time.perf_counter() - begin
    visits = [opened(file) for _ in range(repeats)]
    steps = len(ledger.steps(run / "rollouts"))
    return {
        "completions": completions, "tokens": tokens, "steps": steps, "steps_shown": len(blocks) - 3,
        "rollouts_bytes": sum(f.stat().st_size for f in ledger.steps(run / "rollouts")),
        "page_bytes": file.stat().st_size,
        "made_s": took, "visits": visits, **{key: median(v[key] for v in visits) for key in visits[0]},
        "slowest_ms": max(v["opened_ms"] for v in visits),
    }  # fmt: skip


def table(found: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"{one['completions']:,}", str(one["tokens"]), f"{one['steps_shown']} of {one['steps']}",
            f"{one['rollouts_bytes'] / MIB:.0f}", f"{one['page_bytes'] / MIB:.0f}", f"{one['made_s']:.0f}",
            f"{one['list_ms'] / 1e3:.2f}",
            f"{one['opened_ms'] / 1e3:.2f} ({one['slowest_ms'] / 1e3:.2f})", f"{one['group_ms'] / 1e3:.2f}",
        ]
        for one in found
    ]  # fmt: skip
    header = [
        "completions", "mean tokens", "steps shown", "rollouts MiB", "page MiB", "made in s", "list drawn in s",
        "all opened in s (slowest)",
        "a group in s",
    ]  # fmt: skip
    return as_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[60, 400], help="mean of a completion")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if (wants := missing()) is not None:
        raise SystemExit(wants)
    told = conditions(("pyarrow", "selenium"))
    with tempfile.TemporaryDirectory() as folder, browser() as driver:
        told["versions"]["chromium"] = driver.capabilities["browserVersion"]
        found = [measure(Path(folder), args.completions, tokens, args.repeats) for tokens in args.tokens]
    text = (
        f"# A report of {args.completions:,} completions\n\n{table(found)}\n\nMedians of {args.repeats} visits, each "
        f"in a new browser.\n\nConditions: {under(told, 'Wall time')}\n"
    )
    save("report_page", {"conditions": told, "runs": found}, text)


if __name__ == "__main__":
    main()
