"""How long a step of a run takes: seconds of generation, training and push, from the counts of a plan and what the
device does in a second.

A decoding step of the engine takes what the host needs for it (scheduling, sampling, one kernel after the other) and
what the device needs: it reads all weights and the KV cache of the sequences, or multiplies, whichever takes longer.
The learner takes what its products need, what its other operations move, and what the host needs to start them. The
host's seconds and the shares of the data sheet that are reached are fitted to measured rows, which
benchmarks/system/hours.py names and compares with the predictions, beside others.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.memory.generator import kv_token_bytes
from cluster.memory.learner import MLP_TILE, mlp_share
from cluster.memory.plan import CARDS, CardKind, Plan, Wish, Workload
from cluster.memory.shape import DTYPE_BYTES, Checkpointing, Shape


class Rates(NamedTuple):
    """What a device does in a second: of a GPU by its data sheet, of one core of a CPU as measured.

    flops: floating-point operations of matrix products in the model's type (on tensor cores, dense, float32 sums).
    bandwidth: bytes from and to its memory.
    """

    flops: float
    bandwidth: float


class Host(NamedTuple):
    """Seconds that the host takes, and shares of a device's rates that are reached."""

    step: float  # seconds of a decoding step
    sequence: float  # more for each sequence of it
    layer: float  # more for each layer, with its adapters
    decoding: float  # share of the products' rate while decoding
    reading: float  # share of the bandwidth
    products: float  # share of the products' rate in the learner
    attention: float  # share of that in its attention, which a CPU computes in float32, in small tiles
    layer_pass: tuple[float, float]  # seconds of the learner for a pass of a micro-batch through a layer: LoRA, full
    update: float  # seconds of the learner beside its passes: the batch, the optimizer's step
    push: float  # seconds until a pushed adapter is proven


ON_CARD = Host(0.4e-3, 25e-6, 55e-6, 0.6, 0.82, 0.75, 1.0, (1.2e-3, 0.6e-3), 0.0, 0.25)
ON_CPU = Host(2e-3, 120e-6, 100e-6, 0.22, 0.8, 0.8, 0.25, (0.5e-3, 0.5e-3), 0.05, 0.05)
MOVED, MOVED_HEAD = 416, 48  # bytes for each element of a token's width in a layer, and of its logits (roofline.md)
UNPACKED = 1.5  # bytes of a decoding step for each byte of a 4-bit base in 16 bits: packed, unpacked, partly cached
UNPACKING = 75e9  # bytes in 16 bits that the learner unpacks in a second, with bitsandbytes on an H100
PUSHED = 10e9  # bytes of whole weights that a push moves in a second
WOKEN = 3.7e9  # bytes of weights in a second, put to sleep and woken again (an H200: 3.3 GB in 0.9 s)


@dataclass(frozen=True, slots=True)
class Pace:
    """What a step's seconds depend on beside a plan and its workload. Other fields of `Wish` are in the plan.

    groups: of a step. length: mean tokens of a completion. workers, learners: processes of each role. together: the
    generators work while the learner trains (max_staleness above 0). further: passes through the model beside the
    policy's, forward ones counted as 1: the reference of learner.loss.beta 1, a value model 2. updates: times that a
    batch is trained on.
    """

    groups: int
    length: float
    workers: int = 1
    learners: int = 1
    together: bool = False
    further: float = 0.0
    updates: int = 1


class Part(NamedTuple):
    """Seconds of generation or training. device: those in which the device is busy."""

    whole: float
    device: float


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of a step. device: in which both roles together keep their one card busy; 0 if each has its own."""

    generate: float
    train: float
    push: float
    together: bool
    device: float = 0.0

    @property
    def step(self) -> float:
        at_once = max(self.generate, self.train, self.device)
        return (at_once if self.together else self.generate + self.train) + self.push

    def words(self, steps: int) -> str:
        """For users: a step by part, and the duration of so many."""
        parts = f"generation {self.generate:.1f} s, training {self.train:.1f} s, push {self.push:.1f} s"
        both = "; the first two at once" if self.together else ""
        return f"{self.step:.1f} s a step ({parts}{both}), {duration(steps * self.step)} for {steps} steps"


def step_seconds(found: Plan, wish: Wish, work: Workload, pace: Pace, rates: Rates) -> Seconds:
    """Seconds of a step of the plan `found`. rates: of a card, or of all cores of a role."""
    host = ON_CARD if wish.cuda else ON_CPU
    generating = generation_seconds(found, wish, work, pace, rates)
    training = _training(found, wish, work, pace, rates)
    moved = found.shape.params * DTYPE_BYTES[wish.dtype] / PUSHED if wish.mode == "full" else 0.0
    woken = found.generator["weights"] / WOKEN if found.layout == "alternating" else 0.0
    shared = generating.device + training.device if wish.cuda and found.layout != "separate" else 0.0
    return Seconds(generating.whole, training.whole, host.push + moved + woken, pace.together, shared)


def generation_seconds(found: Plan, wish: Wish, work: Workload, pace: Pace, rates: Rates) -> Part:
    """Seconds in which the completions of `pace.groups` problems are generated."""
    shape, host, length = found.shape, ON_CARD if wish.cuda else ON_CPU, max(pace.length, 1.0)
    asked = pace.groups * work.generations / pace.workers
    batch = min(asked, max(found.sequences, 1))
    decoded = asked / batch * length  # decoding steps: what ends makes room for what waits
    weights = found.generator["weights"]
    if found.base == "nf4":
        weights = int(2 * shape.params * UNPACKED / found.shards)
    cached = batch * (work.prompt + length / 2) * kv_token_bytes(shape, wish.kv_dtype) / found.shards
    multiplied = 2 * shape.active_params * batch / found.shards / (host.decoding * rates.flops)
    sharing = found.generators if wish.cuda else 1  # generators that one card serves; on CPUs each has cores of its own
    device = max((weights + cached) / (host.reading * rates.bandwidth), multiplied) * sharing
    own = host.step + host.sequence * batch + host.layer * shape.layers
    prompts = pace.groups / pace.workers * work.prompt * sharing
    prefilled = 2 * shape.active_params * prompts / found.shards / (host.products * rates.flops)
    return Part(decoded * (own + device) + prefilled, decoded * device + prefilled)


def _training(found: Plan, wish: Wish, work: Workload, pace: Pace, rates: Rates) -> Part:
    shape, host, length = found.shape, ON_CARD if wish.cuda else ON_CPU, max(pace.length, 2.0)
    tokens, batches = micro_batches(found.token_budget, work, pace)
    again = _repeated(shape, found.checkpointing)
    if wish.offload and found.token_budget > MLP_TILE:
        again += mlp_share(shape)  # MLPs by tiles are computed a third time
    # Forward, backward by inputs and by weights.
    passes = ((2 if wish.mode == "lora" else 3) + again) * pace.updates + pace.further
    attended = 2 * shape.layers * shape.heads * shape.head_dim * (work.prompt + length / 2)
    multiplied = 2 * shape.active_params + 2 * attended / host.attention
    products = tokens * passes * multiplied / (host.products * rates.flops)
    turns = ((2 + again) * pace.updates + pace.further) / 2  # a pass forward and one backward move MOVED
    wide = (MOVED * shape.layers * shape.hidden + MOVED_HEAD * shape.vocab) * turns
    moved = tokens * wide * DTYPE_BYTES[wish.dtype] / 2 / (host.reading * rates.bandwidth)
    own = host.layer_pass[wish.mode == "full"]
    unpacked = batches * 2 * turns * 2 * shape.linear_params / UNPACKING if found.base == "nf4" else 0.0
    device = products + moved + unpacked
    return Part(device + batches * passes * shape.layers * own + host.update * pace.updates, device)


def micro_batches(budget: int, work: Workload, pace: Pace) -> tuple[float, int]:
    """Tokens and micro-batches of a learner rank in a step, as learner.batch.micro_batch makes them of completions of
    one length: groups stay whole, and each part of one that is larger than `budget` repeats the prompt."""
    own = max(pace.length, 2.0) - 1
    together = max(1, min(work.generations, int((budget - work.prompt) // own)))  # completions of a part
    parts = math.ceil(work.generations / together)
    groups = pace.groups / pace.learners
    tokens = groups * (parts * work.prompt + work.generations * own)
    return tokens, math.ceil(groups * parts / max(1, budget // (work.prompt + together * own)))


def told(kind: CardKind | None, size: int, seconds_on: Callable[[Rates], Seconds], steps: int) -> str | None:
    """A line for users about the duration of so many steps on a card, or on the fastest and the slowest of those that
    have about `size` bytes; None where the rates are not known.

    kind: the card, None: not named. seconds_on: the seconds of a step at given rates.
    """
    like = [card for card in CARDS if abs(card.free - size) < 0.1 * size] if kind is None else [kind]
    found = [(seconds_on(Rates(card.flops, card.bandwidth)), card.name) for card in like if card.flops]
    if not found:
        return None
    (fast, fastest), (slow, slowest) = (choose(found, key=lambda one: one[0].step) for choose in (min, max))
    if fastest == slowest:
        return f"time: about {fast.words(steps)} on {fastest}"
    return (
        f"time: about {fast.step:.1f} s a step on {fastest} to {slow.step:.1f} s on {slowest}, "
        f"{duration(steps * fast.step)} to {duration(steps * slow.step)} for {steps} steps"
    )


def _repeated(shape: Shape, checkpointing: Checkpointing) -> float:
    """The share of the forward pass that is computed a second time."""
    if isinstance(checkpointing, int):
        return checkpointing / shape.layers
    return {"none": 0.0, "mlp": mlp_share(shape)}.get(str(checkpointing), 1.0)


def duration(seconds: float) -> str:
    """The seconds as `40 s`, `12 min` or `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


# What a core of this machine does in a second.

SHAPE = 1024, 512, 1024  # rows, summed dimension, columns of a product of a small layer
COPIED = 64 * 2**20  # bytes
TURNS = 5


def measured_rates(dtype: str, threads: int) -> Rates:
    """The rates of `threads` cores of this machine, by the best of a few trials; it takes about a second, and torch."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, summed, columns = SHAPE
        kind = getattr(torch, dtype)
        left, right = torch.ones(rows, summed, dtype=kind), torch.ones(summed, columns, dtype=kind)
        source = torch.ones(COPIED // 4)
        target = torch.empty_like(source)
        multiplied = min(_timed(lambda: left @ right) for _ in range(TURNS))
        copied = min(_timed(lambda: target.copy_(source)) for _ in range(TURNS))
    finally:
        torch.set_num_threads(before)
    return Rates(2 * rows * summed * columns / multiplied, 2 * COPIED / copied)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
