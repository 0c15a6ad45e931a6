"""Adapters in PEFT's format for tests."""

from __future__ import annotations

import json
from pathlib import Path

from examples.random_model import make_adapter


def written_adapter(tiny_path: str, folder: Path, seed: int) -> str:
    """The folder, with an adapter in it whose weights are the seed's."""
    payload, config = make_adapter(Path(tiny_path), seed=seed)
    (folder / "adapter_model.safetensors").write_bytes(payload)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
