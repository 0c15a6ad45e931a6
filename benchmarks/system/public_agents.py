"""An agent of openai-agents for benchmarks.system.foreign_environments: the package as it is, with one tool."""

from __future__ import annotations

from typing import Any

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")  # by default it asks for /v1/responses
set_tracing_disabled(True)  # traces would be sent to OpenAI


@function_tool  # type: ignore[untyped-decorator, unused-ignore]  # without the package it has no type
def calculator(expression: str) -> str:
    """Computes a product."""
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))  # what it raises is told to the policy, as the package does


def solve(problem: dict[str, Any]) -> float:
    """1 where the agent's last word holds the answer."""
    agent = Agent(name="solver", tools=[calculator], model="policy")
    said = Runner.run_sync(agent, problem["prompt"], max_turns=3)
    return float(problem["columns"]["answer"] in str(said.final_output))
