"""Which version of a package is installed, without importing it."""

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
