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
BEFORE = ("cd4a07a9", "b68adae0")  # the last commit with the old places, and one between the moves
MOVED = {
    **{
        f"rewards/{name}.py": f"rewards/built_in/{name}.py"
        for name in (
            "format", "json_match", "json_schema", "length", "math", "number", "reasoning_gym", "regex",
            "sequence_classifier", "unit_tests",
        )
    },
    "rewards/judge_settings.py": "rewards/judge.py",
    "rollout/env/adapters/trl_rollout.py": "rollout/env/adapters/trl.py",
    **{
        file: file
        for file in (
            "rollout/env/adapters/openenv.py", "rollout/env/adapters/skyrl_gym.py", "rollout/env/adapters/trl.py",
            "rollout/env/adapters/verifiers.py",
            "rollout/env/tasks/number_guessing.py", "rollout/env/tasks/second_try.py",
            "rollout/env/tools/calculator.py", "rollout/env/tools/python_code.py", "rollout/env/tools/python_tools.py",
        )
    },
}  # fmt: skip


def then(commit: str, old: str, new: str) -> str:
    """The digest at a commit, in the old place or already in the new one."""
    for file in (old, new):
        found = subprocess.run(["git", "show", f"{commit}:{file}"], cwd=ROOT, capture_output=True)
        if found.returncode == 0:
            return hashlib.sha256(found.stdout).hexdigest()
    raise FileNotFoundError(f"{commit} has neither {old} nor {new}")


def now(file: str) -> str:
    """The digest today."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


def table() -> dict[str, str]:
    """Each digest of before -> that of today."""
    return {then(commit, old, new): now(new) for commit in BEFORE for old, new in MOVED.items()}


if __name__ == "__main__":
    MOVED_FILE.write_text(json.dumps(table(), indent=1) + "\n")
