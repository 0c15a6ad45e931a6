"""AMX, the matrix instructions of newer Intel CPUs, in a process in which vLLM computes.

Linux gives them to a process that asks. vLLM's attention in bfloat16 uses them without asking, so that the process ends
with "Illegal instruction" where nothing before it has asked. Hence importing this module asks.
"""

from __future__ import annotations

import torch


class AmxWorker:
    """For `--worker-extension-cls` of a server: vLLM imports it in the process of its engine, and it adds nothing."""


def ask_for_amx() -> None:
    """By a product in bfloat16: torch's oneDNN asks for what the CPU has."""
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones)


ask_for_amx()
