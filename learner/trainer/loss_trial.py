"""A user's own surrogate objective, tried on a few tokens before anything expensive starts.

A process of its own (learner.driver.input_checks): a configuration as JSON on stdin, a list of sentences as the last
line on stdout.
"""

import json
import sys

from cluster.errors import WrongInput
from learner.algo.loss import try_surrogate
from learner.algo.surrogates import LossConfig
from learner.config import RunConfig


def wrong_with(loss: LossConfig) -> list[str]:
    """What is wrong with it, in one sentence; empty if nothing is."""
    try:
        try_surrogate(loss)
    except WrongInput as error:
        return [str(error)]
    return []


if __name__ == "__main__":
    print(json.dumps(wrong_with(RunConfig.model_validate_json(sys.stdin.read()).learner.loss)))
