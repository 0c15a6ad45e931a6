"""Where the processes run, what they may take, and how long anyone waits for them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]


class Frozen(BaseModel):
    """Base of every configuration class: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GpuConfig(Frozen):
    """GPU of one role instance: 0 = CPU, a fraction = a slice of one card, 1 = a card of its own."""

    generator: Annotated[float, Field(ge=0, le=1)] = 0.0
    learner: Annotated[float, Field(ge=0, le=1)] = 0.0


class CpuConfig(Frozen):
    """CPU cores of one role instance; also its number of compute threads."""

    generator: Annotated[int, Field(ge=1)] = 1
    learner: Annotated[int, Field(ge=1)] = 1


class DeadlineConfig(Frozen):
    """Seconds that a wait may last before the run says what it waited for and acts."""

    start: Annotated[float, Field(gt=0)] = 600.0
    group: Annotated[float, Field(gt=0)] = 900.0
    step: Annotated[float, Field(gt=0)] = 3600.0
    push: Annotated[float, Field(gt=0)] = 120.0
    heartbeat: Annotated[float, Field(gt=0)] = 300.0  # without a finished micro-batch (on a CPU: any computation)


class ClusterConfig(Frozen):
    """Ray: `local` starts a private cluster, `auto` or host:port joins one; a submitted job always joins its own."""

    address: str = "local"
    gpus: GpuConfig = GpuConfig()
    cpus: CpuConfig = CpuConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
