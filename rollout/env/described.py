"""An exception in one line, with the place where it was raised."""

import traceback
from pathlib import Path

from rewards.base import said

SHOWN = 500  # characters of an exception's text


def described(error: BaseException) -> str:
    """What was raised, and in which line of which file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {said(error)[:SHOWN]}{where}"
