"""A run that can be exported, once per session; to be read, or copied first."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.learner.tools.exports import run_folder


@pytest.fixture(scope="session")
def made(tiny_path: str, groups: list[pa.Table], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.mktemp("made"), tiny_path, groups)
