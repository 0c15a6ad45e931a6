"""The checks of this machine (its cards, driver, environment variables and memory), which learner.driver.preflight
makes before a run starts."""

import os
import re
import socket
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.util import find_spec

from cluster import machine
from cluster.errors import WrongInput
from cluster.memory import plan as kinds
from cluster.memory.plan import gib, host_bytes
from cluster.memory.shape import total
from cluster.placement import local_node, place
from cluster.ray_cluster import joins, store_bytes
from cluster.ray_private import root
from learner.config import RunConfig, roles
from learner.driver.memory import Budgets, Cards, cards_wanted, layouts, stored_bytes, wish_of
from rewards.config import classifier_of
from rollout.architecture import text_of
from rollout.data.model_files import model_weights, read_json

# Whether environment variables and the network let Ray's processes start. Where they do not, Ray waits for a minute or
# for ever, and reports that it is overloaded.

ERRORS = "error"  # an action of PYTHONWARNINGS, which accepts its first letters too
CONNECT_S = 5.0  # most seconds for a connection of this machine to itself


def check_startable(environ: Mapping[str, str] = os.environ) -> None:
    """Raises WrongInput if Ray's processes would not start on this machine."""
    for warnings in environ.get("PYTHONWARNINGS", "").split(","):
        action, *fields = (field.strip() for field in warnings.split(":"))
        if action and ERRORS.startswith(action) and not any(fields[2:3]):  # the warnings of all modules are errors
            raise WrongInput(
                f"PYTHONWARNINGS: must make no error of warnings, since Ray's processes warn as they start and would "
                f"end, got {environ['PYTHONWARNINGS']!r}; unset it, or name a module of yours in it"
            )
    if (level := environ.get("PYTHONOPTIMIZE", "")).isdecimal() and int(level) > 1:
        raise WrongInput(
            f"PYTHONOPTIMIZE: must be at most 1, since Ray's processes need their docstrings, got {level}; unset it"
        )
    root()
    _check_loopback()


def _check_loopback() -> None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        raise WrongInput(
            f"cluster.address: local needs the loopback interface, by which the processes of a run talk, and 127.0.0.1 "
            f"does not answer ({error.strerror or error}); switch it on (ip link set lo up)"
        ) from None


# CUDA's major version -> least driver (CUDA Toolkit release notes, table of minor version compatibility).
DRIVERS = {12: 525, 13: 580}
# Parts of the plan that main memory must hold: weights, optimizer states and activations, none of which is swapped.
MUST_FIT = ("asleep", "offloaded", "paged", "policy", "passing")


def check_placement(config: RunConfig, assumed: Cards | None) -> None:
    """Raises WrongInput unless there are cores and cards for every role. A cluster that is joined is checked later,
    when the driver has connected to it. assumed: cards to assume instead of this machine's."""
    cpus = sum(role.cpus for role in roles(config))
    if assumed is not None:
        place(roles(config), [{"CPU": float(cpus), "GPU": float(assumed.count)}])
        if assumed.kind is not None:
            _check_card(config, assumed.kind.capability, assumed.kind.name)
    elif not joins(config.cluster.address):
        check_startable()
        _check_cards(config)
        place(roles(config), [local_node(cpus)])


def _check_cards(config: RunConfig) -> None:
    count = cards_wanted(config)
    if count == 0:
        return
    driver = machine.card_driver_version()
    if driver is None:
        raise WrongInput(
            f"cluster.gpus: the run needs {count} GPU, and no NVIDIA driver answers; install one "
            f"({'in Windows, for WSL2' if machine.is_wsl() else 'and see that nvidia-smi works'}), or set "
            "cluster.gpus.generator=0, cluster.gpus.learner=0 and cluster.rewards.gpus=0"
        )
    visible, there = machine.visible_cards(), len(machine.visible_cards({}))
    if len(visible) < count <= there:
        raise WrongInput(
            f"CUDA_VISIBLE_DEVICES: shows {len(visible)} of {there} cards, and the run needs {count} GPU; name more, "
            "or lower cluster.gpus"
        )
    if wrong := driver_too_old(driver, machine.torch_cuda()):
        raise WrongInput(wrong)
    if config.cluster.gpus.learner > 0 and find_spec("liger_kernel") is None:
        raise WrongInput("liger-kernel: is not installed, and a learner on a card needs it; pip install -e '.[gpu]'")
    for card in visible[:count]:
        _check_card(config, card.capability, card.name)


def _check_card(config: RunConfig, capability: tuple[int, int], name: str) -> None:
    if wrong := kinds.lacks(capability, dtype=config.model.dtype, kv_dtype=config.rollout.kv_cache_dtype):
        raise WrongInput(f"{wrong} ({name})")


def driver_too_old(driver: str, cuda: str | None) -> str | None:
    """A sentence with what to do if the driver is too old for torch, else None. cuda: as machine.torch_cuda has it."""
    if cuda is None:
        return "torch: is not installed; pip install -e '.[gpu]'"
    if not cuda:
        return "torch: this build is for CPUs only; install the CUDA one, pip install -e '.[gpu]'"
    least = DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if int(driver.partition(".")[0]) < least:
        return f"NVIDIA driver: {driver} is older than CUDA {cuda} needs, R{least}; update it"
    return None


def cuda_wheels() -> frozenset[int]:
    """Major versions of CUDA for which NVIDIA's wheels are installed. Up to 12 a wheel's name has it, as in
    nvidia-cublas-cu12; from 13 on the wheel's version is that of CUDA. CUTLASS wheels do not count: they come for
    several CUDA versions at once."""
    found = set()
    for wheel in distributions():
        name = wheel.metadata["Name"] or ""
        if match := re.fullmatch(r"nvidia-(?!cutlass)[a-z-]+-cu(\d+)", name):
            found.add(int(match[1]))
        elif name == "nvidia-cuda-runtime":
            found.add(int(wheel.version.partition(".")[0]))
    return frozenset(found)


def _unused(config: RunConfig) -> tuple[str, ...]:
    """A line about cards that the run leaves alone though its settings do not ask for CPUs."""
    there = machine.visible_cards()
    if not there:
        return ()
    why = "they are too few for its processes, or divided by MIG; cluster.gpus says what each takes"
    if not machine.torch_cuda():
        why = "this torch is for CPUs; make setup GPU=1 has another"
    elif config.model.dtype == "float32":
        why = "model.dtype is float32, and adapters on a card want 16 bits; set bfloat16 or float16"
    return (f"cards: {len(there)} x {there[0].name}, not used: {why}",)


def machine_notes(config: RunConfig) -> tuple[str, ...]:
    """Lines for the user about the system and its cards."""
    given = "gpus" in config.cluster.model_fields_set
    if joins(config.cluster.address):
        here = "" if given else "cluster.gpus: not given, so on CPUs; set it for cards of the cluster's nodes"
        return () if given else (here,)
    if all(role.gpus == 0 for role in roles(config)):
        return () if given else _unused(config)
    notes = []
    own = int((machine.torch_cuda() or "0").partition(".")[0])
    if others := cuda_wheels() - {own}:
        versions = ", ".join(map(str, sorted(others)))
        notes.append(f"CUDA: wheels for {versions} are installed beside torch's {own}; gleaner doctor says more")
    if machine.is_wsl():
        notes.append("WSL2: the driver is Windows', and Linux has the memory that .wslconfig gives it")
    return tuple(notes)


def classifier_bytes(config: RunConfig) -> int:
    """Bytes of the models that each reward process loads (`use: sequence_classifier`), if their files are here."""
    found = 0
    for model in filter(None, map(classifier_of, config.rewards)):
        try:
            found += sum(tensor.nbytes for tensor in (model_weights(model) or {}).values())
        except WrongInput:  # the trial of the reward function reports it
            continue
    return found


def classifier_notes(config: RunConfig) -> tuple[str, ...]:
    """A line for each model of `use: sequence_classifier` that cannot read the longest completion after the longest
    prompt, by the policy's count of tokens."""
    longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
    notes = []
    for model in filter(None, map(classifier_of, config.rewards)):
        most = text_of(read_json(model, "config.json")).get("max_position_embeddings")
        if isinstance(most, int) and most < longest:
            notes.append(
                f"rewards: {model} reads {most} tokens, prompt and completion may have {longest}: completions that are "
                "too long for it get no reward"
            )
    return tuple(notes)


def check_main_memory(config: RunConfig, budgets: Budgets) -> tuple[str, ...]:
    """Lines for the user about main and shared memory of this machine. Raises WrongInput if the parts of MUST_FIT alone
    need more than its main memory."""
    if budgets.plan is None or config.cluster.gpus.learner == 0 or joins(config.cluster.address):
        return ()
    has, shared = machine.main_memory(), machine.shared_memory() or 0
    store = store_bytes(stored_bytes(config, budgets.policy_bytes), shared)
    parts = host_bytes(
        budgets.plan, wish_of(config, layouts(config)), object_store=store,
        learners=config.cluster.learners,
        reward_processes=config.reward_processes, reward_models=classifier_bytes(config),
        environments=0 if config.env.use is None else config.trajectories,
    )  # fmt: skip
    weights = sum(parts[name] for name in MUST_FIT)
    if weights > has:
        named = ", ".join(f"{name} {gib(parts[name])}" for name in MUST_FIT if parts[name])
        raise WrongInput(
            f"main memory: the run needs {gib(weights)} for weights and activations ({named}), this machine has "
            f"{gib(has)}; set memory.layout=slices, learner.checkpointing=full, or take a smaller model"
        )
    notes = []
    if total(parts) > machine.available_memory():
        notes.append(
            f"main memory: the run takes about {gib(total(parts))}, {gib(machine.available_memory())} are free; end "
            "other processes, or it may swap (docs/memory.md)"
        )
    if shared < parts["object_store"]:
        notes.append(
            f"/dev/shm: {gib(shared)} are free of the {gib(parts['object_store'])} of Ray's object store, which then "
            "lies on disk and is slow; in a container: docker run --shm-size=1g"
        )
    return tuple(notes)
