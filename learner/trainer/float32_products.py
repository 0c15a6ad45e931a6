"""Which library multiplies float32 matrices on AMD's processors: settled when the learner's process starts, by trying
both.

torch's wheels hold two, MKL and oneDNN. MKL is the default, made for Intel's processors, and on AMD's the slower one by
far: on Zen 5 115 GFLOP/s a core, where oneDNN does 260. On Intel's there is no trial: on a busy machine its noise chose
oneDNN in one start of five, which compiled every shape anew (900 MB and half as much time again in the demo) and
rounded otherwise than the start before.

torch gives float32 products to oneDNN only where it is told that less than float32 will do. A processor without matrix
units for bfloat16 computes in float32 all the same; one that has them may round. So one product is compared with
float64, and the setting stays only if nothing was rounded and time is saved.

It holds for every product of the process: only learner.driver.roles calls this, for a process that is
the learner's alone.
"""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("learner")

LESS = "bf16"  # torch.backends.mkldnn.matmul.fp32_precision: products may go to oneDNN
ONEDNN = "oneDNN"
EXACT = 1e-6  # relative norm of a product's error; float32 has 2e-7 to 5e-7, bfloat16 3e-3
FASTER = 1.8  # on Zen 5 the gain is 2.2; a busy Zen 4 measured 1.0 to 1.6, which is noise
SHAPE = 1024, 512, 1024  # rows, summed, columns: a small layer's products
TURNS = 5


def choose_library() -> bool:
    """True if float32 products go to oneDNN from now on; else the setting is as it was. A line in the log says which.

    About 0.1 s of one core.
    """
    library: Any = torch.backends.mkldnn
    if not _made_by_amd() or not library.is_available():
        return False
    setting = library.matmul
    before: str = setting.fp32_precision
    generator = torch.Generator().manual_seed(0)
    rows, summed, columns = SHAPE
    a, b = torch.randn(rows, summed, generator=generator), torch.randn(summed, columns, generator=generator)
    seconds: dict[str, list[float]] = {before: [], LESS: []}
    try:
        for _ in range(TURNS):  # in turns, since other processes start beside this one
            for way, taken in seconds.items():
                setting.fp32_precision = way
                started = time.process_time()  # on a busy machine wall time is noise, and the choice would be, too
                product = a @ b
                taken.append(time.process_time() - started)
        error = _error(product, a, b)
    finally:
        setting.fp32_precision = before
    gain = min(seconds[before]) / min(seconds[LESS])
    chosen = error < EXACT and gain >= FASTER
    if chosen:
        setting.fp32_precision = LESS
    log.info(
        "float32 products: %s (oneDNN takes 1/%.2f of the time of torch's default, relative error %.0e)",
        "oneDNN" if chosen else "torch's default", gain, error,
    )  # fmt: skip
    return chosen


def library() -> str:
    """Which one it is: oneDNN, or default."""
    backend: Any = torch.backends.mkldnn
    return ONEDNN if backend.matmul.fp32_precision == LESS else "default"


def use_library(name: str) -> None:
    """Without a trial: the one that `library` named in the process whose steps go on or are replayed."""
    backend: Any = torch.backends.mkldnn
    backend.matmul.fp32_precision = LESS if name == ONEDNN else "none"


def _made_by_amd() -> bool:
    return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()


def _error(product: Tensor, a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double()
    return float((product - exact).norm() / exact.norm())
