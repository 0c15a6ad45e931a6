"""Completions in a terminal. What a model wrote is shown, never obeyed: neither markup nor control characters are."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from learner.driver.console import escaped

NARROW = 44  # columns that a completion wants beside another


def show(rows: Sequence[dict[str, Any]], source: str) -> None:
    """Groups below one another; the completions of a group side by side as far as the terminal is wide."""
    console = Console(highlight=False)
    for (group, problem), own in groupby(rows, key=lambda row: (row["group_id"], row["problem_id"])):
        several = list(own)
        console.rule(Text(f"{source}  problem {escaped(problem)}  group {group}"), align="left")
        console.print(of_group(several, console.width))


def of_group(rows: Sequence[dict[str, Any]], width: int) -> Group:
    """A prompt, and its completions side by side as far as `width` columns allow. rows: learner.tools.rollouts.rows_of,
    at least one."""
    asked: list[RenderableType] = [_message(message) for message in rows[0]["prompt"]]
    if rows[0]["answer"] is not None:
        asked.append(Text.assemble(("answer  ", "bold"), escaped(str(rows[0]["answer"]))))
    beside = min(max(width // NARROW, 1), len(rows))
    return Group(*asked, Columns([_panel(row) for row in rows], width=width // beside - 1, padding=(0, 0, 0, 1)))


def _panel(row: dict[str, Any]) -> Panel:
    said = row["messages"]
    turns = [_message(one) for one in said] if said else [Text(escaped(row["completion"]), overflow="fold")]
    for name, value in row["logged"].items():
        turns.append(
            Text.assemble(
                (f"{escaped(name)}  ", "bold"),
                escaped(value if isinstance(value, str) else f"{value:.6g}"),
                overflow="fold",
            )
        )
    if row["error"] is not None:
        turns.append(Text(escaped(row["error"]), style="red", overflow="fold"))
    return Panel(Group(*turns), title=Text(_title(row)), subtitle=Text(_parts(row)), title_align="left")


def _title(row: dict[str, Any]) -> str:
    reward = row["reward_status"] if row["reward"] is None else f"{row['reward']:.4g}"
    return f"{row['sample']}  reward {reward}  {row['tokens']} tokens  {escaped(row['finish_reason'])}"


def _parts(row: dict[str, Any]) -> str:
    given = {name: value for name, value in row["parts"].items() if value is not None}
    told = [f"{escaped(name)} {value:.4g}" for name, value in given.items()]
    turns = [f"turn {i} {value:.4g}" for i, value in enumerate(row["turn_rewards"]) if value is not None]
    return "  ".join([*told, *turns])


def _message(message: dict[str, Any]) -> Text:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    role = escaped(str(message.get("role", "")))
    parts = ((f"{role}  ", "bold"), escaped(text), escaped(f" {calls}" if calls else ""))
    return Text.assemble(*parts, overflow="fold")  # nothing of it is left out
