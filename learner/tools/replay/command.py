"""What the command line of gleaner replay means."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster import threads
from learner.config import RunConfig
from learner.config.load import absolute
from learner.driver.metrics import RewardsFailing
from learner.tools.replay import shown
from learner.tools.replay.bisect import bisect
from learner.tools.replay.changes import (
    Changes,
    asked_again,
    changes_of,
    check_possible,
    computes_elsewhere,
    decides,
    own_loss,
    rescored,
)
from learner.tools.replay.folder import place_for
from learner.tools.replay.recorded import Recorded, ReplayError, Step, load_config, read_recorded
from learner.tools.replay.same import compared
from learner.tools.replay.scoring import try_on
from learner.tools.replay.taking import Learner
from learner.tools.replay.what_if import Question, answer, bound_of
from learner.tools.report.run_folder import REPLAY
from learner.tools.reported import reported


@dataclass(frozen=True, slots=True)
class Asked:
    """What learner.tools.commands.replay takes, under its names."""

    run: Path
    overrides: list[str] | None
    start: int
    to: int | None
    output: Path | None
    bisect: str | None
    as_json: bool


def run(asked: Asked) -> int:
    """Exit code: 0; 1 if something differs, or failed on the way; 2 if something given is wrong."""
    codes: list[int] = []
    return reported(lambda: codes.append(_replay(asked)), wrong=(ReplayError,), failed=(RewardsFailing,)) or codes[0]


def _replay(asked: Asked) -> int:
    if asked.bisect is not None:
        if asked.overrides or asked.output is not None or asked.start or asked.to is not None:
            raise ReplayError(
                "--bisect: looks at what the run recorded and takes no step; leave out other settings, --from, --to "
                "and --output"
            )
        return bisect(asked.run, asked.bisect, as_json=asked.as_json)
    recorded = read_recorded(asked.run)
    config = absolute(load_config(asked.run, asked.overrides or ()))
    changes = asked_again(changes_of(absolute(recorded.config), config), asked.overrides or (), recorded.config)
    check_possible(changes, recorded.config, config, asked.start)
    steps, state = recorded.chosen(asked.start, asked.to), recorded.checkpoint(asked.start)
    recorded.check_inputs(own_loss=not own_loss(changes))
    threads.sleeping(config.cluster.cpus.learner)  # as many as in a run's learner
    if decides(changes) or asked.output is not None:
        return _what_if(asked, recorded, config, changes, steps, state)
    learner = Learner(config, state, as_recorded=not computes_elsewhere(changes))
    return asyncio.run(_again(asked, recorded, steps, learner))


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


def _what_if(
    asked: Asked, recorded: Recorded, config: RunConfig, changes: Changes, steps: Sequence[Step], state: Path | None
) -> int:
    """Other settings, into a folder of their own."""
    if scores := rescored(changes):
        try_on(config, steps[0].groups(config.learner.groups_per_step)[0][0])
    place = place_for(asked.run, asked.output)
    named = load_config(asked.run, [*(asked.overrides or ()), f"name={place.name}", f"output_dir={place.parent}"])
    question = Question(asked.run, absolute(named), changes, steps, state, place)
    far = asyncio.run(answer(question, lambda taken: None if asked.as_json else shown.other(taken, rescored=scores)))
    bound = bound_of(config)
    if asked.as_json:
        facts = json.loads((place / REPLAY).read_text())
        print(json.dumps({"folder": str(place)} | facts | {"bound": bound, "far_from_step": far}, indent=2))
    else:
        print(shown.far(far, bound))
        print(f"folder   {place}\ncompare  gleaner report {place} --against {asked.run}")
        print(f"score    gleaner eval --run {place}")
    return 0
