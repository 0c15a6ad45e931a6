"""An agent that knows of nothing but OpenAI's client: it answers a question with a calculator as its tool.

    python examples/calculator_agent.py

As `env.use: program` it learns in a run: OPENAI_BASE_URL and OPENAI_API_KEY, which the client reads, are then those of
the policy, GLEANER_PROBLEM is a file with the problem, and GLEANER_REWARD is where a reward may be written.
docs/agents.md has the configuration.
"""

import ast
import json
import operator
import os
from pathlib import Path
from typing import Any

from openai import OpenAI

TURNS = 3
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR: Any = {
    "type": "function",
    "function": {"name": "calculator", "description": "Computes an expression.", "parameters": SCHEMA},
}
OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def computed(node: ast.AST) -> int:
    """The value of a sum, difference or product of whole numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](computed(node.left), computed(node.right)))
    raise ValueError("only whole numbers with +, - and * can be computed")


def answer(arguments: str) -> str:
    """What the tool says to a call."""
    try:
        return str(computed(ast.parse(str(json.loads(arguments)["expression"]), mode="eval").body))
    except (KeyError, ValueError, SyntaxError) as error:
        return f"Error: {error}"


def main() -> None:
    problem = json.loads(Path(os.environ["GLEANER_PROBLEM"]).read_text())
    client, messages = OpenAI(), problem["messages"]
    for _ in range(TURNS):
        said = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR]).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            assert call.type == "function"
            result = answer(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
