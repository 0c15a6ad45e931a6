"""What somebody's code raised, in one line."""

import traceback
from pathlib import Path
from typing import NamedTuple

from rewards import environment, memory
from rewards.base import said

LONGEST = 500  # characters of an exception's text that are worth carrying


class Settings(NamedTuple):
    """What a user may change: the key of the memory cap; who is kept from variables, and how they get {names}."""

    memory: str
    variables: str


OF_REWARDS = Settings("rollout.reward_memory", "reward functions: name it with this reward, env: [{names}]")
OF_ENVIRONMENTS = Settings("env.memory", "environments: name it, env.variables=[{names}]")


def described(error: BaseException, settings: Settings = OF_REWARDS, *, caller: str = "") -> str:
    """`ValueError: boom (my_rewards.py, line 3)`: where it was raised, and what to do where that is known.

    Args:
        caller: the file that called the code, whose own lines say nothing of it.
    """
    text = said(error)[:LONGEST]
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # its text ends with file and line
        return told
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != caller and not frame.filename.startswith("<frozen")
    ]
    if frames:
        told += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    if memory.met(error):
        return f"{told}: {memory.advice(settings.memory)}"
    return told + environment.advice(text, settings.variables)
