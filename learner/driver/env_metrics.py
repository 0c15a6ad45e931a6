"""Numbers of trajectories: turns, calls, and what environments took and said of themselves. Pure."""

from collections import Counter

import numpy as np
import pyarrow as pa

from rollout.env.trajectory import FAULTS
from rollout.schema import masks_of


def env_metrics(rows: pa.Table) -> dict[str, float]:
    """`env/...`: means over trajectories; empty where all are single completions.

    env/errors: share that a fault of the environment ended, and has no reward. env/outcome_<name>: share that ended so.
    env/seconds: of the environment, in all turns together. env/observation_tokens: tokens that the policy did not
    sample. Numbers that an environment gave itself, by its names, are sums over turns.
    """
    if rows.column("messages").null_count == len(rows):
        return {}
    turns = rows.column("turns").to_pylist()
    outcomes = Counter(rows.column("finish_reason").to_pylist())
    metrics = {
        "env/turns": float(np.mean([len(row) for row in turns])),
        "env/turns_max": float(max(len(row) for row in turns)),
        "env/calls": float(np.mean([sum(turn["calls"] for turn in row) for row in turns])),
        "env/malformed": float(np.mean([sum(turn["malformed"] for turn in row) for row in turns])),
        "env/seconds": float(np.mean([sum(turn["env_ms"] for turn in row) for row in turns])) / 1e3,
        "env/observation_tokens": float(np.mean([np.count_nonzero(~mask) for mask in masks_of(rows)])),
        "env/errors": sum(outcomes[name] for name in FAULTS) / len(rows),
    }
    metrics |= {f"env/outcome_{name}": count / len(rows) for name, count in outcomes.items()}
    own: Counter[str] = Counter()
    for row in rows.column("env_metrics").to_pylist():
        own.update({number["name"]: number["value"] for number in row})
    return metrics | {f"env/{name}": total / len(rows) for name, total in own.items()}
