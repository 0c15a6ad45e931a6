"""Reward functions of every kind, in a file of their own, and the messages that a pool sends."""

from collections.abc import Sequence

import pytest

from rewards.call import Verdict
from rewards.config import RewardConfig
from rewards.slot import ScoreCall, Slot
from tests.rewards.pool_case import OneOf

REWARDS = """
import asyncio, ctypes, multiprocessing, os, subprocess, time
from pathlib import Path

def good(completions, **kwargs): return [len(c) for c in completions]
def spoken(prompts, completions, answer, **kwargs):
    return [float(c[0]["content"] == a and p[-1]["role"] == "user") for p, c, a in zip(prompts, completions, answer)]
async def later(completions):
    await asyncio.sleep(0.01)
    return [0.5] * len(completions)
def none(completions): return [None, 1.0]
def nan(completions): return [float("nan"), 1.0]
def of_a_task(completions, task, own): return [float(len(c)) if t == own else None for c, t in zip(completions, task)]
def short(completions): return [1.0]
def boom(completions): raise ValueError("boom")
def loop(completions):
    while True: pass
def c_loop(completions): return [len(str(7 ** (10 ** 9)))]
def leave(completions):
    time.sleep(0.3)  # an end within 0.1 s may go by without its exit code
    os._exit(3)
def crash(completions):
    time.sleep(0.3)
    ctypes.string_at(0)
def hog(completions): return [len(bytearray(8 << 30))]
class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)
def odd(completions): raise Odd("cannot be unpickled", 2)
def child(completions, where):
    Path(where).write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '600']).pid}")
    while True: time.sleep(1)
def size(text): return len(text)
def pooled(completions, where):
    global kept
    kept = multiprocessing.Pool(2)
    Path(where).write_text(" ".join(str(child.pid) for child in multiprocessing.active_children()))
    return kept.map(size, completions)
def words(completions): return ["good"] * len(completions)
def endless(completions, where): Path(where).open("a").write("called "); time.sleep(600)
"""


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory: pytest.TempPathFactory) -> OneOf:
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS)
    return lambda function, **more: RewardConfig(use=f"{path}:{function}", **more)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each message had."""
    sizes: list[int] = []
    real = Slot.scores

    async def counted(self: Slot, asked: Sequence[ScoreCall]) -> list[Verdict] | None:
        sizes.append(len(asked))
        return await real(self, asked)

    monkeypatch.setattr(Slot, "scores", counted)
    return sizes
