"""A whole model that two ranks train in shards against one process, for many architectures: how far the weights are
apart after three steps, and whether both have the same names.

    PYTHONPATH=. python -m benchmarks.learner.sharded_families [KIND ...]

Tiny random models (tests/model_rows.py), five groups of six completions, micro-batches of 300 tokens, AdamW at 1e-3.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.common import as_table, conditions, save, under
from examples.random_families import FAMILIES, TINY, make_family
from tests.learner.rank_processes import rank_processes
from tests.learner.ranks.test_divided_weights import FULL, trained
from tests.learner.rollouts import make_groups, uniform
from tests.learner.trainers import make_trainer
from tests.model_rows import ROWS

KINDS = (
    "llama", "mistral", "gemma", "gemma2", "gemma3", "qwen3", "cohere", "glm4", "granite", "olmo2", "olmo3", "phi3",
    "apertus", "exaone4", "starcoder2", "helium", "smollm3", "lfm2", "nemotron",
)  # fmt: skip
DTYPES = ("float32", "bfloat16")
STEPS = 3


def written(kind: str, folder: Path) -> str:
    if kind in FAMILIES:
        return str(make_family(folder, kind))
    torch.manual_seed(0)
    hf: Any = transformers
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **(TINY | ROWS[kind])))
    model.float().save_pretrained(folder)
    return str(folder)


def apart(path: str, dtype: str) -> float:
    """The largest difference of two weights."""
    rng = np.random.default_rng(0)
    groups = make_groups([rng.normal(size=6).tolist() for _ in range(5)], uniform, max_completion=40)
    settings = FULL | {"dtype": dtype}
    wanted, *_ = asyncio.run(trained(make_trainer(path, **settings), groups, STEPS))
    with rank_processes(2, path, sharded=True, **settings) as processes:
        found, *_ = processes.all(trained, groups, STEPS)[0]
    assert found.keys() == wanted.keys()
    return max(float((found[name].float() - wanted[name].float()).abs().max()) for name in wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=KINDS, metavar="KIND")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in asked.kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = written(kind, Path(folder) / kind)
            rows.append({"kind": kind} | {dtype: apart(path, dtype) for dtype in DTYPES})
        print(rows[-1], flush=True)
    told = conditions()
    table = as_table(("model_type", *DTYPES), [(row["kind"], *(f"{row[d]:.1e}" for d in DTYPES)) for row in rows])
    note = (
        f"After {STEPS} steps, in which AdamW moves weights by up to 3e-3. Sums of two ranks have another order; in "
        "bfloat16 a weight may so be rounded to the next one, which is 2^-8 of it apart."
    )
    text = f"# A whole model in shards against one process\n\n{table}\n\n{under(told, note)}\n"
    save("sharded_families", {"conditions": told, "rows": rows}, text)


if __name__ == "__main__":
    main()
