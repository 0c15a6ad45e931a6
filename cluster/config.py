"""Where the processes run, what they may take, and how long anyone waits for them."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator

Positive = Annotated[float, Field(gt=0)]


class Frozen(BaseModel):
    """Base of every configuration class: immutable, and an unknown key is an error.

    The text below a field says what it is and why one would change it; docs/keys.md is made from it.
    """

    # Numbers that are not finite are allowed in free arguments alone, and are written as such: by default as null.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        """To Python true is 1: `checkpointing: true` would be that of one layer."""
        if any(isinstance(one, bool) for one in (value if isinstance(value, list | tuple) else [value])):
            found = list(_taken(cls.model_fields[str(field.field_name)].annotation))
            if bool not in found and (int in found or float in found):
                words = [*(word for word in found if isinstance(word, str)), "a number"]
                raise ValueError(f"must be {' or '.join(words)}")
        return value


def _taken(annotation: Any) -> Iterator[Any]:
    """What an annotation is made of: plain types, words of a Literal, and constraints."""
    if not (inner := get_args(annotation)):
        yield annotation
    for one in inner:
        yield from _taken(one)


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    named = re.fullmatch(r"[^\s/]+", host) and re.fullmatch(r"[0-9]{1,5}", port)
    if value in ("local", "auto") or (named and 0 < int(port) < 2**16):
        return value
    raise ValueError("must be local, auto, or host:port (of ray start --head)")


def _slice_or_cards(count: float) -> float:
    if count > 1 and count != int(count):
        raise ValueError(f"must be a fraction of one card or a whole number of cards, got {count:g}; take {int(count)}")
    return count


class GpuConfig(Frozen):
    """GPU of one role instance: 0 = CPU, a fraction = a slice of one card, 1 = a card of its own."""

    generator: Annotated[float, Field(ge=0), AfterValidator(_slice_or_cards)] = 0.0
    """Of each generator: 0 is the CPU, a fraction a slice of a card, 1 a card of its own; 2 or more are cards of one
    machine over which vLLM spreads a model that is too large for one. 0.5 for both roles: two slices of one card.
    Settings that say nothing of `cluster.gpus` take the cards of the machine where the run starts, if torch is a build
    for cards and `model.dtype` is not float32: one for each process if there are enough, else equal slices of one; set
    0 for both roles to leave them alone."""
    learner: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of the learner, likewise. 1 for both roles: a card each."""
    teacher: Annotated[float, Field(ge=0), AfterValidator(_slice_or_cards)] = 0.0
    """Of `model.teacher`, likewise: a card of its own, several for one that is too large for it, or a slice of the card
    of other roles, from which the memory plan then takes what it needs. Where nothing is said of `cluster.gpus` and
    there are two cards, it has one of its own."""

    @property
    def own_cards(self) -> bool:
        """Whether a generator and the learner need more than one card together."""
        return self.generator + self.learner > 1

    @property
    def one_card(self) -> bool:
        """Whether a generator and the learner share a card."""
        return min(self.generator, self.learner) > 0 and not self.own_cards


class CpuConfig(Frozen):
    """CPU cores of one role instance; also its number of compute threads."""

    generator: Annotated[int, Field(ge=1)] = 1
    """Cores, and compute threads, of each generator. Raise it where a run on CPUs says that generation is the longer
    side."""
    learner: Annotated[int, Field(ge=1)] = 1
    """Cores, and compute threads, of the learner. Raise it where a run on CPUs says that training is the longer
    side."""
    teacher: Annotated[int, Field(ge=1)] = 1
    """Cores, and compute threads, of `model.teacher`. Raise it where a run on CPUs waits for what it
    says."""


class RewardProcessConfig(Frozen):
    """Processes that do nothing but score: reward functions apart from the generators."""

    processes: Annotated[int, Field(ge=0)] = 0
    """How many of them serve all generators, each with `rollout.reward_workers` groups at once; 0: reward functions run
    beside each generator. Set it where they need a card, or cores and memory that the generators' nodes lack."""
    cpus: Annotated[int, Field(ge=1)] = 1
    """Cores of each, and compute threads of a reward model in it. Raise it where `reward/ms` is a large part of a
    group's time."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Cards of each, of its own; `sequence_classifier` computes on the first. Set it for a large reward model."""
    node: str | None = None
    """The node that they are on: its name in Ray, its address, or the name of its machine; null: wherever there is
    room. Set it where only one has what they need."""


class Deadlines(Frozen):
    """Seconds that a wait may last before the run says what it waited for and acts.

    Attributes:
        start: for a process to start, room on the cluster, and reading the data.
        group: for one group of completions; beyond it the generator counts as hung and is replaced. It is multiplied by
          the number of rounds in which a generator decodes (with an environment: plays) all that it is asked for at
          once.
        step: for one training step, or one checkpoint.
        push: for a policy to reach a generator, and for the answer to the probe; one more is given for each 50 MB of
          it, and with max_staleness above 0 `group` more, since both may have to wait for the completions under way.
        heartbeat: that a learner may go without a finished micro-batch (on a CPU: without any computation) before it
          counts as hung; a generator, one of several ranks or of rewards.processes, or the teacher, is replaced when
          its process gives no answer for half as long.
    """

    start: Positive = 600.0
    group: Positive = 900.0
    step: Positive = 3600.0
    push: Positive = 120.0
    heartbeat: Positive = 300.0

    @property
    def silence(self) -> float:
        """For a process that serves generators to give a sign of life: well below `group`, after which a generator that
        waits for it would count as hung."""
        return min(self.heartbeat / 2, self.group / 4)

    @classmethod
    def of(cls, patience: float) -> "Deadlines":
        """All of them times `patience`. How long a process takes to start no user who wants to hear of a hang sooner
        can help, so that one grows alone."""
        scaled = {name: patience * seconds for name, seconds in cls()}
        return cls(**scaled | {"start": max(1.0, patience) * cls().start})


class ClusterConfig(Frozen):
    """Ray: `local` starts a private cluster, `auto` or host:port joins one; a submitted job always joins its own."""

    address: Annotated[str, AfterValidator(_address)] = "local"
    """`local` starts a private Ray cluster, `auto` or host:port joins one that is there; a submitted job always joins
    its own."""
    gpus: GpuConfig = GpuConfig()
    cpus: CpuConfig = CpuConfig()
    tensor_parallel: Annotated[int, Field(ge=1)] | None = None
    """Processes over which each generator spreads its model, with a card each; null: as many as `gpus.generator` has
    cards. Set it on a CPU, where they share `cpus.generator`, to try such a run."""
    learners: Annotated[int, Field(ge=1)] = 1
    """Ranks of the learner: processes that share the work of each step, each with `cpus.learner` and `gpus.learner` of
    its own and a whole copy of the model, or with `memory.layout: sharded` its share. Raise it where training is the
    longer side and there are cores or cards to spare, or where one card has no room."""
    rewards: RewardProcessConfig = RewardProcessConfig()
    patience: Positive = 1.0
    """How long the run waits before it says what it waited for and acts, as a factor on all its deadlines: 600 s for a
    process to start, 900 s for one group of completions (in each round in which a generator decodes what it is asked
    for at once), 3600 s for a step or a checkpoint, 120 s for a policy to reach a generator, 300 s for a learner
    without a sign of life. Raise it for long completions, large batches, slow disks and networks; below 1 what hangs is
    replaced sooner, and the time to start stays."""
    _settled: Deadlines | None = PrivateAttr(None)

    @property
    def deadlines(self) -> Deadlines:
        """By `patience`, or as `waiting` has settled them."""
        return self._settled or Deadlines.of(self.patience)

    def waiting(self, deadlines: Deadlines) -> Self:
        """The same with these deadlines."""
        found = self.model_copy()
        found._settled = deadlines
        return found

    @property
    def shards(self) -> int:
        """Processes over which each generator spreads its model."""
        return self.tensor_parallel or max(1, int(self.gpus.generator))

    @property
    def teacher_shards(self) -> int:
        """Processes over which the teacher spreads its model."""
        return max(1, int(self.gpus.teacher))
