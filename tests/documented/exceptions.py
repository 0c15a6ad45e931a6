"""What exceptions.yaml says: which documented commands and blocks `make test-docs` does not run, and why."""

from pathlib import Path
from typing import Any

import yaml

_TOLD: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

NOT_RUN: dict[str, str] = {command: why for why, commands in _TOLD["not run"].items() for command in commands}
PYTHON: dict[tuple[str, str], str] = {(one["page"], one["first"]): one["why"] for one in _TOLD["python"]}
