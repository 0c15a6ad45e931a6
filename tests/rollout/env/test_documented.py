"""The environment of docs/environments.md, as it stands there."""

import re
from pathlib import Path
from typing import Any

from rollout.env.config import EnvConfig
from rollout.env.process import EnvironmentProcess, Forks, spec_of
from tests.rollout.env.hand import problem, said

TEXT = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


async def test_the_documented_environment_runs_as_it_is(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# my_env.py\n.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_env.py").write_text(code)
    config = EnvConfig(use=f"{tmp_path}/my_env.py:MyEnvironment", args={"hints": 2})
    forks = Forks(spec_of(config))
    env: Any = EnvironmentProcess(forks, config)
    assert (await env.reset(problem("2 + 2", answer="4"), 0)).messages == ()
    step = await env.step(said("5"))
    assert (step.messages, step.done) == (({"role": "user", "content": "Not quite, try again."},), False)
    step = await env.step(said(" 4"))
    assert (step.reward, step.done, await env.score()) == (1.0, True, {})
    await env.close()
    forks.close()
