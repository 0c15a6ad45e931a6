"""docs/licences.md: the licence of every package that `make setup` installs. python -m tests.licence_page makes it."""

import re
from collections import defaultdict
from importlib.metadata import PackageMetadata, metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST, DOCUMENT = ROOT / "requirements" / "cpu.txt", ROOT / "docs" / "licences.md"
# One name for what packages call differently.
SAME = {
    "MIT License": "MIT", "Apache Software License": "Apache-2.0", "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0", "BSD License": "BSD", "3-Clause BSD License": "BSD-3-Clause",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0", "The Unlicense (Unlicense)": "Unlicense",
    "GNU Library or Lesser General Public License (LGPL)": "LGPL",
}  # fmt: skip
HEAD = """\
# Licences

gleaner is under the Apache License 2.0, the GSM8K sample in `examples/gsm8k/` under its own MIT licence. These are the
licences that the {count} packages of `requirements/cpu.txt` and torch name in their metadata; gleaner's wheel holds
none of them. Made by `python -m tests.licence_page`; where it matters, read the packages' own texts.

| licence | packages |
|---|---|
"""


def licence_of(told: PackageMetadata) -> str:
    """By its expression, else its classifiers, else its own words."""
    if "License-Expression" in told:
        return told["License-Expression"]
    named = [line.split(" :: ")[-1] for line in told.get_all("Classifier") or [] if line.startswith("License :: ")]
    exact = sorted({SAME.get(one, one) for one in named if one != "OSI Approved"})
    words = "\n".join(told.get_all("License") or ["not said"]).strip().splitlines()[0]
    return " AND ".join(exact) or SAME.get(words, words)


def document() -> str:
    names = ["torch", *re.findall(r"^([\w.-]+)==", LIST.read_text(), re.MULTILINE)]
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[licence_of(metadata(name))].append(name)
    rows = [f"| {licence} | {', '.join(sorted(of, key=str.lower))} |" for licence, of in sorted(found.items())]
    return HEAD.format(count=len(names)) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
