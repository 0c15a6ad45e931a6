"""Which settings go together with an environment's."""

from __future__ import annotations

from learner.config.rule import Rule
from learner.config.settings import Settings
from rewards.config import adapters_of
from rollout.config import OWN, DataConfig
from rollout.env.config import TURN_TIMEOUT_S, EnvConfig

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
