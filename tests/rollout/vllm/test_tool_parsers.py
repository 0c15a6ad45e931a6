"""vLLM's parsers, chosen by what a template writes."""

from __future__ import annotations

import pytest

from cluster.errors import WrongInput
from rollout.env.protocol import ToolCall, ToolSpec
from rollout.env.tools.parser import choose
from tests.rollout.data.test_observation import CHATML_TOOLS, chat_of

pytest.importorskip("vllm")
HERMES = "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
XML = CHATML_TOOLS.replace(  # as Qwen3-Coder and Qwen3.5 write calls
    HERMES,
    "<function={{ c.function.name }}>\n{% for name, value in c.function.arguments.items() %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>",
)
TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}


def test_a_parser_of_vllm_reads_what_the_template_writes() -> None:
    name, parser, mark = choose(chat_of(XML))
    assert (name, mark) == ("qwen3_coder", "<tool_call>")
    text = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n"
    assert parser(text + "</tool_call><|im_end|>", [TOOL]) == ((ToolCall("add", {"a": 3, "b": "3"}),), ())
    assert parser("It is 3.<|im_end|>", [TOOL]) == ((), ())
    calls, malformed = parser("<tool_call>\n<functio", [TOOL])
    assert calls == ()
    assert malformed == ("A tool call was begun with <tool_call> and could not be read.",)


def test_a_template_that_no_parser_reads_is_refused() -> None:
    chat = chat_of(CHATML_TOOLS.replace(HERMES, "{{ c.function.arguments.values() | list | reverse | join('!') }}"))
    with pytest.raises(WrongInput, match=r"^env\.tool_parser: some parser must read back .*: it writes '<tool_call>"):
        choose(chat)
    with pytest.raises(WrongInput, match=r"^env\.tool_parser: qwen3_coder must read back .*; give hermes"):
        choose(chat_of(CHATML_TOOLS), "qwen3_coder")
    with pytest.raises(WrongInput, match=r"^env\.tool_parser: must be auto, hermes or one of .*, got qwen9$"):
        choose(chat, "qwen9")
    assert choose(chat, "hermes").name == "hermes"
