"""Which roles of a run are prestarted, and what their processes import meanwhile.

Those of a private cluster, without a card: which cards a process sees, Ray says as late as it asks for the process, and
libraries look for cards as they are imported.
"""

import logging
import os
from collections.abc import Callable

from cluster.placement import waiting
from cluster.prestart.prestarted import Prestarted
from cluster.ray_cluster import joins, role_env
from learner.config import RunConfig, generator_roles, learner_roles, roles
from learner.model.base import has_4_bit_layers, left_out, quiet
from rollout.data.hub import ChatError
from rollout.vllm.environment import required_env


def prestarted(config: RunConfig, *, learns: bool = True) -> Prestarted:
    """To be closed when the run has ended. Empty where roles are not prestarted, or the model cannot be read, which the
    checks of the start will tell. learns: whether there is a learner beside the generators."""
    found = Prestarted()
    if joins(config.cluster.address):
        return found
    try:
        learner = import_learner_for_4_bit if has_4_bit_layers(config.model) else import_learner
    except ChatError:
        return found
    wanted = [(role, import_generator) for role in generator_roles(config)]
    wanted += [(role, learner) for role in learner_roles(config) if learns]
    threads = waiting(roles(config) if learns else generator_roles(config), os.cpu_count() or 1)
    alike: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for role, preparation in wanted:
        if role.gpus == 0:
            env = role_env(role, required_env(cuda=False)) | threads
            alike.setdefault(tuple(env.items()), {})[role.name] = _named(preparation)
    for variables, preparations in alike.items():
        found.start(_named(import_common), preparations, dict(variables))
    return found


def _named(function: Callable[[], None]) -> str:
    return f"{function.__module__}:{function.__name__}"


def import_common() -> None:
    """What generators and learner import, and is imported once for all of them."""
    import learner.model.common_imports  # noqa: F401


def import_generator() -> None:
    """What a generator imports, with vLLM."""
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # as rollout.worker.vllm_engine does
    import rollout.vllm.engine
    import rollout.worker  # noqa: F401
    from rollout.vllm.arguments import import_cpu_engine

    import_cpu_engine()


def import_learner() -> None:
    """What a learner without 4-bit layers imports."""
    with left_out():
        import_learner_for_4_bit()


def import_learner_for_4_bit() -> None:
    """What a learner imports, with bitsandbytes."""
    quiet()
    import learner.driver.roles
    import learner.ranks.rank  # noqa: F401
