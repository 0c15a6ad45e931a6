"""How long the driver takes before the start of a run over many rows of data, and how much memory.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.many_rows [--rows 1000000]

`--dry-run` of a run of 64 completions a group on a file of JSON lines, in a process of its own: rows are read, checked
and digested, prompts are tokenised as they are asked for. Seconds of the driver's CPU and of wall time, and its peak
resident memory (VmHWM); processes that it starts to try model and reward are not in them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.common import as_table, conditions, save, under
from benchmarks.processes import spent


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
            used = spent("learner.main", *words)
        found[count] = {"cpu_s": used.cpu_s, "wall_s": used.wall_s, "peak_mb": used.peak_bytes / 10**6}
        cells.append([f"{count:,}", f"{used.cpu_s:.1f}", f"{used.wall_s:.1f}", f"{used.peak_bytes / 10**6:.0f}"])
        print(cells[-1], flush=True)
    table = as_table(["rows", "CPU-s", "wall s", "peak MB"], cells)
    text = f"# Before the start of a run over many rows\n\n{table}\n\n{under(told, 'CPU and wall time')}\n"
    save("many_rows", {"conditions": told, "found": found}, text)


if __name__ == "__main__":
    main()
