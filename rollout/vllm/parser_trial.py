"""Whether some parser reads the tool calls of a model, where that takes vLLM.

A process of its own (learner.driver.input_checks): a configuration as JSON on stdin, a list of sentences as the last
line on stdout.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rollout.data.chat import Chat
from rollout.data.hub import joined
from rollout.env.tools.parser import ToolParserError, choose


def wrong_with(config: dict[str, Any]) -> list[str]:
    """One sentence, or none. `config`: of the run; only model, chat template and env.tool_parser are read."""
    model = joined(config["model"]["path"], config["model"]["revision"])
    try:
        choose(Chat.load(model, config["data"]["chat_template_kwargs"]), config["env"]["tool_parser"])
    except ToolParserError as error:
        return [str(error)]
    return []


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    print(json.dumps(wrong_with(json.loads(sys.stdin.read()))))
