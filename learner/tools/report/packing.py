"""Values on their way into a page: JSON, gzip, base64. A browser unpacks one block when it is asked for."""

import base64
import gzip
import json
from typing import Any

Block = str
"""Base64 of gzip of ASCII JSON: nothing in it can end a script element."""


def packed(value: Any) -> Block:
    """Level 6 makes 5 % less of completions than level 1, in twice the time; the same value gives the same block."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)).decode("ascii")


def unpacked(block: Block) -> Any:
    """What was packed."""
    return json.loads(gzip.decompress(base64.b64decode(block)))
