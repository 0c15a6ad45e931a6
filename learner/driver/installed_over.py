"""Whether another distribution was installed over a package of this project, as pip does without a word: names as plain
as `rewards` are others' too. Imports the standard library alone."""

from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, PackagePath, distributions, files

OURS = "gleaner-rl"


def installed_over(packages: Sequence[str]) -> str:
    """A sentence that names the other distribution, or ''. Of a repository, which pip has not copied, ''."""
    for file in _first_files(packages):
        if _is_as_recorded(file):
            continue
        for other in distributions():
            name = other.metadata["Name"]
            if name != OURS and str(file) in map(str, other.files or ()):
                return (
                    f"{file.locate()} is the distribution {name}'s, installed over gleaner's package {file.parent}; "
                    f"install gleaner-rl again in an environment without {name}"
                )
    return ""


def _first_files(packages: Sequence[str]) -> Iterator[PackagePath]:
    """`__init__.py` of each package, where pip has recorded it."""
    try:
        recorded = files(OURS) or []
    except PackageNotFoundError:
        return
    names = {f"{package}/__init__.py" for package in packages}
    yield from (file for file in recorded if str(file) in names and file.hash is not None)


def _is_as_recorded(file: PackagePath) -> bool:
    path = file.locate()
    with open(str(path), "rb") as stream:
        digest = urlsafe_b64encode(sha256(stream.read()).digest()).rstrip(b"=").decode()
    return file.hash is None or file.hash.value == digest
