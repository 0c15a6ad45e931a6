"""The processes of a run or of a cluster, whoever started them: all inherit a mark in their environment.

The mark's variable begins with XDG_, since reward processes keep those (rewards/environment.py).
"""

from pathlib import Path


def marked(mark: str) -> dict[int, str]:
    """Living processes in whose environment the mark is: pid -> command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
    return found
