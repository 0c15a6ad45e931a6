"""Reads tool calls with vLLM's tool parsers, for models that do not write calls in Hermes' format."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from rollout.env.protocol import ToolCall, ToolSpec
from rollout.env.tools.parser import call_of


def names() -> list[str]:
    """Names of all tool parsers of the installed vLLM."""
    from vllm.tool_parsers import ToolParserManager

    return sorted({*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers})


class VllmToolParser:
    """One of vLLM's parsers, for one tokenizer. Its constructor's errors are raised, often for a missing token."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        from vllm.tool_parsers import ToolParserManager

        # A policy that is learning often writes what a parser cannot read; vLLM would log a traceback each time.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._class, self._tokenizer = ToolParserManager.get_tool_parser(name), tokenizer
        self._class(tokenizer)

    def __call__(self, text: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        """The calls in the text of a turn, which has no end token. Several parsers look up the types of arguments in
        `tools`. The parser's errors, for a text that it does not expect, are raised."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        specs = [ChatCompletionToolsParam(**tool) for tool in tools]
        request = ChatCompletionRequest(messages=[], model="", tools=specs or None)  # type: ignore[call-arg]
        parser = self._class(self._tokenizer, specs)  # type: ignore[arg-type]
        found = parser.extract_tool_calls(text, request)
        return [_call(call.function.name, call.function.arguments) for call in found.tool_calls]


def _call(name: str, arguments: str) -> ToolCall:
    return call_of({"name": name, "arguments": json.loads(arguments)})
