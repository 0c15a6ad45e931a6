"""What is changed of vLLM's CPU build in each process that computes with it: the engine's, and one of each shard."""

from __future__ import annotations

from rollout.vllm.cpu.amx import ask_for_amx
from rollout.vllm.cpu.lora import install_fast_cpu_lora, serve_experts
from rollout.vllm.cpu.norm import install_cpu_norm
from rollout.vllm.cpu.sampling import install_cpu_sampling


def prepare_cpu_process() -> None:
    """To be called before the model is made. A second call changes nothing."""
    ask_for_amx()
    install_fast_cpu_lora()
    serve_experts()
    install_cpu_norm()
    install_cpu_sampling()
