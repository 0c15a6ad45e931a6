"""learner/driver/moved_functions.json: digests that files of our reward functions and environments had before they
were moved, and those of the same files today. A run of before the move goes on, since the functions compute the same.

    python -m tests.moved_functions        # writes the file; tests/learner/driver/test_identity.py compares

Whoever changes what one of these functions computes takes its line out of MOVED: runs of before then do not go on.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

from learner.driver.identity import MOVED_FILE

ROOT = Path(__file__).parents[1]
BEFORE = "cd4a07a9"  # the last commit with the old places
MOVED = {
    **{
        f"rewards/{name}.py": f"rewards/built_in/{name}.py"
        for name in (
            "format", "json_match", "json_schema", "length", "math", "number", "reasoning_gym", "regex",
            "sequence_classifier", "unit_tests",
        )
    },
    "rewards/judge_settings.py": "rewards/judge.py",
    **{
        file: file
        for file in (
            "rollout/env/adapters/openenv.py", "rollout/env/adapters/skyrl_gym.py", "rollout/env/adapters/trl.py",
            "rollout/env/adapters/trl.py", "rollout/env/adapters/verifiers.py",
            "rollout/env/tasks/number_guessing.py", "rollout/env/tasks/second_try.py",
            "rollout/env/tools/calculator.py", "rollout/env/tools/python_code.py", "rollout/env/tools/python_tools.py",
        )
    },
}  # fmt: skip


def then(file: str) -> str:
    """The digest before the move."""
    content = subprocess.run(["git", "show", f"{BEFORE}:{file}"], cwd=ROOT, capture_output=True, check=True).stdout
    return hashlib.sha256(content).hexdigest()


def now(file: str) -> str:
    """The digest today."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


if __name__ == "__main__":
    MOVED_FILE.write_text(json.dumps({then(old): now(new) for old, new in MOVED.items()}, indent=1) + "\n")
