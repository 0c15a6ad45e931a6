"""The process in which learner.api.calls runs a training or an evaluation. PARENT is the caller's process id:

    python -m learner.api.child PARENT train --config /dev/stdin
    python -m learner.api.child PARENT sweep FILE KEY=VALUE,...
    python -m learner.api.child PARENT evaluate FOLDER

Standard input holds the configuration of the run, or for an evaluation a JSON object with the tree of a configuration
and the arguments of learner.tools.evaluation.evaluate, whose result is written to FOLDER.
"""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from cluster.child import end_with_parent
from learner.driver import process
from learner.main import answer, command_of, leave, main

RESULT, ROWS = "result.json", "rows.parquet"


def tie_to(parent: int) -> None:
    """Has this process get SIGTERM when its parent ends: a run then finishes its step and writes a checkpoint.

    PR_SET_PDEATHSIG sends the signal when the thread that started this process ends, so that thread has to wait for
    this process.
    """
    process.keep_streams()
    for number in (signal.SIGINT, signal.SIGTERM):  # they may be ignored in processes that notebooks start
        signal.signal(number, signal.default_int_handler)
    process.end_as_command()
    if not end_with_parent(parent, signal.SIGTERM):  # the parent has ended already
        leave(1)


def evaluate(folder: Path) -> int:
    """Runs the evaluation that standard input describes. Returns the exit code, as learner.tools.reported does."""
    process.ours_first()
    from learner.tools.reported import reported

    return reported(lambda: _evaluate(folder))


def _evaluate(folder: Path) -> None:
    import pyarrow.parquet as pq

    from learner.config import load
    from learner.tools import evaluation
    from rollout.data import model_files

    given = json.load(sys.stdin)
    config = load.validated(given.pop("config"))
    model_files.settle([config.model.path, config.data.path, config.data.eval.path])
    found = evaluation.evaluate(config, **given)
    pq.write_table(found.rows, folder / ROWS)
    (folder / RESULT).write_text(json.dumps(found.to_dict()))


def sweep(words: list[str]) -> int:
    """Runs the sweep that the words of the command line describe. Returns the exit code."""
    process.ours_first()
    from learner.tools.sweep import SweepRequest, run

    return answer(command_of(SweepRequest, run, "sweep"), words, "sweep")


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    WORK: dict[str, Callable[[list[str]], int]] = {
        "train": main,
        "sweep": sweep,
        "evaluate": lambda words: evaluate(Path(words[0])),
    }
    leave(WORK[sys.argv[2]](sys.argv[3:]))
