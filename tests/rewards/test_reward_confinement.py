"""What a reward process may see of the environment and hold in memory, with real processes."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from rewards import limits
from rewards.call import Group
from rewards.check import try_rewards
from rewards.config import RewardConfig
from rewards.pool import RewardPool, Scores

SECRETS = ("RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "https_proxy")
REWARDS = """
import os, subprocess
from pathlib import Path

def see(completions, where):
    started = subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()
    initial = Path("/proc/self/environ").read_text().split("\\0")
    Path(where).write_text("\\n".join([*started, *(f"{k}={v}" for k, v in os.environ.items()), *initial]))
    return [1.0] * len(completions)
def ask(completions): return [float(len(os.environ["OPENAI_API_KEY"]))] * len(completions)
def small_model(completions):
    import torch
    layers = [torch.nn.Embedding(300, 64), torch.nn.TransformerEncoderLayer(64, 4), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers)
    return [float(model(torch.ones(2, 16, dtype=torch.long)).isfinite().all())] * len(completions)
def eat_tensor(completions):
    import torch
    return [float(torch.zeros(1 << 31).sum())]
"""
EAGER = (
    "import os\nKEY = os.environ['OPENAI_API_KEY']\ndef f(completions): return [float(len(KEY))] * len(completions)\n"
)


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A reward function of the file; every secret is set here, and its value is secret-<name>."""
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret-{name}")
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "eager.py").write_text(EAGER)
    return lambda function, file="mine", **more: RewardConfig(use=f"{tmp_path}/{file}.py:{function}", **more)


def _scores(*rewards: RewardConfig, **options: Any) -> Scores:
    async def main() -> Scores:
        async with RewardPool(rewards, **options) as pool:
            return await pool.score(Group(["p"], ["c"], [[1]], {}))

    return asyncio.run(main())


def test_a_reward_sees_what_it_names_and_no_other_secret(reward: Any, tmp_path: Path) -> None:
    blind, knows = tmp_path / "blind", tmp_path / "knows"
    rewards = [
        reward("see", args={"where": str(knows)}, env=("OPENAI_API_KEY",)),
        reward("see", args={"where": str(blind)}),  # after it, in the same process
    ]
    assert _scores(*rewards).reward == [2.0]
    assert "secret" not in blind.read_text()
    assert "OPENAI_API_KEY=secret-OPENAI_API_KEY" in knows.read_text()
    assert knows.read_text().count("secret") == 2  # what it starts has it, too
    for kept in ("PATH", "HOME"):
        assert f"{kept}={os.environ[kept]}" in blind.read_text()


def test_the_missing_variable_and_its_key_are_named(reward: Any) -> None:
    sentence = r"OPENAI_API_KEY is kept from reward functions: name it with this reward, env: \[OPENAI_API_KEY\]"
    assert _scores(reward("ask", env=("OPENAI_API_KEY",))).reward == [21.0]
    assert _scores(reward("f", "eager", env=("OPENAI_API_KEY",))).reward == [21.0]
    for config in (reward("ask"), reward("f", "eager")):
        with pytest.raises(WrongInput, match=sentence):
            try_rewards([config], Group(["p"], ["c"], [[1]], {}))


def test_a_variable_that_is_not_set_is_refused_before_anything_starts(reward: Any) -> None:
    with pytest.raises(WrongInput, match=r"reward 'ask': env: .* and NO_SUCH_KEY is not; export it before the run"):
        RewardPool([reward("ask", env=("NO_SUCH_KEY", "HF_TOKEN"))])


def test_only_what_is_lent_is_there_and_only_while_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "before")
    monkeypatch.delenv("B_KEY", raising=False)
    with limits.lent({"A_KEY": "a", "B_KEY": "b"}):
        assert (os.environ["A_KEY"], os.environ["B_KEY"]) == ("a", "b")
    assert os.environ["A_KEY"] == "before"
    assert "B_KEY" not in os.environ


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_small_model_runs_within_the_default_cap(reward: Any) -> None:
    assert _scores(reward("small_model", timeout_s=100)).reward == [1.0]


def test_who_eats_memory_is_stopped_and_told_the_cap_and_its_key(reward: Any) -> None:
    (failure,) = _scores(reward("eat_tensor", timeout_s=60), memory_bytes=1 << 30).failures
    assert "its process may hold 1 GiB: raise rollout.process_memory, for example to 2GiB" in failure


@pytest.mark.parametrize(
    ("error", "is_ours"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20 GiB"), False),
        (RuntimeError("cuda: cannot allocate memory"), False),
        (ValueError("boom"), False),
    ],
)
def test_which_failures_are_those_of_the_cap(error: Exception, is_ours: bool) -> None:
    assert limits.memory_met(error) is is_ours


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "spent"),
    [
        (MemoryError(), True),
        (OSError(24, "Too many open files"), True),
        (RuntimeError("can't start new thread"), True),
        (_raised(ValueError("no answer"), OSError(24, "Too many open files")), True),
        (_raised(RuntimeError("pool broke"), RuntimeError("can't start new thread")), True),
        (FileNotFoundError(2, "No such file"), False),
        (RuntimeError("CUDA out of memory"), False),
        (RecursionError(), False),
    ],
)
def test_which_failures_may_be_those_of_what_others_left(error: BaseException, spent: bool) -> None:
    assert limits.memory_spent(error) is spent


LEAKS = """
import os, threading
kept = []
def memory(completions):
    kept.append(bytearray(80 << 20))
    return [1.0] * len(completions)
def files(completions):
    kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(soft // 3))
    return [1.0] * len(completions)
def threads(completions):
    for _ in range(12):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return [1.0] * len(completions)
async def later(completions):
    return memory(completions)
def large(completions):
    return [float(len(bytearray(1 << 30)))]
import resource
soft = 64
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
"""


def test_a_function_that_leaks_gets_a_fresh_process_and_loses_no_score(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS)

    async def scored(leak: str) -> list[Scores]:
        config = RewardConfig(use=f"{tmp_path}/leaks.py:{leak}")
        async with RewardPool([config], memory_bytes=256 << 20) as pool:
            return [await pool.score(Group(["p"], ["c"], [[1]], {})) for _ in range(4)]

    async def main() -> list[list[Scores]]:
        return await asyncio.gather(*map(scored, ("later", "files", "threads")))

    for found in asyncio.run(main()):
        assert [(scores.reward, scores.failures) for scores in found] == [([1.0], ())] * 4


def test_a_function_that_wants_too_much_at_once_keeps_its_process(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(f"{LEAKS}\ndef pid(completions): return [float(os.getpid())]")

    async def main() -> list[Scores]:
        rewards = [RewardConfig(use=f"{tmp_path}/leaks.py:{name}") for name in ("pid", "large")]
        async with RewardPool(rewards, memory_bytes=256 << 20) as pool:
            return [await pool.score(Group(["p"], ["c"], [[1]], {})) for _ in range(3)]

    found = asyncio.run(main())
    assert len({scores.parts["pid"][0] for scores in found}) == 1
    assert all("its process may hold 0.25 GiB" in scores.failures[0] for scores in found)
