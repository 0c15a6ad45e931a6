"""What uv is told of pip's configuration, from what pip itself prints of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "requirements" / "uv_settings.py"


def test_it_is_told_where_pip_looks(tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    several = "extra-index-url = https://b\n  https://c\ntimeout = 9\n"
    file.write_text(f"[global]\nindex-url = https://a/simple\n{several}[wheel]\nindex-url = https://d\n")
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True,
        env=others | {"PIP_CONFIG_FILE": str(file), "PIP_FIND_LINKS": "/x /y"},
    ).stdout  # fmt: skip
    found = subprocess.run([sys.executable, SCRIPT], input=told, capture_output=True, text=True, check=True).stdout
    wanted = {"UV_DEFAULT_INDEX=https://a/simple", "UV_INDEX=https://b https://c", "UV_FIND_LINKS=/x,/y"}
    assert wanted <= set(found.splitlines())
    assert "timeout" not in found
