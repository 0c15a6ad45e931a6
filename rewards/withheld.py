"""Variables that say where requests go, are set where the run is started, and are kept from reward functions: without
them a client goes to its default address, with the user's texts."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.reading import Unreadable, read_bytes
from rewards.config import RewardConfig
from rewards.environment import kept
from rewards.loader import BUILT_INS
from rewards.own_imports import own_imports

# OPENAI_BASE_URL, OPENAI_API_BASE, AZURE_OPENAI_ENDPOINT, OLLAMA_HOST, ...; what stands before is whose it is.
_ADDRESS = re.compile(r"([A-Z0-9]+(?:_[A-Z0-9]+)*?)_(?:API_)?(?:BASE_URL|BASE|URL|ENDPOINT|HOST)")
_PROXY = re.compile(r"(?:https?|all)_proxy", re.IGNORECASE)
_CLIENTS = re.compile(rb"\b(?:requests|httpx|aiohttp|urllib|openai|anthropic|litellm|huggingface_hub)\b")
MOST = 1 << 20  # bytes of a file of the user's that is looked through


def withheld_notes(reward: RewardConfig, label: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each such variable that the function names, or whose owner it names: in the text of its file and of
    what that imports from beside it, or by another variable of that owner in `env`. label: of the reward."""
    if reward.use in BUILT_INS:
        return []
    text = b"\n".join(_texts(reward.use))
    owners = {name.partition("_")[0] for name in reward.env}
    found = [name for name in sorted(environ) if kept(name) and name not in reward.env and _reads(name, text, owners)]
    return [
        f"{label}: {name} is set here and kept from reward functions, so that a client in them goes to its default "
        f"address; if it is to count, set env=[{', '.join([*reward.env, name])}]"
        for name in found
    ]


def _reads(name: str, text: bytes, owners: set[str]) -> bool:
    if _PROXY.fullmatch(name):
        return bool(owners or _CLIENTS.search(text))
    if (address := _ADDRESS.fullmatch(name)) is None:
        return False
    whose = address[1].partition("_")[0]
    return whose in owners or name.encode() in text or re.search(rb"\b%s\b" % whose.lower().encode(), text) is not None


def _texts(use: str) -> Iterator[bytes]:
    """Of the function's file, pickled or not; of a module that is named by its import nothing."""
    file = Path(use.rpartition(":")[0] or use)
    if file.is_file():
        for one in (file, *(own_imports(file, file.parent) if file.suffix == ".py" else ())):
            try:
                yield read_bytes(one, MOST)
            except (
                OSError,
                Unreadable,
            ):  # what cannot be read is said as it is loaded; a larger file is not looked through
                continue
