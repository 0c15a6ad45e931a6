"""Requests to an OpenAI-compatible endpoint: so many at once, so many a minute, repeated where that may help."""

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from rewards.base import RewardError
from rewards.judge_proxy import is_here, proxy_to
from rewards.judge_settings import JudgeSettings

LONGEST = 300  # characters of somebody else's words in a sentence of ours


class JudgeFailed(Exception):
    """The judge gave no answer; one sentence."""


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    """Of what an endpoint answers, the part that is read."""

    choices: Annotated[list[_Choice], Field(min_length=1)]


class RequestRate:
    """Lets requests go at even distances."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._turn = asyncio.Lock()  # first come, first served

    async def wait(self, *_: Any) -> None:
        """Returns when the next request may go. Who gives up meanwhile has used no turn: those of a group that is late
        would keep the next one waiting."""
        async with self._turn:
            if (early := self._next - time.monotonic()) > 0:
                await asyncio.sleep(early)
            self._next = max(time.monotonic(), self._next) + self._gap


class JudgeClient:
    """One endpoint. Used from one event loop."""

    def __init__(self, settings: JudgeSettings, share: float) -> None:
        """share: of the requests a minute, the part of this process. Raises RewardError: the environment's proxy is one
        that cannot be asked."""
        import openai

        self._settings, self._errors = settings, openai
        self._places = asyncio.Semaphore(settings.at_once)
        rate = RequestRate(None if settings.per_minute is None else settings.per_minute * share)
        # The hook is called before each request, repetitions included, and its time is not the request's.
        self._proxy = proxy_to(settings.base_url)
        # To this machine a proxy, which may be another one, has no way.
        direct: dict[str, Any] = {}
        if is_here(settings.base_url):
            direct = {"trust_env": False, "verify": ssl.create_default_context()}
        try:
            http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [rate.wait]}, **direct)
        except (ImportError, ValueError) as error:  # of SOCKS without its package; of a kind of proxy that is unknown
            host = urlsplit(settings.base_url).hostname
            raise RewardError(
                f"args.base_url: {settings.base_url} cannot be asked by {self._proxy or 'the proxies here'}: "
                f"{_said(error)}; set no_proxy={host} if it is reached without, or another proxy"
            ) from None
        self._client = openai.AsyncOpenAI(
            base_url=settings.base_url, api_key=settings.api_key or "none", timeout=settings.request_s,
            max_retries=settings.retries, http_client=http,
        )  # fmt: skip

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """What the model answers. Raises JudgeFailed."""
        tries = f"{self._settings.retries + 1} tries"
        asked = self._settings.base_url if self._proxy is None else f"{self._settings.base_url} by {self._proxy}"
        try:
            async with self._places:
                chat: Any = self._client.chat.completions.with_raw_response  # types of each role's message are no help
                raw = await chat.create(
                    model=self._settings.model, messages=list(messages), extra_body=self._settings.options
                )
        except self._errors.APITimeoutError:
            raise JudgeFailed(f"no answer within {self._settings.request_s:g} s, in {tries}") from None
        except self._errors.APIConnectionError as error:
            raise JudgeFailed(f"{asked} cannot be reached ({_said(error.__cause__)})") from None
        except self._errors.APIStatusError as error:
            body = error.response.text[:LONGEST]
            raise JudgeFailed(f"{asked} answers {error.status_code}: {_line(body)}") from None
        except self._errors.OpenAIError as error:
            raise JudgeFailed(_said(error)) from None
        try:
            return _Completion.model_validate_json(raw.http_response.content).choices[0].message.content
        except ValidationError:
            text = raw.http_response.text[:LONGEST]
            raise JudgeFailed(f"{asked} answers what is no chat completion: {_line(text)}") from None

    async def close(self) -> None:
        """Lets go of its connections."""
        await self._client.close()


def _said(error: BaseException | None) -> str:
    return _line(str(error) or type(error).__name__)[:LONGEST]


def _line(text: str) -> str:
    return " ".join(text.split())
