"""A whole run whose reward functions have processes of their own."""

import os
import re
import signal
from pathlib import Path

import pytest

from examples.random_model import make_tiny_model
from rollout import ledger
from tests.flow.run import Run, wait_until

# Says where it ran: the name of the process that started its own.
WHERE = """
import psutil

def threes(completion_ids, **columns):
    return [float(len(ids) % 3) for ids in completion_ids]

def where(completion_ids, **columns):
    above = " ".join(one.name() + " ".join(one.cmdline()) for one in psutil.Process().parents())
    return [float("ray::rewards-" in above)] * len(completion_ids)
"""


def servers(run: Run) -> dict[str, int]:
    """The reward processes of their own by name: pid."""
    found = ((re.search(r"ray::(rewards-\d)", command), pid) for pid, command in run.processes().items())
    return {named[1]: pid for named, pid in found if named is not None}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_and_hung_reward_processes_cost_no_group_and_no_generator(tmp_path: Path) -> None:
    """Two generators share two of them; groups under way in one that is lost are scored by the fresh one."""
    (tmp_path / "where.py").write_text(WHERE)
    rewards = [{"use": f"{tmp_path}/where.py:threes"}, {"use": f"{tmp_path}/where.py:where", "weight": 0.0}]
    run = Run(
        tmp_path, make_tiny_model(tmp_path / "tiny", family="Llama"), steps=12, rewards=rewards,
        cluster={"rewards": {"processes": 2}, "patience": 0.1},
    )  # fmt: skip
    process = run.start("data.eval.every=0", "checkpoint.every=12", "rollout.workers=2")
    for name, number, after in (("rewards-0", signal.SIGKILL, 2), ("rewards-1", signal.SIGSTOP, 5)):
        wait_until(lambda after=after: len(run.metrics()) > after, f"{after + 1} steps", 240, process)  # type: ignore[misc]
        lost = servers(run)[name]
        os.kill(lost, number)
        wait_until(lambda name=name, lost=lost: servers(run).get(name, lost) != lost, "a fresh one", 120, process)  # type: ignore[misc]
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert re.search("rewards-1: pulse gave no answer within 10 s .* it hangs", " ".join(output.split())), output
    restarted = re.findall(r"learner: (\S+): .*; starting a fresh process", " ".join(output.split(" ")))
    assert restarted == ["rewards-0", "rewards-1"], output  # no generator was blamed
    assert [line["step"] for line in run.metrics()] == list(range(1, 13))
    rows = [ledger.read(path) for path in ledger.steps(run.folder / "rollouts")]
    places = [place for step in rows for place in dict.fromkeys(step.column("position").to_pylist())]
    assert sorted(places) == list(range(36)), "a group was lost or trained twice"
    for step in rows:
        assert {*step.column("reward_status").to_pylist()} == {"ok"}
        for ids, parts in zip(step["completion_ids"].to_pylist(), step["reward_parts"].to_pylist(), strict=True):
            assert {part["name"]: part["value"] for part in parts} == {"threes": len(ids) % 3, "where": 1.0}
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_a_reward_function_there_must_not_do_ends_the_run_in_its_own_words(tmp_path: Path) -> None:
    rewards = [{"use": f"{tmp_path}/late.py:late", "on_error": "fail"}]
    text = "import itertools\ncalls = itertools.count()\n"
    text += "def late(completions, **columns):\n    return [1 / (next(calls) < 8) for _ in completions]\n"
    (tmp_path / "late.py").write_text(text)
    run = Run(
        tmp_path, make_tiny_model(tmp_path / "tiny", family="Llama"), rewards=rewards,
        cluster={"rewards": {"processes": 1}},
    )  # fmt: skip
    process = run.start("data.eval.every=0")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "reward 'late'" in output.splitlines()[-1], output
    assert "ZeroDivisionError" in output.splitlines()[-1], output


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_run_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    run = Run(
        tmp_path, make_tiny_model(tmp_path / "tiny", family="Llama"), steps=1000,
        rewards=[{"use": f"{tmp_path}/where.py:threes"}], cluster={"rewards": {"processes": 1}},
    )  # fmt: skip
    process = run.start("data.eval.every=0")
    with run.watched() as (mapped, _):
        wait_until(lambda: len(run.metrics()) > 1, "two steps", 240, process)
        process.kill()
        process.communicate()
    assert any("/sem." in name for name in mapped), mapped
    wait_until(lambda: not [name for name in mapped if Path(name).exists()], f"{mapped} to go", seconds=30)
