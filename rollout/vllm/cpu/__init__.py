"""What is done otherwise than by vLLM where its build for CPUs computes."""
