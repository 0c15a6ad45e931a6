"""The environment variables of a generator's process. They must be set before the process imports torch, so a launcher
(Ray's runtime_env, or the shell) sets them. Therefore this module imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.types import EngineError

# Wrong values of these variables silently break correctness or speed. The others need only be present, so that a
# launcher may give an engine more threads or another log level.
_EXACT = ("VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE", "VLLM_CPU_INT4_W4A8")


def required_env(cuda: bool) -> dict[str, str]:
    """Variables and values for a process that will hold a VllmEngine.

    cuda: whether the engine will run on an NVIDIA device; then TORCH_COMPILE_DISABLE must not be set at all.
    """
    env = {
        # The engine runs in this process: adapters pass by memory, and killing the actor leaves no process behind.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # vLLM makes process groups of this one process. Their ports ask for no token, so they stay on this machine.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if cuda:
        return env
    return env | {
        # vLLM compiles one logprob helper even in eager mode: 10 s of g++ at the first request.
        "TORCH_COMPILE_DISABLE": "1",
        # vLLM makes torch.set_num_threads a no-op, so only this variable sets the threads. Spinning OpenMP threads on a
        # busy machine made it 10 times slower. A launcher that gives the engine k idle cores sets k.
        "OMP_NUM_THREADS": "1",
        # oneDNN keeps a kernel and its memory for each shape that it has met, 1,024 of them by default. Over thousands
        # of steps, whose batches have all numbers of tokens, a generator grew by 150 MB.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # avoids a line about NUMA at every start
        # With AMX, vLLM would round the activations of 4-bit layers to 8 bits, which the learner does not.
        "VLLM_CPU_INT4_W4A8": "0",
        # With "auto" two engines would pin themselves to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def check_env(cuda: bool, environ: Mapping[str, str]) -> None:
    """Raises EngineError, naming every variable that is missing or wrong in environ."""
    wrong = []
    for name, value in required_env(cuda).items():
        found = environ.get(name)
        if found is None or (name in _EXACT and found != value):
            wrong.append(f"{name} must be {value!r}, got {found!r}")
    if cuda and environ.get("TORCH_COMPILE_DISABLE", "0") not in ("", "0"):
        wrong.append("TORCH_COMPILE_DISABLE must not be set on CUDA, it turns vLLM's compilation off")
    if wrong:
        raise EngineError(
            f"environment of the generator process: {'; '.join(wrong)}. "
            "Start the process with rollout.vllm.environment.required_env(cuda)"
        )
