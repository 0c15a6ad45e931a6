"""A function that is run once on each of some nodes of the cluster, in a process of its own there."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from cluster.deadline import within
from cluster.ray_actor import in_one_line
from cluster.ray_reservation import Node

A = TypeVar("A")
T = TypeVar("T")


class NodeFailed(str):
    """Why a node gave no answer, on one line."""


async def on_each(
    nodes: Iterable[Node], work: Callable[[A], T], argument: A, deadline_s: float
) -> dict[Node, T | NodeFailed]:
    """What `work(argument)` returns on each node; all nodes work at the same time. It takes no core of those that are
    reserved."""
    wanted = sorted(set(nodes))
    answers = await asyncio.gather(*(_on(node, work, argument, deadline_s) for node in wanted))
    return dict(zip(wanted, answers, strict=True))


async def _on(node: Node, work: Callable[[A], T], argument: A, deadline_s: float) -> T | NodeFailed:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(work)
    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    ref = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(argument)
    try:
        async with within(deadline_s):
            found: T = await ref
    except TimeoutError:
        ray.cancel(ref, force=True)
        return NodeFailed(f"no answer within {deadline_s:g} s")
    except ray.exceptions.RayError as error:
        return NodeFailed(in_one_line(getattr(error, "cause", None) or error))
    return found
