"""An environment's answers on their way from its process: checked there, plain JSON between."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.base import counts, said
from rewards.config import ENV_COUNTS, TAKEN
from rollout.env.plain import DEEPEST, is_text, too_deep
from rollout.env.program import Asked
from rollout.env.protocol import Message, Start, Step
from rollout.env.trajectory import TURNS

OBSERVED = ("tool", "user")  # roles that may answer a turn
COUNTED = ENV_COUNTS | {"accuracy", "failed", "unscored"}
"""What the driver counts itself as env/<name> or eval/<name>; besides these outcome_<...>."""


class BadAnswer(ValueError):
    """An environment returned something that a trajectory cannot go on with; one sentence."""


def start_to_json(start: Any) -> dict[str, Any]:
    """Raises BadAnswer unless it is a whole rollout.env.protocol.Start, or a program's question."""
    if isinstance(start, Asked):
        return _asked_to_json(start)
    if not isinstance(start, Start):
        raise BadAnswer(f"reset must return a Start, got {type(start).__name__}")
    messages = _messages("reset", start.messages, None)
    if not isinstance(start.tools, Sequence) or not all(_is_tool(tool) for tool in start.tools):
        raise BadAnswer(
            'reset: tools must be a sequence of {"type": "function", "function": {"name": ..., "parameters": {...}}}, '
            f"got {start.tools!r:.80}"
        )
    return {"messages": messages, "tools": [dict(tool) for tool in start.tools], "state": str(start.state)}


def step_to_json(step: Any) -> dict[str, Any]:
    """Raises BadAnswer unless it is a whole rollout.env.protocol.Step that the policy can go on from, or is done; or a
    program's question."""
    if isinstance(step, Asked):
        return _asked_to_json(step)
    if not isinstance(step, Step):
        raise BadAnswer(f"step must return a Step, got {type(step).__name__}")
    messages = _messages("step", step.messages, OBSERVED)
    if not step.done and not messages:
        raise BadAnswer("step: must return at least one message unless it is done, got none")
    reward = None if step.reward is None else _number("step: reward", step.reward)
    if not isinstance(step.warnings, Mapping) or not all(map(is_text, [*step.warnings, *step.warnings.values()])):
        raise BadAnswer(f"step: warnings must come as a mapping from text to text, got {step.warnings!r:.80}")
    told = {"metrics": _metrics(step.metrics), "warnings": dict(step.warnings)}
    return {"messages": messages, "reward": reward, "done": bool(step.done)} | told


def encoded(method: str, value: Any) -> bytes:
    """An answer in JSON. Raises BadAnswer for what JSON cannot hold."""
    if too_deep(value):
        raise BadAnswer(f"{method}: must answer with values that are nested at most {DEEPEST} deep")
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError) as error:
        raise BadAnswer(f"{method}: must answer with what JSON can hold: {said(error)}") from None


def start_from_json(answer: dict[str, Any]) -> Start | Asked:
    """The inverse of start_to_json."""
    if "token_ids" in answer:
        return _asked_from_json(answer)
    return Start(tuple(answer["messages"]), tuple(answer["tools"]), answer["state"])


def step_from_json(answer: dict[str, Any]) -> Step | Asked:
    """The inverse of step_to_json."""
    if "token_ids" in answer:
        return _asked_from_json(answer)
    return Step(tuple(answer["messages"]), answer["reward"], answer["done"], answer["metrics"], answer["warnings"])


def parts(values: Any) -> dict[str, float]:
    """Parts of a reward by name. Raises BadAnswer for anything else."""
    if taken := (TAKEN | {TURNS}) & set(found := _numbers("score", values)):
        raise BadAnswer(f"score: a reward is named {', '.join(sorted(taken))} already; give another name")
    return found


def _metrics(values: Any) -> dict[str, float]:
    """Raises BadAnswer unless they are numbers under names that the driver has not taken."""
    found = _numbers("step", values)
    if taken := sorted(name for name in found if name in COUNTED or name.startswith("outcome_")):
        raise BadAnswer(f"step: a metric is named {', '.join(taken)} already; give another name")
    return found


def _numbers(method: str, values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(is_text(name) for name in values):
        raise BadAnswer(f"{method}: numbers must come as a mapping from names, got {values!r:.80}")
    return {name: _number(f"{method}: {name}", value) for name, value in values.items()}


def _asked_to_json(asked: Asked) -> dict[str, Any]:
    if not asked.token_ids or not all(type(token) is int for token in asked.token_ids):
        raise BadAnswer(f"run: a prompt must be token ids, at least one, got {asked.token_ids!r:.80}")
    if asked.max_tokens is not None and (type(asked.max_tokens) is not int or asked.max_tokens < 1):
        raise BadAnswer(f"run: max_tokens must be a number >= 1, got {asked.max_tokens!r:.80}")
    return {"token_ids": list(asked.token_ids), "max_tokens": asked.max_tokens}


def _asked_from_json(answer: dict[str, Any]) -> Asked:
    return Asked(tuple(answer["token_ids"]), answer["max_tokens"])


def _number(what: str, value: Any) -> float:
    if not hasattr(value, "__float__") or not counts(number := float(value)):
        raise BadAnswer(f"{what} must be a finite number of at most 1e30, got {value!r:.80}")
    return number


def _messages(method: str, messages: Any, roles: Sequence[str] | None) -> list[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise BadAnswer(f"{method}: messages must be a sequence of messages, got {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, Mapping) or not is_text(message.get("role")):
            raise BadAnswer(f'{method}: a message must be {{"role": ..., "content": ...}}, got {message!r:.80}')
        for key in ("content", *(key for key in ("name", "tool_call_id") if message.get(key) is not None)):
            if not is_text(message.get(key)):
                got = message.get(key)
                raise BadAnswer(f"{method}: a message's {key} must be text that UTF-8 can hold, got {got!r:.80}")
        if roles is not None and message["role"] not in roles:
            raise BadAnswer(f"{method}: a message's role must be one of {', '.join(roles)}, got {message['role']!r}")
    return [dict(message) for message in messages]


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return (
        isinstance(function, Mapping)
        and is_text(function.get("name"))
        and isinstance(function.get("parameters", {}), Mapping)
    )
