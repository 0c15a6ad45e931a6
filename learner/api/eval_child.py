"""The process of an evaluation that was started from Python: `python -m learner.api.eval_child PARENT FOLDER`.

A JSON object comes in by standard input: the tree of a configuration, and the arguments of learner.tools.evaluation.
The result goes to the folder.
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq

from learner.api.child import tie_to
from learner.config import load
from learner.driver.process import ours_first
from learner.main import leave
from learner.tools.evaluation import evaluate
from learner.tools.reported import reported
from rollout.data import hub

RESULT, ROWS = "result.json", "rows.parquet"


def work(folder: Path) -> None:
    """Evaluates. Raises what is wrong."""
    given = json.load(sys.stdin)
    config = load.validated(given.pop("config"))
    hub.settle([config.model.path, config.data.path, config.data.eval.path])
    found = evaluate(config, **given)
    pq.write_table(found.rows, folder / ROWS)
    (folder / RESULT).write_text(json.dumps(found.to_dict()))


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    ours_first()
    leave(reported(lambda: work(Path(sys.argv[2]))))
