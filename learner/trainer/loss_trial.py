"""Tries a user's own surrogate objective on a few tokens before anything expensive starts. learner.driver.input_checks
runs this module as a process, which reads a configuration as JSON on stdin and prints a list of sentences as its last
line.
"""

import json
import sys

from cluster.errors import WrongInput
from learner.algo.loss import try_surrogate
from learner.algo.surrogates import LossConfig
from learner.config import RunConfig


def wrong_with(loss: LossConfig) -> list[str]:
    """Returns a sentence on what is wrong with the surrogate objective; an empty list if nothing is."""
    try:
        try_surrogate(loss)
    except WrongInput as error:
        return [str(error)]
    return []


if __name__ == "__main__":
    print(json.dumps(wrong_with(RunConfig.model_validate_json(sys.stdin.read()).learner.loss)))
