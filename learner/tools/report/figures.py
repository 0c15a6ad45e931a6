"""Which curves a report draws, and from which metrics (docs/metrics.md says what each means)."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """One chart: its title, what a reader should know, its metrics (a * at the end: all that begin so), its scale."""

    title: str
    hint: str
    metrics: tuple[str, ...]
    log: bool = False


NO_SCORE = ("failed", "ms", "std", "unscored", "zero_variance_groups", "zeroed")  # behind reward/ or eval/
FIGURES = (
    Figure("Held-out", "one greedy completion a problem, on problems that are not trained on", ("eval/*",)),
    Figure("Reward", "weighted sum, and each function's own number", ("reward/mean", "reward/*")),
    Figure("Logged by reward functions", "log_metric, mean over groups", ("log/*",)),
    Figure("Completion length", "tokens", ("rollout/completion_length", "rollout/completion_length_max")),
    Figure("Cut at the limit", "share of completions", ("rollout/truncated",)),
    Figure("Entropy", "nats a token; learning stops where it falls to 0", ("policy/entropy",)),
    Figure("KL to the reference", "nats a token", ("policy/kl",)),
    Figure(
        "Mismatch of learner and sampler",
        "largest difference of a logprob, in nats; float32 stays below 1e-3",
        ("policy/mismatch_max", "policy/mismatch_max_current", "policy/mismatch_k3"),
        log=True,
    ),
    Figure("Staleness", "policy versions", ("policy/staleness_mean", "policy/staleness_max")),
    Figure(
        "Time of a step",
        "seconds; generating and training may overlap",
        ("time/step", "time/generate", "time/train", "time/wait", "time/push", "time/evaluate", "time/checkpoint"),
    ),
    Figure("Gradient norm", "before clipping", ("loss/grad_norm", "value/grad_norm")),
    Figure("Clipped or masked tokens", "share", ("policy/clip_fraction", "policy/masked_fraction")),
    Figure(
        "Groups without a signal",
        "all completions of it scored alike",
        ("reward/zero_variance_groups",),
    ),
    Figure("Failed rewards", "share of completions", ("reward/failed",)),
    Figure(
        "Failed completions by kind",
        "how many; what failed stands above the completions, in words",
        tuple(f"reward/status_{kind}" for kind in ("error", "timeout", "nan", "environment")),
    ),
    Figure("Turns and calls", "of a trajectory", ("env/turns", "env/calls", "env/malformed", "env/errors")),
    Figure("Value function", "PPO", ("value/explained_variance", "value/loss")),
)


def figures(names: Iterable[str]) -> list[dict[str, Any]]:
    """Those that these metrics are enough for, with the metrics that are there."""
    known = sorted(names)
    drawn = [(figure, _found(figure.metrics, known)) for figure in FIGURES]
    return [{"title": f.title, "hint": f.hint, "metrics": metrics, "log": f.log} for f, metrics in drawn if metrics]


def _found(wanted: tuple[str, ...], known: list[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in wanted:
        start = name.removesuffix("*")
        same = [one for one in known if one == name or (start != name and one.startswith(start) and is_score(one))]
        played = {one for one in same if f"env/{one.removeprefix(start)}" in known}  # turns, calls: of the environment
        found |= dict.fromkeys(one for one in same if one not in played)
    return list(found)


def is_score(name: str) -> bool:
    """Whether a metric under reward/ or eval/ is a number that a function gave."""
    own = name.partition("/")[2]
    return own not in NO_SCORE and not own.startswith("status_")
