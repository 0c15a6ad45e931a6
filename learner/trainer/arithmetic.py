"""With what this process computes: what the last bits of a step depend on, beside its settings and its rollouts."""

from pathlib import Path

import torch

from learner.trainer.float32_products import library
from learner.trainer.service import Arithmetic


def arithmetic_on(device: torch.device) -> Arithmetic:
    """Of the learner on that device."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else _processor()
    # As a plain text: torch's own class of it would import torch in the driver, which reads this.
    return Arithmetic(str(torch.__version__), name, torch.get_num_threads(), library())


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"
