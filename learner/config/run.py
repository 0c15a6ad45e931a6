"""RunConfig: settings that go together, and the processes that they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pydantic import ValidationInfo, model_validator

from cluster.config import RewardProcessConfig
from cluster.placement import Role
from learner.algo.surrogates import SURROGATES, LossConfig
from learner.config.settings import EarlyStopConfig, LoraConfig, Settings, ValueConfig
from rewards.config import TAKEN, adapters_of, functions_of, resolved_names
from rollout.config import OWN, DataConfig
from rollout.data.hub import is_hub_name, split
from rollout.env.config import TURN_TIMEOUT_S, EnvConfig

# One rule between settings: what it says, and when it is broken.


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting that needs others, or does not go with them."""

    setting: str  # as one writes it
    rule: str  # and why
    mend: str  # the next step
    got: tuple[str, ...]  # the keys whose values decide
    broken: Callable[[Settings], bool]

    def sentence(self, config: Settings) -> str:
        """Field, rule, next step, values."""
        values = ", ".join(f"{key}={_written(config, key)}" for key in self.got)
        return f"{self.setting} {self.rule}; {self.mend} (got {values})"


def _written(config: Settings, key: str) -> str:
    """The value of a dotted key, as it is written in a file."""
    value: Any = reduce(getattr, key.split("."), config)
    return value if isinstance(value, str) else json.dumps(value, default=str)


# Which settings go with several ranks of the learner, and with exact sums.

SEVERAL = "cluster.learners:"


def _several(needs: str, mend: str, got: str, broken: Callable[[Settings], bool]) -> Rule:
    return Rule(
        SEVERAL, f"above 1 needs {needs}", f"{mend}, or cluster.learners=1", ("cluster.learners", got),
        lambda c: c.cluster.learners > 1 and broken(c),
    )  # fmt: skip


def _sharded(
    needs: str, mend: str, got: str, broken: Callable[[Settings], bool], instead: str = "memory.base=own"
) -> Rule:
    return Rule(
        "memory.base: sharded", f"needs {needs}", f"{mend}, or {instead}", (got,),
        lambda c: c.memory.base == "sharded" and broken(c),
    )  # fmt: skip


ONE = "cluster.learners=1 with memory.base=own"


RANKS = (
    _several(
        "memory.base=sharded where a whole model is trained: else each rank has all of it, and all of its optimizer",
        "set that, or learner.mode=lora", "memory.base",
        lambda c: c.learner.mode == "full" and c.memory.base == "own",
    ),
    _several(
        "a card or none for each rank: NCCL takes no two on one card", "set cluster.gpus.learner=1",
        "cluster.gpus.learner", lambda c: 0 < c.cluster.gpus.learner < 1 and c.memory.layout != "alternating",
    ),
    _several(
        "a layout in which each rank has its card to itself", "set memory.layout=auto", "memory.layout",
        lambda c: c.memory.layout == "alternating",
    ),
    _several(
        "memory.base=own: the base of a generator is mapped by one learner", "set that", "memory.base",
        lambda c: c.memory.base == "shared",
    ),
    _sharded(
        "cluster.learners above 1, over which it is divided", "set cluster.learners=2", "cluster.learners",
        lambda c: c.cluster.learners == 1,
    ),
    _sharded(
        "model.base=none: the blocks of 4 bits are not divided", "set that", "model.base",
        lambda c: c.model.base == "nf4",
    ),
    _sharded(
        "learner.push=adapter: no rank has the weights that an adapter would be merged with", "set that",
        "learner.push", lambda c: c.learner.push == "merged",
    ),
    _sharded(
        "model.reference_dtype=auto: a reference in 8 bits is not divided", "set that", "model.reference_dtype",
        lambda c: c.learner.mode == "full" and c.model.reference_dtype == "int8", ONE,
    ),
    _sharded(
        "learner.optimizer.kind=adamw or adamw_8bit where a whole model is trained: each rank's rows are float32 "
        "masters", "set one of them", "learner.optimizer.kind",
        lambda c: c.learner.mode == "full" and c.learner.optimizer.kind not in ("adamw", "adamw_8bit"), ONE,
    ),
    Rule(
        "learner.reduce: exact", "needs learner.mode=lora: it takes 16 bytes for each weight that is trained",
        "set that, or reduce=fast", ("learner.mode",),
        lambda c: c.learner.reduce == "exact" and c.learner.mode == "full",
    ),
)  # fmt: skip


# Which settings go with a generator whose model is spread over several processes.

SPREAD = ("cluster.tensor_parallel", "cluster.gpus.generator")


def _spread(needs: str, mend: str, got: str, broken: Callable[[Settings], bool]) -> Rule:
    return Rule(
        "cluster.tensor_parallel:", f"above 1 (or cluster.gpus.generator) needs {needs}",
        f"{mend}, or take one card for each generator", (*SPREAD, got),
        lambda c: c.cluster.shards > 1 and broken(c),
    )  # fmt: skip


SHARDS = (
    Rule(
        "cluster.tensor_parallel:", "must be the number of cards of a generator, which has a process for each",
        "leave it out, or set cluster.gpus.generator to it", SPREAD,
        lambda c: c.cluster.gpus.generator > 0 and c.cluster.shards != max(1, c.cluster.gpus.generator),
    ),
    _spread(
        "model.base=none: each process would quantise its part by itself, and in other blocks than the learner",
        "set that", "model.base", lambda c: c.model.base == "nf4",
    ),
    _spread(
        "memory.base=own: the learner maps the base of one process", "set that", "memory.base",
        lambda c: c.memory.base == "shared",
    ),
)  # fmt: skip


# Which settings go together with an environment's.

WITH_TOOLS = ("tools", "trl_environment")


def _turn_seconds(config: Settings) -> float:
    """That the tool calls of a turn may take together; what is no number is refused where the environment is made."""
    given = config.env.args.get("turn_timeout_s", TURN_TIMEOUT_S)
    return float(given) if isinstance(given, int | float) else 0.0


ENV = (
    Rule(
        "data.path: env:own", "needs an environment, whose problems these are", "set env.use, or give a file",
        ("env.use",), lambda c: OWN in (c.data.path, c.data.eval.path) and c.env.use is None,
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
        "data.prompt: null", "needs an environment, which says what the model is asked",
        "set env.use, or name a column", ("env.use",),
        lambda c: c.data.prompt is None and c.env.use is None,
    ),
    Rule(
        "env:", "its settings need env.use, without which there is no environment", "set env.use, or leave them out",
        ("env.use",),
        lambda c: c.env.use is None and c.env != EnvConfig(),
    ),
    Rule(
        "rewards:", "must list at least one with env.use=tools, which answers calls and gives no rewards",
        "add for example {use: number}", ("env.use",),
        lambda c: c.env.use == "tools" and not c.rewards,
    ),
    Rule(
        "env.history: template",
        "may make several rows of a trajectory, for which neither PPO's values nor a reward model's score are made",
        "set append, or learner.algorithm=grpo and rewards without adapter:", ("learner.algorithm",),
        lambda c: c.env.history == "template"
        and (c.learner.algorithm == "ppo" or bool(adapters_of(c.rewards))),
    ),
    Rule(
        "env.timeout_s:",
        "must be below cluster.deadlines.group, past which the generator counts as hung that plays the trajectory",
        "lower it, or raise the deadline", ("cluster.deadlines.group",),
        lambda c: c.env.use is not None and c.env.timeout_s >= c.cluster.deadlines.group,
    ),
    Rule(
        "env.args.turn_timeout_s:",
        f"must be below env.step_timeout_s with use: {' or '.join(WITH_TOOLS)} ({TURN_TIMEOUT_S:g} if not given), else "
        "a trajectory whose calls take long ends without a reward", "lower it, or raise env.step_timeout_s",
        ("env.step_timeout_s",),
        lambda c: c.env.use in WITH_TOOLS and _turn_seconds(c) >= c.env.step_timeout_s,
    ),
)  # fmt: skip


# Which settings go together: one table, from which the errors and the table in docs/configuration.md are made.
#
# What one setting alone may be stands at its field; what needs a model, data or machine is asked later
# (learner.driver).


def broken_rules(config: Settings) -> list[str]:
    """A sentence for each rule that the configuration breaks."""
    return [rule.sentence(config) for rule in RULES if rule.broken(config)]


EVALUATED = (
    Rule(
        "checkpoint.best: true", "needs evaluations, which say what is best", "set data.eval.every, or leave it out",
        ("data.eval.every",), lambda c: c.checkpoint.best and c.data.eval.every == 0,
    ),
    Rule(
        "early_stop:", "needs evaluations, by which it goes", "set data.eval.every, or leave it out",
        ("data.eval.every",), lambda c: c.early_stop != EarlyStopConfig() and c.data.eval.every == 0,
    ),
)  # fmt: skip
SAMPLED = (
    Rule(
        "rollout.top_p, top_k, min_p, structured_outputs:",
        "need rollout.temperature=1: at another vLLM gives no logprobs of the whole distribution",
        "set temperature=1, or leave them out", ("rollout.temperature",),
        lambda c: c.rollout.truncates and c.rollout.temperature != 1,
    ),
    Rule(
        "rollout.structured_outputs:", "does not go with an environment: a turn that calls a tool has another form",
        "leave one of them out", ("env.use",),
        lambda c: bool(c.rollout.structured_outputs.form) and c.env.use is not None,
    ),
)  # fmt: skip
TEMPLATE = (
    Rule(
        "data.chat_template: none", "does not go with data.chat_template_kwargs: there is nothing that reads them",
        "leave one of them out", ("data.chat_template_kwargs",),
        lambda c: c.data.chat_template == "none" and bool(c.data.chat_template_kwargs),
    ),
    Rule(
        "data.chat_template: none", "does not go with an environment, whose answers the chat template writes",
        "leave one of them out", ("env.use",),
        lambda c: c.data.chat_template == "none" and c.env.use is not None,
    ),
)  # fmt: skip


def _takes_turns(config: Settings) -> bool:
    return config.memory.layout == "alternating"


def _not_shared(needs: str, mend: str, got: tuple[str, ...], broken: Callable[[Settings], bool]) -> Rule:
    return Rule(
        "memory.base: shared", f"needs {needs}", f"{mend}, or memory.base=own", got,
        lambda c: c.memory.base == "shared" and broken(c),
    )  # fmt: skip


GPUS = ("cluster.gpus.generator", "cluster.gpus.learner")
CLIPPED = ", ".join(name for name, row in SURROGATES.items() if row.several_updates)

REWARDS = (
    Rule(
        "rewards:", "must list at least one reward function, unless an environment gives the rewards",
        "add for example {use: number}, or set env.use", ("env.use",),
        lambda c: not c.rewards and c.env.use is None,
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
LENGTH = (
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
        "learner.push: merged",
        "needs a base in 16 or 32 bits: merging into one of 4 bits would change the policy",
        "set push=adapter, or model.base=none", ("model.base",),
        lambda c: c.learner.push == "merged" and c.model.base == "nf4",
    ),
    Rule(
        "model.reference:", "without learner.loss.beta above 0 nothing is held close to it",
        "set learner.loss.beta, or leave it out", ("learner.loss.beta",),
        lambda c: c.model.reference is not None and c.learner.loss.beta == 0,
    ),
    Rule(
        "model.reference_dtype: int8",
        "is for the reference of a model that is trained as a whole, with learner.mode=full and learner.loss.beta "
        "above 0", "leave it out", ("learner.mode", "learner.loss.beta"),
        lambda c: c.model.reference_dtype != "auto" and (c.learner.mode != "full" or c.learner.loss.beta == 0),
    ),
)  # fmt: skip


def _not_with_full(other: str, why: str, is_set: Callable[[Settings], bool]) -> Rule:
    key = other.partition("=")[0]
    return Rule(
        "learner.mode: full", f"does not go with {other}: {why}", "leave one of them out", ("learner.mode", key),
        lambda c: c.learner.mode == "full" and is_set(c),
    )  # fmt: skip


FULL = (
    _not_with_full("learner.lora", "there is no adapter", lambda c: c.learner.lora != LoraConfig()),
    _not_with_full("learner.push=merged", "there is no adapter to merge", lambda c: c.learner.push == "merged"),
    _not_with_full("model.adapter", "there is no adapter to start from", lambda c: c.model.adapter is not None),
    _not_with_full("model.base=nf4", "4 bits cannot be trained", lambda c: c.model.base == "nf4"),
    _not_with_full("model.dtype=float16", "its gradients underflow", lambda c: c.model.dtype == "float16"),
)

MODELS = "rewards: use: adapter:<folder>"
MODEL_REWARDS = (
    Rule(
        MODELS, "needs learner.mode=lora: a reward model shares the frozen base, and a base that is trained is another "
        "one after each step", "set that, or use: sequence_classifier", ("learner.mode",),
        lambda c: c.learner.mode == "full" and bool(adapters_of(c.rewards)),
    ),
    Rule(
        MODELS, "does not go with rollout.dynamic_sampling, which looks at rewards before the learner has scored",
        "set dynamic_sampling=false, or use: sequence_classifier", ("rollout.dynamic_sampling",),
        lambda c: c.rollout.dynamic_sampling and bool(adapters_of(c.rewards)),
    ),
    Rule(
        "rewards:", "must list a function for evaluation, which reward models do not take part in",
        "add one, with weight 0 if it is not to be trained on, or set data.eval.every=0", ("data.eval.every",),
        lambda c: c.data.eval.every > 0 and bool(c.rewards) and c.env.use is None and not functions_of(c.rewards),
    ),
)  # fmt: skip
LEARNER = (
    Rule(
        "learner.optimizer.kind: adamw_rounded",
        "is for bfloat16 weights without float32 masters: an adapter's are few, and float32 weights are their own",
        "set adamw, or learner.mode=full with model.dtype=bfloat16", ("learner.mode", "model.dtype"),
        lambda c: c.learner.optimizer.kind == "adamw_rounded"
        and (c.learner.mode != "full" or c.model.dtype != "bfloat16"),
    ),
    Rule(
        "learner.optimizer.kind: paged_adamw_8bit", "needs CUDA's unified memory",
        "set adamw_8bit, or cluster.gpus.learner=1", ("cluster.gpus.learner",),
        lambda c: c.learner.optimizer.kind == "paged_adamw_8bit" and c.cluster.gpus.learner == 0,
    ),
    Rule(
        "learner.offload_boundaries: true",
        "needs learner.checkpointing=full on a GPU, else there is nothing to move", "set both, or leave it out",
        ("learner.checkpointing", "cluster.gpus.learner"),
        lambda c: c.learner.offload_boundaries
        and (c.learner.checkpointing != "full" or c.cluster.gpus.learner == 0),
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
        "learner.loss.bounds.cap:",
        f"with ratio={CLIPPED} bounds how far the batch's first policy may be from the sampler, which only "
        "learner.updates_per_batch above 1 looks at", "leave it out",
        ("learner.loss.bounds", "learner.updates_per_batch"),
        lambda c: "cap" in c.learner.loss.bounds and c.learner.loss.several_updates
        and c.learner.updates_per_batch == 1,
    ),
    Rule(
        "learner.loss.bounds.epsilon:",
        "must be given with ratio=gspo unless model.dtype=float32: its paper's 3e-4 and 4e-4 lie within the rounding "
        "noise between sampler and learner", "give for example [0.01, 0.01]", ("model.dtype",),
        lambda c: c.learner.loss.ratio == "gspo" and "epsilon" not in c.learner.loss.bounds
        and c.model.dtype != "float32",
    ),
)  # fmt: skip


def _not_with_ppo(setting: str, why: str, got: str, is_set: Callable[[Settings], bool]) -> Rule:
    return Rule(
        setting, f"does not go with learner.algorithm=ppo: {why}", "leave one of them out", ("learner.algorithm", got),
        lambda c: c.learner.algorithm == "ppo" and is_set(c),
    )  # fmt: skip


PPO = (
    _not_with_ppo(
        "learner.mode: full", "the value model is an adapter on a base that stays as it is", "learner.mode",
        lambda c: c.learner.mode == "full",
    ),
    _not_with_ppo(
        "learner.loss.advantage:", "a value model takes the place of the group's mean", "learner.loss.advantage",
        lambda c: c.learner.loss.advantage != LossConfig().advantage,
    ),
    _not_with_ppo(
        "rollout.dynamic_sampling: true", "groups whose rewards are all equal teach, too", "rollout.dynamic_sampling",
        lambda c: c.rollout.dynamic_sampling,
    ),
    Rule(
        "learner.value:", "is of learner.algorithm=ppo, and grpo has no value model", "set that, or leave it out",
        ("learner.algorithm",), lambda c: c.learner.algorithm == "grpo" and c.learner.value != ValueConfig(),
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
MEMORY = (
    Rule(
        "memory.device:", "does not go with one role on a GPU and one on a CPU, which share no memory",
        "set memory.device=null, and rollout.kv_cache and memory.learner instead", GPUS,
        lambda c: c.memory.device is not None and (c.cluster.gpus.generator > 0) != (c.cluster.gpus.learner > 0),
    ),
    Rule(
        "memory.layout: separate", "needs a card for each role",
        "set cluster.gpus.generator=1 and cluster.gpus.learner=1", GPUS,
        lambda c: c.memory.layout == "separate" and not c.cluster.gpus.own_cards,
    ),
    Rule(
        "memory.layout: slices", "needs both roles on one card",
        "set cluster.gpus.generator + cluster.gpus.learner to at most 1", GPUS,
        lambda c: c.memory.layout == "slices" and c.cluster.gpus.own_cards,
    ),
    Rule(
        "memory.layout: alternating", "needs both roles on one CUDA card",
        "set cluster.gpus.generator=0.5 and cluster.gpus.learner=0.5", GPUS,
        lambda c: _takes_turns(c) and not c.cluster.gpus.one_card and c.cluster.learners == 1,
    ),
    Rule(
        "memory.layout: alternating", "needs max_staleness=0: a generator cannot generate while it sleeps",
        "set that, or memory.layout=slices", ("max_staleness",),
        lambda c: _takes_turns(c) and c.max_staleness > 0,
    ),
)  # fmt: skip
SHARED = (
    _not_shared(
        "learner.mode=lora: a base that is trained is not the one that the generator serves", "set that",
        ("learner.mode",), lambda c: c.learner.mode == "full",
    ),
    _not_shared(
        "learner.push=adapter: whole weights would be written into the base that both roles compute with", "set that",
        ("learner.push",), lambda c: c.learner.push == "merged",
    ),
    _not_shared(
        "rollout.workers=1: the learner maps the base of one generator, and a second one has its own", "set that",
        ("rollout.workers",), lambda c: c.rollout.workers > 1,
    ),
    _not_shared(
        "both roles on one card, or both on a CPU", "set cluster.gpus.generator=0.5 and cluster.gpus.learner=0.5", GPUS,
        lambda c: not c.cluster.gpus.one_card and max(c.cluster.gpus.generator, c.cluster.gpus.learner) > 0,
    ),
    _not_shared(
        "a generator that stays awake: the memory of one that sleeps cannot be mapped", "set memory.layout=slices",
        ("memory.layout",), _takes_turns,
    ),
)  # fmt: skip

RULES = (
    *REWARDS, *MODEL_REWARDS, *TEMPLATE, *SAMPLED, *EVALUATED, *ENV, *LENGTH, *MODEL, *FULL, *LEARNER, *PPO, *MEMORY,
    *SHARED, *RANKS, *SHARDS,
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
    """Whether rules between settings are passed over, since some settings were left out (learner.config.load)."""
    return isinstance(info.context, dict) and info.context.get("rules") is False


def roles(config: Settings) -> list[Role]:
    """The processes of a run: its generators, those that only score, then the learner or its ranks."""
    return [*generator_roles(config), *reward_roles(config), *learner_roles(config)]


def generator_roles(config: Settings) -> list[Role]:
    """Those that sample."""
    cpus, gpus = config.cluster.cpus.generator, config.cluster.gpus.generator
    return [Role(f"generator-{rank}", cpus, gpus) for rank in range(config.rollout.workers)]


def reward_roles(config: Settings) -> list[Role]:
    """Those that do nothing but score; none where that is done beside the generators."""
    asked = config.cluster.rewards
    return [Role(f"rewards-{i}", asked.cpus, asked.gpus, node=asked.node) for i in range(asked.processes)]


def learner_roles(config: Settings) -> list[Role]:
    """Those that learn; near each other, since ranks exchange gradients in every step."""
    cpus, gpus, count = config.cluster.cpus.learner, config.cluster.gpus.learner, config.cluster.learners
    return [Role("learner" if count == 1 else f"learner-{rank}", cpus, gpus, packed=True) for rank in range(count)]
