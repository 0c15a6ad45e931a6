"""What the command line of gleaner replay means."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

from learner.driver import failure
from learner.driver.config_io import ConfigError
from learner.tools.replay import shown
from learner.tools.replay.recorded import Recorded, ReplayError, Step, read_recorded
from learner.tools.replay.same import compared
from learner.tools.replay.taking import Learner


@dataclass(frozen=True, slots=True)
class Asked:
    """What learner.tools.commands.replay takes, under its names."""

    run: Path
    start: int
    to: int | None
    as_json: bool


def run(asked: Asked) -> int:
    """Exit code: 0; 1 if something differs, or failed on the way; 2 if something given is wrong."""
    try:
        return asyncio.run(_replay(asked))
    except (ReplayError, ConfigError) as error:
        print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        return 2
    except Exception as error:
        text, code = failure.tell(error)
        print(text, file=sys.stderr)
        return code


async def _replay(asked: Asked) -> int:
    recorded = read_recorded(asked.run)
    steps, state = recorded.chosen(asked.start, asked.to), recorded.checkpoint(asked.start)
    recorded.check_inputs(own_loss=True)
    # Before torch loads, as in the learner's process of a run.
    os.environ |= {"OMP_NUM_THREADS": str(recorded.config.cluster.cpus.learner), "TQDM_DISABLE": "1"}
    return await _again(asked, recorded, steps, Learner(recorded.config, state))


async def _again(asked: Asked, recorded: Recorded, steps: Sequence[Step], learner: Learner) -> int:
    """The same settings, up to the first difference."""
    started = time.perf_counter()
    async with aclosing(compared(learner, recorded, steps)) as found:
        async for one in found:
            if not asked.as_json:
                shown.step(one)
            if not one.same:
                break
    seconds = time.perf_counter() - started
    if asked.as_json:
        summary = {"from": asked.start, "to": steps[-1].number, "same": one.same, "seconds": round(seconds, 1)}
        print(json.dumps(summary | ({} if one.same else {"first_difference": asdict(one)}), indent=2))
    elif one.same:
        shown.same(recorded, steps, seconds)
    else:
        shown.difference(recorded, one)
    return 0 if one.same else 1
