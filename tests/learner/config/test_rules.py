"""Each rule of learner.config.run: what breaks it, what is said, and what next to it is allowed."""

import re

import pytest

from learner.config.load import ConfigError, load_config
from learner.config.run import RULES

NEEDED = ["model.path=m", "data.path=d", "rewards=[{use: format}]"]
FULL, CLIP = "learner.mode=full", "learner.loss.ratio=clip"
GENERATOR_CARD, LEARNER_CARD = "cluster.gpus.generator=1", "cluster.gpus.learner=1"
SHARED = ("cluster.gpus.generator=0.5", "cluster.gpus.learner=0.5")
TURNS = ("memory.layout=alternating", *SHARED)
ONE_BASE, DIVIDED = "memory.base=shared", "memory.base=sharded"
PAGED, ROUNDED = "learner.optimizer.kind=paged_adamw_8bit", "learner.optimizer.kind=adamw_rounded"
PPO = "learner.algorithm=ppo"
SEVERAL = ("cluster.learners=2",)
SPREAD = "cluster.tensor_parallel=2"
OFFLOAD = ("learner.offload_boundaries=true", "learner.checkpointing=full")

MODEL = "rewards=[{use: 'adapter:x'}, {use: format, weight: 0}]"

BROKEN = [  # what breaks one rule, and the sentence's parts that name it
    (["rewards=[]"], "rewards: must list at least one reward function.*got env.use=null"),
    (["rewards=[]", "env.use=tools"], "rewards: must list at least one with env.use=tools.*got env.use=tools"),
    (
        ["env.use=tools", "env.step_timeout_s=20"],
        "env.args.turn_timeout_s: must be below env.step_timeout_s .*got env.step_timeout_s=20.0",
    ),
    (
        ["env.use=trl_environment", "env.args.turn_timeout_s=31"],
        "env.args.turn_timeout_s: must be below .*got env.step_timeout_s=30.0",
    ),
    (["env.max_turns=3"], "env: its settings need env.use"),
    (["cluster.rewards.gpus=1"], "cluster.rewards: needs processes: .*got cluster.rewards.processes=0"),
    (
        ["cluster.rewards.processes=1", "rewards=[{use: 'adapter:x'}]", "data.eval.every=0"],
        "cluster.rewards.processes: needs reward functions.*got cluster.rewards.processes=1",
    ),
    (
        ["env.use=tools", "env.history=template", "learner.algorithm=ppo"],
        "env.history: template .*got learner.algorithm",
    ),
    (["env.use=tools", "env.history=template", "rewards=[{use: 'adapter:x'}]"], "env.history: template may make"),
    (
        ["env.use=tools", "env.timeout_s=900"],
        "env.timeout_s: must be below cluster.deadlines.group.*got cluster.deadlines.group=900.0",
    ),
    (
        ["data.chat_template=none", "data.chat_template_kwargs={a: 1}"],
        "data.chat_template: none does not go with data.",
    ),
    (
        ["data.chat_template=none", "env.use=tools"],
        "data.chat_template: none does not go with an env.*got env.use=tools",
    ),
    (["data.path=env:own"], "data.path: env:own needs an environment.*got env.use=null"),
    (
        ["data.path=env:own", "env.use=a.py:B", "data.prompt=text"],
        "data.path: env:own has no columns.*got data.prompt=te",
    ),
    (
        ["data.path=env:own", "env.use=a.py:B", "data.eval.path=held.jsonl"],
        "data.eval.path: must be the env.*held.j",
    ),
    (["data.prompt=null"], "data.prompt: null needs an environment.*got env.use=null"),
    (["rollout.structured_outputs.regex=a+", "env.use=tools"], "rollout.structured_outputs: does not go with .*"),
    (
        ["rollout.top_k=5", "rollout.temperature=0.7"],
        "rollout.top_p, top_k, min_p, structured_outputs: need .*got rollout.temperature=0.7",
    ),
    (["checkpoint.best=true", "data.eval.every=0"], "checkpoint.best: true needs evaluations.*got data.eval.every=0"),
    (["early_stop.patience=2", "data.eval.every=0"], "early_stop: needs evaluations.*got data.eval.every=0"),
    (["steps=3", "epochs=1"], "steps: does not go with epochs.*got steps=3, epochs=1.0"),
    (["rollout.in_flight=continue"], "rollout.in_flight: continue needs.*got max_staleness=0"),
    (["model.base=nf4", "model.dtype=float32"], "model.base: nf4 needs a type of 16 bits.*got model.dtype=float32"),
    (["learner.push=merged", "model.base=nf4"], "learner.push: merged needs.*got model.base=nf4"),
    (["model.revision=v1", "model.path=/m"], "model.revision: needs a hub name .*got model.revision=v1, model.path=/m"),
    (["model.path=org/m@v1"], "model.path: must be a name without its revision.*got model.path=org/m@v1"),
    (["model.reference=x"], "model.reference: without learner.loss.beta"),
    (["model.reference_dtype=int8", FULL], "model.reference_dtype: int8.*got learner.mode=full, learner.loss.beta=0"),
    (["model.reference_dtype=int8", "learner.loss.beta=0.1"], "model.reference_dtype: int8.*learner.mode=lora"),
    ([FULL, "learner.lora.rank=8"], "learner.mode: full does not go with learner.lora:"),
    ([FULL, "learner.push=merged"], "learner.mode: full does not go with learner.push=merged"),
    ([FULL, "model.adapter=x"], "learner.mode: full does not go with model.adapter"),
    ([FULL, "model.base=nf4"], "learner.mode: full does not go with model.base=nf4"),
    ([FULL, "model.dtype=float16"], "learner.mode: full does not go with model.dtype=float16"),
    ([MODEL, FULL], "rewards: use: adapter:<folder> needs learner.mode=lora: .*got learner.mode=full"),
    ([MODEL, "rollout.dynamic_sampling=true"], "rewards: use: adapter:<folder> does not go with rollout.dynamic"),
    (["rewards=[{use: 'adapter:x'}]"], "rewards: must list a function for evaluation, .*got data.eval.every=20"),
    ([ROUNDED], "learner.optimizer.kind: adamw_rounded is for bfloat16.*got learner.mode=lora, model.dtype=bfloat16"),
    ([ROUNDED, FULL, "model.dtype=float32"], "learner.optimizer.kind: adamw_rounded is for.*got.*model.dtype=float32"),
    ([*SEVERAL, FULL], "cluster.learners: above 1 needs memory.base=sharded.*got cluster.learners=2, memory.base=own"),
    ([*SEVERAL, "cluster.gpus.learner=0.5"], "cluster.learners: above 1 needs a card or none.*got.*gpus.learner=0.5"),
    ([*SEVERAL, *TURNS], "cluster.learners: above 1 needs a layout in which .*got.*memory.layout=alternating"),
    ([*SEVERAL, ONE_BASE], "cluster.learners: above 1 needs memory.base=own.*got.*memory.base=shared"),
    ([DIVIDED], "memory.base: sharded needs cluster.learners above 1.*got cluster.learners=1"),
    ([*SEVERAL, DIVIDED, "model.base=nf4"], "memory.base: sharded needs model.base=none.*got model.base=nf4"),
    (
        [*SEVERAL, DIVIDED, FULL, "learner.loss.beta=0.1", "model.reference_dtype=int8"],
        "memory.base: sharded needs model.reference_dtype=auto.*=own .got model.reference_dtype=int8",
    ),
    ([*SEVERAL, DIVIDED, FULL, ROUNDED], "memory.base: sharded needs learner.optimizer.kind=adamw or.*got.*rounded"),
    ([*SEVERAL, DIVIDED, "learner.push=merged"], "memory.base: sharded needs learner.push=adapter.*got learner.push"),
    ([SPREAD, GENERATOR_CARD], "cluster.tensor_parallel: must be the number.*got.*parallel=2, .*gpus.generator=1.0"),
    ([SPREAD, "model.base=nf4"], "cluster.tensor_parallel: above 1 .* needs model.base=none: .*got.*model.base=nf4"),
    ([SPREAD, ONE_BASE], "cluster.tensor_parallel: above 1 .* needs memory.base=own.*got.*memory.base=shared"),
    (["learner.reduce=exact", FULL], "learner.reduce: exact needs learner.mode=lora.*got learner.mode=full"),
    ([PAGED], "learner.optimizer.kind: paged_adamw_8bit needs CUDA.*got cluster.gpus.learner=0"),
    ([*OFFLOAD], "learner.offload_boundaries: true needs.*checkpointing=full, cluster.gpus.learner=0"),
    ([OFFLOAD[0], LEARNER_CARD], "learner.offload_boundaries: true needs.*checkpointing=auto, cluster.gpus.learner=1"),
    (["learner.updates_per_batch=9", CLIP], "learner.updates_per_batch: must be at most.*batch=9.*step=8"),
    (["learner.updates_per_batch=2", "learner.loss.ratio=a.py:f"], "above 1 needs.*learner.loss.ratio=a.py:f"),
    (["learner.updates_per_batch=2"], "learner.updates_per_batch: above 1 needs.*got.*2, learner.loss.ratio=masked"),
    ([CLIP, "learner.loss.bounds.cap=2"], "learner.loss.bounds.cap: with ratio=clip.*got.*bounds=..cap.: 2.0."),
    (["learner.loss.ratio=gspo"], "learner.loss.bounds.epsilon: must be given.*model.dtype=bfloat16"),
    ([PPO, FULL], "learner.mode: full does not go with learner.algorithm=ppo.*got learner.algorithm=ppo, .*mode=full"),
    ([PPO, "learner.loss.advantage=group"], "learner.loss.advantage: does not go with .*ppo.*got.*advantage=group"),
    ([PPO, "rollout.dynamic_sampling=true"], "rollout.dynamic_sampling: true does not go with .*ppo"),
    (["learner.value.lam=0.9"], "learner.value: is of learner.algorithm=ppo.*got learner.algorithm=grpo"),
    ([PPO, "learner.value.warmup=5", "steps=5"], "learner.value.warmup: must be below the run's steps.*got steps=5"),
    (["rollout.num_generations=1"], "rollout.num_generations: must be at least 2 .*got rollout.num_generations=1"),
    (["memory.device=16GiB", GENERATOR_CARD], "memory.device: .*share no memory.*generator=1.0, .*learner=0.0"),
    (["memory.layout=separate", *SHARED], "memory.layout: separate needs a card for each.*generator=0.5"),
    (["memory.layout=slices", GENERATOR_CARD, LEARNER_CARD], "memory.layout: slices needs both.*learner=1.0"),
    (["memory.layout=alternating"], "memory.layout: alternating needs both roles on one CUDA card"),
    (["memory.layout=alternating", GENERATOR_CARD, LEARNER_CARD], "alternating needs both roles on one CUDA card"),
    ([*TURNS, "max_staleness=1"], "alternating needs max_staleness=0.*got max_staleness=1"),
    ([ONE_BASE, FULL], "memory.base: shared needs learner.mode=lora: .* or memory.base=own .*mode=full"),
    ([ONE_BASE, "learner.push=merged"], "memory.base: shared needs learner.push=adapter: whole weights.*push=merged"),
    ([ONE_BASE, "rollout.workers=2"], "memory.base: shared needs rollout.workers=1: .*got rollout.workers=2"),
    ([ONE_BASE, GENERATOR_CARD, LEARNER_CARD], "memory.base: shared needs both roles on one card, or both on a CPU"),
    ([ONE_BASE, GENERATOR_CARD], "memory.base: shared needs both roles on one card, .*generator=1.0, .*learner=0.0"),
    ([ONE_BASE, *TURNS], "memory.base: shared needs a generator that stays awake.*got memory.layout=alternating"),
]
ALLOWED = [
    [],
    ["rewards=[]", "env.use=number_guessing"],
    ["env.use=tools", "env.step_timeout_s=20", "env.args.turn_timeout_s=19"],
    ["env.use=tools", "env.concurrency=1", "env.timeout_s=899"],
    [PPO, "rollout.num_generations=1", "learner.value.warmup=3"],
    ["epochs=2"],
    ["rollout.in_flight=continue", "max_staleness=1"],
    ["model.base=nf4"],
    ["model.base=nf4", "model.dtype=float16", GENERATOR_CARD],
    [ONE_BASE, *SHARED, "model.base=nf4"],
    ["learner.push=merged", "max_staleness=2"],
    ["model.reference=x", "learner.loss.beta=0.1"],
    [FULL, "model.reference_dtype=int8", "learner.loss.beta=0.1", "learner.optimizer.kind=adamw_8bit"],
    [*SEVERAL, DIVIDED, FULL, "learner.loss.beta=0.1", "model.reference=x"],
    [MODEL],
    ["rewards=[{use: 'adapter:x'}]", "data.eval.every=0"],
    [PAGED, LEARNER_CARD],
    [ROUNDED, FULL],
    [*OFFLOAD, LEARNER_CARD],
    ["learner.updates_per_batch=8", CLIP, "learner.loss.bounds.cap=2"],
    ["learner.loss.ratio=gspo", "learner.loss.bounds.epsilon=[0.1, 0.1]"],
    ["learner.loss.ratio=gspo", "model.dtype=float32"],
    ["cluster.rewards.processes=2", "cluster.rewards.node=a", "cluster.rewards.cpus=2"],
    [*SEVERAL, LEARNER_CARD],
    [*SEVERAL, PPO, "learner.reduce=fast"],
    ["learner.reduce=exact"],
    ["memory.device=16GiB", "memory.layout=slices", *SHARED],
    ["memory.device=16GiB", "memory.layout=slices"],
    ["memory.layout=separate", GENERATOR_CARD, LEARNER_CARD],
    [*TURNS],
    [ONE_BASE],
    [ONE_BASE, *SHARED, "memory.layout=slices", "memory.device=24GiB", "max_staleness=1"],
]


def told(*overrides: str) -> list[str]:
    """The lines that refuse a configuration; none if it is taken."""
    try:
        load_config(None, [*NEEDED, *overrides])
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(("overrides", "pattern"), BROKEN)
def test_what_does_not_go_together_is_one_line(overrides: list[str], pattern: str) -> None:
    (line,) = told(*overrides)
    assert re.search(pattern, line), line


@pytest.mark.parametrize("overrides", ALLOWED)
def test_what_goes_together_is_taken(overrides: list[str]) -> None:
    assert told(*overrides) == []


def test_each_rule_is_broken_by_a_case_above() -> None:
    lines = [line for overrides, _ in BROKEN for line in told(*overrides)]
    assert [rule for rule in RULES if not any(line.startswith(f"{rule.setting} {rule.rule}") for line in lines)] == []


def test_all_are_told_at_once() -> None:
    assert len(told("steps=3", "epochs=1", "rollout.in_flight=continue", "model.reference=x")) == 3
