"""Agents as they are, by whole rollout workers: real clients in processes of their own, real vLLM behind them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from examples.random_model import make_adapter
from examples.tiny_tools import QUESTION
from learner.batch.micro_batch import read
from rollout.data.chat import Chat
from rollout.engine import EngineSettings
from rollout.env.config import EnvConfig
from rollout.env.rollouts import EnvSettings
from rollout.env.trajectory import Limits
from rollout.schema import Problem, parts_of
from rollout.types import Adapter, Completion, Sampling
from rollout.worker import RolloutWorker, WorkerSpec, vllm_engine

pytest.importorskip("vllm")
MODEL = Path(__file__).parents[3] / "examples" / "tiny-tools"
AGENTS = Path(__file__).with_name("agents.py")
CHAT = Chat.load(str(MODEL))
STOP_IDS, STOP = CHAT.stops(())
SETTINGS = EngineSettings(
    model=str(MODEL), dtype="float32", max_model_len=256, kv_cache_bytes=1 << 26, max_num_seqs=8, max_lora_rank=8,
    adapter_window=2, seed=0, stop_ids=STOP_IDS, stop=STOP,
)  # fmt: skip
MESSAGES = ({"role": "user", "content": QUESTION.format(37, 24)},)
PROBLEM = Problem("p-7", MESSAGES, {"answer": "888"}, CHAT.render(MESSAGES)[1], 0, 0)
Table = list[dict[str, Any]]


class Kept:
    """An engine that remembers what it sampled, as (all ids, logprobs of the last), and that workers do not close."""

    def __init__(self) -> None:
        self.engine: Any = vllm_engine(SETTINGS)
        self.sampled: list[tuple[list[int], list[float]]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        found: list[Completion] = await self.engine.generate(prompt_ids, sampling)
        self.sampled += [([*prompt_ids, *one.token_ids.tolist()], one.logprobs.tolist()) for one in found]
        return found

    async def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.fixture(scope="module")
def engine() -> Iterator[Kept]:
    kept = Kept()
    asyncio.run(kept.load_adapter(Adapter.build(0, *make_adapter(MODEL, seed=0, scale=0.01))))
    yield kept
    asyncio.run(kept.engine.close())


async def played(
    engine: Kept, kind: str = "", *, samples: int = 4, turns: int = 3, problem: Problem = PROBLEM, **args: Any
) -> Table:
    """The rows of a group of trajectories of an agent of that kind."""
    env = EnvConfig(
        use="program", args=args if "command" in args else {"function": f"{AGENTS}:{kind}"} | args, max_turns=turns,
        step_timeout_s=8,
    )  # fmt: skip
    settings = EnvSettings(env, Limits(128, 128, turns, 60), concurrency=4, seed=1, alone=True)
    worker = RolloutWorker(WorkerSpec(0, "run", SETTINGS, (), 1, 2**30, lambda _: engine, settings))
    engine.sampled.clear()
    try:
        table = await worker.rollout(problem, Sampling(n=samples, max_tokens=128, seed=3), 0)
        assert table is not None
        assert sum(map(len, read([table]).rewards)) == samples  # the learner counts trajectories, and not their rows
        return [row | {"parts": parts} for row, parts in zip(table.to_pylist(), parts_of(table), strict=True)]
    finally:
        await worker.close()


def command(*words: str) -> list[str]:
    return [sys.executable, str(AGENTS), *words]


def text(row: dict[str, Any]) -> str:
    return CHAT.decode([*row["prompt_ids"], *row["completion_ids"]], special=True)


def check_engine_s(engine: Kept, rows: Table) -> None:
    """Each turn of each row is what the engine sampled behind exactly the tokens before it, and all that it sampled is
    in a row."""
    sampled = list(engine.sampled)
    for row in rows:
        ids, size = [*row["prompt_ids"], *row["completion_ids"]], len(row["prompt_ids"])
        mask = [False] * len(row["completion_ids"])
        for turn in row["turns"]:
            start, stop = turn["start"], turn["stop"]
            sampled.remove((ids[: size + stop], row["behavior_logprobs"][start:stop]))
            mask[start:stop] = [True] * (stop - start)
        assert row["loss_mask"] == mask
    assert sampled == []


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37*24"}}</tool_call>'
OPENED = f"<|system|>Tools: calculator(expression)<|end|><|user|>{MESSAGES[0]['content']}<|end|><|assistant|>"
ANSWERED = f"{CALL}<|end|><|tool|>888<|end|><|assistant|><answer>888</answer><|end|>"


async def test_an_unmodified_program_is_trained_on_what_the_engine_sampled(engine: Kept) -> None:
    rows = await played(engine, command=command("plain"))
    check_engine_s(engine, rows)
    assert [row["sample"] for row in rows] == [0, 1, 2, 3]
    assert {row["finish_reason"] for row in rows} == {"done"}
    for row in rows:
        assert row["reward"] == row["parts"]["right"] == float("888" in row["completion"].rpartition("<answer>")[2])
    called = next(row for row in rows if text(row) == OPENED + ANSWERED)
    assert [turn["calls"] for turn in called["turns"]] == [1, 0]
    assert [one["role"] for one in json.loads(called["messages"])] == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("kind", ["streams", "touches", "blocks", "claude", "claude_streams"])
async def test_a_conversation_that_goes_on_is_one_row(engine: Kept, kind: str) -> None:
    rows = await played(engine, kind)
    check_engine_s(engine, rows)
    assert [row["sample"] for row in rows] == [0, 1, 2, 3]
    (called, *_) = [row for row in rows if text(row) == OPENED + ANSWERED]
    assert called["parts"] == {"program" if kind == "blocks" else "right": 1.0}


async def test_a_history_that_is_rewritten_goes_on_in_a_further_row(engine: Kept) -> None:
    rows = await played(engine, "compacts")
    check_engine_s(engine, rows)
    groups = {sample: list(own) for sample, own in groupby(rows, lambda row: row["sample"])}
    assert sorted(groups) == [0, 1, 2, 3]
    first, second = next(own for own in groups.values() if len(own) == 2 and text(own[0]) == f"{OPENED}{CALL}<|end|>")
    assert text(second).startswith(OPENED.replace("<|assistant|>", "<|user|>888<|end|><|assistant|>"))
    assert first["reward"] == second["reward"] is not None
    assert (first["messages"], second["finish_reason"]) == (None, "done")
    assert [one["role"] for one in json.loads(second["messages"])] == ["assistant", "user", "assistant"]


async def test_requests_from_one_place_have_a_row_each_and_keep_what_was_sampled_before(engine: Kept) -> None:
    rows = await played(engine, "at_once", samples=1, turns=5)
    check_engine_s(engine, rows)
    assert [row["sample"] for row in rows] == [0] * 4
    assert sorted(len(row["turns"]) for row in rows) == [1, 1, 1, 2]
    (whole,) = [row for row in rows if len(row["turns"]) == 2]
    first = whole["completion_ids"][: whole["turns"][0]["stop"]]
    (fork,) = [row for row in rows if "down" in text(row)]
    known = [*whole["prompt_ids"], *first]
    assert [*fork["prompt_ids"], *fork["completion_ids"]][: len(known)] == known
    assert "up" in text(whole)


async def test_what_cannot_be_answered_is_refused_in_the_client_s_own_form(engine: Kept) -> None:
    (row,) = await played(engine, "wrong", samples=1)
    assert row["parts"] == dict.fromkeys(row["parts"], 1.0)
    assert len(row["parts"]) > 15
    assert len(row["turns"]) == 1


async def test_an_answer_ends_at_a_stop_string_as_if_nothing_had_been_sampled_behind_it(engine: Kept) -> None:
    rows = await played(engine, "stops")
    assert {row["parts"]["before"] for row in rows} == {1.0}
    for row in rows:
        end = row["completion"].partition("</answer>")[1] or "37"
        assert row["completion"].endswith(end)
        assert row["completion"].count(end) == 1
        ids = [*row["prompt_ids"], *row["completion_ids"]]
        size = len(row["completion_ids"])
        behavior = row["behavior_logprobs"]
        assert any(all_[: len(ids)] == ids and logprobs[:size] == behavior for all_, logprobs in engine.sampled)


async def test_sampling_is_the_run_s_own_by_request_of_the_configuration(engine: Kept) -> None:
    (refused,) = await played(engine, "greedy", samples=1)
    assert refused["finish_reason"] == "env_error"
    assert "temperature, seed: sampling is the run's own" in refused["reward_error"]
    rows = await played(engine, "greedy", samples=4, sampling="run")
    assert [row["finish_reason"] for row in rows] == ["done"] * 4
    assert len({row["completion"] for row in rows}) > 1


async def test_a_group_s_first_requests_may_differ_which_is_said(
    engine: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    rows = await played(engine, "dated", samples=2)
    assert [row["finish_reason"] for row in rows] == ["done"] * 2
    assert rows[0]["prompt_ids"] != rows[1]["prompt_ids"]
    assert "must begin alike, and those of p-7 have 2 different first messages or tools; take the" in caplog.text


@pytest.mark.parametrize("kind", ["goes_on", "never_ends"])
async def test_beyond_its_limits_a_program_is_refused_and_at_last_ended(engine: Kept, kind: str) -> None:
    rows = await played(engine, samples=1, turns=2, command=command(kind))
    assert {(row["finish_reason"], row["reward"]) for row in rows} == {("turns", 0.0)}
    assert len(rows) == 2


async def test_a_program_that_fails_is_a_fault_or_has_the_reward_that_says_so(engine: Kept) -> None:
    (fault,) = await played(engine, samples=1, command=command("raises"))
    assert (fault["finish_reason"], fault["reward"]) == ("env_error", None)
    assert "exit code 1" in fault["reward_error"]
    assert "FileNotFoundError: plan.txt" in fault["reward_error"]
    (scored,) = await played(engine, "raises", samples=1, failed=-0.5)
    assert (scored["finish_reason"], scored["parts"]) == ("done", {"program": -0.5})


@pytest.mark.parametrize(("kind", "said"), [("not_a_number", "must be a finite number"), ("fifo", "a plain file")])
async def test_a_reward_that_is_none_is_a_fault(engine: Kept, kind: str, said: str) -> None:
    (row,) = await played(engine, kind, samples=1)
    assert (row["finish_reason"], row["reward"]) == ("env_error", None)
    assert said in row["reward_error"]


async def test_the_command_line_holds_the_problem_and_no_secret(engine: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLEANER_TEST_TOKEN", "secret")
    words = [*command("told"), "{answer}", "{prompt}", "{{}}", "a b"]
    (row,) = await played(engine, samples=1, command=words)
    assert row["parts"] == {"told": 1.0, "secrets": 0.0}
    (unknown,) = await played(engine, samples=1, command=[*words, "{question}"])
    assert "{question} must be a column of the problem, one of prompt, answer" in unknown["reward_error"]


async def test_what_a_program_has_started_ends_with_it(engine: Kept, tmp_path: Path) -> None:
    (row,) = await played(engine, samples=1, command=command("leaves"))
    await gone(int(row["parts"]["child"]))
    told = tmp_path / "pids"
    problem = replace(PROBLEM, columns={"told": str(told)})
    (row,) = await played(engine, samples=1, command=command("hangs"), problem=problem)
    assert row["finish_reason"] == "env_timeout"
    for pid in told.read_text().split():
        await gone(int(pid))


async def gone(pid: int) -> None:
    """Waits until a process that was killed has ended."""
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
            await asyncio.sleep(0.05)
