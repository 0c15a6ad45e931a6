"""Chooses the library that multiplies float32 matrices on AMD's processors, by trying both when the learner starts.

torch's wheels have two libraries, MKL and oneDNN. MKL, the default, is made for Intel's processors and much slower on
AMD's: on Zen 5 it does 115 GFLOP/s per core, oneDNN 260. On Intel's processors there is no trial: on a busy machine its
noise chose oneDNN in one start of five, which then compiled every shape anew (900 MB and half as much time again in the
demo) and rounded differently from the start before.

torch uses oneDNN for float32 products only if it is told that less than float32 precision suffices. A processor without
matrix units for bfloat16 still computes in float32, but one with such units may round. So a product is compared with
float64, and the setting stays only if it is exact to float32 and faster.

The setting holds for every product of the process, so choose_library must be called only in a process that just trains.
"""

import logging
import time
from typing import Any

import torch
from torch import Tensor

from cluster.machine import processor

log = logging.getLogger("learner")

LESS = "bf16"  # torch.backends.mkldnn.matmul.fp32_precision: products may go to oneDNN
ONEDNN = "oneDNN"
EXACT = 1e-6  # relative norm of a product's error; float32 has 2e-7 to 5e-7, bfloat16 3e-3
FASTER = 1.8  # least gain in speed: on Zen 5 it is 2.2; a busy Zen 4 measured 1.0 to 1.6, which is noise
SHAPE = 1024, 512, 1024  # rows, summed dimension, columns: a product of a small layer
TURNS, MOST_TURNS = 5, 25  # more where the gain is too small yet: the fastest of few turns is slow on a busy machine


def choose_library() -> bool:
    """Tries both libraries and returns whether oneDNN computes float32 products from now on; otherwise the setting
    stays as it was. A line in the log says which. It takes 0.1 s of a core, or 0.5 s where nothing is gained.
    """
    library: Any = torch.backends.mkldnn
    if processor("vendor_id") != "AuthenticAMD" or not library.is_available():
        return False
    setting = library.matmul
    before: str = setting.fp32_precision
    generator = torch.Generator().manual_seed(0)
    rows, summed, columns = SHAPE
    a, b = torch.randn(rows, summed, generator=generator), torch.randn(summed, columns, generator=generator)
    seconds: dict[str, list[float]] = {before: [], LESS: []}
    try:
        gain = 0.0
        for turn in range(MOST_TURNS):  # the libraries take turns, since other processes start at the same time
            for way, taken in seconds.items():
                setting.fp32_precision = way
                started = time.process_time()  # wall time would be noise on a busy machine
                product = a @ b
                taken.append(time.process_time() - started)
            gain = min(seconds[before]) / min(seconds[LESS])
            if turn + 1 >= TURNS and gain >= FASTER:
                break
        error = _error(product, a, b)
    finally:
        setting.fp32_precision = before
    chosen = error < EXACT and gain >= FASTER
    if chosen:
        setting.fp32_precision = LESS
    log.info(
        "float32 products: %s (oneDNN takes 1/%.2f of the time of torch's default, relative error %.0e)",
        "oneDNN" if chosen else "torch's default", gain, error,
    )  # fmt: skip
    return chosen


def library() -> str:
    """Returns the library of float32 products in this process: oneDNN, or default."""
    backend: Any = torch.backends.mkldnn
    return ONEDNN if backend.matmul.fp32_precision == LESS else "default"


def use_library(name: str) -> None:
    """Sets the library without a trial. name: what `library` returned in a process whose steps are continued or
    replayed."""
    backend: Any = torch.backends.mkldnn
    backend.matmul.fp32_precision = LESS if name == ONEDNN else "none"


def _error(product: Tensor, a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double()
    return float((product - exact).norm() / exact.norm())
