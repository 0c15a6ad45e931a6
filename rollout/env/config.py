"""What the user writes about an environment."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from cluster.config import Frozen
from rewards.config import Arguments

ENVIRONMENT = "environment"  # the column that names the class of each problem, where trl_environment has several
TURN_TIMEOUT_S = 20.0
"""Seconds for all tool calls of a turn, where env.args.turn_timeout_s does not say; below env.step_timeout_s."""

LEAST_START_S = 60.0  # that a process may take to start, load and reset, however short its answers must be

Seconds = Annotated[FiniteFloat, Field(gt=0)]


class EnvConfig(Frozen):
    """An environment that answers what the policy samples: tools, a game, a second try. Without `use` a trajectory is a
    single completion."""

    use: Annotated[str, Field(min_length=1)] | None = None
    """A built-in name, `package.module:Class` or `path/file.py:Class`: what makes one trajectory's environment when it
    is called with `args` (rollout.env.protocol.Environment)."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments that it is made with. `env:NAME` is the value of an environment variable."""
    variables: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Environment variables that it may see, such as an API key; others that may hold a secret are kept from it."""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """Turns of the policy in a trajectory, at most. All of a trajectory's tokens, observations included, must fit into
    `rollout.max_completion_length`."""
    tool_parser: Annotated[str, Field(min_length=1)] = "auto"
    """What reads the tool calls of a turn: `hermes`, one of vLLM's tool parsers by its name, or `auto`, the one that
    reads back what the model's chat template writes."""
    history: Literal["append", "template", "refuse"] = "append"
    """`append`: answers follow what was sampled, which stays as it is. Some chat templates write the past or an answer
    differently later on (they drop thinking, say): `append` goes on and says so at the start, `refuse` ends the run
    before it starts, `template` renders the conversation anew for each turn, in further rows where it was rewritten."""
    step_timeout_s: Seconds = 30.0
    """Seconds for one answer of the environment, and twice that, at least 60, for its process to start, load and reset;
    beyond it the trajectory ends as `env_timeout`, without a reward. So it does where the whole trajectory takes longer
    than a third of what one group may take, 300 s (`cluster.patience`)."""
    concurrency: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Trajectories that a generator plays at once; `auto`: twice `rollout.max_num_seqs`. Raise it where environments
    are slow, so that the engine has others to sample meanwhile."""

    @property
    def start_timeout_s(self) -> float:
        """Seconds for an environment's process to start, load and reset."""
        return max(LEAST_START_S, 2 * self.step_timeout_s)
