"""One quick connection tells whether the hub can be reached; its client would try for half a minute at each file."""

import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from rollout.data.files import is_file_name, is_pattern

log = logging.getLogger("rollout")

CONNECT_S = 4.0
# Modules that read HF_HUB_OFFLINE as they are imported, which may have happened.
READERS = ("huggingface_hub.constants", "datasets.config")
PINNED = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)@(.+)")
LONGEST = 200  # letters of a name that is looked for on the disk


def settle(paths: Iterable[str | None]) -> None:
    """Sets HF_HUB_OFFLINE, for this process and those that it starts, if one of `paths` is a hub name and the hub
    cannot be reached. Behind a proxy nothing is tried."""
    if switched_off() or getproxies() or not any(path and is_hub_name(path) for path in paths):
        return
    if (host := unreachable()) is None:
        return
    log.warning("%s cannot be reached within %g s: what is in the hub's cache is used", host, CONNECT_S)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in READERS:
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def switched_off() -> bool:
    """Whether the environment says so, read as huggingface_hub does."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE", "")
    return said.upper() in ("1", "ON", "YES", "TRUE")


def unreachable() -> str | None:
    """The hub's host, if it cannot be reached within CONNECT_S."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host, port = url.hostname or "huggingface.co", url.port or (80 if url.scheme == "http" else 443)
    return None if _connects(host, port) else host


def is_hub_name(path: str) -> bool:
    """Whether a path of a model or of data names something on the hub."""
    local = path.startswith(("/", ".", "~", "rg:", "env:")) or is_file_name(path) or is_pattern(path)
    plain = path.count("/") <= 1 and not local
    return plain and len(path) < LONGEST and not Path(path).exists()


def joined(name: str, revision: str | None) -> str:
    """`name@revision`: what a model with a revision is called in every process that reads it. Without one its name, or
    its folder."""
    return name if revision is None else f"{name}@{revision}"


def split(model: str) -> tuple[str, str | None]:
    """(name, revision) of what `joined` gave."""
    found = PINNED.fullmatch(model)
    if found is None or (len(model) < LONGEST and Path(model).exists()):
        return model, None
    return found[1], found[2]


def commit_of(folder: Path) -> str | None:
    """Of the folder that a model's commit has in the hub's cache, the commit. Else None."""
    found = re.search(r"/models--[^/]+/snapshots/([0-9a-f]{40})$", str(folder))
    return found[1] if found is not None else None


def _connects(host: str, port: int) -> bool:
    reached = threading.Event()

    def attempt() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError:
            return
        reached.set()

    # In a thread: looking up a name has no time-out of its own.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return reached.is_set()
