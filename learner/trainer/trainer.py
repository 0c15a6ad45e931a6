"""The learner's Trainer owns the policy and its optimizer on one device; each call of `step` makes a policy version.

It is a plain class with `async` methods, so that it may live in another process. What computes or
writes runs in one separate thread, in the order of the calls (but see BaseThread), and the event loop stays free to
answer meanwhile. This module also
holds that thread, the export of policies, the learner's answer to a probe, and the guard against non-finite updates.
"""

import asyncio
import copy
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from cluster.actor import Several, Shared, stays_there
from cluster.files import Digest
from cluster.machine import processor
from learner.algo.advantage import has_signal
from learner.batch.micro_batch import read
from learner.config import ModelConfig
from learner.config.settings import AUTO_TOKEN_BUDGET, LearnerConfig
from learner.model.bases.shared import MappedBase
from learner.model.export import ServedNames, update_of, write_weights
from learner.model.logprob import check_ids
from learner.model.policy import Policy, resolve_checkpointing
from learner.model.roles import reward_roles
from learner.trainer import state as trainer_state
from learner.trainer.float32_products import library
from learner.trainer.memory_limit import MemoryLimit, TokenBudget, device_of
from learner.trainer.optimizer import AnyUpdater, GradientSums, Peers, gradient_sums, updater_for, wants_masters
from learner.trainer.service import Arithmetic, Exported, TrainerService
from learner.trainer.step import ROLES, OptimizerSteps, Passes, value_learner, value_roles
from rollout.delivery import Answer
from rollout.types import Held, Manifest, SentPolicy, WeightsInFile
from rollout.weights import WeightsFile, digests_of, read_of


def arithmetic_on(device: torch.device) -> Arithmetic:
    """Returns the hardware and the libraries with which this process computes on that device."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else processor("model name") or "CPU"
    # The version is passed on as str: torch.__version__ is of a class of torch, which the driver would have to import.
    return Arithmetic(str(torch.__version__), name, torch.get_num_threads(), library())


# The thread in which the learner works. The event loop stays free, so that `pulse` is answered during a step.

T = TypeVar("T")


class WorkThread:
    """A thread that runs one piece of work after the other, in the order of the calls."""

    def __init__(self) -> None:
        self._clock: list[int] = []  # of the thread, once it has begun
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer", initializer=self._begin)
        self._before: Callable[[], None] | None = None

    def _begin(self) -> None:
        self._clock.append(time.pthread_getcpuclockid(threading.get_ident()))

    def beside(self, before: Callable[[], None]) -> Self:
        """Returns the same thread for another user, for each of whose pieces of work it first calls `before`."""
        other = copy.copy(self)
        other._before = before
        return other

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in the thread; returns or raises what `work` does."""
        before = self._before

        def all_of_it() -> T:
            if before is not None:
                before()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._pool, all_of_it)

    def computed(self) -> float:
        """CPU seconds of the thread. They do not grow while the thread waits for a lock."""
        return time.clock_gettime(self._clock[0]) if self._clock else 0.0


CHECK_EVERY = 20  # policy versions between two checks of the mapped base's content; a check reads all of the base


class BaseThread(WorkThread):
    """The learner's work thread when the base model may be mapped from a generator, which can be lost and replaced.

    Work that computes with the base waits while no base is mapped; other work does not wait.

    base: the mapped base; None where the learner has loaded its own base, which is always there.
    """

    def __init__(self, base: MappedBase | None) -> None:
        super().__init__()
        self._base = base
        self._there = asyncio.Event()
        self._there.set()
        # Seconds without a base so far, without the present absence; and the clock when the present absence began.
        self._away, self._since = 0.0, 0.0

    async def compute(self, work: Callable[[], T]) -> T:
        """Waits until the base is mapped, then does what `run` does."""
        while not self._there.is_set():  # a loop: the base may be detached again before this task has its turn
            await self._there.wait()
        return await self.run(work)

    async def detach(self) -> None:
        """Unmaps the base, after the work that is under way."""
        assert self._base is not None, "the learner's base is its own"
        if self._there.is_set():
            self._there.clear()
            self._since = time.monotonic()
        await self.run(self._base.detach)

    async def attach(self, manifest: Manifest) -> None:
        """Maps the base of a fresh generator; work that waits for a base goes on."""
        assert self._base is not None, "the learner's base is its own"
        base = self._base
        await self.run(lambda: base.attach(manifest))
        self._away += time.monotonic() - self._since
        self._there.set()

    def check(self, version: int) -> None:
        """Raises RuntimeError if the base was written to. It looks at every CHECK_EVERY-th version only, and must be
        called in the work thread."""
        if self._base is not None and version % CHECK_EVERY == 0:
            self._base.check()

    def progress(self, *, on_cpu: bool) -> float:
        """Returns seconds that grow while a step makes progress: the seconds without a base, in which a step waits but
        does not hang, and on a CPU the thread's CPU seconds. On CUDA these are left out: a thread that waits for the
        device uses the CPU, so its CPU seconds grow even if the device hangs."""
        away = self._away + (0.0 if self._there.is_set() else time.monotonic() - self._since)
        return away + (self.computed() if on_cpu else 0.0)


class Sender:
    """Builds what the learner sends to the generators: the adapter, or whole weights.

    merged: whether an adapter is sent merged into the base's weights (learner.push: merged).
    """

    def __init__(self, policy: Policy, *, merged: bool) -> None:
        self.merged = merged
        self._policy, self._file = policy, WeightsFile()

    def outgoing(self, version: int, *, stays: bool) -> tuple[Shared[SentPolicy], Exported]:
        """See TrainerService.outgoing."""
        begun = time.perf_counter()
        update: SentPolicy
        if stays and (self.merged or self._policy.peft_config is None):
            update = write_weights(self._policy, version, self._file, merged=self.merged)
        else:
            update = update_of(self._policy, version, merged=self.merged)
        return Shared(update), Exported(update.policy_id, time.perf_counter() - begun)

    def empty(self) -> WeightsInFile:
        """See TrainerService.empty_weights."""
        return self._file.pack(0, {}, self._policy.dtype)


# The learner's answer to a probe. The generators' answers are compared with it (rollout.delivery).


@torch.no_grad()
def answer_of(policy: Policy, version: int, token_ids: list[int], *, merged: bool) -> Answer:
    """Returns the answer that a generator with this policy must give to a probe: logprobs of the tokens, and digests.

    Raises ValueError for fewer than two tokens, or an id beyond the vocabulary.
    """
    started = time.perf_counter()
    if len(token_ids) < 2:
        raise ValueError(f"token_ids: at least two are needed for a logprob, got {len(token_ids)}")
    check_ids(policy.head, max(token_ids))
    ids = torch.tensor(token_ids, device=policy.head.device)
    states = policy.hidden(ids[None, :-1])
    logprobs = policy.token_logprobs(states, ids[1:], 1.0)
    held = held_of(policy, version, merged=merged)
    return Answer(np.asarray(logprobs.cpu().numpy()), held, time.perf_counter() - started)


@torch.no_grad()
def held_of(policy: Policy, version: int, *, merged: bool) -> Held:
    """Returns the digests of the policy as learner.model.export.update_of sends it. They are made from the learner's
    weights, one tensor at a time, and not from the payload, so that a fault in the payload is found as well."""
    if merged or policy.peft_config is None:
        return Held(digests_of(_merged(policy, version) if merged else _whole(policy, version)))
    return Held(digests_of(_adapter(policy)))


def _adapter(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    scalings, names = policy.scalings(), ServedNames(policy.config)
    for name, master in policy.masters.items():
        sent = master.detach().to("cpu", policy.dtype, copy=True)
        module, _, matrix = name.removesuffix(".weight").rpartition(".")
        # vLLM multiplies B by the scaling once, on loading, in the engine's dtype; the same rounding is needed here.
        if matrix == "lora_B":
            sent.mul_(scalings[module])
        yield from names.weights({name: sent}).items()


def _whole(policy: Policy, version: int) -> Iterator[tuple[str, Tensor]]:
    for name in policy.masters:
        yield name, policy.trained.whole(name, lambda weight: read_of(weight, version, policy.dtype))


def _merged(policy: Policy, version: int) -> Iterator[tuple[str, Tensor]]:
    for name, source in policy.merged().items():
        place = torch.empty(source.shape, dtype=policy.dtype, device=policy.head.device)
        source.write(place)
        yield name, read_of(place, version, policy.dtype)


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of all random number generators that training may draw from: those of Python, numpy, torch on
    the CPU and torch on `device`, as values that torch.load(weights_only=True) accepts."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.tensor(keys, dtype=torch.int64), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores what random_state returned."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


MAX_IN_A_ROW = 3  # steps whose updates were all skipped, after which the run ends


class NonFiniteGuard:
    """Ends a run whose loss or gradient is not finite in several steps in a row.

    in_a_row: number of steps in a row, up to now, in which every update of a role was skipped.
    """

    def __init__(self) -> None:
        self.in_a_row = 0

    def after(self, failed: str | None, metrics: Mapping[str, float], *, may_overflow: bool, step: int) -> None:
        """Counts a step; call it after each. Raises RuntimeError at the third step in a row that was skipped.

        failed: the role all of whose updates were skipped (learner.trainer.step.ROLES); None if there is none.
        may_overflow: whether float16's loss scale, not the model, may be to blame. An overflow halves the scale,
            and until the scale is down to 1 such a step sets the count back to 0.
        """
        self.in_a_row = self.in_a_row + 1 if failed and not may_overflow else 0
        if failed and self.in_a_row >= MAX_IN_A_ROW:
            names = ROLES[failed]
            raise RuntimeError(
                f"loss/skipped_nonfinite: the {failed}'s loss and gradient norm must be finite, they were not in "
                f"{self.in_a_row} steps in a row (last: step {step}, {names.loss} {metrics[names.loss]}, {names.norm} "
                f"{metrics[names.norm]}); the weights are those before them. Lower {names.rate}, or look at the last "
                "steps' rollouts"
            )


class DividedNorm:
    """The norm of a gradient that is sharded over the ranks (learner.model.bases.sharded).

    A call is collective: each rank waits for the others, and all get the same number.

    whole: weights that every rank has in full, with the same gradient.
    rows: this rank's shards of the other weights.
    """

    def __init__(self, whole: Iterable[Tensor], rows: Iterable[Tensor], peers: Peers) -> None:
        self._whole, self._rows, self._peers = list(whole), list(rows), peers

    def __call__(self) -> Tensor:
        square = _norm(self._rows).square().to(self._rows[0].device)
        self._peers.sum(square)
        return (square + _norm(self._whole).square()).sqrt()


def _norm(weights: Iterable[Tensor]) -> Tensor:
    return get_total_norm([weight.grad for weight in weights if weight.grad is not None])


class Trainer(TrainerService):
    """Trains a LoRA adapter or the whole model by GRPO, or a LoRA adapter by PPO, with a second adapter for the value.

    Its methods are those of TrainerService, and are described there.

    Args:
        temperature: the sampling temperature; logprobs are of the tempered distribution, except those of `probe`.
        max_completion_length: most tokens of a completion; the constant of the dr_grpo loss.
        total_steps: number of steps of the run, for the learning-rate schedule.
        seed: seed of the adapter's initial weights.
        device: cpu, cuda or cuda:<n>.
        memory_bytes: most bytes that the learner may hold (see learner.trainer.memory_limit.MemoryLimit); None: no
            limit.
        attention: name of the attention implementation (see learner.model.packing_check.enable).
        base: where the generator's base model lies, which the learner maps; None: the learner loads its own base.
        reward_adapters: folders of reward models on the base (learner.model.roles), in the order of `score`'s results.
        peers: the ranks that share each step's work with this one; None: there are no others.
        replays_routing: see learner.model.policy.Policy.
        beside: the trainer of another run of a sweep, whose base and thread this one shares; number: of this run.

    Raises:
        ValueError: the model or the adapter cannot be trained here (see learner.model.policy.Policy), or the base
            cannot be mapped.
    """

    def __init__(
        self,
        model: ModelConfig,
        learner: LearnerConfig,
        *,
        temperature: float,
        max_completion_length: int,
        total_steps: int,
        seed: int,
        device: str,
        memory_bytes: int | None = None,
        attention: str | None = None,
        base: Manifest | None = None,
        reward_adapters: Sequence[str] = (),
        peers: Peers | None = None,
        replays_routing: bool = False,
        beside: "Trainer | None" = None,
        number: int = 0,
    ) -> None:
        self._path, where = model.source, device_of(device)
        tokens = AUTO_TOKEN_BUDGET if learner.token_budget == "auto" else learner.token_budget
        self._budget = TokenBudget(tokens, peers)
        if beside is None:
            mapped = None if base is None else MappedBase(base, where)
            self._memory = MemoryLimit(memory_bytes, where, 0 if mapped is None else mapped.nbytes)
            self._policy = _policy(
                model, learner, seed, where, attention=attention, mapped=mapped, sharded=self._budget.peers.sharded,
                roles=[*reward_roles(reward_adapters), *value_roles(learner)], replays_routing=replays_routing,
            )  # fmt: skip
            self._thread = BaseThread(mapped)
        else:
            masters = wants_masters(learner)
            self._memory = beside._memory
            self._policy = beside._policy.beside(number, model, learner.lora, seed, keep_masters=masters)
            self._thread = beside._thread.beside(self._policy.activate)
        updater, sums = _update(self._policy, learner, self._budget.peers, dtype=model.dtype, device=where)
        self._updates = OptimizerSteps(
            self._policy,
            updater,
            Passes(self._policy, learner, temperature, where, updater.scale, sums),
            self._budget,
            learner,
            value_learner(self._policy, learner, self._budget, dtype=model.dtype, total_steps=total_steps),
            max_completion_length=max_completion_length,
            total_steps=total_steps,
        )
        self._sender = Sender(self._policy, merged=learner.push == "merged")
        self._guard, self._version, self._compares = NonFiniteGuard(), 0, learner.algorithm == "grpo"
        self._top = None if model.teacher is None else learner.loss.teacher_top  # see read

    @property
    def version(self) -> int:
        """The version of the present policy: the number of steps so far."""
        return self._version

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model knows."""
        return len(self._policy.head)

    def share_thread(self) -> None:
        """To be called before other trainers are made beside this one."""
        self._thread = self._thread.beside(self._policy.activate)

    async def drop_gradients(self) -> None:
        """Frees the memory of the newest step's gradients."""
        await self._thread.run(self._policy.clear_gradients)

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        return await self._thread.compute(lambda: self._step(groups))

    async def mismatch(self) -> pa.Array:
        return await self._thread.run(self._updates.mismatch)

    async def score(self, groups: list[pa.Table]) -> list[list[float]]:
        return await self._thread.compute(lambda: self._score(groups))

    async def rehearse(self, prompt_length: int, teacher_length: int = 0) -> dict[str, float]:
        return await self._thread.compute(lambda: self._rehearse(prompt_length, teacher_length))

    async def outgoing(self, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        return await self._thread.run(lambda: self._sender.outgoing(self._version, stays=stays))

    async def empty_weights(self) -> WeightsInFile:
        return await self._thread.run(self._sender.empty)

    async def probe(self, token_ids: list[int]) -> Answer:
        answer = partial(answer_of, self._policy, merged=self._sender.merged)
        return await self._thread.compute(lambda: answer(self._version, token_ids))

    async def arithmetic(self) -> Arithmetic:
        return await self._thread.run(lambda: arithmetic_on(self._policy.head.device))

    async def detach_base(self) -> None:
        await self._thread.detach()

    async def attach_base(self, manifest: Manifest) -> None:
        await self._thread.attach(manifest)

    async def release_cache(self) -> None:
        await self._thread.run(torch.cuda.empty_cache)

    async def pulse(self) -> float:
        return self._updates.passed + self._thread.progress(on_cpu=self._policy.head.device.type == "cpu")

    async def sees(self, file: Path) -> bool:
        return file.exists()

    async def save(self, folder: Path) -> dict[str, Digest]:
        write = partial(trainer_state.write, folder, self._policy, self._path)
        return await self._thread.run(lambda: write(self._state()))

    async def load(self, folder: Path) -> None:
        await self._thread.run(lambda: self._set_state(_read(folder, self._policy, self._updates, self._budget.peers)))

    def _step(self, groups: list[pa.Table]) -> dict[str, float]:
        started, retries = time.perf_counter(), self._budget.retries
        self._memory.start_step()
        rows = read(groups, self._top)
        check_ids(self._policy.head, rows.highest_id)
        rate = self._updates.rate(self._version)
        learned = self._updates.learn(rows, self._version, rate)
        metrics = learned.metrics()
        self._version += 1
        self._thread.check(self._version)
        self._memory.check()
        self._guard.after(learned.failed, metrics, may_overflow=self._updates.may_overflow, step=self._version)
        # A value or a teacher teaches as much of a group whose rewards are all equal as of any other.
        if self._compares:
            metrics["reward/zero_variance_groups"] = float(sum(not has_signal(rewards) for rewards in rows.rewards))
        return metrics | {
            "loss/learning_rate": rate,
            "time/train": time.perf_counter() - started,
            **_memory_metrics(self._memory, self._budget, retries),
        }

    def _score(self, groups: list[pa.Table]) -> list[list[float]]:
        rows = read(groups)
        check_ids(self._policy.head, rows.highest_id)
        return [self._updates.sequence_scores(rows, role) for role in self._policy.reward_models]

    def _rehearse(self, prompt_length: int, teacher_length: int) -> dict[str, float]:
        self._memory.start_step()
        self._updates.rehearse(prompt_length, self._version, teacher_length, self._top)
        self._memory.check()
        return _memory_metrics(self._memory, self._budget, 0)

    def _state(self) -> dict[str, Any]:
        """Returns all that the next steps depend on, except the weights and a token budget that was lowered (it changes
        rounding only), as tensors and plain values."""
        return {
            "version": self._version,
            "nonfinite": self._guard.in_a_row,
            "random": random_state(self._policy.head.device),
            **self._updates.state_dict(),
        }

    def _set_state(self, state: dict[str, Any]) -> None:
        self._updates.load_state_dict(state)
        self._version, self._guard.in_a_row = state["version"], state["nonfinite"]
        set_random_state(state["random"], self._policy.head.device)


# Trainers of several runs on one base (gleaner sweep). Each run has an adapter, an optimizer and a policy version of
# its own; their work is done one piece after the other, in one thread.

TRIAL = 32  # tokens on which a policy is tried before the driver has given others


class Trainers(Several[Trainer]):
    """The trainers of several runs: TrainerService, each of whose methods takes the number of a run first.

    make: (number of the run, the trainer of run 0 or None for run 0 itself) -> the trainer of the run, for each run.
    """

    def __init__(self, make: Sequence[Callable[[int, Trainer | None], Trainer]]) -> None:
        first = make[0](0, None)
        first.share_thread()
        super().__init__([first, *(one(number, first) for number, one in enumerate(make[1:], 1))])
        trial = [i % first.vocabulary for i in range(1, TRIAL + 1)]
        self._tried = [trial for _ in make]  # of each run, the token ids of its newest probe
        self._answers: dict[int, tuple[int, list[int], Answer]] = {}  # of each run, the answer in its last `outgoing`

    async def step(self, run: int, groups: list[pa.Table]) -> dict[str, float]:
        """See TrainerService.step."""
        trainer = self.objects[run]
        try:
            return await trainer.step(groups)
        finally:
            await trainer.drop_gradients()  # else those of all runs would be held at the same time

    async def probe(self, run: int, token_ids: list[int]) -> Answer:
        """See TrainerService.probe. The tokens are mostly those on which `outgoing` has just tried the policy."""
        self._tried[run] = token_ids
        version, tried, answer = self._answers.pop(run, (-1, [], None))
        if answer is not None and (version, tried) == (self.objects[run].version, token_ids):
            return answer
        return await self.objects[run].probe(token_ids)

    @stays_there
    async def outgoing(self, run: int, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        """See TrainerService.outgoing. Raises RuntimeError for a policy whose logprobs are not finite: the engine,
        which all runs share, must not get it."""
        trainer = self.objects[run]
        answer = await trainer.probe(self._tried[run])
        self._answers[run] = trainer.version, self._tried[run], answer
        if not np.isfinite(answer.logprobs).all():
            raise RuntimeError(
                f"policy v{trainer.version}: its logprobs must be finite, {np.isfinite(answer.logprobs).sum()} of "
                f"{len(answer.logprobs)} are; lower learner.learning_rate, or learner.optimizer.max_grad_norm"
            )
        return await trainer.outgoing(stays)

    async def pulse(self, run: int) -> float:
        """See TrainerService.pulse. A step of one run waits for those of the others, so it is the sum over all runs."""
        return sum([await trainer.pulse() for trainer in self.objects])


def _update(
    policy: Policy, learner: LearnerConfig, peers: Peers, *, dtype: str, device: torch.device
) -> tuple[AnyUpdater, GradientSums]:
    """Returns the updater of all trained weights, and the gradient sums of the weights that are not sharded (FSDP2 sums
    the gradients of sharded weights)."""
    masters, divided = policy.masters, policy.trained.divided
    whole = [weight for name, weight in masters.items() if name not in divided]
    rows = [weight for name, weight in masters.items() if name in divided]
    norm = DividedNorm(whole, rows, peers) if rows else None
    updater = updater_for([*whole, *rows], learner, dtype=dtype, device=device, norm=norm)
    return updater, gradient_sums(whole, learner, peers)


def _policy(
    model: ModelConfig, learner: LearnerConfig, seed: int, device: torch.device, *, sharded: bool, **given: Any
) -> Policy:
    return Policy(
        model,
        learner.lora if learner.mode == "lora" else None,
        checkpointing=resolve_checkpointing(learner.recomputed, device),
        seed=seed,
        device=device,
        offload=learner.offloads,
        keep_masters=wants_masters(learner) or sharded,
        keep_reference=learner.loss.beta > 0 and model.teacher is None,
        sharded=sharded,
        **given,
    )


def _read(folder: Path, policy: Policy, updates: OptimizerSteps, peers: Peers) -> dict[str, Any]:
    """Sets the policy's weights from a checkpoint, and returns the rest of its state."""
    if not policy.trained.divided and not (folder / trainer_state.SHARDS).is_dir():
        return trainer_state.read(folder, policy)
    from learner.trainer.state import DividedState  # imported here since few runs use it

    return DividedState(policy, updates.updater.optimizers, peers).read(folder)


def _memory_metrics(memory: MemoryLimit, budget: TokenBudget, retries_before: int) -> dict[str, float]:
    return {
        "memory/learner_peak": float(memory.peak()),
        "memory/oom_retries": float(budget.retries - retries_before),
        "memory/token_budget": float(budget.tokens),
    }
