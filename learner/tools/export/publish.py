"""An exported folder on the hub, by huggingface_hub's own upload."""

import os
from pathlib import Path
from urllib.request import getproxies

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils._validators import validate_repo_id

from learner.tools.export.errors import ExportError, ExportFailed
from rollout.data import hub

FAULTS = (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError, OSError)


def check_hub(repo: str) -> None:
    """Whether the hub is there and knows who pushes; nothing is made on it. Raises ExportError."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ExportError(f"--push-to: must be OWNER/NAME, got {repo[:100]}: {error}") from None
    if repo.count("/") != 1:
        raise ExportError(f"--push-to: must be OWNER/NAME, got {repo[:100]}; put your name or organisation before it")
    if hub.switched_off():
        raise ExportError("--push-to: the hub is switched off by HF_HUB_OFFLINE; unset it, or leave --push-to out")
    if unreachable := _unreachable():
        raise ExportError(f"--push-to: {unreachable}; try again when it can be reached, or leave --push-to out")
    if get_token() is None:
        raise ExportError("--push-to: nobody is logged in to the hub; run: hf auth login")
    try:
        _api().whoami()
    except FAULTS as error:
        raise ExportError(f"--push-to: the hub does not take the login: {_first_line(error)}; hf auth login") from None


def publish(folder: Path, repo: str, *, public: bool) -> str:
    """The address of what was uploaded. A new repository is private, unless `public`. Raises ExportFailed."""
    try:
        if unreachable := _unreachable():
            raise OSError(unreachable)
        _api().create_repo(repo, private=not public, exist_ok=True)
        found = _api().upload_folder(repo_id=repo, folder_path=folder, commit_message="gleaner export")
    except FAULTS as error:
        raise ExportFailed(
            f"--push-to: {repo} was not uploaded: {_first_line(error)}; {folder} is whole and verified: hf upload "
            f"{repo} {folder}"
        ) from error
    return str(found.repo_url)


def _api() -> HfApi:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _unreachable() -> str:
    """A sentence, or ''. Behind a proxy nothing is tried."""
    host = None if getproxies() else hub.unreachable()
    return "" if host is None else f"{host} cannot be reached within {hub.CONNECT_S:g} s"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
