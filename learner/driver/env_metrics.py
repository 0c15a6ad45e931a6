"""Numbers of trajectories: turns, calls, and what environments took and said of themselves. Pure."""

from collections import Counter

import numpy as np
import pyarrow as pa

from rollout.env.trajectory import FAULTS
from rollout.schema import lasts, masks_of, whole


def env_metrics(rows: pa.Table) -> dict[str, float]:
    """`env/...`: means over trajectories; empty where all are single completions.

    env/errors: share that a fault of the environment ended, and has no reward. env/outcome_<name>: share that ended so.
    env/seconds: of the environment, in all turns together. env/observation_tokens: tokens that the policy did not
    sample, of all rows of a trajectory. Numbers that an environment gave itself, by its names, are sums over turns.
    """
    if rows.column("messages").null_count == len(rows):
        return {}
    ends, last = whole(rows), lasts(rows)
    turns = rows.column("turns").to_pylist()
    every, count = [turn for row in turns for turn in row], len(ends)
    played = np.add.reduceat([len(row) for row in turns], np.flatnonzero(np.append(True, last[:-1])))
    outcomes = Counter(ends.column("finish_reason").to_pylist())
    observed = sum(np.count_nonzero(~mask) for mask in masks_of(rows))
    metrics = {
        "env/turns": len(every) / count,
        "env/turns_max": float(max(played)),
        "env/calls": sum(turn["calls"] for turn in every) / count,
        "env/malformed": sum(turn["malformed"] for turn in every) / count,
        "env/seconds": sum(turn["env_ms"] for turn in every) / count / 1e3,
        "env/observation_tokens": observed / count,
        "env/errors": sum(outcomes[name] for name in FAULTS) / count,
    }
    metrics |= {f"env/outcome_{name}": number / count for name, number in outcomes.items()}
    own: Counter[str] = Counter()
    for row in ends.column("env_metrics").to_pylist():
        own.update({number["name"]: number["value"] for number in row})
    return metrics | {f"env/{name}": total / count for name, total in own.items()}
