"""Environments driven by hand."""

from __future__ import annotations

from typing import Any

from rollout.env.protocol import Turn
from rollout.schema import Problem


def problem(question: str = "?", **columns: Any) -> Problem:
    return Problem("p-0", ({"role": "user", "content": question},), columns, (1, 2), position=0, epoch=0)


def said(text: str) -> Turn:
    return Turn(text, (7,))
