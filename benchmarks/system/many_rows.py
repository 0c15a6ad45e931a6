"""How long the driver takes before the start of a run over many rows of data, and how much memory.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.many_rows [--rows 1000000]

`--dry-run` of a run of 64 completions a group on a file of JSON lines, in a process of its own: rows are read, checked
and digested, prompts are tokenised as they are asked for. Seconds of the driver's CPU and of wall time, and its peak
resident memory (VmHWM); processes that it starts to try model and reward are not in them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import as_table, conditions, save, under

DRIVER = (
    "import re, sys, time\nfrom learner.main import main\ncode = main(sys.argv[1:])\n"
    "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
    "print('spent', time.process_time(), peak)\nsys.exit(code)\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 1_000_000])
    options = parser.parse_args()
    told, found, cells = conditions(), {}, []
    for count in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "train.jsonl"
            with data.open("w") as file:
                for i in range(count):
                    other = i * 7 % 1000
                    row = {"question": f"State the final answer: {i} + {other} =", "answer": str(i + other)}
                    file.write(json.dumps(row | {"number": i, "part": {"a": [i % 5, None, 0.5]}}) + "\n")
            words = [
                "--config", "configs/local_cpu.yaml", "--dry-run", f"output_dir={folder}", f"data.path={data}",
                "data.args={}", "data.size=null", "data.eval.every=0", "rewards=[{use: number}]",
                "rollout.num_generations=64",
            ]  # fmt: skip
            begun = time.monotonic()
            done = subprocess.run([sys.executable, "-c", DRIVER, *words], text=True, capture_output=True)
            wall = time.monotonic() - begun
            assert done.returncode == 0, done.stdout + done.stderr
            _, cpu, peak = done.stdout.splitlines()[-1].split()
        found[count] = {"cpu_s": float(cpu), "wall_s": wall, "peak_mb": int(peak) / 1000}
        cells.append([f"{count:,}", f"{float(cpu):.1f}", f"{wall:.1f}", f"{int(peak) / 1000:.0f}"])
        print(cells[-1], flush=True)
    table = as_table(["rows", "CPU-s", "wall s", "peak MB"], cells)
    text = f"# Before the start of a run over many rows\n\n{table}\n\n{under(told, 'CPU and wall time')}\n"
    save("many_rows", {"conditions": told, "found": found}, text)


if __name__ == "__main__":
    main()
