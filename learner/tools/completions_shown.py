"""Carries out gleaner rollouts show: it reads completions from a run's ledger, chooses some, and shows them in a
terminal."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from cluster.errors import WrongInput
from cluster.telemetry import number
from learner.driver.console import escaped
from learner.tools.rollouts import RolloutsRequest
from rollout import ledger
from rollout.schema import asked_of, parts_of, said_of, whole

# Output in a terminal. What a model wrote is shown as text: markup and control characters in it have no effect.

NARROW = 44  # least columns of a completion beside another


def show_completions(rows: Sequence[dict[str, Any]], source: str) -> None:
    """Prints groups below one another, and the completions of a group side by side as far as the terminal is wide."""
    console = Console(highlight=False)
    for (group, problem), own in groupby(rows, key=lambda row: (row["group_id"], row["problem_id"])):
        several = list(own)
        console.rule(Text(f"{source}  problem {escaped(problem)}  group {group}"), align="left")
        console.print(of_group(several, console.width))


def of_group(rows: Sequence[dict[str, Any]], width: int) -> Group:
    """Returns a prompt, and its completions side by side as far as `width` columns allow. rows: the group's rows, at
    least one, from rows_of."""
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
    return Text.assemble(*parts, overflow="fold")  # long lines are folded, so that no text is cut off


COLUMNS = ("group_id", "problem_id", "sample", "completion", "reward", "reward_status", "finish_reason", "worker")


def show(asked: RolloutsRequest) -> None:
    """Prints the completions that were asked for. Raises WrongInput if there are none."""
    file = _file(asked)
    rows = chosen(rows_of(file), asked)
    if asked.as_json:
        print(json.dumps(rows, indent=2))
    else:
        show_completions(rows, file.name)


def chosen(rows: Sequence[dict[str, Any]], asked: RolloutsRequest) -> list[dict[str, Any]]:
    """Returns the rows that were asked for. Raises WrongInput if there are none."""
    if not rows:
        raise WrongInput("DIR: the step holds no completions; give another --step")
    if asked.best and asked.worst:
        raise WrongInput("--best: does not go with --worst; give one of them")
    found = [row for row in rows if asked.problem in (None, row["problem_id"])]
    if not found:
        known = ", ".join(dict.fromkeys(row["problem_id"] for row in rows[:200]))
        raise WrongInput(
            f"--problem: must be one of this step, {known[:300]}, got {asked.problem}; or give another --step"
        )
    if asked.sample is not None:
        most = max(row["sample"] for row in found)
        found = [row for row in found if row["sample"] == asked.sample]
        if not found:
            raise WrongInput(f"--sample: must be at most {most}, got {asked.sample}")
    if asked.best or asked.worst:
        scored = [row for row in found if row["reward"] is not None]
        if not scored:
            raise WrongInput("--best, --worst: none of these completions has a reward; leave it out to see why")
        return [(max if asked.best else min)(scored, key=lambda row: float(row["reward"]))]
    if asked.chooses or asked.as_json:
        return found
    first = list(dict.fromkeys(row["group_id"] for row in found))[: asked.groups]
    return [row for row in found if row["group_id"] in first]


def _file(asked: RolloutsRequest) -> Path:
    folder = asked.folder / "rollouts" if (asked.folder / "rollouts").is_dir() else asked.folder
    files = {int(file.stem.removeprefix("step-")): file for file in ledger.steps(folder)}
    if not files:
        raise WrongInput(f"DIR: {asked.folder} holds no step-*.parquet; give the folder of a run that has begun")
    if asked.step is not None and asked.step not in files:
        raise WrongInput(f"--step: must be one from {min(files)} to {max(files)} that is there, got {asked.step}")
    return files[max(files) if asked.step is None else asked.step]


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Returns the completions of a step file, in its order, as they are shown. Raises WrongInput."""
    try:
        table = whole(ledger.read(file))
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise WrongInput(f"DIR: {file} cannot be read: {reason}; give another --step") from error
    columns = [
        *COLUMNS,
        "reward_error",
        "logged",
        "problem",
        "messages",
        "turns",
        "completion_ids",
        "loss_mask",
        "policy_version_min",
        "policy_version_max",
    ]
    pairs = zip(table.select(columns).to_pylist(), parts_of(table), strict=True)
    return [_row(row, parts) for row, parts in pairs]


def _row(row: dict[str, Any], parts: dict[str, float | None]) -> dict[str, Any]:
    problem = asked_of(row["problem"])
    asks = problem.messages
    return {name: row[name] for name in COLUMNS} | {
        "reward": number(row["reward"]),
        "parts": {name: number(value) for name, value in parts.items()},
        "tokens": len(row["completion_ids"])
        if row["loss_mask"] is None
        else sum(row["loss_mask"]),  # the mask is true for sampled tokens
        "versions": [row["policy_version_min"], row["policy_version_max"]],
        "prompt": [{"role": "text", "content": asks}] if isinstance(asks, str) else asks,
        "answer": problem.columns.get("answer"),
        "messages": said_of(row["messages"]),
        "error": row["reward_error"],
        "logged": {one["name"]: number(one["value"]) if one["text"] is None else one["text"] for one in row["logged"]},
        "turn_rewards": [number(turn["reward"]) for turn in row["turns"]],
    }
