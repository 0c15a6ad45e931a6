"""Where a step of the learner spends its time on a CPU, by part, and the floor of its products.

    make smollm2 && OMP_NUM_THREADS=1 PYTHONPATH=. .venv/bin/python -m benchmarks.learner.cpu_step

SmolLM2-135M-Instruct as in benchmarks.learner.real_step, and the random Llama of 25M weights of the ragged workload
(benchmarks.system.system_vs_trl): prompts of 200 to 400 tokens, 8 groups of 8 completions of 1 to 256. One thread,
under torch's profiler after a step to warm up; products are told apart by their shapes.

    base        products with frozen weights of the layers
    adapter     products with a dimension of the adapter's rank, of one layer or of several that share an input
    head        products with a tile of the vocabulary
    attention   scores and weighted sums, and all that belongs to them
    copies      casts, concatenations, gathered rows
    other       what goes through memory number by number: norms, SwiGLU, softmax of the head, sums

Floor: the operations of a part's products by the rate of a single large product of its type here.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import LEARNER_PACKAGES, as_table, conditions, parser_of, save, under
from benchmarks.learner.real_step import RANK, Rows, make_rows, trainer_of
from benchmarks.system.system_run import make_model
from learner.model.logprob import VOCAB_TILE
from learner.trainer.float32_products import choose_library, library

PRODUCTS = "mm", "addmm", "addmm_"
COPIES = "copy_", "cat", "index_select", "index_copy_", "index_add_", "index_add", "_to_copy"
ATTENTION = "bmm", "_softmax", "_softmax_backward_data", "_Tiles", "_TilesBackward"
PARTS = "base", "adapter", "head", "attention", "copies", "other"


def ragged_rows(vocab: int) -> Rows:
    rng = np.random.default_rng(0)
    rows: Rows = []
    for _ in range(8):
        prompt = rng.integers(5, vocab, rng.integers(200, 401)).tolist()
        rows += [(prompt, rng.integers(5, vocab, min(rng.geometric(0.01), 256)).tolist()) for _ in range(8)]
    return rows


def rate(dtype: torch.dtype) -> float:
    """Operations a second of a product of 2048 x 1024 x 1024."""
    a, b = torch.randn(2048, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    taken = []
    for _ in range(6):
        started = time.process_time()
        a @ b
        taken.append(time.process_time() - started)
    return 2 * 2048 * 1024 * 1024 / min(taken)


def part_of(name: str, shapes: list[list[int]], vocab: int) -> str:
    name = name.removeprefix("aten::")
    if name in PRODUCTS:
        sizes = {size for shape in shapes for size in shape}
        if sizes & {VOCAB_TILE, vocab % VOCAB_TILE, vocab}:
            return "head"
        return "adapter" if sizes & {RANK, 2 * RANK, 3 * RANK} else "base"
    return "attention" if name in ATTENTION else "copies" if name in COPIES else "other"


def operations(name: str, shapes: list[list[int]]) -> int:
    """Of one product; addmm's first matrix is what it adds to."""
    a, b = [shape for shape in shapes if len(shape) == 2][-2:]
    return 2 * prod(a) * b[1]


def measured(step: Any, vocab: int, dtype: str) -> dict[str, Any]:
    step()
    started = time.process_time()
    step()
    whole = time.process_time() - started
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    seconds, floor, calls = Counter[str](), Counter[str](), Counter[str]()
    rates = {one: rate(getattr(torch, one)) for one in {dtype, "float32"}}
    for event in found.key_averages(group_by_input_shape=True):
        part = part_of(event.key, event.input_shapes, vocab)
        seconds[part] += event.self_cpu_time_total / 1e6
        calls[part] += event.count
        if event.key.removeprefix("aten::") in PRODUCTS:
            kind = "float32" if part == "head" else dtype
            floor[part] += event.count * operations(event.key, event.input_shapes) / rates[kind]
    return {"whole": whole, "seconds": seconds, "floor": floor, "calls": calls, "rates": rates}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"), help="holds a folder for each type")
    options = parser.parse_args()
    torch.set_num_threads(1)
    choose_library()
    told, found, lines = conditions(LEARNER_PACKAGES), {}, []
    with tempfile.TemporaryDirectory() as made:
        make_model(Path(made), end_rate=0.01, context=1024)
        cases: list[tuple[str, str, str, Rows | None]]
        cases = [(f"SmolLM2, {dtype}", str(options.folder / dtype), dtype, None) for dtype in ("bfloat16", "float32")]
        cases += [(f"ragged 25M, {dtype}", made, dtype, ragged_rows(8000)) for dtype in ("float32", "bfloat16")]
        for name, model, dtype, rows in cases:
            rows = rows or make_rows(model)
            trainer = trainer_of(model, dtype, rows, packed=True)
            vocab = 49152 if "SmolLM2" in name else 8004
            one = found[name] = measured(trainer, vocab, dtype)
            whole = sum(one["seconds"].values())
            cells = []
            for part in PARTS:
                own, least = one["seconds"][part] * one["whole"] / whole, one["floor"][part]
                cells.append(f"{own:.2f} ({least:.2f})" if least else f"{own:.2f}")
            lines.append([name, f"{one['whole']:.2f}", *cells])
            print(*lines[-1], {kind: f"{value / 1e9:.0f}" for kind, value in one["rates"].items()}, flush=True)
    text = (
        f"# A step of the learner on a CPU, by part\n\n{as_table(['step', 'CPU-s', *PARTS], lines)}\n\n"
        f"In brackets: the floor of a part's products. LoRA r = {RANK}; float32 products by {library()}.\n\n"
        f"Conditions: {under(told, 'CPU time of one thread; parts by the profiler, scaled to a step without it')}\n"
    )
    save("cpu_step", {"conditions": told, "found": found}, text)


if __name__ == "__main__":
    main()
