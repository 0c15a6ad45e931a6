"""The two chat APIs that agents are written for: OpenAI's /v1/chat/completions and Anthropic's /v1/messages.

Each reads a request as rollout.env.protocol.Asked and writes the answer, an error, and the events of a stream, as the
clients of openai 3 and anthropic 2 read them. A request that asks for what is not done here is refused, never answered
without it.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollout.env.protocol import Asked, Message, Said, ToolSpec, is_text, too_deep

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
           "repetition_penalty")  # fmt: skip
"""What a request may ask of the sampling, which is the run's: refused, or not heeded with env.args.sampling: run."""
UNHEARD = frozenset({"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "cache_control",
                     "prompt_cache_retention"})  # fmt: skip
"""What has no say in an answer: it is about accounts and caches of a provider."""
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values that ask for nothing
    "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "store": (False,),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "logit_bias": ({},),
    "thinking": ({"type": "disabled"},), "mcp_servers": ([],),
}  # fmt: skip
OF_OPENAI = ("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens",
             "stop", "stream", "stream_options")  # fmt: skip
OF_ANTHROPIC = ("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream")


class BadRequest(ValueError):
    """A request that cannot be answered as it stands; one sentence."""


Answer = Callable[[Said, str], dict[str, Any]]
"""The answer, and the name of the model that the client asked for -> the body of the response."""


class Api(NamedTuple):
    """One API. asked: body of a request, and env.args.sampling -> Asked; raises BadRequest. events: body of a response,
    and that of its request -> the same as server-sent events. error: sentence, status, code -> body."""

    asked: Callable[[Mapping[str, Any], str], Asked]
    answer: Answer
    events: Callable[[dict[str, Any], Mapping[str, Any]], Iterator[str]]
    error: Callable[[str, int, str], dict[str, Any]]


def _heeded(body: Mapping[str, Any], known: Sequence[str], sampling: str) -> None:
    """Raises BadRequest if the request asks for something that the answer would not have."""
    asks = {name for name, value in body.items() if value is not None and value not in NEUTRAL.get(name, ())}
    if sampling == "refuse" and (own := [name for name in SAMPLED if name in asks]):
        raise BadRequest(
            f"{', '.join(own)}: sampling is the run's own (rollout.temperature and others), since what it sampled is "
            "trained on; leave it out of the request, or set env.args.sampling: run, by which it is not heeded"
        )
    if others := sorted(asks - {*known, *SAMPLED} - UNHEARD):
        raise BadRequest(f"{', '.join(others)}: must be left out of a request here, since an answer could not heed it")


def _field(body: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The field of that type. Raises BadRequest for one of another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise BadRequest(f"{name}: must be of type {kind.__name__}, got {value!r:.80}")
    return value


def _size(body: Mapping[str, Any], name: str) -> int | None:
    value: int | None = _field(body, name, int)
    if value is not None and value < 1:
        raise BadRequest(f"{name}: must be at least 1, got {value}")
    return value


def _mappings(values: Any, what: str) -> list[Mapping[str, Any]]:
    if not isinstance(values, list) or not all(isinstance(one, Mapping) for one in values):
        raise BadRequest(f"{what}: must be a list of objects, got {values!r:.80}")
    return values


def _strings(value: Any, what: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value or []
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise BadRequest(f"{what}: must be texts, none empty, got {value!r:.80}")
    return tuple(values)


def _text(content: Any, what: str) -> str:
    """The text of a content: a text, or blocks of text, which are put together line by line."""
    if content is None:
        return ""
    if not isinstance(content, str):
        blocks = _mappings(content, what)
        if other := next((block for block in blocks if block.get("type") != "text"), None):
            raise BadRequest(f"{what}: must be text, since that is all the policy reads, got {other.get('type')}")
        content = "\n".join(str(block.get("text", "")) for block in blocks)
    if not is_text(content):
        raise BadRequest(f"{what}: must be text that UTF-8 can hold, and has half of a surrogate pair")
    return str(content)


def _call(id_: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call of an assistant's message, as chat templates take it."""
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise BadRequest(f"messages: a tool call must have a name, and arguments that are an object, got {name!r:.80}")
    return {"id": str(id_), "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _checked(asked: Asked) -> Asked:
    """The request, in which each answer of a tool has the tool's name. Raises BadRequest if there is no message."""
    if not asked.messages:
        raise BadRequest("messages: must hold at least one message, got none")
    if too_deep(asked.messages) or too_deep(asked.tools):
        raise BadRequest("messages, tools: must not be nested a hundred levels deep")
    names = {call["id"]: call["function"]["name"] for one in asked.messages for call in one.get("tool_calls", ())}
    messages = tuple(
        one | {"name": names[one["tool_call_id"]]} if one.get("tool_call_id") in names else one
        for one in asked.messages
    )
    return asked._replace(messages=messages)


# OpenAI's.


def _openai_asked(body: Mapping[str, Any], sampling: str) -> Asked:
    _heeded(body, OF_OPENAI, sampling)
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise BadRequest(f"tool_choice: must be auto or none, since no call can be forced here, got {choice!r:.80}")
    one = _field(body, "parallel_tool_calls", bool, True) is False
    size = _size(body, "max_completion_tokens")
    return _checked(
        Asked(
            tuple(_openai_message(message) for message in _mappings(body.get("messages"), "messages")),
            tuple(_openai_tool(tool) for tool in _mappings(body.get("tools") or [], "tools")),
            _size(body, "max_tokens") if size is None else size,
            _strings(body.get("stop"), "stop"),
            0 if choice == "none" else 1 if one else None,
        )
    )


def _openai_message(message: Mapping[str, Any]) -> Message:
    role, content = message.get("role"), _text(message.get("content"), "messages: content")
    if role in ("system", "developer"):
        return {"role": "system", "content": content}
    if role == "user":
        name = _field(message, "name", str)
        return {"role": "user", "content": content} | ({} if name is None else {"name": name})
    if role == "tool":
        return {"role": "tool", "content": content, "tool_call_id": str(message.get("tool_call_id", ""))}
    if role != "assistant":
        raise BadRequest(f"messages: a role must be system, developer, user, assistant or tool, got {role!r:.80}")
    calls = [_openai_call(call) for call in _mappings(message.get("tool_calls") or [], "messages: tool_calls")]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"messages: a tool call must be of a function, got {call!r:.80}")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        raise BadRequest(f"messages: arguments of a call must be JSON, got {function.get('arguments')!r:.80}") from None
    return _call(call.get("id"), function.get("name"), arguments)


def _openai_tool(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping) or not function.get("name"):
        raise BadRequest(f"tools: each must be a function with a name, got {tool!r:.80}")
    # `strict` is left out: it is no part of what a template shows, and no call is made to keep to its schema here.
    return {"type": "function", "function": {key: value for key, value in function.items() if key != "strict"}}


def _openai_answer(said: Said, model: str) -> dict[str, Any]:
    calls = [
        {"id": id_, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for id_, call in said.calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": said.text or (None if calls else ""), "refusal": None}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning_content": said.thinking} if said.thinking else {}
    finish = "tool_calls" if calls and said.finish_reason == "stop" else said.finish_reason
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": said.prompt,
            "completion_tokens": said.completion,
            "total_tokens": said.prompt + said.completion,
        },
    }


def _openai_events(answer: dict[str, Any], body: Mapping[str, Any]) -> Iterator[str]:
    """The answer as a stream: the role, the text, each call whole, and how it finished."""
    (choice,), usage = answer["choices"], answer["usage"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    base = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    base |= {"usage": None} if with_usage else {}
    for delta, finish in [*((one, None) for one in deltas), ({}, choice["finish_reason"])]:
        chunk = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        yield f"data: {json.dumps(base | {'choices': [chunk]})}\n\n"
    if with_usage:
        yield f"data: {json.dumps(base | {'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def _openai_error(sentence: str, status: int, code: str) -> dict[str, Any]:
    return {"error": {"message": sentence, "type": code, "param": None, "code": code}}


# Anthropic's.


def _anthropic_asked(body: Mapping[str, Any], sampling: str) -> Asked:
    _heeded(body, OF_ANTHROPIC, sampling)
    choice: Mapping[str, Any] = _field(body, "tool_choice", dict, {})
    if choice.get("type", "auto") not in ("none", "auto"):
        raise BadRequest(f"tool_choice: must be auto or none, since no call can be forced here, got {choice!r:.80}")
    system = _text(body.get("system"), "system")
    messages = [{"role": "system", "content": system}] if system else []
    for message in _mappings(body.get("messages"), "messages"):
        messages += _anthropic_messages(message)
    if messages and messages[-1]["role"] == "assistant":
        raise BadRequest("messages: the last one must be of role user, since the policy begins its turns itself")
    return _checked(
        Asked(
            tuple(messages),
            tuple(_anthropic_tool(tool) for tool in _mappings(body.get("tools") or [], "tools")),
            _size(body, "max_tokens"),
            _strings(body.get("stop_sequences"), "stop_sequences"),
            0 if choice.get("type") == "none" else 1 if choice.get("disable_parallel_tool_use") else None,
        )
    )


def _anthropic_messages(message: Mapping[str, Any]) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"messages: a role must be user or assistant, got {role!r:.80}")
    blocks = [] if isinstance(content, str) else _mappings(content, "messages: content")
    kind = {"assistant": "tool_use", "user": "tool_result"}.get(str(role), "")
    special = [block for block in blocks if block.get("type") == kind]
    text = _text(content if isinstance(content, str) else [one for one in blocks if one not in special], "messages")
    if role == "assistant":
        calls = [_call(block.get("id"), block.get("name"), block.get("input")) for block in special]
        return [{"role": role, "content": text} | ({"tool_calls": calls} if calls else {})]
    results: list[Message] = [
        {
            "role": "tool",
            "content": _text(block.get("content"), "messages: tool_result"),
            "tool_call_id": str(block.get("tool_use_id", "")),
        }
        for block in special
    ]
    return [*results, *([{"role": str(role), "content": text}] if text or not results else [])]


def _anthropic_tool(tool: Mapping[str, Any]) -> ToolSpec:
    if tool.get("type") not in (None, "custom") or not tool.get("name") or "input_schema" not in tool:
        raise BadRequest(f"tools: each must have a name and an input_schema, and runs at the client, got {tool!r:.80}")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _anthropic_answer(said: Said, model: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": said.text}] if said.text or not said.calls else []
    content += [{"type": "tool_use", "id": id_, "name": call.name, "input": call.arguments} for id_, call in said.calls]
    reason = "tool_use" if said.calls else "stop_sequence" if said.stop else "end_turn"
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "max_tokens" if said.finish_reason == "length" else reason,
        "stop_sequence": said.stop or None,
        "usage": {"input_tokens": said.prompt, "output_tokens": said.completion},
    }


def _anthropic_events(answer: dict[str, Any], body: Mapping[str, Any]) -> Iterator[str]:
    """The answer as a stream: each block whole."""

    def event(kind: str, **values: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n"

    usage = answer["usage"]
    begun = answer | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", message=begun | {"usage": usage | {"output_tokens": 0}})
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]})
    yield event("message_stop")


def _anthropic_error(sentence: str, status: int, code: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    return {"type": "error", "error": {"type": kinds.get(status, "invalid_request_error"), "message": sentence}}


OPENAI = Api(_openai_asked, _openai_answer, _openai_events, _openai_error)
ANTHROPIC = Api(_anthropic_asked, _anthropic_answer, _anthropic_events, _anthropic_error)
APIS = {"/v1/chat/completions": OPENAI, "/v1/messages": ANTHROPIC}
MODELS = {  # GET /v1/models, in both forms
    "object": "list",
    "data": [{"id": "policy", "object": "model", "type": "model", "display_name": "policy", "created": 0,
              "created_at": "1970-01-01T00:00:00Z", "owned_by": "gleaner"}],
    "has_more": False, "first_id": "policy", "last_id": "policy",
}  # fmt: skip
