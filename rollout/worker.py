"""RolloutWorker, the object in a generator's process: it has the engine sample a group for a problem, has the reward
functions score the group, and returns it as one Arrow table. It knows nothing of GRPO."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cluster.actor import Several, Unusable, ValueLost
from rewards.base import JUDGE, Progress
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.pool import NOWHERE, Judging, RewardPool, Scores
from rollout.data.chat import Chat, Template
from rollout.delivery import Answer, Receipt
from rollout.engine import Engine, EngineDied, EngineSettings, NoAdapter
from rollout.env.play import ChatDialogue, Player
from rollout.env.rollouts import EnvSettings, Trajectories, rows_of, scored, sentence_of
from rollout.env.trajectory import Trajectory
from rollout.schema import Origin, Problem, build_group, facts_of
from rollout.scorer import RewardProcesses, Room, Scorer, Sentences, SharedPool, SharedScorer, side_by_side
from rollout.service import RolloutService
from rollout.teacher.process import Teacher
from rollout.types import Completion, EngineError, Manifest, Sampling, SentPolicy, Weights, WeightsInFile

if TYPE_CHECKING:
    from rollout.vllm.engine import VllmEngine
    from rollout.weights import WeightsReader

log = logging.getLogger("rollout")

Columns = dict[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The settings from which a generator's process is built. They are small, and need neither torch nor vLLM."""

    rank: int
    run_id: str
    engine: EngineSettings
    rewards: tuple[RewardConfig, ...]
    reward_workers: int  # reward processes beside the engine
    reward_memory: int  # bytes of each reward process
    make_engine: Callable[[EngineSettings], Engine]
    env: EnvSettings | None = None  # None: single completions
    judged: Judging = NOWHERE
    printed: Path | None = None  # file for what reward functions print
    reward_processes: RewardProcesses | None = None  # shared by all workers; None: reward_workers beside the engine
    chat_template: Template = "auto"  # data.chat_template
    steps: int = 0  # steps of the run
    teacher: Teacher | None = None  # the process of model.teacher


class RolloutWorker(RolloutService):
    """One engine with its reward functions, and with its environments if the run has any.

    Each call takes problems and returns their groups as tables of rollout.schema; take_policy makes another policy the
    newest. A call waits for the engine, the reward functions and the environments, for nothing else.
    """

    def __init__(self, spec: WorkerSpec, scorer_of: "Callable[[WorkerSpec], Scorer | None] | None" = None) -> None:
        """scorer_of: makes what scores the groups; None: reward processes of this worker's own, or the shared ones."""
        self.spec = spec
        # Only trajectories are rendered here: the prompts of single completions arrive as tokens.
        template_kwargs = spec.env.chat_template_kwargs if spec.env is not None else None
        self.chat = Chat.load(spec.engine.model, template_kwargs, spec.engine.stop, template=spec.chat_template)
        # Before the engine, so that the reward functions load while the engine starts.
        self.scorer = (scorer_of or _scorer)(spec)
        stop_ids, stop = self.chat.stops(spec.engine.stop)
        self.engine = spec.make_engine(replace(spec.engine, stop_ids=stop_ids, stop=stop))
        self.trajectories: Trajectories | None = None
        if spec.env is not None:
            config = spec.env.config
            dialogue = ChatDialogue(self.chat, config.tool_parser, stop_ids)
            player = Player(dialogue, spec.env.limits, config.history)
            self.trajectories = Trajectories(spec.env, self.engine, player)
        concurrency = spec.env.concurrency if spec.env is not None else spec.engine.max_num_seqs
        self._room = Room(min(spec.engine.max_num_seqs, concurrency))  # for the groups that `rollouts` generates
        self._version = 0  # version of the newest policy
        self._reader: WeightsReader | None = None
        self._sentences = Sentences(log)

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        try:
            with self._engine_alive():
                return build_group(await self._group(problem, sampling, attempt, self.spec.teacher))
        except NoAdapter:
            return None

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
    ) -> pa.Table | None:
        async def group(problem: Problem, sampling: Sampling) -> Columns:
            async with self._room.taken(sampling.n):
                return await self._group(problem, sampling, attempt, None)  # nothing is learned from these

        try:
            with self._engine_alive():
                groups = await side_by_side(group(*each) for each in zip(problems, samplings, strict=True))
        except NoAdapter:
            return None
        return build_group({name: [*chain.from_iterable(one[name] for one in groups)] for name in groups[0]})

    async def _group(self, problem: Problem, sampling: Sampling, attempt: int, teacher: Teacher | None) -> Columns:
        begun = time.perf_counter()

        def by() -> Origin:
            elapsed = (time.perf_counter() - begun) * 1e3
            return Origin(self.spec.run_id, self.spec.rank, attempt, sampling.seed, elapsed, self._version)

        if self.trajectories is None:
            completions = await self.engine.generate(problem.prompt_ids, sampling)
            origin, opened = by(), self._opened(problem, problem.prompt_ids)
            answers = [self._of_completions(opened, completions, origin)]
            answers += [] if teacher is None else [teacher.columns(problem.prompt_ids, completions)]
            return reduce(or_, await side_by_side(answers))
        played = await self.trajectories.group(problem, sampling)
        opening = next((one.opening for one in played if one.began), ())
        if opening and not isinstance(problem.messages, str):
            problem = replace(problem, messages=tuple(dict(one) for one in opening))  # reward functions get these
        return await self._of_trajectories(self._opened(problem, played[0].rows[0].prompt_ids), played, by())

    def _opened(self, problem: Problem, prompt_ids: Sequence[int]) -> Problem:
        """The problem with the opening tag that its rendered prompt ends in."""
        return replace(problem, prefilled=self.chat.prefilled(prompt_ids))

    def _progress(self, problem: Problem) -> Progress:
        return Progress(self._version, self.spec.steps, problem.epoch)

    async def _of_completions(self, problem: Problem, completions: Sequence[Completion], by: Origin) -> Columns:
        ids = [c.token_ids.tolist() for c in completions]
        texts = [self.chat.decode(tokens) for tokens in ids]
        assert self.scorer is not None
        progress = self._progress(problem)
        group = Group.of(problem.messages, texts, ids, problem.columns, problem.prefilled, progress)
        scores = await self.scorer.score(group)
        self._tell_of(scores)
        return facts_of(problem, completions, by) | {
            "completion": texts,
            "reward": scores.reward,
            "reward_parts": [[(k, v[i]) for k, v in scores.parts.items()] for i in range(len(texts))],
            "reward_status": scores.status,
            "reward_error": scores.errors,
            "reward_ms": [scores.ms] * len(texts),
            "logged": scores.logged,
        }

    async def _of_trajectories(self, problem: Problem, played: Sequence[Trajectory], by: Origin) -> Columns:
        self._sentences.warn(sentence_of(t) for t in played if t.faulted)
        scores = await scored(self.scorer, problem, played, self._progress(problem))
        if scores is not None:
            self._tell_of(scores)
        assert self.spec.env is not None
        return rows_of(problem, played, self.chat.decode, scores, by, alone=self.spec.env.alone)

    def _tell_of(self, scores: Scores) -> None:
        self._sentences.warn(scores.failures)
        self._sentences.warn_of(scores.zeroed)
        self._sentences.warn_of(scores.asked)

    @contextmanager
    def _engine_alive(self) -> Iterator[None]:
        """Turns EngineDied into Unusable, so that a fresh process takes the place of this one; keeps the message."""
        try:
            yield
        except EngineDied as error:
            log.exception("the engine died; a fresh process takes the place of this one")
            raise Unusable(" ".join(str(error).split())) from None

    async def take_policy(self, policy: SentPolicy) -> Receipt | None:
        start = time.perf_counter()
        with self._engine_alive():
            digest: str | None
            if isinstance(policy, WeightsInFile):
                digest = await self._weights_reader().load(policy, self.engine.load_weights)
            elif isinstance(policy, Weights):
                digest = await self.engine.load_weights(policy)
            else:
                digest = await self.engine.load_adapter(policy)
            if digest is None:
                return None
            self._version, seconds = policy.version, time.perf_counter() - start
            return Receipt(digest, seconds, await self.engine.peak_memory())

    async def reaches(self, place: WeightsInFile) -> str:
        try:
            await self._weights_reader().load(place, _nothing)
        except (EngineError, ValueLost) as error:
            return str(error)
        return ""

    def _weights_reader(self) -> "WeightsReader":
        if self._reader is None:
            from rollout.weights import WeightsReader  # imported here, since the driver imports this file without torch

            self._reader = WeightsReader()
        return self._reader

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        start = time.perf_counter()
        with self._engine_alive():
            logprobs, held = await self.engine.probe(token_ids), await self.engine.held()
        return Answer(logprobs, held, time.perf_counter() - start)

    async def share_base(self) -> Manifest:
        with self._engine_alive():
            return await self.engine.share_base()

    async def sleep(self) -> None:
        with self._engine_alive():
            await self.engine.sleep()

    async def wake(self) -> None:
        with self._engine_alive():
            await self.engine.wake()

    async def close(self) -> None:
        await self.engine.close()
        if self.scorer is not None:
            self.scorer.close()
        if self.trajectories is not None:
            self.trajectories.close()


async def _nothing(weights: Weights) -> str:
    return weights.digest


def _scorer(spec: WorkerSpec) -> Scorer | None:
    """None if environments alone give rewards. Without reward functions and environments the pool is empty, and each
    completion gets the status that no function scored it."""
    if spec.reward_processes is not None:
        return SharedScorer(spec.reward_processes, spec.rank)
    if not spec.rewards and spec.env is not None:
        return None
    return RewardPool(spec.rewards, spec.reward_workers, spec.reward_memory, spec.judged, spec.printed)


class RolloutWorkers(Several[RolloutWorker]):
    """The workers of several runs on one engine: RolloutService, each of whose methods takes the number of a run first.

    Runs with the same reward functions share their reward processes, as groups of one run do; judges, whose answers are
    kept in the folder of a run, are each run's own.
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self._specs = specs
        self._engine: VllmEngine | None = None
        self._pools: dict[str, SharedPool] = {}
        super().__init__([RolloutWorker(self._of_run(run, one), self._scorer) for run, one in enumerate(specs)])

    def _of_run(self, run: int, spec: WorkerSpec) -> WorkerSpec:
        return replace(spec, make_engine=partial(self._engine_of, run))

    def _engine_of(self, run: int, settings: EngineSettings) -> Engine:
        """Makes the engine when the first worker asks for it, whose reward functions load meanwhile."""
        if self._engine is None:
            self._engine = shared_engine([spec.engine for spec in self._specs])
        return self._engine.of_run(run, settings)

    def _scorer(self, spec: WorkerSpec) -> Scorer | None:
        if spec.reward_processes is not None or not spec.rewards or any(one.use == JUDGE for one in spec.rewards):
            return _scorer(spec)
        key = repr((spec.rewards, spec.reward_workers, spec.reward_memory))
        if key not in self._pools:
            pool = _scorer(spec)
            assert pool is not None
            self._pools[key] = SharedPool(pool)
        return self._pools[key].taken()


def shared_engine(settings: Sequence[EngineSettings]) -> "VllmEngine":
    """Makes the vLLM engine of several runs (see vllm_engine)."""
    _quiet()
    from rollout.vllm.engine import VllmEngine

    return VllmEngine(*settings)


def vllm_engine(settings: EngineSettings) -> "VllmEngine":
    """Makes the vLLM engine. vLLM is imported only here, in the process of a generator or a teacher."""
    return shared_engine([settings])


def _quiet() -> None:
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # torch warns of the missing Triton on a CPU
