"""The learner on a CUDA card (checklist A, B and C), on random weights of the real shapes: nothing is downloaded.

    PYTHONPATH=. python -m benchmarks.gpu.learner                      all rows, about 45 minutes on an H100
    PYTHONPATH=. python -m benchmarks.gpu.learner --minutes 9          what fits into 9; the same command goes on
    PYTHONPATH=. python -m benchmarks.gpu.learner --only a-Llama b-    rows whose names begin so
    PYTHONPATH=. python -m benchmarks.gpu.learner --device cpu --tiny  the rehearsal, into build/rehearsal

Needs torch, transformers, peft, accelerate, pyarrow, pydantic, numpy, safetensors; neither ray, vllm nor datasets. Rows
that need bitsandbytes (8-bit states, 4-bit bases), liger-kernel or trl say so where it is missing. Each row is a
process of its own and a JSON under benchmarks/results/gpu/<card>-<date>/; rows that are there are not run again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.common import as_table
from benchmarks.gpu import busy, memory, speed, trl
from benchmarks.gpu.rows import Found, Row, folder_for, run_all, run_here
from cluster.memory.shape import Shape
from learner.driver.roles import ALLOCATOR

TINY = Shape("tiny", "llama", 64, 160, 2, 4, 2, 16, 512, tied=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1M weights, to rehearse")
    parser.add_argument("--minutes", type=float, default=60, help="no row is begun later, and none goes on")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    parser.add_argument("--folder", type=Path, help="of the results, to go on with those of another day")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tiny = TINY if options.tiny else None
    rows = [*memory.rows(tiny), *speed.rows(tiny), *busy.rows(tiny), *trl.rows(tiny)]
    folder = options.folder or folder_for(options.device, options.tiny)
    if options.row:
        run_here(next(row for row in rows if row.name == options.row), options.device, folder / f"{options.row}.json")
        return 0
    os.environ.update(ALLOCATOR)  # as the learner of a run has it on a card; of the rows' processes
    passed = ["--device", options.device, "--folder", str(folder), *(["--tiny"] if options.tiny else [])]
    wanted = [row for row in rows if row.name.startswith(tuple(options.only))]
    run_all("benchmarks.gpu.learner", wanted, folder, passed, options.minutes)
    text = report(rows, folder)
    (folder / "learner.md").write_text(text)
    print(text)
    return 0


def report(rows: list[Row], folder: Path) -> str:
    """Tables of all rows that are there."""
    import json

    found: dict[str, Found] = {
        row.name: json.loads(file.read_text()) for row in rows if (file := folder / f"{row.name}.json").exists()
    }
    parts = {"a": ("Memory, GB without the CUDA context", memory.table), "b": ("Speed", speed.table),
             "c": ("One step beside TRL", trl.table)}  # fmt: skip
    text = ""
    for letter, (title, table) in parts.items():
        some = {name: one for name, one in found.items() if name.startswith(f"{letter}-")}
        text += f"## {title}\n\n{as_table(*table(some))}\n\n" if some else ""
    told: Found = next((one["conditions"] for one in found.values() if "conditions" in one), {})
    return f"{text}Conditions: {json.dumps(told)}\n"


if __name__ == "__main__":
    sys.exit(main())
