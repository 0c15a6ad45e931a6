"""Programs that ask in ways that programs ask. Loaded by their file."""

from collections.abc import Mapping
from typing import Any

import aiohttp

from rollout.env.adapters.verifiers import token_server
from rollout.env.protocol import Model, OutOfBudget
from rollout.schema import Problem

OPENING, BETWEEN = [5, 6, 7], [8, 9]


class Asking:
    """Asks `turns` times; `how` is what it does otherwise. Its reward is the number of tokens that it was given."""

    def __init__(self, turns: int = 2, how: str = "") -> None:
        self._turns, self._how = turns, how

    async def run(self, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
        prompt, given = list(OPENING), 0
        if self._how == "silent":
            return {"given": 1.0}
        if self._how == "http":
            async with token_server(model) as url, aiohttp.ClientSession() as session:
                return await self._over_http(session, url)
        for _ in range(self._turns):
            try:
                sampled = await model.generate(prompt, None)
            except OutOfBudget:
                if self._how == "lets pass":
                    raise
                return {"given": float(given), "refused": 1.0}
            given += len(sampled.token_ids)
            prompt += [*sampled.token_ids, *BETWEEN]
            match self._how:
                case "again":
                    prompt = list(OPENING)
                case "raises":
                    raise ValueError("no such room")
                case "no token":
                    prompt += [10**6]
        return {"given": float(given)}

    async def _over_http(self, session: aiohttp.ClientSession, url: str) -> dict[str, float]:
        async def post(**sampling: Any) -> tuple[int, Any]:
            body = {"token_ids": OPENING, "sampling_params": {"logprobs": 1, "stop_token_ids": [2], **sampling}}
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                return response.status, await response.json()

        status, answer = await post(max_tokens=4, top_p=1.0)
        (choice,) = answer["choices"]
        tokens = [f"token_id:{token}" for token in choice["token_ids"]]
        whole = [one["token"] for one in choice["logprobs"]["content"]] == tokens and choice[
            "finish_reason"
        ] == "length"
        refused, error = await post(temperature=0.3, logit_bias={"7": 1.0})
        told = error["error"]["message"].startswith("temperature, logit_bias: sampling is the run's own")
        async with session.post(f"{url[:-1]}/inference/v1/generate", json={"token_ids": OPENING}) as response:
            unknown = response.status
        over = {"token_ids": [*OPENING, *choice["token_ids"], *[8] * 400]}
        async with session.post(f"{url}/inference/v1/generate", json=over) as response:
            (last,) = (await response.json())["choices"]
        return {
            "unknown": float(unknown == 404),
            "ended": float(last["token_ids"] == [] and last["finish_reason"] == "length"),
            "ok": float(status == 200),
            "whole": float(whole),
            "refused": float(refused == 400),
            "told": float(told),
        }
