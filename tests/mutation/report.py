"""What `make mutants` prints at its end: killed and survivors by file, and each survivor's reason.

    PYTHONPATH=build/mutants .venv/bin/python tests/mutation/report.py

A mutant is known by its file and the line that it makes, so a reason outlives changes elsewhere in the file.
Exit code 1: of those that no reason excuses fewer than 95 % are killed, or a survivor has no reason in accepted.yaml.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

ACCEPTED = Path(__file__).with_name("accepted.yaml")
WANTED = 0.95
KILLED = ("killed", "timeout", "segfault")  # a mutant that never ends is seen, too: by the test's time limit


def results() -> Iterator[tuple[str, str, str]]:
    """(file, mutant, status) of every mutant that the last run tried."""
    for meta in sorted(Path("mutants").rglob("*.py.meta")):
        file = meta.relative_to("mutants").as_posix().removesuffix(".meta")
        for mutant, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            if code is not None:
                yield file, mutant, status_by_exit_code[code]


def change(file: str, mutant: str) -> tuple[str, str]:
    """The lines that the mutant takes away and those that it makes, each as one line."""
    lines = get_diff_for_mutant(mutant, path=file).splitlines()
    parts = {sign: [one[1:].strip() for one in lines if one.startswith(sign) and one[:3] != sign * 3] for sign in "-+"}
    return " ".join(parts["-"]), " ".join(parts["+"])


def reasons() -> dict[str, str]:
    """`file: line that a mutant makes`, or takes away where it makes none -> why no test needs to see it."""
    groups = yaml.safe_load(ACCEPTED.read_text()) or []
    return {mutant: group["reason"] for group in groups for mutant in group["mutants"]}


def main() -> int:
    known, unexplained, excused = reasons(), 0, 0
    counts: dict[str, Counter[str]] = {}
    for file, mutant, status in results():
        counts.setdefault(file, Counter())["killed" if status in KILLED else status] += 1
        if status in KILLED:
            continue
        before, after = change(file, mutant)
        key = f"{file}: {after or '- ' + before}"
        unexplained += key not in known
        excused += key in known
        print(f"{status}  {file}\n    - {before}\n    + {after}\n    {known.get(key, 'NO REASON GIVEN')}")
    for file, count in counts.items():
        left = ", ".join(f"{number} {status}" for status, number in count.items() if status != "killed")
        print(f"{file:26} {count['killed'] / count.total():6.1%} of {count.total()} killed  {left}")
    everything = sum(counts.values(), Counter[str]())
    total = everything.total()
    share = everything["killed"] / max(total - excused, 1)
    print(
        f"{everything['killed'] / max(total, 1):.1%} of {total} mutants killed, {share:.1%} of those that no reason "
        f"excuses; {unexplained} survivors without a reason"
    )
    return 0 if share >= WANTED and not unexplained else 1


if __name__ == "__main__":
    sys.exit(main())
