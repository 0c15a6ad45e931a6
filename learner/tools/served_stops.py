"""A middleware in the server of gleaner serve: requests without stop strings get those of the training. vLLM reads
default temperatures and stop tokens from a file, but takes stop strings from requests only.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

VARIABLE = "GLEANER_STOP"  # environment variable with a JSON list of stop strings
MOST = 4  # most stop strings of a request (OpenAI's limit, which vLLM has, too)
KEYS = {
    "/completions": "stop", "/chat/completions": "stop", "/chat/completions/batch": "stop", "/responses": "stop",
    "/messages": "stop_sequences",
}  # fmt: skip

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TrainingStops:
    """An ASGI middleware around `app`, for vLLM's --middleware."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app, self._stop = app, json.loads(os.environ[VARIABLE])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = next((key for path, key in KEYS.items() if str(scope.get("path", "")).endswith(f"/v1{path}")), None)
        if scope["type"] != "http" or scope["method"] != "POST" or key is None:
            return await self._app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client is gone
                return None
            body, more = body + message.get("body", b""), message.get("more_body", False)
        body = with_stops(body, key, self._stop)
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        scope["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def whole() -> MutableMapping[str, Any]:
            return waiting.pop() if waiting else await receive()

        return await self._app(scope, whole, send)


def with_stops(body: bytes, key: str, stop: list[str]) -> bytes:
    """Returns the request with these stop strings, or unchanged if it has its own or cannot be read. As in training the
    answer keeps the string that ended it."""
    try:
        asked = json.loads(body)
    except ValueError:
        return body
    if not isinstance(asked, dict) or asked.get(key):
        return body
    more = {"include_stop_str_in_output": True} if key == "stop" else {}
    return json.dumps(more | asked | {key: stop}).encode()
