"""plan(): what a run with these settings takes on a card, as data."""

import numbers
import os
from collections.abc import Mapping
from typing import Any

from learner.api.errors import InputError

STAND_INS = {"data": {"path": "rg:chain_sum"}, "rewards": [{"use": "number"}]}  # for what takes no memory
SLICES = {"generator": 0.5, "learner": 0.5}


def plan(model: str | os.PathLike[str] | Mapping[str, Any], gpu: str | float, **settings: Any) -> list[dict[str, Any]]:
    """What the memory planner says of a model on a card: a row for what it chooses, and one for each way of training
    with what that needs at least.

    Args:
        model: a name of the planner's table or a folder with a config.json, or the section `model` of a configuration.
        gpu: a card or its size: "rtx4090", 24 (GB as sold), "24GiB". One without bfloat16 computes in float16.
        settings: keys of the configuration as in `train`; those that take no memory may be left out. Without
            `cluster.gpus` generator and learner are two slices of the card.

    Returns:
        Rows with the keys `model`, `params`, `method` ("chosen" in the first), `fits`, and the numbers of
        `gleaner plan --json`, in bytes. A choice that does not fit has `needs` and `advice` in their place.

    Raises:
        InputError: the model, the card or a setting is wrong.
    """
    from cluster.memory.search import least
    from cluster.memory.shape import shape_of
    from learner.api.inputs import Inputs
    from learner.api.settings import checked, tree_of
    from learner.driver import memory
    from learner.tools.plan import able, asked_for, dtype_of, methods, no_bfloat16, to_dict

    try:
        card = memory.card_size(f"{float(gpu):g}" if isinstance(gpu, numbers.Real) else str(gpu))
    except ValueError as error:
        raise InputError(f"gpu: {error}") from None
    old = no_bfloat16(card)
    config = checked(_with_defaults(tree_of(None, model, None, {}, {**STAND_INS, **settings}, Inputs()), old=old))
    try:
        [shape] = able([shape_of(config.model.path)], card)
    except (ValueError, OSError) as error:
        raise InputError(str(error).removeprefix("--")) from None
    found = memory.planned(config, shape, card.bytes)
    work = memory.workload(config, config.rollout.sequences)
    wish = memory.wish_of(config, memory.layouts(config))
    rows = {"chosen": to_dict(found[0] if isinstance(found, tuple) else found)}
    for name, method in methods(ppo=config.learner.algorithm == "ppo", old=old).items():
        own = asked_for(wish, method, dtype_of(method, wish.dtype, old=old))
        if (own.base, own.dtype) != ("nf4", "float32"):  # 4 bits go with types of 16
            rows[name] = to_dict(least(shape, card.bytes, work, own))
    return [{"model": shape.name, "params": shape.params, "method": name, **row} for name, row in rows.items()]


def _with_defaults(tree: dict[str, Any], *, old: bool) -> dict[str, Any]:
    """On one card, which if it is old has no bfloat16."""
    if isinstance(cluster := tree.setdefault("cluster", {}), dict):
        cluster.setdefault("gpus", SLICES)
    if old:
        learner = tree.get("learner")
        whole = isinstance(learner, dict) and learner.get("mode") == "full"
        tree["model"].setdefault("dtype", "float32" if whole else "float16")  # float16 trains no whole model
    return tree
