"""What requests of OpenAI's and Anthropic's clients mean here, and what their answers become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.env.adapters.chat_api import ANTHROPIC, OPENAI, Api, BadRequest
from rollout.env.protocol import Asked, Said, ToolCall

SPEC: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
CALL = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
CONVERSATION = (
    {"role": "system", "content": "Be\nbrief."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "here", "tool_call_id": "a1", "name": "look"},
    {"role": "user", "content": "So?"},
)


def test_both_say_the_same() -> None:
    written = CALL | {"function": {"name": "look", "arguments": '{"at": "it"}'}}
    of_openai = OPENAI.asked(
        {
            "model": "x", "user": "me", "n": 1, "top_p": 1.0, "max_completion_tokens": 7, "stop": "END",
            "tools": [{"type": "function", "function": SPEC["function"] | {"strict": True}}],
            "parallel_tool_calls": False,
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": "I look.", "refusal": None, "tool_calls": [written]},
                {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "here"}]},
                {"role": "user", "content": "So?"},
            ],
        },
        "refuse",
    )  # fmt: skip
    of_anthropic = ANTHROPIC.asked(
        {
            "model": "x", "metadata": {"user_id": "me"}, "max_tokens": 7, "stop_sequences": ["END"],
            "tools": [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "system": [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
                       {"type": "text", "text": "brief."}],
            "messages": [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a1", "name": "look", "input": {"at": "it"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "a1", "content": [{"type": "text", "text": "here"}]},
                    {"type": "text", "text": "So?"},
                ]},
            ],
        },
        "refuse",
    )  # fmt: skip
    assert of_openai == of_anthropic == Asked(CONVERSATION, (SPEC,), 7, ("END",), 1)


ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 9}


@pytest.mark.parametrize("api", [OPENAI, ANTHROPIC])
@pytest.mark.parametrize("own", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}])
def test_the_request_s_own_sampling_is_refused_or_by_request_not_heeded(api: Api, own: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=f"{next(iter(own))}: sampling is the run's own"):
        api.asked(ASKED | own, "refuse")
    assert api.asked(ASKED | own, "run") == api.asked(ASKED, "refuse")


@pytest.mark.parametrize(
    ("api", "wrong", "said"),
    [
        (OPENAI, {"messages": "hello"}, "messages: must be a list"),
        (OPENAI, {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]}, "of a function"),
        (OPENAI, {"max_tokens": True}, "max_tokens: must be of type int"),
        (OPENAI, {"web_search_options": {}}, "web_search_options: must be left out"),
        (OPENAI, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools: each must be a function"),
        (OPENAI, {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        (OPENAI, {"stop": [""]}, "stop: must be texts"),
        (ANTHROPIC, {"tool_choice": {"type": "any"}}, "tool_choice: must be auto or none"),
        (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: must be left out"),
        (ANTHROPIC, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "runs at the client"),
        (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "got image"),
    ],
)
def test_what_cannot_be_heeded_is_refused(api: Api, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        api.asked(ASKED | wrong, "run")


def said(**how: Any) -> Said:
    fields: dict[str, Any] = {
        "text": "", "thinking": "", "calls": (), "finish_reason": "stop", "stop": "", "prompt": 5, "completion": 3,
        "cut": False,
    }  # fmt: skip
    return Said(**fields | how)


LOOKS = (("call00000", ToolCall("look", {"at": "it"})),)


@pytest.mark.parametrize(
    ("how", "of_openai", "of_anthropic"),
    [
        ({"text": "Here."}, "stop", "end_turn"),
        ({"text": "He", "stop": "re"}, "stop", "stop_sequence"),
        ({"text": "He", "finish_reason": "length"}, "length", "max_tokens"),
        ({"calls": LOOKS}, "tool_calls", "tool_use"),
        ({"calls": LOOKS, "finish_reason": "length"}, "length", "max_tokens"),
    ],
)
def test_each_says_how_an_answer_ended(how: dict[str, Any], of_openai: str, of_anthropic: str) -> None:
    assert OPENAI.answer(said(**how), "x")["choices"][0]["finish_reason"] == of_openai
    assert ANTHROPIC.answer(said(**how), "x")["stop_reason"] == of_anthropic


def test_thinking_is_told_apart() -> None:
    answer = said(text="Here.", thinking="It was there.", calls=LOOKS)
    message = OPENAI.answer(answer, "x")["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Here.", "It was there.")
    assert "there" not in json.dumps(ANTHROPIC.answer(answer, "x"))
    assert OPENAI.answer(said(calls=LOOKS), "x")["choices"][0]["message"]["content"] is None
