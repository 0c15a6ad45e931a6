"""`make kernels`: vLLM's and Liger's Triton kernels in Triton's interpreter. Without it nothing here is collected:
Triton is not in the environment, since a vLLM for CPUs that finds it takes other paths."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
