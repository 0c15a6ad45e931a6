"""All settings of a run as typed, frozen values. Imports neither torch, vllm nor ray."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, field_validator

from cluster.config import ClusterConfig, Frozen, Positive
from cluster.memory.shape import EXPERTS, LoraRank, OptimizerKind
from cluster.trackers import known_tracker
from learner.algo.surrogates import LossConfig
from learner.config.arrangement import ARRANGEMENTS, Arrangement
from rewards.config import RewardConfig
from rollout.config import Bytes, DataConfig, RolloutConfig
from rollout.data.model_files import joined
from rollout.env.config import EnvConfig

# What the learner does with a batch: adapter, loss, optimizer, schedule, memory of a step.

AUTO_TOKEN_BUDGET = 8192  # tokens of a micro-batch where no plan says otherwise


class LoraConfig(Frozen):
    """LoRA (Hu et al. 2021): W + alpha/rank * B A on the target modules; lm_head and embeddings never.

    With model.adapter, what is left out here is the adapter's.
    """

    rank: LoraRank = 16
    """Of the adapter, one that vLLM serves. Raise it for more capacity, at more memory and a larger push."""
    alpha: Positive = 32.0
    """The adapter counts alpha / rank times; usually twice the rank. Raise it to let the same weights change more."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers that are adapted, by the end of their names. A shorter list takes less memory and learns less. Of a model
    with experts `all-linear` is the attention alone; `experts` in a list adapts the routed experts; with
    generators on a CPU it needs `push: merged`."""

    @field_validator("targets", mode="before")
    @classmethod
    def _names_are_listed(cls, targets: Any) -> Any:
        """To PEFT a text is a regular expression, which may choose single blocks; what is known of an adapter here are
        the ends of names."""
        if targets == [] or (isinstance(targets, str) and targets != "all-linear"):
            raise ValueError(
                "must be all-linear, or a list of the ends of layers' names such as [q_proj, v_proj], no regular "
                f"expression; write the names out (got {targets!r})"
            )
        return targets

    @property
    def adapts_experts(self) -> bool:
        """Whether the routed experts get adapters."""
        return EXPERTS in self.targets


class ScheduleConfig(Frozen):
    """Learning-rate schedule; `warmup` is a fraction of the run's steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warm-up; `linear` and `cosine` fall to 0 at the end of the run, for a length known before."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Part of the run's steps in which the rate rises from 0. Raise it where the first steps harm."""


class OptimizerConfig(Frozen):
    """AdamW, with float32 masters or without; bitsandbytes' 8-bit AdamW, or the same with states that CUDA may page out
    to host memory."""

    kind: OptimizerKind = "adamw"
    """The others save memory, which matters for full fine-tuning: `adamw_rounded` updates bfloat16 weights without
    float32 masters, rounded at random (12 bytes a weight in place of 20), the 8-bit kinds do so with states in 8 bits
    (6 bytes); the paged one needs CUDA."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Decay of AdamW's averages of the gradient and of its square. A lower second one forgets peaks sooner."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of matrices; norms and biases do not decay. Raise it for full fine-tuning over many epochs."""
    max_grad_norm: Positive = 1.0
    """The gradient's norm is clipped to it. Lower it where `loss/grad_norm` has peaks that harm."""


class ValueConfig(Frozen):
    """PPO's value model: an adapter of its own on the base of all roles, and a float32 head. Optimizer, schedule and
    updates per batch are the policy's."""

    start: str | None = None
    """Folder of a reward model to start from (an adapter with a scalar head, in PEFT's form); null: a new adapter of
    the policy's rank and targets, whose value is 0 everywhere. A reward model knows from the first step what is
    good."""
    learning_rate: Positive = 1e-4
    """Several times the policy's: what it has to follow moves with every step. Lower it where `value/loss` jumps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a token later counts. Below 1 short completions are preferred."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Of GAE: 1 trusts the rewards that came, 0 the value of the next token. Raise it where `value/explained_variance`
    stays low, or completions are so long that a reward at their end never reaches their beginning."""
    clip: Positive | None = 0.2
    """How far a batch may move a value, in units of the reward; null: without bound. It matters only with
    `updates_per_batch` above 1: the first update of a batch begins at the old values."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which the value alone learns. Set it where the policy gets worse before it gets better."""


class LearnerConfig(Frozen):
    """The learner's update."""

    algorithm: Literal["grpo", "ppo", "distill"] = "grpo"
    """Where advantages come from: `grpo` compares the completions of a group; `ppo` asks a value model, token by token,
    and needs no groups. PPO for rewards of turns or long trajectories, where one number for all tokens says little.
    `distill`: from a teacher, `model.reference`, `model.teacher` or the base that reads `data.teacher`, token by
    token, on the policy's own completions; rewards are measured and teach nothing ([losses.md](losses.md))."""
    value: ValueConfig = ValueConfig()
    mode: Literal["lora", "full"] = "lora"
    """`lora` trains an adapter, `full` every weight of the model, at several times the memory."""
    push: Literal["adapter", "merged"] = "adapter"
    """`merged`: the generators get base and adapter as one, and decode without LoRA. It pays where a step's decoding
    takes long beside a push of all adapted matrices; with `max_staleness` use it with `in_flight: continue`, else each
    push waits until the generators are idle. In bfloat16 merging rounds the weights once more, so sampler and learner
    differ a little more."""
    lora: LoraConfig = LoraConfig()
    groups_per_step: Annotated[int, Field(ge=1)] = 8
    """Problems per update. More: a steadier gradient, and longer steps."""
    updates_per_batch: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per batch, by decoupled PPO, each on its share of the groups; above 1 it wants `loss.ratio:
    clip`. For learning more from each batch where generation is dear."""
    learning_rate: Positive = 2e-5
    """LoRA wants about ten times a full fine-tune's rate. Lower it where `policy/mismatch_k3` or `policy/kl` grows."""
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    checkpointing: Literal["none", "full", "mlp", "offloaded", "auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Activations that are computed twice instead of kept: of no layer, all, the MLPs, or the first k layers;
    `offloaded`: of all, what `full` keeps goes to host memory, and MLPs are computed by tiles of 4096 tokens, for very
    long sequences; `auto`: by the memory plan. Less memory, the same gradient: to the bit, by tiles up to rounding."""
    token_budget: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens of a micro-batch, a shared prompt counted once; `auto`: by the memory plan, 8192 without one. The gradient
    depends on it by rounding alone; when memory runs out it is lowered, and what did not fit is computed again."""
    reduce: Literal["auto", "exact", "fast"] = "auto"
    """How gradients of micro-batches are added. `exact`: without rounding, so that the number of ranks
    (`cluster.learners`) changes no bit; 16 bytes more for each weight of the adapter, and finer micro-batches. `fast`:
    in float32. `auto`: `exact` with several ranks, of LoRA."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Times that a learner which died or hangs (`cluster.patience`) is replaced, and the run goes on by
    itself from the last checkpoint. Set it for long runs that nobody watches."""

    @property
    def offloads(self) -> bool:
        """Whether what is kept of activations goes to host memory."""
        return self.checkpointing == "offloaded"

    @property
    def recomputed(self) -> Literal["none", "full", "mlp", "auto"] | int:
        """Of which layers activations are computed twice."""
        return "full" if self.checkpointing == "offloaded" else self.checkpointing

    @property
    def pushes_adapters(self) -> bool:
        """Whether the generators hold adapters; else whole weights are replaced."""
        return self.mode == "lora" and self.push == "adapter"


NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a run, a pattern


def _revision(value: str) -> str:
    if not value.strip():
        raise ValueError(f"must name a branch, tag or commit, or be left out for the newest (got {value!r})")
    return value.strip()


class ModelConfig(Frozen):
    """The base model, its compute type, an adapter to start from, and what to stay close to."""

    path: str
    """Hub name or folder of the base model; docs/model_tables.md lists the architectures."""
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
    """What to stay close to (`learner.loss.beta`), or with `learner.algorithm: distill` the teacher: a folder of an
    adapter; null: `adapter`, or the base. With `learner.mode: full` a whole model; null: the weights that training
    starts from."""
    teacher: str | None = None
    """A larger model with the same tokenizer that teaches the policy token by token, in a process of its own
    (`learner.algorithm: distill`, or `learner.loss.beta` beside rewards): a folder or hub name."""
    reference_dtype: Literal["auto", "int8"] = "auto"
    """With `learner.mode: full`: how the reference's second set of weights is held; `auto`: as `dtype`, `int8`: half
    the bytes."""

    @property
    def source(self) -> str:
        """What names the base where it is read: path and revision in one (rollout.data.model_files)."""
        return joined(self.path, self.revision)


class MemoryConfig(Frozen):
    """What the memory plan is made for (cluster.memory.search), which settles learner.checkpointing,
    learner.token_budget and rollout.kv_cache where these are auto, and leaves the learner what the generators do not
    have."""

    device: Bytes | None = None
    """Memory of one card (on a CPU: of what both roles may have), for which the plan is made, and to which it is kept.
    null: on cards what is free on them; on a CPU nothing is held to a limit. Set it to leave a part of a card to
    others."""
    layout: Literal["auto", "separate", "slices", "alternating", "shared", "sharded"] = "auto"
    """How the roles lie on the hardware: `separate` cards, two `slices` of one, or `alternating`: the generators sleep
    while the learner trains; `auto`: one of these, by `cluster.gpus` and the memory plan. `shared`: slices, with one
    copy of the base for both roles; the generator owns it, the learner maps it. For LoRA with one generator on the
    learner's card, where a second copy of the weights would not fit. `sharded`: several `cluster.learners` divide the
    learner's copy among them, and gather it layer by layer; for LoRA on a base that one card has no room for, and with
    `learner.mode: full` the optimizer's states and gradients are divided as well."""
    _runs: int = PrivateAttr(1)

    @property
    def runs(self) -> int:
        """Runs that share the processes of this one, and its base (gleaner sweep)."""
        return self._runs

    def shared_by(self, runs: int) -> Self:
        """The same for so many runs."""
        found = self.model_copy()
        found._runs = runs
        return found


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
    """Stops a run whose learner and sampler disagree: mean k3 (nats) above `mismatch_k3`, several steps in a row."""

    mismatch_k3: Positive | None = 1e-2
    """Most `policy/mismatch_k3`, in nats: five steps in a row above it end the run, with a checkpoint and the reason.
    null: the run is never stopped for it. Raise it for a staleness at which the policy moves far."""


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
    """Steps of the run, a batch each (of `learner.updates_per_batch` optimizer steps), or null for `epochs`; 60 where
    both are null. More while `eval/accuracy` still rises."""
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
        (rollout.weights). Of several ranks that are replaced one by one it must outlive the one that sent it."""
        return not self.learner.pushes_adapters and not self.arrangement.undoes(self)

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement that memory.layout names. Where that is `auto`, learner.driver.memory.Budgets.arrangement is
        what the memory plan chose."""
        return ARRANGEMENTS[self.memory.layout]

    @property
    def kv_dtype(self) -> str:
        """The type of the generators' keys and values, which is the coarsest type that a logprob goes through."""
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
        the deadline of a group for each round of completions that are decoded, or played, at once."""
        at_once = self.rollout.sequences if self.env.use is None else self.trajectories
        return self.cluster.deadlines.group * math.ceil(self.under_way / at_once)

    @property
    def trajectory_s(self) -> float:
        """Seconds that a trajectory may take, generation included: well below what the generator counts as hung by that
        plays it."""
        return self.cluster.deadlines.group / 3

    @property
    def run_dir(self) -> Path:
        """Absolute folder of the run (a submitted job's working directory is thrown away)."""
        return (Path(self.output_dir).expanduser() / self.name.format(seed=self.seed)).absolute()

    @property
    def sweep_dir(self) -> Path:
        """Absolute folder of a sweep of this configuration, which holds those of its runs."""
        whole = self.name.replace("seed{seed}", "").replace("{seed}", "").rstrip("-_.") or "sweep"
        return (Path(self.output_dir).expanduser() / whole).absolute()

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


# The learning rate of each step. It loads no torch, since a start tells what it will be, too.


def rate_factor(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """What learning_rate is multiplied by in step `step` (from 0) of `total_steps`; never 0.

    Linear warm-up over the first `warmup` of the run, then 1, or a straight line, or half a cosine (SGDR 1608.03983,
    equation 5), towards 0 after the last step: transformers' schedules, but for its first step, which is of rate 0.
    A function of the step alone, so that a resumed run needs no other state than its step.
    """
    warmup = math.ceil(schedule.warmup * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    rest = max(total_steps - warmup, 1)
    progress = min(step - warmup, rest - 1) / rest
    return 1 - progress if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
