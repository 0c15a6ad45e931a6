"""Whether there is room for what an export writes, and for the model as it is merged."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from cluster.machine import available_memory
from cluster.memory.plan import gib
from cluster.memory.units import DTYPE_BYTES
from learner.tools.export.errors import ExportError
from learner.tools.export.source import Source
from rollout.data.weight_files import adapter_weights, model_weights

OTHERS = 50 * 10**6  # bytes of tokenizer, configuration and card
PROCESS = 2 * 10**9  # of memory: torch, and logits of one completion
GGUF_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "auto": 2.0, "q8_0": 34 / 32}  # of a weight


@dataclass(frozen=True, slots=True)
class Needed:
    """Bytes on the disk, and in memory, on a card or not; weights that the model has, 0 if that is not known yet."""

    disk: int
    memory: int
    weights: int


def needed(source: Source, dtype: str | None, outtype: str | None) -> Needed:
    """Of merged weights of that type, and a GGUF file of that one beside them; dtype None: of the adapter alone."""
    if dtype is None:
        stored = adapter_weights(str(source.learned), "RUN").values()
        return Needed(2 * sum(one.nbytes for one in stored) + OTHERS, 0, 0)  # twice: vLLM may want other names
    found = model_weights(str(source.learned) if source.whole_model else source.config.model.source) or {}
    weights = sum(math.prod(one.shape) for one in found.values())
    each = DTYPE_BYTES[dtype] + (GGUF_BYTES[outtype] if outtype else 0)
    return Needed(int(weights * each) + OTHERS, 4 * weights + PROCESS, weights)


def check_disk(wanted: Needed, out: Path) -> None:
    """Raises ExportError."""
    there = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if wanted.disk > free:
        raise ExportError(
            f"OUT: needs {gib(wanted.disk)} on the disk of {there}, which has {gib(free)} left; give another folder"
        )


def check_memory(wanted: Needed) -> None:
    """Of a merge on the CPU. Raises ExportError."""
    free = available_memory()
    if wanted.memory > free:
        raise ExportError(
            f"RUN: merging in float32 needs {gib(wanted.memory)} of memory, {gib(free)} are free; give "
            "--adapter-only, which needs none, or merge on a larger machine"
        )
