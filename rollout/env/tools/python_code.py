"""Python as a tool: code runs in a process of its own, and what it prints is the answer (rewards.code.process)."""

from rewards.code.process import Limits, run

CHARACTERS = 3800  # with how it ended fewer than an answer may have (PythonTools), which would be cut at its end


async def python(code: str) -> str:
    """Runs a Python program and returns what it prints. Nothing is kept from one call to the next.

    Args:
        code: the program; it has no network, and files that it writes are gone afterwards

    Returns:
        what it printed, the traceback of an error included
    """
    return await run(code, Limits(characters=CHARACTERS))
