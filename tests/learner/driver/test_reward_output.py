"""What reward functions of a run print: kept in its folder, and its first lines said once."""

import asyncio
from pathlib import Path

import pytest

from learner.driver import console
from learner.driver.console import RewardOutput
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.limits import NAME
from rewards.pool import RewardPool


@pytest.mark.parametrize(
    "code", ["print(one)", "import sys; sys.stderr.write(one + chr(10))", "os.system('echo ' + one)"]
)
def test_lines_are_kept_said_once_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str) -> None:
    (tmp_path / NAME).write_text("of an earlier start\n")
    found = RewardOutput(tmp_path)
    assert (found.first(), found.total()) == ("", "")
    (tmp_path / "loud.py").write_text(
        f"import os\ndef loud(completions):\n    for one in completions:\n        {code}\n    return [1.0] * 5\n"
    )

    async def score() -> None:
        async with RewardPool([RewardConfig(use=f"{tmp_path}/loud.py:loud")], printed=tmp_path / NAME) as pool:
            for _ in range(2):
                await pool.score(Group(["p"] * 5, ["a" * 200, "b", "c", "d", "e"], [[1]] * 5, {}))

    asyncio.run(score())
    assert found.first() == (f"reward functions print, into {tmp_path / NAME}; its first lines: {'a' * 100} | b | c")
    assert (found.first(), found.total()) == ("", f"reward functions printed 10 lines, into {tmp_path / NAME}")
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("before", "printed"), [(0, 300), (40, 17)])
def test_it_grows_no_further_than_it_may_and_what_is_left_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, printed: int
) -> None:
    monkeypatch.setattr(console, "MOST_LINES", 120)
    file = tmp_path / NAME
    file.write_text("0123456\n" * (before // 8))
    found = RewardOutput(tmp_path)
    assert found.bound() == ""
    lines = 0
    with file.open("ab") as open_elsewhere:  # as functions write
        for turn in range(3):
            for _ in range(printed):
                open_elsewhere.write(b"0123456\n")
            open_elsewhere.flush()
            lines += printed
            told = found.bound()
            assert (str(file) in told and "what follows is left out" in told) == (turn == 0)
            assert file.stat().st_size == 120
    kept = (120 - before) // 8
    assert found.total() == f"reward functions printed {lines} lines, into {file}, of which {lines - kept} are left out"
