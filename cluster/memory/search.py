"""The search for a plan: of the settings that make learner and generators fit a device, those with the fewest seconds a
step by cluster.memory.seconds; and if none do, which single changes would.

Learner and generator each get a budget of bytes, in one of three layouts:

    separate     each role has a device of its own
    slices       both roles are on one device all the time
    alternating  both roles are on one device; the engine sleeps while the learner trains (vLLM's sleep level 1), and
                 the learner keeps what it holds between two steps while the engine generates

A base in 16 bits is preferred to one in 4 bits, which is another model. All other choices leave what is learned as it
is: recomputation, tokens of a micro-batch, layout. What the learner leaves of the device is KV cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cluster.memory import learner as learner_memory
from cluster.memory import shape as units
from cluster.memory.generator import Serving, cache_bytes, cached_sequences, generator_bytes
from cluster.memory.learner import Learning, Micro, pushed_bytes
from cluster.memory.plan import CARDS, USABLE, CardKind, Layout, Misfit, Plan, Wish, Workload, gib, lacks
from cluster.memory.seconds import Pace, Rates, step_seconds
from cluster.memory.shape import DTYPE_BYTES, SHAPES, Base, Checkpointing, Shape

# Tokens of a micro-batch that are tried, beside a group's and a completion's. With fewer than the first the learner
# waits for its operations to be started; more than the last save little of that.
BUDGETS = 2048, 4096, 8192, 16384
GROUPS = 8  # of a step, where they are not known
# Generators that sleep must save a tenth: they pin main memory, and how long they wake was measured once. So must one
# base for both roles, where a base for each has room, too: it ties the roles to one card.
ASLEEP = SHARING = 1.1
WORTH = 0.9  # share of a step's seconds from which on an fp8 cache is advised
CPU_CORE = Rates(50e9, 10e9)  # for the order alone; what is told to users is measured


def plan(
    shape: Shape,
    device_bytes: int,
    work: Workload,
    wish: Wish,
    pace: Pace | None = None,
    card: CardKind | None = None,
) -> Plan | Misfit:
    """The settings that fit and take the fewest seconds a step; if none fit, what would make them fit.

    pace: what a step's seconds depend on beside; None: 8 groups of completions of full length, one role after the
    other. card: its kind, where it is known; None: the fastest of the size.
    """
    for base in _bases(shape, wish):
        tried = _learners(shape, device_bytes, work, wish, base)
        if fitting := [most for found in tried if (most := _with_most_kv(found, work, wish)) is not None]:
            return min(fitting, key=lambda found: (cost(found, work, wish, pace, card), found.device_peak))
    small = least(shape, device_bytes, work, wish)
    return Misfit(shape, device_bytes, small, tuple(_advice(shape, device_bytes, work, wish, small)))


def least(shape: Shape, device_bytes: int, work: Workload, wish: Wish) -> Plan:
    """The settings that need the smallest device, whether or not they fit this one."""
    tried = (found for base in _bases(shape, wish) for found in _learners(shape, device_bytes, work, wish, base))
    return min(tried, key=lambda found: (found.device_peak, found.learner_bytes))


def fp8_advice(
    found: Plan, work: Workload, wish: Wish, pace: Pace | None = None, card: CardKind | None = None
) -> str | None:
    """A line for users if a KV cache in fp8 would save a tenth of a step, as more sequences are decoded at once; None
    if not, or if the card cannot. The completions are other ones then, by the cache's rounding."""
    if not wish.cuda or wish.kv_dtype == "fp8" or wish.kv_bytes is not None or found.sequences >= work.sequences:
        return None
    if card is not None and lacks(card.capability, dtype=wish.dtype, kv_dtype="fp8"):
        return None
    narrow = replace(wish, kv_dtype="fp8", base=found.base)
    other = plan(found.shape, found.device_bytes, work, narrow, pace, card)
    if isinstance(other, Misfit) or other.sequences <= found.sequences:
        return None
    share = cost(other, work, narrow, pace, card) / cost(found, work, wish, pace, card)
    if share > WORTH:
        return None
    return (
        f"rollout.kv_cache_dtype=fp8 would decode {other.sequences} sequences of full length at once instead of "
        f"{found.sequences}, a step in {share:.2f} of the time (rounded keys and values; compute capability 8.9)"
    )


def expected_seconds(
    found: Plan, work: Workload, wish: Wish, pace: Pace | None = None, card: CardKind | None = None
) -> float:
    """Seconds of a step. pace, card: as for `plan`."""
    rates = _rates(card, found.device_bytes) if wish.cuda else CPU_CORE
    if pace is None:
        pace = Pace(work.groups or GROUPS, work.completion, work.generators, further=2.0 * (wish.value_rank > 0))
    return step_seconds(found, wish, work, pace, rates).step


def cost(found: Plan, work: Workload, wish: Wish, pace: Pace | None = None, card: CardKind | None = None) -> float:
    """The seconds by which plans are ordered: those of generators that sleep, and of one base for both roles, count for
    more. pace, card: as for `plan`."""
    sleeping = found.layout == "alternating"
    return expected_seconds(found, work, wish, pace, card) * (ASLEEP if sleeping else SHARING if wish.shared else 1)


def _rates(card: CardKind | None, size: int) -> Rates:
    """The card's rates; where they are not known those of the fastest card of about `size` bytes, else of the card next
    to it in size."""
    if card is None or not card.flops:
        known = [one for one in CARDS if one.flops]
        like = [one for one in known if abs(one.free - size) < 0.1 * size]
        card = max(like, key=lambda one: one.flops) if like else min(known, key=lambda one: abs(one.free - size))
    return Rates(card.flops, card.bandwidth)


def _fits(found: Plan) -> bool:
    return found.device_peak <= USABLE * found.device_bytes


def _possible(shape: Shape, device_bytes: int, work: Workload, wish: Wish) -> bool:
    """Whether there is a plan."""
    return any(_fits(f) for base in _bases(shape, wish) for f in _learners(shape, device_bytes, work, wish, base))


def _bases(shape: Shape, wish: Wish) -> list[Base]:
    """The bases that are possible, the preferred first."""
    bases: tuple[Base, ...] = ("none", "nf4") if shape.stored is None else ("none",)
    whole = wish.mode == "full" or wish.push == "merged" or wish.dtype == "float32" or wish.base_ranks > 1
    return [base for base in (bases if wish.base is None else (wish.base,)) if base == "none" or not whole]


def _learners(shape: Shape, device_bytes: int, work: Workload, wish: Wish, base: Base) -> Iterator[Plan]:
    """Every layout, recomputation and micro-batch, with the KV cache that was asked for, or one sequence's."""
    kv_bytes = wish.kv_bytes
    if kv_bytes is None:
        kv_bytes = cache_bytes(shape, wish.kv_dtype, work.whole, 1, cuda=wish.cuda)
    layouts = ("slices",) if wish.shared else wish.layouts
    for layout in (one for one in layouts if wish.cuda or one != "alternating"):  # a generator on CPUs cannot sleep
        for policy in _policies(shape, wish):
            for budget in _budgets(work, wish):
                yield _plan(shape, device_bytes, work, wish, layout, base, policy, budget, kv_bytes)


def _plan(
    shape: Shape,
    device_bytes: int,
    work: Workload,
    wish: Wish,
    layout: Layout,
    base: Base,
    policy: Checkpointing,
    budget: int,
    kv_bytes: int,
) -> Plan:
    learning = Learning(
        mode=wish.mode, push=wish.push, rank=wish.rank, targets=wish.targets, dtype=wish.dtype, base=base,
        optimizer=wish.optimizer, checkpointing=policy, frozen_ranks=wish.frozen_ranks, reference=wish.reference,
        offload=wish.offload, cuda=wish.cuda, value_rank=wish.value_rank, exact=wish.exact, undo=wish.undo,
        ranks=wish.base_ranks, runs=wish.runs, top=wish.top,
    )  # fmt: skip
    most = int(min(budget, work.most))
    # The teacher's own micro-batch, which runs forward alone, counts as one that is trained on: never too few bytes.
    micros = [Micro.of(prompt, work.completion, work.generations, most) for prompt in {work.prompt, work.read}]
    sent = pushed_bytes(shape, wish.mode, wish.push, wish.targets, DTYPE_BYTES[wish.dtype])
    serving = Serving(
        dtype=wish.dtype, base=base, rank=wish.rank, adapters=0 if sent else work.adapters, pushed=sent,
        sequences=work.sequences, kv_bytes=kv_bytes, targets=wish.targets, cuda=wish.cuda, longest=work.whole,
        shards=work.shards,
    )  # fmt: skip
    held = cached_sequences(shape, wish.kv_dtype, work.whole, kv_bytes, cuda=wish.cuda)
    learner = max(
        (learner_memory.learner_bytes(shape, learning, micro) for micro in micros),
        key=lambda parts: sum(parts.values()),
    )
    if wish.shared:
        learner["weights"] = 0  # they are the generator's, and counted there
    return Plan(
        shape=shape, device_bytes=device_bytes, layout=layout, base=base, checkpointing=policy, token_budget=budget,
        kv_bytes=kv_bytes, sequences=min(held, work.sequences), learner=learner,
        generator=generator_bytes(shape, serving), generators=work.generators, learners=work.learners,
        shards=work.shards,
    )  # fmt: skip


def _policies(shape: Shape, wish: Wish) -> list[Checkpointing]:
    """Ways of recomputation."""
    if wish.checkpointing is not None:
        return [wish.checkpointing]
    some = {shape.layers // 4, shape.layers // 2, 3 * shape.layers // 4} - {0}
    return ["none", *sorted(some), "mlp", "full"]


def _budgets(work: Workload, wish: Wish) -> list[int]:
    """Tokens of a micro-batch: at least a completion, at most a step."""
    if wish.token_budget is not None:
        return [wish.token_budget]
    sizes = {max(size, work.longest) for size in BUDGETS} | {work.group, work.longest}
    return sorted({int(min(size, work.most)) for size in sizes})


def _with_most_kv(found: Plan, work: Workload, wish: Wish) -> Plan | None:
    """The plan with the rest of the device as KV cache, up to all sequences at full length; None if it does not fit."""
    if not _fits(found):
        return None
    if wish.kv_bytes is not None or found.sequences == 0:
        return found

    def holding(count: int) -> Plan:
        size = cache_bytes(found.shape, wish.kv_dtype, work.whole, count, cuda=wish.cuda)
        here = size // work.shards if wish.cuda else size
        return replace(found, kv_bytes=size, sequences=count, generator=found.generator | {"kv_cache": here})

    fits, beyond = 1, work.sequences + 1
    while beyond - fits > 1:
        tried = (fits + beyond) // 2
        fits, beyond = (tried, beyond) if _fits(holding(tried)) else (fits, tried)
    return holding(fits)


def _advice(shape: Shape, device_bytes: int, work: Workload, wish: Wish, small: Plan) -> Iterator[str]:
    changes: list[tuple[str, Workload, Wish]] = []
    if wish.checkpointing not in (None, "full"):
        changes.append(("learner.checkpointing=full", work, replace(wish, checkpointing="full")))
    if wish.token_budget is not None and wish.token_budget > work.longest:
        smaller = replace(wish, token_budget=work.longest)
        changes.append((f"learner.token_budget={work.longest}", work, smaller))
    if wish.kv_bytes is not None:
        changes.append(("rollout.kv_cache=auto", work, replace(wish, kv_bytes=None)))
    if wish.cuda and "alternating" not in wish.layouts and wish.layouts != ("separate",):
        changes.append(
            ("memory.layout=alternating with max_staleness=0", work, replace(wish, layouts=("alternating",)))
        )
    shareable = wish.mode == "lora" and wish.push == "adapter" and units.unshared(shape) is None
    if wish.cuda and shareable and work.generators == 1:
        changes.append(("memory.layout=shared", work, replace(wish, shared=wish.layouts != ("separate",))))
    changes.extend((text, work, divided) for text, divided in _divided(wish))
    if wish.mode == "full" and wish.optimizer == "adamw" and wish.dtype == "bfloat16":
        changes.append(("learner.optimizer.kind=adamw_rounded", work, replace(wish, optimizer="adamw_rounded")))
    if wish.mode == "full" and wish.optimizer in ("adamw", "adamw_rounded"):
        changes.append(("learner.optimizer.kind=adamw_8bit", work, replace(wish, optimizer="adamw_8bit")))
    if wish.reference == "auto" and wish.base_ranks == 1:
        changes.append(("model.reference_dtype=int8", work, replace(wish, reference="int8")))
    if wish.base == "none" and wish.mode == "lora" and wish.dtype != "float32" and shape.stored is None:
        changes.append(("model.base=nf4", work, replace(wish, base="nf4")))
    if wish.mode == "full":
        optimizer = "adamw" if wish.optimizer == "adamw_rounded" else wish.optimizer  # adamw_rounded is for mode full
        lora = replace(wish, mode="lora", base="none", reference="none", optimizer=optimizer)
        other = "" if optimizer == wish.optimizer else f" with learner.optimizer.kind={optimizer}"
        changes.append((f"learner.mode=lora{other}", work, lora))
    half = max(1, work.completion // 2)
    changes.append((f"rollout.max_completion_length={half}", replace(work, completion=half), wish))
    yield from (text for text, w, asked in changes if _possible(shape, device_bytes, w, asked))
    yield from _other_models(shape, device_bytes, work, wish)
    if (
        wish.cuda
        and wish.layouts != ("separate",)
        and _possible(shape, device_bytes, work, replace(wish, layouts=("separate",), shared=False))
    ):
        yield "a second card of this size (cluster.gpus.generator=1, cluster.gpus.learner=1)"
    yield f"{'a card' if wish.cuda else 'memory.device'} of {gib(small.device_peak / USABLE)}"


def _divided(wish: Wish) -> Iterator[tuple[str, Wish]]:
    """Changes that divide the model among twice as many GPUs, or four times as many if it is trained as a whole."""
    full = wish.mode == "full"
    if not wish.cuda or wish.layouts != ("separate",) or wish.base == "nf4" or wish.push == "merged":
        return
    if full and (wish.reference == "int8" or wish.optimizer not in ("adamw", "adamw_8bit")):
        return
    for times in (2, 4) if full else (2,):
        divided = replace(wish, base="none", base_ranks=times * wish.base_ranks, exact=not full)
        yield f"memory.layout=sharded with cluster.learners={divided.base_ranks}, a card each", divided


def _other_models(shape: Shape, device_bytes: int, work: Workload, wish: Wish) -> Iterator[str]:
    """A smaller model of SHAPES that fits: the largest of the same kind, else the largest of another kind."""
    smaller: Sequence[Shape] = [s for s in SHAPES.values() if s.params < shape.params]
    for other in sorted(smaller, key=lambda s: (s.kind != shape.kind, -s.params)):
        if _possible(other, device_bytes, work, wish):
            yield f"model.path: {other.name}"
            return
