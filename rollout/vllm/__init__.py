"""The generator on vLLM. Only the files of this folder import vllm."""
