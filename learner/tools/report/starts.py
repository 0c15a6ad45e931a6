"""The starts of a run that came to their end: which steps each took, and where its time went."""

from typing import NamedTuple

from learner.tools.report.run_folder import Run


class Start(NamedTuple):
    """One start. steps: what it took, `steps 5 to 8`. phases: name -> seconds, in the order in which they count."""

    steps: str
    phases: dict[str, float]


def starts_of(run: Run) -> list[Start]:
    """Oldest first."""
    ends = [] if run.file is None else [(step, run.file.time(step)) for step in run.file.steps if step]
    found = []
    for line in run.phases:
        begun = line["at"] - line["wall"]
        steps = [step for step, at in ends if begun <= at <= line["at"]]
        phases = {name: round(spent, 3) for name, spent in line.items() if name not in ("at", "wall")}
        found.append(Start(_told(steps), phases))
    return found


def _told(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
