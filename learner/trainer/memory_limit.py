"""The learner's memory within a step: a token budget that is lowered when memory runs out (TokenBudget), and a limit on
the learner's bytes (MemoryLimit).
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cluster.memory.plan import gib
from cluster.telemetry import peak_resident
from learner.batch.micro_batch import Rows, shares
from learner.trainer.optimizer import Alone, Peers
from rollout.schema import Teaching

log = logging.getLogger("learner")


class Pass(Protocol):
    """What TokenBudget needs of a micro-batch; see learner.batch.micro_batch.MicroBatch for the two members."""

    @property
    def ids(self) -> Tensor: ...

    def idle_copy(self) -> Any: ...


T = TypeVar("T")
B = TypeVar("B", bound=Pass)

WARN_AT = 0.9  # share of the limit from which a warning is logged


class OutOfMemory(RuntimeError):
    """The learner does not fit; the message names tokens and bytes and what to change. learner.tools.bradley_terry says
    it by its own options."""


class TokenBudget:
    """The most tokens of a micro-batch. Whenever memory runs out on any rank, it is lowered for as long as the process
    lives: to half of the plan's largest micro-batch, but not below the longest completion with its prompt.

    Attributes:
        tokens: the present budget.
        retries: how often the budget was lowered.
        peers: the ranks that share the work.
    """

    def __init__(self, tokens: int, peers: Peers | None = None) -> None:
        self.tokens, self.retries = tokens, 0
        self.peers = peers or Alone()

    def run(self, plan: Callable[[int], Sequence[B]], work: Callable[[Sequence[B]], list[T]]) -> list[T]:
        """Runs `work` on the micro-batches plan(token budget), and returns its results in their order. Each rank works
        on its share and gets the results of all ranks.

        When memory runs out, the budget is lowered and all micro-batches are computed again. They start from the
        beginning since the backward pass that failed has added only some of its gradients. Plans begin with their
        largest micro-batch, so a budget that is too large fails before much work is lost.

        Raises:
            OutOfMemory: a micro-batch of one completion does not fit; or memory ran out while the base is sharded: the
                other ranks then wait within the same pass, and cannot be told to start again.
        """
        while True:
            batches = plan(self.tokens)
            places = shares([batch.ids.numel() for batch in batches], self.peers.count)
            own = places[self.peers.rank]
            done: list[T] = []
            reason = ""
            try:
                done = work([*(batches[place] for place in own), *self._idle(batches, places)])[: len(own)]
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            if reason and self.peers.sharded:
                raise OutOfMemory(
                    f"learner.token_budget: memory ran out in a micro-batch of at most {_largest(batches)} tokens "
                    f"({reason}), and with memory.layout=sharded no step is taken again; set it below {self.tokens}, "
                    "or learner.checkpointing=full"
                )
            # This is done after the except block, when the exception's frames, which hold the failed graph, are freed.
            reasons, results = zip(*self.peers.gather((reason, done)), strict=True)
            if not any(reasons):
                of_place = {
                    place: result
                    for own, given in zip(places, results, strict=True)
                    for place, result in zip(own, given, strict=True)
                }
                return [of_place[place] for place in range(len(batches))]
            torch.cuda.empty_cache()  # does nothing without CUDA
            self._lower(largest=_largest(batches), alone=_largest(plan(1)), reason=next(filter(None, reasons)))

    def _idle(self, batches: Sequence[B], places: Sequence[Sequence[int]]) -> list[B]:
        """Returns idle copies that this rank computes after its own micro-batches, so that all ranks have the same
        number of passes, which a sharded base requires. They are copies of the smallest micro-batch, the plan's
        last."""
        if not self.peers.sharded:
            return []
        missing = max(map(len, places)) - len(places[self.peers.rank])
        return [batches[-1].idle_copy() for _ in range(missing)]

    def _lower(self, *, largest: int, alone: int, reason: str) -> None:
        if largest <= alone:
            raise OutOfMemory(
                f"learner.token_budget: one completion with its prompt, {alone} tokens, does not fit in memory (budget "
                f"{self.tokens}; {reason}). Lower rollout.max_prompt_length, max_completion_length or "
                "data.teacher.max_prompt_length, set learner.checkpointing=full or model.base=nf4, or take a smaller "
                "model"
            )
        before, self.tokens = self.tokens, max(min(largest, self.tokens) // 2, alone)
        self.retries += 1
        log.warning(
            "out of memory with micro-batches of up to %d tokens: they are computed again, and all later ones, with a "
            "token budget of %d instead of %d (%s)",
            largest,
            self.tokens,
            before,
            reason,
        )


def _largest(batches: Sequence[Pass]) -> int:
    return max(batch.ids.numel() for batch in batches)


def longest_rows(prompt_length: int, completion_length: int, count: int, top: int | None = None) -> Rows:
    """Returns `count` completions of one prompt, with the given lengths in tokens; all token ids are 0. top: as in
    learner.batch.micro_batch.read."""
    tokens = np.zeros(count * completion_length, np.int32)
    likeliest = np.zeros((len(tokens), top or 0), np.int32)
    said = Teaching(tokens.astype(np.float32), likeliest, likeliest.astype(np.float32))
    return Rows(
        rewards=[np.zeros(count)],
        prompts=[np.zeros(prompt_length, np.int32)] * count,
        completions=tokens,
        behavior=tokens.astype(np.float32),
        versions=tokens,
        lengths=np.full(count, completion_length, np.int64),
        truncated=np.zeros(count, np.bool_),
        teaching=None if top is None else said,
    )


def device_of(name: str) -> torch.device:
    """Returns the torch device; a CUDA device gets an index, without which no limit can be set for its allocator."""
    device = torch.device(name)
    unnumbered = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if unnumbered else device


class MemoryLimit:
    """The limit on the bytes that the learner may hold.

    On CUDA the limit is the cap of torch's allocator, which raises torch.OutOfMemoryError beyond it. It counts weights,
    adapters, optimizer states and activations, but not the CUDA context (about 0.5 GB). On a CPU no allocation can be
    refused in advance, so `check` compares the limit with the growth of the process's highest resident set since this
    object was made. If a GPU has less memory free than the limit, since the generators took more than planned, the
    limit is lowered to that.

    limit: bytes; None: there is no limit.
    mapped: bytes of the mapped base of the generator (memory.layout: shared), which do not count as the learner's.
        torch's allocator does not count them; a CPU's resident set does, so they are subtracted from it.

    Raises:
        ValueError: the limit is more than the device has.
    """

    def __init__(self, limit: int | None, device: torch.device, mapped: int = 0) -> None:
        self._limit, self._device, self._mapped = limit, device, mapped
        self._warned = False
        self._start = peak_resident() - mapped  # the mapped base is resident by now: MappedBase has read all of it
        if limit is not None and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            if limit > total:
                raise ValueError(
                    f"the learner's memory: must be at most the {total / 2**20:.0f} MiB of {device}, got "
                    f"{limit / 2**20:.0f} MiB"
                )
            self._limit = min(limit, torch.cuda.mem_get_info(device)[0])
            if self._limit < limit:
                log.warning(
                    "the learner's memory: only %s of the planned %s are free on %s; set memory.device or "
                    "rollout.kv_cache lower",
                    gib(self._limit),
                    gib(limit),
                    device,
                )
            torch.cuda.set_per_process_memory_fraction(self._limit / total, device)

    def start_step(self) -> None:
        """Begins a new peak on CUDA. On a CPU only the peak since the process's start is known."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Returns bytes: on CUDA the allocator's peak in this step, on a CPU the process's highest resident set so far
        without the mapped base."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_resident() - self._mapped

    def check(self) -> None:
        """Compares the peak with the limit; call it after a step. It warns once from 90 % of the limit on, and raises
        OutOfMemory beyond the limit."""
        if self._limit is None:
            return
        used = self.peak() - (0 if self._device.type == "cuda" else self._start)
        told = f"the learner's peak of {used / 2**20:.0f} MiB, its limit is {self._limit / 2**20:.0f} MiB"
        if used > self._limit:
            raise OutOfMemory(f"the learner's memory: {told}; lower learner.token_budget, or raise memory.device")
        if used > WARN_AT * self._limit and not self._warned:
            self._warned = True
            log.warning("the learner's memory: %s (%.0f %%)", told, 100 * used / self._limit)
