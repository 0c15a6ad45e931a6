"""Each rule of learner.config: what breaks it, what is said, and what next to it is allowed."""

import re

import pytest

from cluster.errors import WrongInput
from learner.config.load import load_config
from learner.config.run import RULES

NEEDED = ["model.path=m", "data.path=d", "rewards=[{use: format}]"]
FULL, CLIP = "learner.mode=full", "learner.loss.ratio=clip"
GENERATOR_CARD, LEARNER_CARD = "cluster.gpus.generator=1", "cluster.gpus.learner=1"
SHARED = ("cluster.gpus.generator=0.5", "cluster.gpus.learner=0.5")
TURNS = ("memory.layout=alternating", *SHARED)
ONE_BASE, DIVIDED = "memory.layout=shared", "memory.layout=sharded"
EXPERTS = "learner.lora.targets=[q_proj,experts]"
PAGED, ROUNDED = "learner.optimizer.kind=paged_adamw_8bit", "learner.optimizer.kind=adamw_rounded"
PPO, DISTILL = "learner.algorithm=ppo", "learner.algorithm=distill"
HINTED = "data.teacher.system=Think."
TAUGHT = [DISTILL, "model.reference=x", "learner.loss.beta=1"]
LARGER = ["model.teacher=x", "learner.loss.beta=1"]
SEVERAL = ("cluster.learners=2",)
SPREAD = "cluster.tensor_parallel=2"
OFFLOAD = "learner.checkpointing=offloaded"

MODEL = "rewards=[{use: 'adapter:x'}, {use: format, weight: 0}]"

BROKEN = [  # what breaks one rule, and the sentence's parts that name it
    (["rewards=[]"], "rewards: must list at least one reward function.*got env.use=null"),
    (["rewards=[{use: number, watch: true}]"], "rewards: must list at least one reward function that is trained on"),
    (["rewards=[]", "env.use=tools"], "rewards: must list at least one .* env.use=tools answers.*got env.use=tools"),
    (["rewards=[{use: 'adapter:x'}]"], "rewards: must list a function for evaluation, .*got data.eval.every=20"),
    (
        ["env.use=tools", "env.step_timeout_s=20"],
        "env.args.turn_timeout_s: must be below env.step_timeout_s .*got env.step_timeout_s=20.0",
    ),
    (
        ["env.use=trl_environment", "env.args.turn_timeout_s=31"],
        "env.args.turn_timeout_s: must be below .*got env.step_timeout_s=30.0",
    ),
    (["env.max_turns=3"], "env.use: must be given with .* other settings of env.*got env.use=null"),
    (["data.path=env:own"], "env.use: must be given with data.path=env:own.*got env.use=null, data.path=env:own"),
    (["data.prompt=null"], "env.use: must be given with .*data.prompt=null.*got env.use=null.*data.prompt=null"),
    (["rollout.structured_outputs.regex=a+", "env.use=tools"], "env.use: does not go with rollout.structured_outputs"),
    (["data.curriculum=own", "data.shuffle=false"], "data.curriculum: does not go with .*got data.shuffle=false, "),
    (["data.curriculum=runs/x", *TAUGHT], "data.curriculum: does not go with .*learner.algorithm=distill"),
    (["data.chat_template=none", "env.use=tools"], "env.use: does not go with .*got env.use=tools, .*template=none"),
    (
        ["rollout.routing_replay=true", "rollout.structured_outputs.regex=a+"],
        "rollout.routing_replay: does not go with rollout.structured_outputs.*got rollout.routing_replay=true",
    ),
    (["rollout.routing_replay=true", SPREAD], "rollout.routing_replay: .*got .*cluster.tensor_parallel=2"),
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
    (["env.use=program", "env.history=template"], "env.use: program may make several rows .*env.history=template"),
    (["env.use=program", "rewards=[{use: 'adapter:x'}]"], "env.use: program may make several rows"),
    (["env.use=program", "env.variables=[OPENAI_API_KEY]"], "env.use: program gives .* must name none of them"),
    (
        ["data.chat_template=none", "data.chat_template_kwargs={a: 1}"],
        "data.chat_template: none does not go with data.",
    ),
    (
        ["data.path=env:own", "env.use=a.py:B", "data.prompt=text"],
        "data.path: env:own has no columns.*got data.prompt=te",
    ),
    (
        ["data.path=env:own", "env.use=a.py:B", "data.eval.path=held.jsonl"],
        "data.eval.path: must be the env.*held.j",
    ),
    (
        ["rollout.top_k=5", "rollout.temperature=0.7"],
        "rollout.top_p, top_k, min_p, structured_outputs: need .*got rollout.temperature=0.7",
    ),
    (["checkpoint.best=true", "data.eval.every=0"], "checkpoint.best, early_stop: need eval.*got data.eval.every=0"),
    (["early_stop.patience=2", "data.eval.every=0"], "checkpoint.best, early_stop: need eval.*got data.eval.every=0"),
    (["steps=3", "epochs=1"], "steps: does not go with epochs.*got steps=3, epochs=1.0"),
    (["rollout.in_flight=continue"], "rollout.in_flight: continue needs.*got max_staleness=0"),
    (["model.base=nf4", "model.dtype=float32"], "model.base: nf4 needs a type of 16 bits.*got model.dtype=float32"),
    (["model.base=nf4", SPREAD], "model.base: nf4 needs the whole model in one process.*got cluster.tensor_parallel=2"),
    ([*SEVERAL, DIVIDED, "model.base=nf4"], "model.base: nf4 needs the whole model.*memory.layout=sharded"),
    (["learner.push=merged", "model.base=nf4"], "learner.push: merged needs.*got model.base=nf4"),
    ([*SEVERAL, DIVIDED, "learner.push=merged"], "learner.push: merged needs.*got .*memory.layout=sharded"),
    ([GENERATOR_CARD, "model.dtype=float32"], "model.dtype: float32 does not go with adapters on a card.*got learner"),
    ([EXPERTS], "learner.lora.targets: experts needs .*got learner.push=adapter, "),
    ([GENERATOR_CARD, EXPERTS, "model.base=nf4"], "learner.lora.targets: experts needs a base .*got model.base=nf4"),
    ([*SEVERAL, DIVIDED, GENERATOR_CARD, EXPERTS], "learner.lora.targets: experts needs a base .*layout=sharded"),
    ([ONE_BASE, "learner.push=merged"], "learner.push: merged needs.*got .*memory.layout=shared"),
    (["model.revision=v1", "model.path=/m"], "model.revision: needs a hub name .*got model.revision=v1, model.path=/m"),
    (["model.path=org/m@v1"], "model.path: must be a name without its revision.*got model.path=org/m@v1"),
    (["model.reference=x"], "model.reference, reference_dtype: need learner.loss.beta.*got learner.loss.beta=0.0"),
    (["model.reference_dtype=int8", FULL], "model.reference, reference_dtype: need .*beta=0.0, learner.mode=full"),
    (["model.reference_dtype=int8", "learner.loss.beta=0.1"], "model.reference, reference_dtype: .*mode=lora"),
    ([FULL, "learner.lora.rank=8"], "learner.mode: full has no adapter, .*got .*learner.lora.rank=8"),
    ([FULL, "learner.push=merged"], "learner.mode: full has no adapter, .*got learner.push=merged"),
    ([FULL, "model.adapter=x"], "learner.mode: full has no adapter, .*model.adapter=x"),
    (["learner.reduce=exact", FULL], "learner.mode: full has no adapter.*learner.reduce=exact"),
    ([FULL, "model.base=nf4"], "learner.mode: full needs model.base=none.*got model.base=nf4"),
    ([FULL, "model.dtype=float16"], "learner.mode: full needs model.base=none and.*model.dtype=float16"),
    ([MODEL, FULL], "learner.mode: full needs learner.algorithm=grpo, no rewards that use: adapter:<folder>"),
    ([PPO, FULL], "learner.mode: full needs learner.algorithm=grpo, .*got learner.algorithm=ppo"),
    ([ONE_BASE, FULL], "learner.mode: full needs .* no memory.layout=shared: .*memory.layout=shared"),
    ([MODEL, "rollout.dynamic_sampling=true"], "rollout.dynamic_sampling: true does not go with .*adapter:<folder>"),
    ([PPO, "rollout.dynamic_sampling=true"], "rollout.dynamic_sampling: true does not go with .*ppo"),
    ([ROUNDED], "learner.optimizer.kind: adamw_rounded is for bfloat16.*got learner.mode=lora, model.dtype=bfloat16"),
    ([ROUNDED, FULL, "model.dtype=float32"], "learner.optimizer.kind: adamw_rounded is for.*got.*model.dtype=float32"),
    ([PAGED], "learner.optimizer.kind, learner.checkpointing: paged.* needs CUDA.*got .*cluster.gpus.learner=0"),
    ([OFFLOAD], "learner.optimizer.kind, learner.checkpointing: .*offloaded a card.*checkpointing=offloaded"),
    ([*SEVERAL, FULL], "cluster.learners: above 1 needs memory.layout=sharded.*got cluster.learners=2, .*=auto"),
    ([*SEVERAL, "cluster.gpus.learner=0.5"], "cluster.learners: above 1 needs a card or none.*got.*gpus.learner=0.5"),
    ([*SEVERAL, *TURNS], "memory.layout: alternating needs .*, and one learner.*got.*cluster.learners=2"),
    ([*SEVERAL, ONE_BASE], "memory.layout: shared needs one generator.*got.*cluster.learners=2"),
    ([DIVIDED], "memory.layout: sharded needs cluster.learners above 1.*got cluster.learners=1"),
    (
        [*SEVERAL, DIVIDED, FULL, "learner.loss.beta=0.1", "model.reference_dtype=int8"],
        "memory.layout: sharded with learner.mode=full needs.*got .*model.reference_dtype=int8",
    ),
    ([*SEVERAL, DIVIDED, FULL, ROUNDED], "memory.layout: sharded with .*needs learner.optimizer.kind.*got.*rounded"),
    ([SPREAD, GENERATOR_CARD], "cluster.tensor_parallel: must be the number.*got.*parallel=2, .*gpus.generator=1.0"),
    ([SPREAD, ONE_BASE], "memory.layout: shared needs one generator of one process.*got.*tensor_parallel=2"),
    (["learner.updates_per_batch=9", CLIP], "learner.updates_per_batch: must be at most.*batch=9.*step=8"),
    (["learner.updates_per_batch=2", "learner.loss.ratio=a.py:f"], "above 1 needs.*learner.loss.ratio=a.py:f"),
    (["learner.updates_per_batch=2"], "learner.updates_per_batch: above 1 needs.*got.*2, learner.loss.ratio=masked"),
    ([CLIP, "learner.loss.bounds.cap=2"], "learner.loss.bounds: cap with ratio=clip.*got.*bounds=..cap.: 2.0."),
    (["learner.loss.ratio=gspo"], "learner.loss.bounds: epsilon must be given.*model.dtype=bfloat16"),
    ([PPO, "learner.loss.advantage=group"], "learner.value, learner.loss.advantage: are one of .*advantage=group"),
    ([DISTILL, "learner.loss.beta=1"], "learner.algorithm: distill needs a teacher, .*model.reference=null, .*beta=1"),
    ([HINTED], "data.teacher: needs learner.loss.beta above 0, .*got learner.loss.beta=0"),
    ([HINTED, "learner.loss.beta=1", "env.use=a.py:A"], "data.teacher: does not go with env.use: .*got env.use=a.py:A"),
    (["data.teacher.max_prompt_length=99"], "data.teacher.max_prompt_length: is of the prompts that .*set one of"),
    (["model.teacher=x"], "model.teacher: needs learner.loss.beta above 0, .*got learner.loss.beta=0"),
    ([*LARGER, "model.reference=y"], "model.teacher: takes the place of a reference: .*got model.reference=y"),
    ([*LARGER, HINTED], "model.teacher: takes the place of a reference: .*data.teacher.system=Think."),
    ([*LARGER, FULL, "model.reference_dtype=int8"], "model.teacher: takes the place .*model.reference_dtype=int8"),
    ([*LARGER, PPO], "model.teacher: does not go with .*got learner.algorithm=ppo"),
    ([*LARGER, "env.use=a.py:A"], "model.teacher: does not go with .*, env.use=a.py:A"),
    ([*LARGER, "rollout.temperature=0.9"], "model.teacher: needs rollout.temperature=1, .*got rollout.temperature=0.9"),
    (["cluster.cpus.teacher=2"], "cluster.gpus.teacher, cluster.cpus.teacher: are of .*got model.teacher=null"),
    (["learner.loss.teacher_top=4"], "learner.loss.teacher_top: is of .*teacher_top=4, model.teacher=null"),
    ([DISTILL, "model.reference=x"], "model.reference, reference_dtype: need learner.loss.beta"),
    *(
        ([*TAUGHT, wrong], "learner.algorithm: distill learns from the teacher alone: it does not go with ")
        for wrong in (
            "learner.loss.ratio=icepop",
            "learner.loss.bounds.cap=3",
            "learner.loss.advantage=none",
            MODEL,
            "learner.loss.top_entropy=0.5",
            "rollout.dynamic_sampling=true",
        )
    ),
    (["learner.value.lam=0.9"], "learner.value, learner.loss.advantage: are one of .*got learner.algorithm=grpo"),
    ([PPO, "learner.value.warmup=5", "steps=5"], "learner.value.warmup: must be below the run's steps.*got steps=5"),
    (["rollout.num_generations=1"], "rollout.num_generations: must be at least 2 .*got rollout.num_generations=1"),
    (["memory.device=16GiB", GENERATOR_CARD], "memory.device: .*share no memory.*generator=1.0, .*learner=0.0"),
    (["memory.layout=separate", *SHARED], "memory.layout: separate needs a card for each.*generator=0.5"),
    (["memory.layout=slices", GENERATOR_CARD, LEARNER_CARD], "memory.layout: slices needs both.*learner=1.0"),
    (["memory.layout=alternating"], "memory.layout: alternating needs both roles on one CUDA card"),
    (["memory.layout=alternating", GENERATOR_CARD, LEARNER_CARD], "alternating needs both roles on one CUDA card"),
    ([*TURNS, "max_staleness=1"], "alternating needs max_staleness=0.*got max_staleness=1"),
    ([ONE_BASE, "rollout.workers=2"], "memory.layout: shared needs one generator .*rollout.workers=2"),
    ([ONE_BASE, GENERATOR_CARD, LEARNER_CARD], "memory.layout: shared needs .*both on one card or both on a CPU"),
    ([ONE_BASE, GENERATOR_CARD], "memory.layout: shared needs .*generator=1.0, .*learner=0.0"),
]
ALLOWED = [
    [],
    ["rewards=[]", "env.use=number_guessing"],
    ["env.use=tools", "env.step_timeout_s=20", "env.args.turn_timeout_s=19"],
    ["env.use=tools", "env.concurrency=1", "cluster.patience=3"],
    [PPO, "rollout.num_generations=1", "learner.value.warmup=3"],
    [*TAUGHT, "rollout.num_generations=1", "learner.loss.mask_truncated=true", "learner.loss.kind=grpo"],
    [*TAUGHT, FULL],
    [*LARGER, DISTILL, "learner.loss.teacher_top=20"],
    [*LARGER, FULL, "learner.loss.teacher_top=4"],
    [*LARGER, *SEVERAL, DIVIDED, "learner.updates_per_batch=2", CLIP],
    ["epochs=2"],
    ["rollout.in_flight=continue", "max_staleness=1"],
    ["model.base=nf4"],
    ["model.base=nf4", "model.dtype=float16", GENERATOR_CARD],
    [ONE_BASE, *SHARED, "model.base=nf4"],
    ["learner.push=merged", "max_staleness=2"],
    ["learner.push=merged", EXPERTS],
    [GENERATOR_CARD, EXPERTS],
    ["model.reference=x", "learner.loss.beta=0.1"],
    [FULL, "model.reference_dtype=int8", "learner.loss.beta=0.1", "learner.optimizer.kind=adamw_8bit"],
    [*SEVERAL, DIVIDED, FULL, "learner.loss.beta=0.1", "model.reference=x"],
    [MODEL],
    ["rewards=[{use: 'adapter:x'}]", "data.eval.every=0"],
    [PAGED, LEARNER_CARD],
    [ROUNDED, FULL],
    [OFFLOAD, LEARNER_CARD],
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
    [ONE_BASE, *SHARED, "memory.device=24GiB", "max_staleness=1"],
]


def told(*overrides: str) -> list[str]:
    """The lines that refuse a configuration; none if it is taken."""
    try:
        load_config(None, [*NEEDED, *overrides])
    except WrongInput as error:
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
