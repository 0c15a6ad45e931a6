"""Write the contracts from the packages' wheels: `make contracts`, or `python -m tests.contracts.make PACKAGE ...`.

pip fetches one wheel at a time and installs none. Their Python files stay in build/contracts, so that after a new use
nothing is fetched again; at first it is about 3 GB, most of it vLLM's libraries, which are thrown away.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from email.parser import Parser
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from packaging.requirements import Requirement

from tests.contracts.contract import Contract, bounds, choices_in, symbols_in
from tests.contracts.source import Source
from tests.contracts.uses import ROOT, uses_of

FETCHED = ROOT / "build" / "contracts"
# Of each minor version the newest. Those that pyproject.toml does not allow show why its bounds are where they are.
VERSIONS = {
    "vllm": ["0.31.0", "0.32.0", "0.33.0"],
    "torch": ["2.11.0", "2.12.1", "2.13.0", "2.14.0"],
    "ray": ["2.59.0", "2.60.0"],
    "bitsandbytes": ["0.50.2"],
    "vllm-bnb-plugin": ["0.0.3"],
    "liger-kernel": ["0.8.5"],
    "fla-core": ["0.6.0"],
}
LINUX = [f"manylinux_2_{minor}_x86_64" for minor in (28, 24, 31, 34, 35, 17)] + ["manylinux2014_x86_64"]
# torch's Python files are the same on every system, and the wheel for this one has a tenth of the size.
PLATFORMS = {"torch": ["macosx_14_0_arm64", "macosx_11_0_arm64"]}
KEPT = (".py", ".dist-info/METADATA", ".dist-info/entry_points.txt")
# Ray's core, in C++, takes settings from environment variables whose names stand nowhere else; of it these are kept.
CORE, VARIABLE = "ray/_raylet.so", re.compile(rb"RAY_[A-Za-z0-9_]{3,}")


def main() -> None:
    for package in sys.argv[1:] or VERSIONS:
        for version in VERSIONS[package]:
            made = contract(package, version, fetched(package, version))
            made.write()
            print(f"{made.file.relative_to(ROOT)}: {len(made.symbols)} names", flush=True)


def fetched(package: str, version: str) -> Path:
    """A zip of the wheel's Python files and metadata, and of names in Ray's core."""
    files = FETCHED / f"{package}-{version}.zip"
    if files.exists():
        return files
    FETCHED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FETCHED) as folder:
        platforms = [f"--platform={name}" for name in PLATFORMS.get(package, LINUX)]
        options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms, f"--dest={folder}"]
        command = [sys.executable, "-m", "pip", "-qq", "download", "--no-cache-dir", *options, f"{package}=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        part = Path(folder) / "part.zip"
        with ZipFile(wheel) as whole, ZipFile(part, "w", ZIP_DEFLATED) as some:
            for name in whole.namelist():
                if name.endswith(KEPT):
                    some.writestr(name, whole.read(name))
                elif name == CORE:
                    some.writestr(f"{name}.txt", b"\n".join(sorted(set(VARIABLE.findall(whole.read(name))))))
        part.rename(files)
    return files


def contract(package: str, version: str, files: Path) -> Contract:
    """What our sources use of the package, as this version has it."""
    uses = uses_of(package)
    with ZipFile(files) as wheel:
        names = set(wheel.namelist())
        source = Source(lambda name: wheel.read(name).decode() if name in names else None)
        texts = [wheel.read(name).decode(errors="replace") for name in names if name.endswith((".py", ".so.txt"))]
        asked = requires(wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode())
        return Contract(package, version, symbols_in(source, uses, texts), choices_in(source, uses), asked)


def requires(metadata: str) -> dict[str, str]:
    """Of what pyproject.toml bounds too: what this version asks of it, whichever extras are chosen."""
    asked = [Requirement(line) for line in Parser().parsestr(metadata).get_all("Requires-Dist", [])]
    here = {"extra": "", "python_version": "3.12", "sys_platform": "linux", "platform_machine": "x86_64"}
    plain = [one for one in asked if one.marker is None or one.marker.evaluate(here)]
    return {one.name.lower(): str(one.specifier) for one in plain if one.name.lower() in bounds()}


if __name__ == "__main__":
    main()
