"""What reward functions of a run print: kept in its folder, and its first lines said once."""

import asyncio
from pathlib import Path

import pytest

from learner.driver.reward_output import RewardOutput
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.output import NAME
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
