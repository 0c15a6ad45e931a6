"""gleaner doctor: what this machine has for a run, what is wrong with it, and how to mend it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from learner.tools.doctor_checks import Finding, findings
from learner.tools.machine_facts import Facts, gather

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


def run(*, as_json: bool) -> int:
    """Exit code: 0; 1 if there is a problem that would stop a run."""
    facts = gather()
    found = findings(facts)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        _show(found, runs_here(facts, found))
    return int(any(one.state == "problem" for one in found))


def runs_here(facts: Facts, found: Sequence[Finding]) -> str:
    """One line: what would run on this machine as it is."""
    if any(one.state == "problem" for one in found):
        return "nothing is sure to run before the problems are mended"
    if facts.visible:
        names = ", ".join(f"{one.name} ({one.size / 2**30:.1f} GiB)" for one in facts.visible)
        return f"would run: training on {names}; gleaner plan --gpu says which models fit"
    return (
        "would run: everything on CPUs (make demo, configs/local_cpu.yaml). No card is here, so nothing on one; a "
        "configuration for cards can be checked with --dry-run --assume-gpus rtx4090"
    )


def _show(found: Sequence[Finding], last: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False, soft_wrap=True)
    for one in found:
        console.print(f"[{COLOURS[one.state]}]{one.state:8}[/]{one.name:12} {escape(one.text)}")
        if one.mend:
            console.print(f"{'':20} -> {escape(one.mend)}")
    console.print(last)
