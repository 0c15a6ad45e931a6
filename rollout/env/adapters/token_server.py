"""The policy over HTTP on loopback, for a program that lives in another process: vLLM's POST /inference/v1/generate, as
far as clients that keep tokens use it (verifiers 0.4: verifiers/v1/clients/train.py and renderers/client.py)."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from rollout.env.program import Model, OutOfBudget, Sampled

MOST_BYTES = 64 * 2**20  # of a request
TAKEN = ("max_tokens", "stop_token_ids", "logprobs", "skip_special_tokens", "routed_experts_prompt_start")
"""What a request may say: how many tokens; and what clients always send, which the run decides or never needs."""
NEUTRAL: dict[str, tuple[Any, ...]] = {  # these change nothing, and some clients send them
    "n": (None, 1),
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "stop": (None, []),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "ignore_eos": (None, False),
}


@contextlib.asynccontextmanager
async def token_server(model: Model) -> AsyncIterator[str]:
    """Serves the policy on a free port of 127.0.0.1 -> its address, "http://127.0.0.1:PORT/KEY". The key is new each
    time: without it other users of the machine are answered with status 404."""
    key = secrets.token_urlsafe()

    async def generate(request: web.Request) -> web.Response:
        return await _generate(model, await request.json())

    application = web.Application(client_max_size=MOST_BYTES)
    application.router.add_post(f"/{key}/inference/v1/generate", generate)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/{key}"
    finally:
        await runner.cleanup()


async def _generate(model: Model, body: Mapping[str, Any]) -> web.Response:
    sampling = body.get("sampling_params") or {}
    own = [name for name in sampling if name not in TAKEN and sampling[name] not in NEUTRAL.get(name, (None,))]
    if own:
        return _error(f"{', '.join(own)}: sampling is the run's own (rollout.*); leave it out of the request")
    try:
        sampled = await model.generate(body["token_ids"], sampling.get("max_tokens"))
    except OutOfBudget:  # a status of failure would be the program's failure to its library, and cost it its reward
        sampled = Sampled([], [], "length")
    return web.json_response({"request_id": "", "choices": [_choice(sampled)]})


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
