"""The teacher's process and who asks it, without a model: a fake engine whose logprobs are made of the ids."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster.actor import Local
from cluster.errors import WrongInput
from rollout.engine import EngineDied, EngineSettings
from rollout.teacher.process import DIED, Teacher, TeacherServer, TeacherSpec, of_policy
from rollout.types import Completion, TeacherLogprobs

SETTINGS = EngineSettings("m", "float32", 64, 1 << 20, 8, 0, 2, 0, prompt_logprobs=3, step_tokens=64)
PROMPT = (50, 32, 43)


class Ids:
    """Tells of each token its id as its logprob, and that it and the next ones are the likeliest."""

    def __init__(self, settings: EngineSettings) -> None:
        self.top = settings.prompt_logprobs or 0
        self.asked: list[tuple[list[int], list[int]]] = []
        self.closed = False

    async def completion_logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TeacherLogprobs:
        self.asked.append(([*prompt_ids], [*completion_ids]))
        await asyncio.sleep(0.01)
        ids = np.array(completion_ids, np.int32).reshape(-1, 1) + np.arange(self.top, dtype=np.int32)
        return TeacherLogprobs(-np.array(completion_ids, np.float32), ids, -ids.astype(np.float32))

    async def close(self) -> None:
        self.closed = True


def spec(engine: Any = Ids, top: int = 3, vocabulary: int = 100, silence_s: float = 5.0) -> TeacherSpec:
    return TeacherSpec(SETTINGS, top, vocabulary, silence_s, engine)


def completions(*lengths: int) -> list[Completion]:
    ids = [np.arange(10, 10 + length, dtype=np.int32) for length in lengths]
    return [Completion(one, np.zeros(len(one), np.float32), "stop", np.zeros(len(one), np.int32)) for one in ids]


async def test_each_completion_of_a_group_gets_what_was_said_of_it() -> None:
    actor: Local[TeacherServer] = Local("teacher-0", TeacherServer, [spec()])
    columns = await Teacher(actor, 3, 5.0).columns(PROMPT, completions(2, 0, 3))
    assert [one.tolist() for one in columns["teacher_logprobs"]] == [[-10, -11], [], [-10, -11, -12]]
    assert columns["teacher_top_ids"][0].tolist() == [10, 11, 12, 11, 12, 13]  # row-major
    assert columns["teacher_top_logprobs"][0].tolist() == [-10, -11, -12, -11, -12, -13]
    assert columns["teacher_top_ids"][1].tolist() == []
    asked = actor._object._engine.asked  # type: ignore[attr-defined]
    assert asked == [([50, 32, 43], [10, 11]), ([50, 32, 43], []), ([50, 32, 43], [10, 11, 12])]


async def test_nobody_asked_for_the_likeliest() -> None:
    actor: Local[TeacherServer] = Local("teacher-0", TeacherServer, [spec(top=0)])
    columns = await Teacher(actor, 0, 5.0).columns(PROMPT, completions(2, 1))
    assert columns["teacher_top_ids"] == columns["teacher_top_logprobs"] == [None, None]
    assert len(columns["teacher_logprobs"]) == 2


async def test_tokens_that_the_policy_does_not_have_are_left_out_or_it_is_said() -> None:
    told = TeacherLogprobs(
        np.zeros(2, np.float32), np.array([[9, 12, 3, 4], [1, 2, 11, 10]]), np.array([[-1.0, -2, -3, -4]] * 2)
    )
    kept = of_policy(told, 2, 10)
    assert (kept.top_ids.tolist(), kept.top_logprobs.tolist()) == ([[9, 3], [1, 2]], [[-1, -3], [-1, -2]])
    assert of_policy(told, 0, 10).top_ids.shape == (2, 0)
    with pytest.raises(WrongInput, match="among its 4 likeliest at some place fewer than 3 have an id below 10"):
        of_policy(told, 3, 10)
    actor: Local[TeacherServer] = Local("teacher-0", TeacherServer, [spec(vocabulary=12)])  # the sentence arrives whole
    with pytest.raises(WrongInput, match="model.teacher: must find tokens of the policy likeliest"):
        await Teacher(actor, 3, 5.0).columns(PROMPT, completions(1))


class Ended(Exception):
    """In place of the end of this process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def end(code: int) -> None:
        found.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    return found


async def test_an_engine_that_dies_takes_its_process_with_it(ends: list[int]) -> None:
    class Dead(Ids):
        async def completion_logprobs(
            self, prompt_ids: Sequence[int], completion_ids: Sequence[int]
        ) -> TeacherLogprobs:
            raise EngineDied("the engine died of something")

    with pytest.raises(Ended):
        await TeacherServer(spec(Dead)).completion_logprobs(PROMPT, [np.array([1], np.int32)])
    assert ends == [DIED]


async def test_an_engine_that_hangs_does_so_too_but_not_one_that_is_busy_with_others(ends: list[int]) -> None:
    free = asyncio.Event()

    class Slow(Ids):
        """Answers one after the other; the prompt 666 never."""

        async def completion_logprobs(
            self, prompt_ids: Sequence[int], completion_ids: Sequence[int]
        ) -> TeacherLogprobs:
            if prompt_ids[0] == 666:
                await free.wait()
            async with lock:
                await asyncio.sleep(0.2)
            return await super().completion_logprobs(prompt_ids, completion_ids)

    lock, server = asyncio.Lock(), TeacherServer(spec(Slow, silence_s=0.5))
    one = [np.array([1], np.int32)]
    told = await asyncio.gather(*(server.completion_logprobs(PROMPT, one) for _ in range(6)))  # the last after 1.2 s
    assert (len(told), ends) == (6, [])
    with pytest.raises(Ended):
        await server.completion_logprobs((666,), one)
    assert ends == [DIED]
    await server.close()
    assert server._engine.closed  # type: ignore[attr-defined]
