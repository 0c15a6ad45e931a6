"""A policy whose node is killed before the generators have it: `make test-nodes`."""

import os

import pytest

from benchmarks.engine.push import Receiver, Sender
from benchmarks.system.lost_node import EmulatedNodes
from cluster.actor import ActorDied, ValueLost
from cluster.placement import Role
from cluster.ray_cluster import connect

pytestmark = pytest.mark.skipif("NODES" not in os.environ, reason="a minute; make test-nodes runs it")
SIZE = 10_000_000


async def test_what_is_gone_with_its_node_is_neither_the_receivers_fault_nor_waited_for() -> None:
    with EmulatedNodes() as nodes:
        for name in ("left", "right"):
            nodes.start(name)
            nodes.until_joined(name)
        session = connect(nodes.address, min_cpus=2)
        try:
            # By these names it is said on which node a process is; generators are spread over the nodes.
            roles = [Role("generator-0", 1, 0), Role("generator-1", 1, 0)]
            await session.reserve(roles, 60)
            sender = session.spawn(roles[0], Sender, [SIZE], {})
            receiver = session.spawn(roles[1], Receiver, [], {})
            for one in (sender, receiver):
                await one.ready(60)
            policy, _ = await sender.call(Sender.outgoing, 60)
            nodes.kill(nodes.node_of("generator-0", ["left", "right"]))
            with pytest.raises(ValueLost, match="generator-1: reached: what it was sent is gone with the node"):
                await receiver.call(Receiver.reached, 60, policy.argument())
            with pytest.raises(ActorDied, match="generator-0"):
                await sender.call(Sender.outgoing, 60)
        finally:
            await session.close()
