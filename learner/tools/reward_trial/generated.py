"""Completions of the configured model, to be tried like the others."""

from collections.abc import Callable, Sequence

from learner.config import RunConfig
from learner.tools.evaluation import evaluate
from learner.tools.reward_trial.cases import Case, TrialError
from rewards.config import RewardConfig

# Some reward function has to be there, and those that are tried may fail: they are asked afterwards, as of the others.
ANY = RewardConfig(use="length", args={"target": 10**9})


def generate(config: RunConfig, cases: Sequence[Case], count: int, note: Callable[[str], None]) -> None:
    """Adds to each case `count` completions, the first of them greedy; none to one whose prompt is too long and left
    out. Starts a run's generators. Raises what learner.tools.evaluation.evaluate does, TrialError."""
    if config.env.use is not None:
        raise TrialError(
            f"--generate: the run's completions are trajectories of env.use: {config.env.use}; leave it out"
        )
    held_out = config.data.eval.model_copy(update={"reward": None})
    data = config.data.model_copy(update={"size": len(cases), "eval": held_out})
    alone = config.model_copy(update={"data": data, "rewards": [ANY]})
    rows = evaluate(alone, held_out=False, samples=count - 1, note=note).rows
    texts: dict[str, list[str]] = {}
    for problem, text in zip(rows["problem_id"].to_pylist(), rows["completion"].to_pylist(), strict=True):
        texts.setdefault(problem, []).append(text)
    for case in cases:
        case.add("generated", texts.get(case.id, []))
