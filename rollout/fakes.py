"""Fakes without a model for tests and benchmarks: groups, an engine and a rollout worker, instant and deterministic."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cluster.telemetry import peak_memory
from rollout.delivery import Answer, Receipt
from rollout.engine import Engine, NoAdapter
from rollout.schema import Origin, Problem, build_group, facts_of
from rollout.scorer import side_by_side
from rollout.service import RolloutService
from rollout.types import (
    Adapter,
    Completion,
    EngineError,
    Held,
    Manifest,
    Sampling,
    SentPolicy,
    Weights,
    WeightsInFile,
    digest_of,
)

# Groups without a worker. By default they hold small numbers that tell rows apart.


def make_problem(position: int, prompt_ids: Sequence[int] = (3, 1, 2)) -> Problem:
    return Problem(f"train-{position}", f"question {position}", {"answer": "4"}, tuple(prompt_ids), position, 0)


def make_columns(
    position: int = 0,
    *,
    attempt: int = 0,
    completions: Sequence[Completion] | None = None,
    rewards: Sequence[float | None] = (1.0, 0.0),
    **changed: Any,
) -> dict[str, Sequence[Any]]:
    """The columns of a group of len(rewards) completions. By default completion j has j + 1 tokens of version 0."""
    if completions is None:
        completions = [
            Completion(np.arange(t, dtype=np.int32), np.full(t, -0.5, np.float32), "stop", np.zeros(t, np.int32))
            for t in range(1, len(rewards) + 1)
        ]
    facts = facts_of(make_problem(position), completions, Origin("run", 0, attempt, seed=17, generate_ms=2.5))
    return facts | {
        "created_at": [0.0] * len(rewards),
        "completion": ["text"] * len(rewards),
        "reward_ms": [1.5] * len(rewards),
        "reward": rewards,
        "reward_parts": [[("vowels", reward)] for reward in rewards],
        "reward_status": ["error" if reward is None else "ok" for reward in rewards],
        **changed,
    }


def make_group(position: int = 0, **how: Any) -> pa.Table:
    """A group as a table. The arguments are those of make_columns."""
    return build_group(make_columns(position, **how))


# An engine without a model, on numpy alone.


def fake_logits(token: int, policy: int, vocab_size: int) -> NDArray[np.float64]:
    """[vocab_size] logits of the token after `token` under policy version `policy`. This is the whole fake model."""
    return np.random.default_rng((policy, token)).standard_normal(vocab_size)


def held_by_fake(policy: int) -> Held:
    """The answer of a fake engine's held() under that policy: one digest in place of those of tensors."""
    return Held({"policy": digest_of(b"%d" % policy)})


class FakeEngine:
    """An Engine whose completions are a pure function of (prompt, seed, version). A seed of None counts as 0.

    The policy depends on the adapter's version only, not on its bytes.

    Args:
        vocab_size: size of the vocabulary; token ids are below it.
        stop_ids: the tokens that end a completion.
        drop_adapter_at: a version that the engine acknowledges and reports in completions, while the policy before it
            stays in force: the silent non-delivery that the probe must find.
        delay_s: seconds that generate waits before it answers.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        stop_ids: Collection[int] = (0,),
        drop_adapter_at: int | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._drop_adapter_at = drop_adapter_at
        self._delay_s = delay_s
        self._version: int | None = None
        self._policy = -1  # -1 is the base model, before any adapter took effect
        self._calls = 0  # running calls of generate
        self._asleep = False
        self._closed = False
        self._generation = uuid.uuid4().hex

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        version, policy = self._newest(), self._policy
        if not prompt_ids:
            raise ValueError("the prompt must hold at least 1 token, got 0")
        self._calls += 1
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._calls -= 1
        self._newest()
        return [self._complete(prompt_ids, sampling, j, version, policy) for j in range(sampling.n)]

    async def load_adapter(self, adapter: Adapter) -> str:
        return self._load(adapter)

    async def load_weights(self, weights: Weights) -> str:
        return self._load(weights)

    def _load(self, update: Adapter | Weights) -> str:
        self._require_awake()
        update.verify()
        self._version = update.version
        if update.version != self._drop_adapter_at:
            self._policy = update.version
        return update.digest

    async def probe(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        self._newest()
        if len(token_ids) < 2:
            raise ValueError(f"a probe needs at least 2 tokens, got {len(token_ids)}")
        return np.array([self._logprobs(a, self._policy, 1.0)[b] for a, b in pairwise(token_ids)], np.float32)

    async def peak_memory(self) -> float:
        """See Engine.peak_memory."""
        return peak_memory()

    async def held(self) -> Held:
        self._newest()
        return held_by_fake(self._policy)

    async def share_base(self) -> Manifest:
        self._require_open()
        return Manifest("shared_file", "nowhere", self._generation, {}, {}, {}, {})

    async def sleep(self) -> None:
        self._require_open()
        if self._calls:
            raise EngineError(f"sleep: nothing may be running, got {self._calls} calls; await them first")
        self._asleep = True

    async def wake(self) -> None:
        self._require_open()
        self._asleep = False

    async def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _require_awake(self) -> None:
        self._require_open()
        if self._asleep:
            raise EngineError("the engine is asleep; await wake() first")

    def _newest(self) -> int:
        self._require_awake()
        if self._version is None:
            raise NoAdapter("no adapter is loaded; await load_adapter first")
        return self._version

    def _complete(self, prompt: Sequence[int], sampling: Sampling, j: int, version: int, policy: int) -> Completion:
        rng = np.random.default_rng((policy + 1, (sampling.seed or 0) + j, *prompt))
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < sampling.max_tokens and not (tokens and tokens[-1] in self._stop_ids):
            row = self._logprobs((tokens or prompt)[-1], policy, sampling.temperature)
            greedy = sampling.temperature == 0
            tokens.append(int(row.argmax() if greedy else rng.choice(self.vocab_size, p=np.exp(row))))
            logprobs.append(float(row[tokens[-1]]))
        finish = "stop" if tokens[-1] in self._stop_ids else "length"
        versions = np.full(len(tokens), version, np.int32)
        return Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), finish, versions)

    def _logprobs(self, token: int, policy: int, temperature: float) -> NDArray[np.float64]:
        """[vocab_size] float64, nats; for temperature 0 those at temperature 1, as with the real engine."""
        logits = fake_logits(token, policy + 1, self.vocab_size) / (temperature or 1.0)
        shifted = logits - logits.max()
        logprobs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
        return logprobs


class FakeWorker(RolloutService):
    """A rollout worker with any Engine, but without tokenizer and reward processes (benchmarks.system.local_run).

    A completion's reward is 1 if it has an odd number of tokens, else 0. Its text is the ids of its tokens.
    """

    def __init__(self, engine: Engine, rank: int = 0) -> None:
        self.engine, self._rank = engine, rank

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        completions = await self.engine.generate(problem.prompt_ids, sampling)
        rewards = [float(len(c.token_ids) % 2) for c in completions]
        rows = facts_of(problem, completions, Origin("run", self._rank, attempt, sampling.seed, 1.0)) | {
            "completion": [" ".join(map(str, c.token_ids)) for c in completions],
            "reward": rewards,
            "reward_parts": [[("odd", reward)] for reward in rewards],
            "reward_status": ["ok"] * len(rewards),
            "reward_ms": [0.0] * len(rewards),
        }
        return build_group(rows)

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
    ) -> pa.Table | None:
        asked = zip(problems, samplings, strict=True)
        groups = await side_by_side(self.rollout(problem, sampling, attempt) for problem, sampling in asked)
        made = [group for group in groups if group is not None]
        return pa.concat_tables(made).combine_chunks() if len(made) == len(groups) else None

    async def reaches(self, place: WeightsInFile) -> str:
        return "it is no process of its own"

    async def take_policy(self, policy: SentPolicy) -> Receipt | None:
        assert not isinstance(policy, WeightsInFile), "the fake trainer sends adapters"
        if isinstance(policy, Weights):
            digest = await self.engine.load_weights(policy)
        else:
            digest = await self.engine.load_adapter(policy)
        return Receipt(digest, 2.0, 1.0)

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        return Answer(await self.engine.probe(token_ids), await self.engine.held(), 3.0)

    async def share_base(self) -> Manifest:
        return await self.engine.share_base()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def close(self) -> None:
        await self.engine.close()
