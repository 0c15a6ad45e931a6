"""PolicyFeed: supplies one worker with policies, each delivered, then proven.

    follow   waits for a newer policy -> delivers it, acknowledged by the digest of what was loaded -> proves
             that the worker generates with it: by its engine's tensors and by a probe

The probe is one request more among those of the lanes, so generation goes on meanwhile; but no group enters the
Buffer before the policy that it was sampled from is proven (proof_of), hence nothing is learned from another.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from cluster.policy_slot import PolicySlot
from cluster.telemetry import Timeline
from rollout.evidence import Evidence
from rollout.service import RolloutService
from rollout.supervised_worker import SupervisedWorker, Supply
from rollout.weight_sync import Answer, Push, Receipt, check_digest

log = logging.getLogger("rollout")


class PolicyFeed:
    """The end of PolicySlot at one worker."""

    def __init__(self, worker: SupervisedWorker, policy_slot: PolicySlot[Push], timeline: Timeline) -> None:
        self.worker, self.policy_slot, self.timeline = worker, policy_slot, timeline
        self.receipt: Receipt | None = None  # of the newest policy that was delivered
        self.answer: Answer | None = None  # to the newest probe
        self.evidence = Evidence()
        self._held = self._proven = -1  # versions of policies
        self.losses = 0  # processes of the worker that were lost
        self._proof = asyncio.Condition()
        worker.supply = Supply(self._leave, self._bring_newest, partial(policy_slot.others, worker.name))

    async def first(self) -> Push:
        """Waits for the first policy and delivers it."""
        push = await self.policy_slot.wait_newer(-1)
        await self._bring(self.deliver, push)
        return push

    async def follow(self, push: Push) -> None:
        """Proves the policy that was delivered, then waits for the next, for ever."""
        while True:
            if self._held >= push.policy_id.version:  # else it was overwritten before it was read
                await self._bring(self.prove, push)
            push = await self.policy_slot.wait_newer(push.policy_id.version)
            await self._bring(self.deliver, push)

    async def _bring(self, how: Callable[[Push], Awaitable[object]], push: Push) -> None:
        async def ask() -> None:
            if self._proven < push.policy_id.version:  # else a fresh process got it, or a newer one
                await how(push)

        await self.worker.attempt(ask)

    async def _leave(self) -> None:
        """What the lost process held and had proven says nothing of the next one."""
        if self.policy_slot.version >= 0:  # before the first policy nobody is waited for, nor comes back with it
            await self.policy_slot.leave(self.worker.name)
        async with self._proof:
            self._held = self._proven = -1
            self.losses += 1
            self._proof.notify_all()

    async def _bring_newest(self) -> None:
        """A policy that was published meanwhile did not wait for this worker, so the next one is brought, too."""
        if self.policy_slot.version < 0:
            return
        newest = self.policy_slot.get()
        while not await self.deliver(newest) or newest.policy_id.version < self.policy_slot.version:
            newest = await self.policy_slot.wait_newer(newest.policy_id.version)
        self.policy_slot.back(self.worker.name)
        await self.prove(newest)

    async def deliver(self, push: Push) -> bool:
        """Sends a policy, and acknowledges it when the worker has loaded the very bytes that were sent. False if the
        learner has written newer ones in their place, and has published the policy after this one."""
        name, version = self.worker.name, push.policy_id.version
        with self.timeline.span("push", name, version=version):
            receipt = await self.worker.actor.call(
                RolloutService.take_policy, self.worker.deadlines.push, push.policy.argument()
            )
            if receipt is None:
                return False
            check_digest(push.policy_id, name, receipt.digest)
        self.receipt, self._held = receipt, version
        await self.policy_slot.acknowledge(name, version)
        return True

    async def prove(self, push: Push) -> None:
        """Asks the worker which tensors it computes with and what they say of the probe; DeliveryError if that is not
        the policy that was sent."""
        name, version = self.worker.name, push.policy_id.version
        with self.timeline.span("prove", name, concurrent=True, version=version):
            answer = await self.worker.actor.call(RolloutService.probe, self.worker.deadlines.push, push.probe_ids)
            await push.verify(name, answer, self.evidence)
        if answer.held.unread and self.answer is None:
            log.warning(
                "%s: %d tensors cannot be read back from its engine, first %s: only logprobs prove that they arrive",
                name,
                len(answer.held.unread),
                answer.held.unread[0],
            )
        self.answer = answer
        async with self._proof:
            self._proven = max(self._proven, version)
            self._proof.notify_all()

    async def proof_of(self, version: int, losses: int) -> bool:
        """Waits until that version or a newer one is proven of the process that came after so many losses; False if it
        is lost first."""
        async with self._proof:
            await self._proof.wait_for(lambda: self._proven >= version or self.losses > losses)
            return self.losses == losses

    async def idle(self) -> None:
        """Waits until no probe is running."""
        await self.proof_of(self._held, self.losses)
