"""vLLM as a generator; the only files that import it."""
