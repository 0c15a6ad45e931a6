"""The policy over HTTP on loopback, for a program that lives in another process: vLLM's POST /inference/v1/generate, as
far as clients that keep tokens use it (verifiers 0.4: verifiers/v1/clients/train.py and renderers/client.py)."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from rollout.env.program import Model, OutOfBudget, Sampled

MOST_BYTES = 64 * 2**20  # of a request
GIVEN = ("temperature", "top_p", "top_k", "min_p", "stop", "seed", "presence_penalty", "frequency_penalty")
"""What is the run's to say: a request that asks for its own is refused."""


@contextlib.asynccontextmanager
async def token_server(model: Model) -> AsyncIterator[str]:
    """Serves the policy on a free port of 127.0.0.1 -> its address, "http://127.0.0.1:PORT"."""

    async def generate(request: web.Request) -> web.Response:
        return await _generate(model, await request.json())

    application = web.Application(client_max_size=MOST_BYTES)
    application.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _generate(model: Model, body: Mapping[str, Any]) -> web.Response:
    sampling = body.get("sampling_params") or {}
    # Neutral values change nothing: clients send some of them always.
    if own := [name for name in GIVEN if sampling.get(name) not in _NEUTRAL.get(name, (None,))]:
        return _error(f"{', '.join(own)}: sampling is the run's own (rollout.*); leave it out of the request")
    try:
        sampled = await model.generate(body["token_ids"], sampling.get("max_tokens"))
    except OutOfBudget as error:
        return _error(str(error))
    return web.json_response({"request_id": "", "choices": [_choice(sampled)]})


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "stop": (None, []),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
}


def _choice(sampled: Sampled) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ]
    return {
        "index": 0,
        "token_ids": sampled.token_ids,
        "finish_reason": sampled.finish_reason,
        "logprobs": {"content": content},
    }


def _error(sentence: str) -> web.Response:
    """Status 400, which clients do not try again."""
    return web.json_response({"error": {"message": sentence, "type": "BadRequestError", "code": 400}}, status=400)
