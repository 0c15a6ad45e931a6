"""RunConfig: the settings of a run, checked against each other, and the processes that they ask for."""

from __future__ import annotations

from pydantic import ValidationInfo, model_validator

from cluster.config import CpuConfig, GpuConfig, RewardProcessConfig
from cluster.placement import Role
from learner.algo.surrogates import SURROGATES, LossConfig
from learner.config.arrangement import ARRANGEMENTS, GPUS
from learner.config.rule import Rule
from learner.config.settings import EarlyStopConfig, LoraConfig, Settings, ValueConfig
from rewards.config import TAKEN, adapters_of, functions_of, resolved_names, trained_on
from rollout.config import OWN, DataConfig, TeacherConfig
from rollout.data.model_files import is_hub_name, split
from rollout.env.config import TURN_TIMEOUT_S, EnvConfig

# The rules between settings. The errors and the table in docs/keys.md are made from them.
#
# What a single setting may be is checked at its field; what depends on the model, the data or the machine is checked
# later (learner.driver). The rules of how the roles lie on the hardware are in learner.config.arrangement.


def broken_rules(config: Settings) -> list[str]:
    """A sentence for each rule that the configuration breaks."""
    return [rule.sentence(config) for rule in RULES if rule.broken(config)]


CLIPPED = ", ".join(name for name, row in SURROGATES.items() if row.several_updates)
WITH_TOOLS = ("tools", "trl_environment")
CLIENTS = tuple(f"{name}_{what}" for name in ("OPENAI", "ANTHROPIC") for what in ("BASE_URL", "API_KEY"))


def _turn_seconds(config: Settings) -> float:
    """Seconds that the tool calls of a turn may take together; 0 for what is no number, which is refused later."""
    given = config.env.args.get("turn_timeout_s", TURN_TIMEOUT_S)
    return float(given) if isinstance(given, int | float) else 0.0


def _wants_environment(config: Settings) -> bool:
    """Whether a setting is given that makes sense only with an environment."""
    data = config.data
    return OWN in (data.path, data.eval.path) or data.prompt is None or config.env != EnvConfig()


def _full(config: Settings) -> bool:
    return config.learner.mode == "full"


def _ppo(config: Settings) -> bool:
    return config.learner.algorithm == "ppo"


def _distills(config: Settings) -> bool:
    return config.learner.algorithm == "distill"


def _asks_for_objective(config: Settings) -> bool:
    """Whether a setting is given that is about rewards' share in the gradient."""
    loss, other = config.learner.loss, LossConfig()
    return (
        (loss.ratio, loss.bounds, loss.advantage, loss.top_entropy)
        != (other.ratio, other.bounds, other.advantage, other.top_entropy)
        or config.rollout.dynamic_sampling
        or bool(adapters_of(config.rewards))
    )


REWARDS = (
    Rule(
        "rewards:", "must list at least one reward function that is trained on (no watch), unless an environment gives "
        "the rewards; env.use=tools answers calls and gives none", "add for example {use: number}, or set env.use",
        ("env.use",), lambda c: not trained_on(c.rewards) and c.env.use in (None, "tools"),
    ),
    Rule(
        "rewards:", "must list a function for evaluation, which reward models do not take part in",
        "add one, with weight 0 if it is not to be trained on, or set data.eval.every=0", ("data.eval.every",),
        lambda c: c.data.eval.every > 0 and bool(c.rewards) and c.env.use is None and not functions_of(c.rewards),
    ),
    Rule(
        "cluster.rewards:", "needs processes: these are what the other settings are about",
        "set cluster.rewards.processes=1, or leave them out", ("cluster.rewards.processes",),
        lambda c: c.cluster.rewards.processes == 0 and c.cluster.rewards != RewardProcessConfig(),
    ),
    Rule(
        "cluster.rewards.processes:", "needs reward functions, which they would run",
        "add one to rewards, or set it to 0", ("cluster.rewards.processes",),
        lambda c: c.cluster.rewards.processes > 0 and not functions_of(c.rewards),
    ),
)  # fmt: skip
DATA = (
    Rule(
        "data.chat_template: none", "does not go with data.chat_template_kwargs: there is nothing that reads them",
        "leave one of them out", ("data.chat_template_kwargs",),
        lambda c: c.data.chat_template == "none" and bool(c.data.chat_template_kwargs),
    ),
    Rule(
        "data.teacher:", "needs learner.loss.beta above 0, the weight of what the teacher says",
        "set it, for example beta=1 with learner.algorithm=distill, or leave data.teacher out",
        ("learner.loss.beta",),
        lambda c: c.data.teacher.privileged and c.learner.loss.beta == 0,
    ),
    Rule(
        "data.teacher:", "does not go with env.use: an environment adds its messages and tools to the policy's prompt "
        "alone", "leave one of them out", ("env.use",),
        lambda c: c.data.teacher.privileged and c.env.use is not None,
    ),
    Rule(
        "data.teacher.max_prompt_length:", "is of the prompts that data.teacher.prompt or system make",
        "set one of these, or leave it out", ("data.teacher.prompt", "data.teacher.system"),
        lambda c: not c.data.teacher.privileged and c.data.teacher != TeacherConfig(),
    ),
    Rule(
        "rollout.top_p, top_k, min_p, structured_outputs:",
        "need rollout.temperature=1: at another vLLM gives no logprobs of the whole distribution",
        "set temperature=1, or leave them out", ("rollout.temperature",),
        lambda c: c.rollout.truncates and c.rollout.temperature != 1,
    ),
    Rule(
        "rollout.routing_replay:",
        "does not go with rollout.structured_outputs, nor with cluster.tensor_parallel above 1: vLLM records experts "
        "in another way of running a model, and in several processes this was not tried",
        "leave one of them out", ("rollout.routing_replay", "cluster.tensor_parallel"),
        lambda c: c.rollout.routing_replay and (bool(c.rollout.structured_outputs.form) or c.cluster.shards > 1),
    ),
    Rule(
        "checkpoint.best, early_stop:", "need evaluations, by which they go", "set data.eval.every, or leave them out",
        ("data.eval.every",),
        lambda c: (c.checkpoint.best or c.early_stop != EarlyStopConfig()) and c.data.eval.every == 0,
    ),
    Rule(
        "data.curriculum:", "does not go with data.shuffle=false, which keeps the order of the source, nor with "
        "learner.algorithm=distill, which learns from a teacher and not from differences between rewards",
        "leave data.curriculum out", ("data.shuffle", "learner.algorithm"),
        lambda c: c.data.curriculum is not None and (not c.data.shuffle or c.learner.algorithm == "distill"),
    ),
    Rule(
        "steps:", "does not go with epochs: both say when the run ends", "leave one of them out", ("steps", "epochs"),
        lambda c: c.steps is not None and c.epochs is not None,
    ),
    Rule(
        "rollout.in_flight: continue",
        "needs completions that are under way when a policy arrives, and at max_staleness 0 there are none",
        "set max_staleness=1, or in_flight=finish", ("max_staleness",),
        lambda c: c.rollout.in_flight == "continue" and c.max_staleness == 0,
    ),
)  # fmt: skip
ENV = (
    Rule(
        "env.use:", "must be given with data.path=env:own, data.prompt=null, or other settings of env: they are of an "
        "environment, which has its problems or says what the model is asked", "set it, or leave them out",
        ("env.use", "data.path", "data.prompt"),
        lambda c: c.env.use is None and _wants_environment(c),
    ),
    Rule(
        "env.use:", "does not go with rollout.structured_outputs, since a turn that calls a tool has another form, nor "
        "with data.chat_template=none, since the chat template writes its answers", "leave one of them out",
        ("env.use", "data.chat_template"),
        lambda c: c.env.use is not None
        and (bool(c.rollout.structured_outputs.form) or c.data.chat_template == "none"),
    ),
    Rule(
        "data.path: env:own", "has no columns that data.prompt could name", "leave data.prompt out", ("data.prompt",),
        lambda c: c.data.path == OWN and c.data.prompt not in (None, DataConfig.model_fields["prompt"].default),
    ),
    Rule(
        "data.eval.path:", "must be the environment's own as data.path is, or neither, unless data.prompt is null: of "
        "the two one has prompts", "set data.prompt=null, or give both", ("data.path", "data.eval.path"),
        lambda c: c.data.eval.path is not None and c.data.prompt is not None
        and (c.data.path == OWN) != (c.data.eval.path == OWN),
    ),
    Rule(
        "env.history: template",
        "may make several rows of a trajectory, for which neither PPO's values nor a reward model's score are made",
        "set append, or learner.algorithm=grpo and rewards without adapter:", ("learner.algorithm",),
        lambda c: c.env.history == "template" and (_ppo(c) or bool(adapters_of(c.rewards))),
    ),
    Rule(
        "env.use: program", "may make several rows of a trajectory, for which neither PPO's values nor a reward "
        "model's score are made, and continues what a program sends: env.history: template has no say in it",
        "set learner.algorithm=grpo, rewards without adapter:, and env.history=append",
        ("learner.algorithm", "env.history"),
        lambda c: c.env.use == "program"
        and (_ppo(c) or bool(adapters_of(c.rewards)) or c.env.history == "template"),
    ),
    Rule(
        "env.use: program", "gives its program address and key of the policy in OPENAI_BASE_URL, OPENAI_API_KEY, "
        "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, so that env.variables must name none of them",
        "leave them out of env.variables", ("env.variables",),
        lambda c: c.env.use == "program" and any(name in CLIENTS for name in c.env.variables),
    ),
    Rule(
        "env.args.turn_timeout_s:",
        f"must be below env.step_timeout_s with use: {' or '.join(WITH_TOOLS)} ({TURN_TIMEOUT_S:g} if not given), else "
        "a trajectory whose calls take long ends without a reward", "lower it, or raise env.step_timeout_s",
        ("env.step_timeout_s",),
        lambda c: c.env.use in WITH_TOOLS and _turn_seconds(c) >= c.env.step_timeout_s,
    ),
)  # fmt: skip
MODEL = (
    Rule(
        "model.revision:", "needs a hub name as model.path: a folder has no revisions",
        "leave it out, or give a name like org/model", ("model.revision", "model.path"),
        lambda c: c.model.revision is not None and not is_hub_name(c.model.path),
    ),
    Rule(
        "model.path:", "must be a name without its revision",
        "set model.revision to what stands behind the @, or check the path of the folder",
        ("model.path",),
        lambda c: split(c.model.path)[1] is not None,
    ),
    Rule(
        "model.base: nf4", "needs a type of 16 bits: vLLM has no room for two 4-bit weights a byte in a float32 model",
        "set model.dtype=bfloat16, or base=none", ("model.dtype",),
        lambda c: c.model.base == "nf4" and c.model.dtype == "float32",
    ),
    Rule(
        "model.base: nf4", "needs the whole model in one process of each role: neither the generator's processes nor "
        "the learner's ranks divide blocks of 4 bits", "set base=none, or a card for each generator and "
        "memory.layout=auto", ("cluster.tensor_parallel", "cluster.gpus.generator", "memory.layout"),
        lambda c: c.model.base == "nf4" and (c.cluster.shards > 1 or c.arrangement.in_shards),
    ),
    Rule(
        "learner.push: merged", "needs a base in 16 or 32 bits that the learner has whole and to itself: merging into "
        "one of 4 bits would change the policy, no rank has all of one in shards, and one that is shared is computed "
        "with", "set push=adapter, or model.base=none and memory.layout=auto", ("model.base", "memory.layout"),
        lambda c: c.learner.push == "merged"
        and (c.model.base == "nf4" or c.arrangement.one_base or c.arrangement.in_shards),
    ),
    Rule(
        "model.dtype: float32", "does not go with adapters on a card, for which vLLM has kernels in 16 bits alone",
        "set bfloat16 (float16 on a card without it), learner.push=merged, or cluster.gpus.generator=0 and "
        "cluster.gpus.learner=0", ("learner.push", "cluster.gpus.generator"),
        lambda c: c.model.dtype == "float32" and c.learner.pushes_adapters and c.cluster.gpus.generator > 0,
    ),
    Rule(
        "learner.lora.targets: experts", "needs learner.push=merged where generators are on a CPU, for which vLLM has "
        "no LoRA for experts", "set that, leave experts out, or give generators a card",
        ("learner.push", "cluster.gpus.generator"),
        lambda c: c.learner.pushes_adapters and c.learner.lora.adapts_experts and c.cluster.gpus.generator == 0,
    ),
    Rule(
        "learner.lora.targets: experts", "needs a base in 16 or 32 bits that the learner has whole: vLLM has no LoRA "
        "for experts beside one of 4 bits, and in shards they were not tried", "set model.base=none and "
        "memory.layout=auto, or leave experts out", ("model.base", "memory.layout"),
        lambda c: c.learner.lora.adapts_experts and (c.model.base == "nf4" or c.arrangement.in_shards),
    ),
    Rule(
        "model.reference, reference_dtype:", "need learner.loss.beta above 0, without which nothing is held close to a "
        "reference, and reference_dtype=int8 learner.mode=full: with LoRA the reference is no second model",
        "set these, or leave them out", ("learner.loss.beta", "learner.mode"),
        lambda c: (c.model.reference is not None and c.learner.loss.beta == 0)
        or (c.model.reference_dtype != "auto" and (not _full(c) or c.learner.loss.beta == 0)),
    ),
)  # fmt: skip
TEACHER = (
    Rule(
        "model.teacher:", "needs learner.loss.beta above 0, the weight of what the teacher says",
        "set it, for example beta=1 with learner.algorithm=distill, or leave model.teacher out",
        ("learner.loss.beta",),
        lambda c: c.model.teacher is not None and c.learner.loss.beta == 0,
    ),
    Rule(
        "model.teacher:", "takes the place of a reference: it does not go with model.reference, reference_dtype or "
        "data.teacher", "leave out what is not meant",
        ("model.reference", "model.reference_dtype", "data.teacher.prompt", "data.teacher.system"),
        lambda c: c.model.teacher is not None
        and (c.model.reference is not None or c.model.reference_dtype != "auto" or c.data.teacher.privileged),
    ),
    Rule(
        "model.teacher:", "does not go with learner.algorithm=ppo, nor with env.use, whose trajectories it is not "
        "asked about", "leave one of them out", ("learner.algorithm", "env.use"),
        lambda c: c.model.teacher is not None and (_ppo(c) or c.env.use is not None),
    ),
    Rule(
        "model.teacher:", "needs rollout.temperature=1, the one of which vLLM tells a prompt's logprobs",
        "set it, or leave model.teacher out", ("rollout.temperature",),
        lambda c: c.model.teacher is not None and c.rollout.temperature != 1,
    ),
    Rule(
        "cluster.gpus.teacher, cluster.cpus.teacher:", "are of the process of model.teacher",
        "set it, or leave them out", ("model.teacher",),
        lambda c: c.model.teacher is None
        and (c.cluster.gpus.teacher, c.cluster.cpus.teacher) != (GpuConfig().teacher, CpuConfig().teacher),
    ),
    Rule(
        "learner.loss.teacher_top:", "is of the likeliest tokens of model.teacher: a teacher on the policy's base is "
        "asked for the sampled token alone", "set model.teacher, or teacher_top=0",
        ("learner.loss.teacher_top", "model.teacher"),
        lambda c: c.learner.loss.teacher_top > 0 and c.model.teacher is None,
    ),
)  # fmt: skip
FULL = (
    Rule(
        "learner.mode: full", "has no adapter, which learner.lora, learner.push=merged, learner.reduce=exact and "
        "model.adapter are about", "leave one of them out",
        ("learner.push", "learner.reduce", "model.adapter", "learner.lora.rank"),
        lambda c: _full(c)
        and (
            c.learner.lora != LoraConfig()
            or c.learner.push == "merged"
            or c.learner.reduce == "exact"
            or c.model.adapter is not None
        ),
    ),
    Rule(
        "learner.mode: full", "needs model.base=none and model.dtype=bfloat16 or float32: 4 bits cannot be trained, "
        "and gradients in float16 underflow", "set these, or learner.mode=lora", ("model.base", "model.dtype"),
        lambda c: _full(c) and (c.model.base == "nf4" or c.model.dtype == "float16"),
    ),
    Rule(
        "learner.mode: full", "needs learner.algorithm=grpo, no rewards that use: adapter:<folder>, and no "
        "memory.layout=shared: they need a frozen base, and one that is trained is another one after each step",
        "set learner.mode=lora, or leave them out", ("learner.algorithm", "memory.layout"),
        lambda c: _full(c) and (_ppo(c) or bool(adapters_of(c.rewards)) or c.arrangement.one_base),
    ),
)  # fmt: skip
LEARNER = (
    Rule(
        "learner.optimizer.kind: adamw_rounded",
        "is for bfloat16 weights without float32 masters: an adapter's are few, and float32 weights are their own",
        "set adamw, or learner.mode=full with model.dtype=bfloat16", ("learner.mode", "model.dtype"),
        lambda c: c.learner.optimizer.kind == "adamw_rounded" and (not _full(c) or c.model.dtype != "bfloat16"),
    ),
    Rule(
        "learner.optimizer.kind, learner.checkpointing:",
        "paged_adamw_8bit needs CUDA's unified memory, and offloaded a card from which something is moved",
        "set adamw_8bit and full, or cluster.gpus.learner=1",
        ("learner.optimizer.kind", "learner.checkpointing", "cluster.gpus.learner"),
        lambda c: (c.learner.optimizer.kind == "paged_adamw_8bit" or c.learner.offloads)
        and c.cluster.gpus.learner == 0,
    ),
    Rule(
        "learner.updates_per_batch:", "must be at most learner.groups_per_step: each update takes at least one group",
        "lower it, or raise the other", ("learner.updates_per_batch", "learner.groups_per_step"),
        lambda c: c.learner.updates_per_batch > c.learner.groups_per_step,
    ),
    Rule(
        "learner.updates_per_batch:",
        f"above 1 needs learner.loss.ratio={CLIPPED}, which holds the policy near the one that its batch began with",
        "set that, or 1", ("learner.updates_per_batch", "learner.loss.ratio"),
        lambda c: c.learner.updates_per_batch > 1 and not c.learner.loss.several_updates,
    ),
    Rule(
        "learner.loss.bounds: cap",
        f"with ratio={CLIPPED} bounds how far the batch's first policy may be from the sampler, which only "
        "learner.updates_per_batch above 1 looks at", "leave it out",
        ("learner.loss.bounds", "learner.updates_per_batch"),
        lambda c: "cap" in c.learner.loss.bounds and c.learner.loss.several_updates
        and c.learner.updates_per_batch == 1,
    ),
    Rule(
        "learner.loss.bounds: epsilon",
        "must be given with ratio=gspo unless model.dtype=float32: its paper's 3e-4 and 4e-4 lie within the rounding "
        "noise between sampler and learner", "give for example [0.01, 0.01]", ("model.dtype",),
        lambda c: c.learner.loss.ratio == "gspo" and "epsilon" not in c.learner.loss.bounds
        and c.model.dtype != "float32",
    ),
    Rule(
        "rollout.dynamic_sampling: true", "does not go with learner.algorithm=ppo, for which groups whose rewards are "
        "all equal teach, too, nor with rewards that use: adapter:<folder>, since it looks at rewards before the "
        "learner has scored", "set it to false, or leave these out", ("learner.algorithm",),
        lambda c: c.rollout.dynamic_sampling and (_ppo(c) or bool(adapters_of(c.rewards))),
    ),
    Rule(
        "learner.value, learner.loss.advantage:", "are one of learner.algorithm=ppo, whose value model takes the place "
        "of the group's mean, and one of grpo, which has no value model", "leave out what is of the other",
        ("learner.algorithm", "learner.loss.advantage"),
        lambda c: c.learner.loss.advantage != LossConfig().advantage if _ppo(c) else c.learner.value != ValueConfig(),
    ),
    Rule(
        "learner.algorithm: distill", "needs a teacher, model.reference, an adapter of the same base (with "
        "learner.mode=full a model), model.teacher, a larger model, or data.teacher, another prompt; and "
        "learner.loss.beta above 0, its weight",
        "set one of these, and for example beta=1",
        ("learner.algorithm", "model.reference", "model.teacher", "data.teacher.prompt", "learner.loss.beta"),
        # with one of these beta is asked for in any case
        lambda c: _distills(c) and c.model.reference is None and c.model.teacher is None
        and not c.data.teacher.privileged,
    ),
    Rule(
        "learner.algorithm: distill", "learns from the teacher alone: it does not go with learner.loss.ratio, bounds, "
        "advantage or top_entropy, rollout.dynamic_sampling, nor rewards that use: "
        "adapter:<folder>", "leave them out, or set grpo, where beta weighs the same teacher beside the rewards",
        ("learner.algorithm",),
        lambda c: _distills(c) and _asks_for_objective(c),
    ),
    Rule(
        "learner.value.warmup:", "must be below the run's steps, else the policy never learns",
        "lower it, or raise steps", ("steps",),
        lambda c: c.num_steps is not None and c.learner.value.warmup >= c.num_steps,
    ),
    Rule(
        "rollout.num_generations:",
        "must be at least 2 with learner.algorithm=grpo, which compares the completions of a group",
        "raise it, or set learner.algorithm=ppo", ("rollout.num_generations", "learner.algorithm"),
        lambda c: c.learner.algorithm == "grpo" and c.rollout.num_generations < 2,
    ),
)  # fmt: skip
HARDWARE = (
    Rule(
        "memory.device:", "does not go with one role on a GPU and one on a CPU, which share no memory",
        "set memory.device=null, and rollout.kv_cache instead", GPUS,
        lambda c: c.memory.device is not None and (c.cluster.gpus.generator > 0) != (c.cluster.gpus.learner > 0),
    ),
    Rule(
        "cluster.tensor_parallel:", "must be the number of cards of a generator, which has a process for each",
        "leave it out, or set cluster.gpus.generator to it", ("cluster.tensor_parallel", "cluster.gpus.generator"),
        lambda c: c.cluster.gpus.generator > 0 and c.cluster.shards != max(1, c.cluster.gpus.generator),
    ),
    Rule(
        "cluster.learners:",
        "above 1 needs memory.layout=sharded where a whole model is trained: else each rank has all of it, and all of "
        "its optimizer", "set that, or learner.mode=lora, or cluster.learners=1", ("cluster.learners", "memory.layout"),
        lambda c: c.cluster.learners > 1 and _full(c) and not (c.arrangement.in_shards or c.arrangement.one_learner),
    ),
    Rule(
        "cluster.learners:", "above 1 needs a card or none for each rank: NCCL takes no two on one card",
        "set cluster.gpus.learner=1, or cluster.learners=1", ("cluster.learners", "cluster.gpus.learner"),
        lambda c: c.cluster.learners > 1 and 0 < c.cluster.gpus.learner < 1 and not c.arrangement.one_learner,
    ),
)  # fmt: skip

RULES = (
    *REWARDS, *DATA, *ENV, *MODEL, *TEACHER, *FULL, *LEARNER, *HARDWARE,
    *(rule for one in ARRANGEMENTS.values() for rule in one.rules),
)  # fmt: skip


class RunConfig(Settings):
    """The settings of one run, checked against each other."""

    @model_validator(mode="after")
    def _reward_names(self, info: ValidationInfo) -> RunConfig:
        if _each_alone(info):
            return self
        taken = TAKEN & set(resolved_names(self.rewards))
        if taken:
            raise ValueError(f"rewards: a metric is named so already; set rewards.<i>.name (got {', '.join(taken)})")
        return self

    @model_validator(mode="after")
    def _settings_go_together(self, info: ValidationInfo) -> RunConfig:
        if _each_alone(info):
            return self
        if broken := broken_rules(self):
            raise ValueError("\n".join(broken))
        return self


def _each_alone(info: ValidationInfo) -> bool:
    """Whether rules between settings are not checked, since wrong settings were left out (learner.config.load)."""
    return isinstance(info.context, dict) and info.context.get("rules") is False


def roles(config: Settings) -> list[Role]:
    """The processes of a run: its generators, the processes that only score, the teacher, then the learner or its
    ranks."""
    return [*generator_roles(config), *reward_roles(config), *teacher_roles(config), *learner_roles(config)]


def generator_roles(config: Settings) -> list[Role]:
    """The generators of a run."""
    cpus, gpus = config.cluster.cpus.generator, config.cluster.gpus.generator
    return [Role(f"generator-{rank}", cpus, gpus) for rank in range(config.rollout.workers)]


def reward_roles(config: Settings) -> list[Role]:
    """The processes that do nothing but score; none where the reward processes belong to the generators."""
    asked = config.cluster.rewards
    return [Role(f"rewards-{i}", asked.cpus, asked.gpus, node=asked.node) for i in range(asked.processes)]


def teacher_roles(config: Settings) -> list[Role]:
    """The process of model.teacher; none without one."""
    asked = config.cluster
    return [] if config.model.teacher is None else [Role("teacher-0", asked.cpus.teacher, asked.gpus.teacher)]


def learner_roles(config: Settings) -> list[Role]:
    """The learner or its ranks, to be placed near each other, since ranks exchange gradients in every step."""
    cpus, gpus, count = config.cluster.cpus.learner, config.cluster.gpus.learner, config.cluster.learners
    return [Role("learner" if count == 1 else f"learner-{rank}", cpus, gpus, packed=True) for rank in range(count)]
