"""Whether the nodes on which a run has room have what it needs: found before anything is loaded there, and said with
the node's name."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.actor import DeadlineExceeded
from cluster.memory.plan import gib
from cluster.placement import Role
from cluster.ray_cluster import Session, connect, joins, wanted_store
from cluster.ray_reservation import Node
from cluster.ray_tasks import NodeFailed, on_each
from learner.config import RunConfig, generator_roles, learner_roles, reward_roles, roles
from learner.driver import run_lock
from learner.driver.findings import PreflightError
from learner.driver.fingerprints import NOT_CACHED, REVISION
from learner.driver.node_facts import NodeFacts, Wanted, look
from learner.driver.preflight import Prepared
from rewards.config import classifier_of, functions_of
from rewards.pickled import SUFFIX
from rollout.env.loader import code_of

NEEDED: Mapping[str, Sequence[str]] = {
    "generator": ("torch", "transformers", "vllm"),
    "learner": ("torch", "transformers", "peft"),
    "reward process": (),
    "reward model": ("torch", "transformers"),
}
LEAST_DISK = 2**30  # bytes
REHEARSAL_S = 10.0  # for room on a cluster of which --dry-run asks where the processes would be


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one kind of process, a key of NEEDED: settings whose models and files it reads."""

    kind: str
    models: Mapping[str, str]
    files: Mapping[str, str]
    roles: Sequence[Role] = ()


async def check_nodes(config: RunConfig, session: Session, deadline_s: float, policy_bytes: int) -> list[str]:
    """Lines that say where each process is to be, and what is worth knowing. Nothing for a private cluster, which is
    this machine. policy_bytes: of a policy on its way to a generator. Raises PreflightError with a line for each thing
    that a node lacks or has in another version."""
    if session.mode == "local":
        return []
    node_of = session.node_of()
    kinds = needs(config)
    wanted = Wanted(
        {name: path for need in kinds for name, path in need.models.items()},
        {name: path for need in kinds for name, path in need.files.items()},
        config.run_dir / run_lock.NAME,
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
        raise PreflightError("\n".join(dict.fromkeys(wrong)))
    return list(dict.fromkeys(notes))


async def rehearse_nodes(prepared: Prepared) -> list[str]:
    """For --dry-run: what `check_nodes` says of a cluster that would be joined, on which room is reserved for a moment.
    Nothing for a private one. Raises PlacementError, PreflightError."""
    config = prepared.config
    if not joins(config.cluster.address):
        return []
    session = connect(config.cluster.address, sum(role.cpus for role in roles(config)))
    waited: list[str] = []
    try:
        await session.reserve(roles(config), REHEARSAL_S, waited.append)
        return await check_nodes(config, session, config.cluster.deadlines.start, prepared.budgets.policy_bytes)
    except DeadlineExceeded as error:
        return [f"{error}; a run waits for {config.cluster.deadlines.start:g} s (cluster.deadlines.start)"]
    finally:
        await session.close()


def needs(config: RunConfig) -> tuple[Needs, ...]:
    """Of a generator, of the learner, and of a process that does nothing but score."""
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
    scoring, generators = reward_roles(config), generator_roles(config)
    learner = Needs("learner", learners, _files(loss), learner_roles(config))
    if not scoring:
        return Needs("generator", base | judges, functions | environments, generators), learner
    return (
        Needs("generator", base, environments, generators),
        learner,
        Needs("reward model" if judges else "reward process", judges, functions, scoring),
    )


def placed(node_of: Mapping[str, Node]) -> list[str]:
    """A line for each node: which processes of the run are on it."""
    roles: dict[str, list[str]] = {}
    for role, node in sorted(node_of.items()):
        roles.setdefault(node.name, []).append(role)
    return [f"placement: node {name}: {', '.join(on)}" for name, on in sorted(roles.items())]


def lacks(facts: NodeFacts, own: NodeFacts, need: Needs) -> Iterator[str]:
    """What a node with processes of that kind lacks, or has otherwise than the driver (`own`)."""
    for name in NEEDED[need.kind]:
        if name not in facts.packages:
            yield f"{name} is not installed, and a {need.kind} needs it"
    for name, there in facts.packages.items():
        here = own.packages.get(name, there)
        if there.partition("+")[0] != here.partition("+")[0]:  # after the +: what it was built for
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
    """Models of the hub that are not in the node's cache."""
    for setting, name in need.models.items():
        if NOT_CACHED in facts.contents[setting].get(REVISION, ""):
            yield f"{setting}: {name} is not in its cache, and is downloaded as the {need.kind} starts"


def short_of(facts: NodeFacts, policy_bytes: int) -> Iterator[str]:
    """What a node has too little of for a run to go well there."""
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
    """The first file that differs; None: none does, or one of the two is still to be downloaded."""
    if any(NOT_CACHED in found.get(REVISION, "") for found in (there, here)):
        return None
    return next((name for name in sorted({*there, *here}) if there.get(name) != here.get(name)), None)


def _again(setting: str, path: str, file: str, own: Mapping[str, str]) -> str:
    """The next step; `own` is what the driver has."""
    if file != REVISION or Path(path).is_dir():
        return "copy it again"
    if setting == "model.path":
        return f"set model.revision={own[file]}"
    return f"on every node run: hf download {path} --revision {own[file]}, and give the folder that it names"


def _files(uses: Mapping[str, str]) -> dict[str, str]:
    """Of functions that are given as `path/file.py:name`, the path."""
    found = {setting: use.rpartition(":")[0] for setting, use in uses.items()}
    return {setting: place for setting, place in found.items() if place.endswith((".py", SUFFIX))}
