"""All settings of a run as typed, frozen values. Imports neither torch, vllm nor ray."""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cluster.config import ClusterConfig, Frozen, Positive
from cluster.trackers import known_tracker
from learner.config.learner import LearnerConfig
from rewards.config import RewardConfig
from rollout.config import Bytes, BytesOrAuto, DataConfig, RolloutConfig
from rollout.data.hub import joined
from rollout.env.config import EnvConfig

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a run, a pattern


def _revision(value: str) -> str:
    if not value.strip():
        raise ValueError(f"must name a branch, tag or commit, or be left out for the newest (got {value!r})")
    return value.strip()


class ModelConfig(Frozen):
    """The base model, its compute type, an adapter to start from, and what to stay close to."""

    path: str
    """Hub name or folder of the base model; docs/models.md lists the architectures."""
    revision: Annotated[str, AfterValidator(_revision)] | None = None
    """Branch, tag or commit of a hub model; null: the newest of its main branch. What it stands for as a run starts,
    config, tokenizer and weights of that commit, is what every process reads, and `config.yaml` then names the commit.
    Set it where a run is to be repeated, or goes over several nodes."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type that learner and generators compute in. float32 for exact comparisons, float16 for cards without
    bfloat16."""
    base: Literal["none", "nf4"] = "none"
    """`nf4`: QLoRA, the frozen base in 4 bits. For models whose 16-bit weights do not fit."""
    adapter: str | None = None
    """Folder of a PEFT LoRA adapter to start from; what `learner.lora` leaves out is the adapter's."""
    reference: str | None = None
    """What to stay close to (`learner.loss.beta`): a folder of an adapter; null: `adapter`, or the base. With
    `learner.mode: full` a whole model; null: the weights that training starts from."""
    reference_dtype: Literal["auto", "int8"] = "auto"
    """With `learner.mode: full`: how the reference's second set of weights is held; `auto`: as `dtype`, `int8`: half
    the bytes."""

    @property
    def source(self) -> str:
        """What names the base where it is read: path and revision in one (rollout.data.hub)."""
        return joined(self.path, self.revision)


class MemoryConfig(Frozen):
    """Two budgets, in bytes. `auto` leaves layout and budgets to the plan (cluster.memory.search), which also settles
    learner.checkpointing, learner.token_budget and rollout.kv_cache where these are auto."""

    device: Bytes | None = None
    """Memory of one card (on a CPU: of what both roles may have), for which the plan is made, and to which it is kept.
    null: on cards what is free on them; on a CPU nothing is held to a limit but the learner to `memory.learner`, if
    that is set. Set it to leave a part of a card to others."""
    layout: Literal["separate", "slices", "alternating", "auto"] = "auto"
    """`separate` cards, two `slices` of one, or `alternating`: the generators sleep while the learner trains."""
    base: Literal["own", "shared", "sharded"] = "own"
    """`shared`: one copy of the base for both roles; the generator owns it, the learner maps it. For LoRA with one
    generator on the learner's card, where a second copy of the weights would not fit. `sharded`: several
    `cluster.learners` divide the learner's copy among them, and gather it layer by layer; for LoRA on a base that one
    card has no room for, and with `learner.mode: full` the optimizer's states and gradients are divided as well."""
    generator: BytesOrAuto = "auto"
    """The most that the plan may give a generator, all of it. Set it to divide a card by hand. Of vLLM the KV cache is
    held to the plan."""
    learner: BytesOrAuto = "auto"
    """The most that the learner's tensors may take, without the CUDA context of about 0.5 GB."""


class CheckpointConfig(Frozen):
    """A checkpoint every `every` steps and at the end; the newest `keep` stay."""

    every: Annotated[int, Field(ge=1)] = 20
    """Steps between checkpoints. Lower it where losing so many steps would hurt."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints that stay; older ones are deleted. Raise it to go back further."""
    best: bool = False
    """Keep that of the highest `eval/accuracy` as well, which is written after each evaluation that is higher than all
    before. `gleaner export --step` takes it."""


class EarlyStopConfig(Frozen):
    """Ends a run before its last step, with a checkpoint, by `eval/accuracy`."""

    patience: Annotated[int, Field(ge=1)] | None = None
    """Evaluations in a row none of which is higher than the best before them. Set it where a run may stop to learn
    unwatched."""
    accuracy: float | None = None
    """What it must reach. Set it where more is not needed."""


class GuardConfig(Frozen):
    """Stops a run whose learner and sampler disagree: mean k3 (nats) above `mismatch_k3`, `steps` steps in a row."""

    mismatch_k3: Positive | None = 1e-2
    """Most `policy/mismatch_k3`, in nats; null: the run is never stopped for it. Raise it for a staleness at which the
    policy moves far."""
    steps: Annotated[int, Field(ge=1)] = 5
    """Steps in a row above it that end the run, with a checkpoint and the reason."""


class Settings(Frozen):
    """Everything that defines a run, each setting as it may be by itself. Only `model.path` and `data.path` have no
    default; `rewards` may be left out where an environment gives them."""

    name: Annotated[str, Field(pattern=rf"^{NAME}(\{{seed\}})?$")] = "run"
    """The run's folder below `output_dir`. Each run wants its own; `{seed}` at its end stands for the seed."""
    output_dir: str = "runs"
    """Where run folders are made. On a cluster: a file system that driver and learner share."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Decides the order of problems, sampling, and a new adapter's weights. Another one for another run of the
    same."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the run, or null for `epochs`; 60 where both are null. More while `eval/accuracy` still
    rises."""
    epochs: Positive | None = None
    """Passes over the problems: the run ends when that many were consumed, with those that dynamic sampling replaced.
    The learning-rate schedule is made for the steps that this takes if none is replaced."""
    resume: str = "auto"
    """`auto`: go on from the newest whole checkpoint of the run folder; `none`: start afresh, in a folder that has
    none; or a checkpoint's path."""
    resume_allow_changed: tuple[str, ...] = ()
    """What may differ from the checkpoint on purpose: `data`, `rewards`, `loss`, `base`, `env` (content), or settings
    such as `learner.learning_rate`; all else that decides a run's numbers must be the same."""
    max_staleness: Annotated[int, Field(ge=0, le=16)] = 0
    """0: generate, then train, in turns. k: generation runs up to k policy versions ahead of training. Raise it to 1 or
    2 where each side has hardware of its own, or generation is long; a run says at its end what its idle times
    advise."""
    model: ModelConfig
    data: DataConfig
    rewards: list[RewardConfig] = Field(default_factory=list)
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()
    guard: GuardConfig = GuardConfig()
    cluster: ClusterConfig = ClusterConfig()
    trackers: tuple[Annotated[str, AfterValidator(known_tracker)], ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, mlflow, trackio, prometheus (docs/running.md); `[]`:
    nowhere."""

    @property
    def weights_stay(self) -> bool:
        """Whether a policy that goes to generators of the learner's machine stays in the learner's memory
        (rollout.weights_file). Of several ranks that are replaced one by one it must outlive the one that sent it."""
        replaced = self.cluster.learners > 1 and self.memory.base != "sharded"
        return not self.learner.pushes_adapters and not replaced

    @property
    def kv_dtype(self) -> str:
        """Of the generators' keys and values: the coarsest type that a logprob goes through."""
        cached = self.rollout.kv_cache_dtype
        return self.model.dtype if cached == "auto" else cached

    @property
    def trajectories(self) -> int:
        """Trajectories that a generator plays at once."""
        auto = self.env.concurrency == "auto"
        return 2 * self.rollout.sequences if auto else int(self.env.concurrency)

    @property
    def under_way(self) -> int:
        """The most completions that one generator is asked for at once in training: of as many groups as
        rollout.producer has lanes."""
        slots = self.learner.groups_per_step * (1 + self.max_staleness)
        return math.ceil(slots / self.rollout.workers) * self.rollout.num_generations

    @property
    def group_deadline_s(self) -> float:
        """Seconds that a group may take which waits behind the others that its generator is asked for at once:
        cluster.deadlines.group for each round of completions that are decoded, or played, at once."""
        at_once = self.rollout.sequences if self.env.use is None else self.trajectories
        return self.cluster.deadlines.group * math.ceil(self.under_way / at_once)

    @property
    def run_dir(self) -> Path:
        """Absolute folder of the run (a submitted job's working directory is thrown away)."""
        return (Path(self.output_dir).expanduser() / self.name.format(seed=self.seed)).absolute()

    @property
    def settled_learner(self) -> LearnerConfig:
        """The learner's settings, with `reduce` as the number of ranks wants it."""
        if self.learner.reduce != "auto":
            return self.learner
        reduce = "exact" if self.cluster.learners > 1 and self.learner.mode == "lora" else "fast"
        return self.learner.model_copy(update={"reduce": reduce})

    def num_problems(self, length: int) -> float:
        """Problems to consume, of `length` in an epoch; inf where `steps` decides."""
        return math.inf if self.epochs is None else math.ceil(round(self.epochs * length, 6))

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps, or None when `epochs` decides once the data is known."""
        return self.steps if self.steps is not None or self.epochs is not None else 60

    @property
    def reward_processes(self) -> int:
        """Processes that run reward functions, in all."""
        return self.rollout.reward_workers * (self.cluster.rewards.processes or self.rollout.workers)
