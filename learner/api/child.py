"""The process of a run or an evaluation that was started from Python:

    python -m learner.api.child PARENT train --config /dev/stdin
    python -m learner.api.child PARENT evaluate FOLDER

By standard input comes the configuration of a run, or for an evaluation a JSON object: the tree of a configuration, and
the arguments of learner.tools.evaluation, whose result goes to the folder.
"""

import json
import signal
import sys
from pathlib import Path

from cluster.child import end_with_parent
from learner.driver import process
from learner.main import leave, main

RESULT, ROWS = "result.json", "rows.parquet"


def tie_to(parent: int) -> None:
    """This process ends with its parent, which is one more request to end: a run finishes its step first, and writes a
    checkpoint.

    As PR_SET_PDEATHSIG goes by the thread that started it, that thread has to wait for it. The kernel tells of the end
    of each thread of the parent.
    """
    process.keep_streams()
    for number in (signal.SIGINT, signal.SIGTERM):  # what starts notebooks may have them ignored
        signal.signal(number, signal.default_int_handler)
    process.end_as_command()
    if not end_with_parent(parent, signal.SIGTERM):  # it has ended already
        leave(1)


def evaluate(folder: Path) -> int:
    """Exit code: as of learner.tools.reported."""
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


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    leave(main(sys.argv[3:]) if sys.argv[2] == "train" else evaluate(Path(sys.argv[3])))
