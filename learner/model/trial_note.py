"""How a trial in a process of its own (learner.driver.input_checks) tells the user what is no reason to refuse a
run."""

import sys

BEGINNING = "note: "  # of the line on stderr, where libraries write, too


def tell(text: str) -> None:
    print(BEGINNING + " ".join(text.split()), file=sys.stderr)


def told(stderr: str) -> list[str]:
    """What a trial that wrote this has told."""
    return [line.removeprefix(BEGINNING) for line in stderr.splitlines() if line.startswith(BEGINNING)]
