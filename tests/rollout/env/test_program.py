"""Programs in their processes: what they ask for is chained on this side, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import parts_of
from rollout.types import Adapter, Sampling
from rollout.worker import RolloutWorker
from tests.rollout.env.programs import BETWEEN, OPENING
from tests.rollout.env.test_rollouts import CHAT, PROBLEM, STOP, spec

PROGRAMS = Path(__file__).with_name("programs.py")
TURN = [11, 12, 13, 14, 15, STOP]


async def rows(folder: Path, how: str = "", turns: int = 2, **env: Any) -> list[dict[str, Any]]:
    """Two trajectories of the program; the policy samples TURN each time."""
    settings = spec(
        folder, sample=lambda ids, _: list(TURN), use=f"{PROGRAMS}:Asking", args={"turns": turns, "how": how}, **env
    )
    worker = RolloutWorker(settings)
    try:
        await worker.take_policy(Adapter.build(3, b"three", {}))
        table = await worker.rollout(PROBLEM, Sampling(n=2, max_tokens=400, seed=70), 0)
        assert table is not None
        return [row | {"parts": parts} for row, parts in zip(table.to_pylist(), parts_of(table), strict=True)]
    finally:
        await worker.close()


async def test_prompts_that_extend_each_other_are_one_row(tmp_path: Path) -> None:
    one, other = await rows(tmp_path)
    assert one["prompt_ids"] == OPENING
    assert one["completion_ids"] == [*TURN, *BETWEEN, *TURN]
    assert one["loss_mask"] == [True] * 6 + [False] * 2 + [True] * 6
    assert one["behavior_logprobs"] == [-0.5] * 6 + [0.0] * 2 + [-0.5] * 6
    assert one["token_versions"] == [3] * 14
    assert [(turn["start"], turn["stop"]) for turn in one["turns"]] == [(0, 6), (8, 14)]
    assert one["finish_reason"] == "done"
    assert one["parts"]["given"] == 12.0
    assert [message["role"] for message in json.loads(one["messages"])] == ["assistant", "user", "assistant"]
    assert other["completion_ids"] == one["completion_ids"]


@pytest.mark.parametrize(
    ("how", "outcome", "tokens"),
    [
        ("again", "branched", 6),
        ("raises", "env_error", 6),
        ("silent", "bad_observation", 0),
        ("no token", "bad_observation", 6),
    ],
)
async def test_what_cannot_be_trained_on_has_a_name_and_no_reward(
    tmp_path: Path, how: str, outcome: str, tokens: int
) -> None:
    row, _ = await rows(tmp_path, how)
    assert (row["finish_reason"], row["reward"], row["parts"]) == (outcome, None, {})
    assert len(row["completion_ids"]) == tokens


async def test_a_program_is_refused_more_turns_than_it_may_have_and_still_gives_its_reward(tmp_path: Path) -> None:
    row, _ = await rows(tmp_path, turns=99)
    assert (row["finish_reason"], len(row["turns"]), row["loss_mask"][-1]) == ("turns", 8, True)
    assert (row["parts"]["given"], row["parts"]["refused"]) == (48.0, 1.0)


async def test_a_program_that_lets_it_pass_has_ended_as_one_that_is_cut(tmp_path: Path) -> None:
    row, _ = await rows(tmp_path, "lets pass", turns=99)
    assert (row["finish_reason"], len(row["turns"]), row["reward_status"]) == ("turns", 8, "ok")


async def test_over_http_as_a_client_of_vllm_sees_it(tmp_path: Path) -> None:
    row, _ = await rows(tmp_path, "http")
    told = ("ok", "whole", "refused", "told", "unknown", "ended")
    assert {name: row["parts"][name] for name in told} == dict.fromkeys(told, 1.0)
    assert row["completion_ids"] == TURN[:4]
    assert row["finish_reason"] == "length"  # of the trajectory; its reward is there all the same


def test_the_tokens_are_the_tokenizers() -> None:
    assert max(*TURN, *OPENING, *BETWEEN) < len(CHAT.tokenizer)
