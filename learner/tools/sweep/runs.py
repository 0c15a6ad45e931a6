"""The runs of a sweep: made of a configuration and of keys with several values, and checked whether they can share a
generator and a learner.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import WrongInput
from cluster.telemetry import METRICS_FILE
from cluster.trackers import dotted
from learner.config import RunConfig
from learner.config.load import load_config
from learner.config.rule import Rule
from learner.driver.failure import Findings
from learner.driver.preflight import Prepared
from rewards.config import adapters_of

MOST_RUNS = 64
CHARACTERS = re.compile(r"[^A-Za-z0-9._]+")  # that the name of a folder is not made of
LONGEST_NAME = 120
OPEN, CLOSED, QUOTES, BEGINS = "[{(", "]})", "'\"", "[{(,:"

# Keys that decide what the processes are; of a section, all of its keys.
SAME = (
    "output_dir", "name", "model", "memory", "cluster", "trackers", "rollout.workers", "rollout.kv_cache",
    "rollout.kv_cache_dtype", "rollout.in_flight", "rollout.routing_replay", "rollout.structured_outputs",
    "rollout.process_memory", "learner.mode", "learner.push", "learner.reduce", "learner.restarts",
    "learner.lora.targets", "learner.checkpointing", "learner.token_budget", "learner.optimizer.kind",
)  # fmt: skip
# Keys whose largest value the processes are made for.
LARGEST = (
    "learner.lora.rank", "rollout.max_prompt_length", "rollout.max_completion_length", "rollout.max_num_seqs",
    "rollout.num_generations", "learner.groups_per_step", "max_staleness", "data.teacher.max_prompt_length",
)  # fmt: skip
OF_ROLLOUT = ("max_prompt_length", "max_completion_length", "num_generations")
IN_ONE_PROCESS = {"wandb", "trackio", "prometheus"}  # trackers that have one run in a process

RULES = (
    Rule(
        "a sweep", "trains adapters on one base, by GRPO or distillation: a whole model, merged weights and PPO's "
        "value are each run's own", "set learner.mode=lora, push=adapter, algorithm=grpo, or train the runs one by one",
        ("learner.mode", "learner.push", "learner.algorithm"),
        lambda c: not c.learner.pushes_adapters or c.learner.algorithm == "ppo",
    ),
    Rule(
        "a sweep", "has no reward models on the base (use: adapter:<folder>), which each run would want its own of",
        "leave them out, or train the runs one by one", ("learner.mode",), lambda c: bool(adapters_of(c.rewards)),
    ),
    Rule(
        "a sweep", "lets completions finish under the policy that they began with: an engine labels the tokens of all "
        "its completions alike", "set rollout.in_flight=finish", ("rollout.in_flight",),
        lambda c: c.rollout.in_flight != "finish",
    ),
    Rule(
        "a sweep", "has its roles awake, each with a base of its own, in one process: while one run trains, others "
        "generate", "set memory.layout=auto, slices or separate, cluster.learners=1 and cluster.tensor_parallel=1",
        ("memory.layout", "cluster.learners", "cluster.gpus.generator"),
        lambda c: c.memory.layout in ("alternating", "shared", "sharded") or c.cluster.learners > 1
        or c.cluster.shards > 1,
    ),
    Rule(
        "a sweep", "has reward processes beside its generators", "leave cluster.rewards out",
        ("cluster.rewards.processes",), lambda c: c.cluster.rewards.processes > 0,
    ),
    Rule(
        "a sweep", "has no process of a teacher (model.teacher), which each run would want to itself",
        "leave it out, or train the runs one by one", ("model.teacher",), lambda c: c.model.teacher is not None,
    ),
    Rule(
        "trackers:", "wandb, trackio and prometheus hold one run in a process, and a sweep has all of its runs in one",
        "give tensorboard or mlflow", ("trackers",), lambda c: bool(IN_ONE_PROCESS & set(c.trackers)),
    ),
    Rule(
        "resume:", "must be auto or none: a checkpoint is of one run", "leave it out", ("resume",),
        lambda c: c.resume not in ("auto", "none"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Named:
    """One run of a sweep. name: of its folder. given: the settings that it has of its own, as they were written."""

    name: str
    given: Mapping[str, str]
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep: its runs, in the order of the grid."""

    runs: tuple[Named, ...]

    @property
    def configs(self) -> list[RunConfig]:
        """The runs' configurations."""
        return [one.config for one in self.runs]


def sweep_of(file: str, overrides: Sequence[str], *, zipped: bool = False, cards: int | None = None) -> Sweep:
    """The sweep of a configuration file and overrides, of which those with several values, separated by commas, make
    the runs: all combinations, or with `zipped` the first values together, the second ones, and so on. A value that is
    a list stands in brackets. cards: as load_config has it.

    Raises WrongInput with a line for each mistake.
    """
    several, common = {}, []
    for word in overrides:
        key, equals, text = word.removeprefix("--").partition("=")
        values = _split(key, text) if equals else []
        if len(values) > 1:
            if key in several:
                raise WrongInput(f"{key}: is given twice; write all its values behind one =")
            if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
                raise WrongInput(f"{key}: must have different values, got {twice[0][:40]} twice; leave one out")
            several[key] = values
        else:
            common.append(word)
    runs = list(_combined(several, zipped=zipped))
    found, configs = Findings(), list[RunConfig]()
    for given in runs:
        own = [f"{key}={value}" for key, value in given.items()]
        config = found.of(load_config, file, [*common, *own], cards)
        configs += [] if config is None else [config]
    found.finish()
    names = _names(runs)
    placed = [_placed(config, name) for config, name in zip(configs, names, strict=True)]
    if wrong := [*_refused(configs)]:
        raise WrongInput("\n".join(wrong))
    return Sweep(tuple(map(Named, names, runs, placed)))


def _split(key: str, text: str) -> list[str]:
    """The parts of a text between commas that stand in no bracket and no quotes. A quote opens where a value begins, so
    that an apostrophe inside of a word is none. Raises WrongInput for a bracket or quote that is not closed."""
    parts, depth, quote, escaped = [""], 0, "", False
    for character in text:
        before = parts[-1].rstrip()[-1:]
        if quote:
            ends = character == quote and not escaped
            escaped = quote == '"' and character == "\\" and not escaped
            quote = "" if ends else quote
        elif character in QUOTES and before in ("", *BEGINS):
            quote = character
        elif character in OPEN:
            depth += 1
        elif character in CLOSED:
            depth = max(0, depth - 1)
        elif character == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    if quote or depth:
        what = f"a quote {quote}" if quote else "a bracket"
        raise WrongInput(f"{key}: {what} is not closed, got {text[:80]}; close it")
    return [part.strip() for part in parts]


def _combined(several: Mapping[str, Sequence[str]], *, zipped: bool) -> Iterator[dict[str, str]]:
    if not several:
        raise WrongInput("sweep: needs a key with several values, for example seed=0,1,2; gleaner train runs one")
    counts = {key: len(values) for key, values in several.items()}
    if zipped and len(set(counts.values())) > 1:
        told = ", ".join(f"{key} {count}" for key, count in counts.items())
        raise WrongInput(f"--zip: pairs the values of keys, so each must have as many (got {told})")
    combinations = list(zip(*several.values(), strict=True) if zipped else itertools.product(*several.values()))
    if len(combinations) > MOST_RUNS:
        raise WrongInput(f"sweep: must be of at most {MOST_RUNS} runs, got {len(combinations)}; give fewer values")
    yield from (dict(zip(several, values, strict=True)) for values in combinations)


def _names(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """A name for each run, of the last part of each key, or of all parts where two keys end alike, and its value."""
    ends = [key.rpartition(".")[2] for key in runs[0]]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(runs[0], ends, strict=True)}
    plain = ["_".join(f"{short[key]}-{_plain(value)}" for key, value in given.items()) for given in runs]
    short_enough = [name[:LONGEST_NAME] for name in plain]
    return [
        name if short_enough.count(name) == 1 else f"{name}-{_digest(given)}"
        for name, given in zip(short_enough, runs, strict=True)
    ]


def _digest(given: Mapping[str, str]) -> str:
    """A text that other values give another of: of names that characters or their length would make equal."""
    return hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()[:8]


def _plain(value: str) -> str:
    return CHARACTERS.sub("-", value.replace("+", "")).strip("-.") or "empty"  # 1e+30 is no 1e-30


def _placed(config: RunConfig, name: str) -> RunConfig:
    """The configuration with its folder in that of the sweep."""
    return config.model_copy(update={"output_dir": str(config.sweep_dir), "name": name})


def _refused(configs: Sequence[RunConfig]) -> Iterator[str]:
    """A sentence for each reason why the runs cannot share their processes."""
    sentences = [rule.sentence(config) for rule in RULES for config in configs if rule.broken(config)]
    yield from dict.fromkeys(sentences)
    settings = [dotted(config.model_dump(mode="json")) for config in configs]
    for key in dict.fromkeys(itertools.chain(*settings)):
        values = list(dict.fromkeys(str(one.get(key)) for one in settings))
        if len(values) > 1 and _kind(key) == "same":
            yield (
                f"{key}: must be the same in all runs of a sweep, which share generator and learner; give one value, "
                f"or train the runs one by one (got {', '.join(values)[:80]})"
            )
    if len({config.rollout.truncates for config in configs}) > 1:
        yield (
            "rollout.top_p, top_k, min_p: must be given in all runs of a sweep or in none: an engine gives logprobs "
            "of the whole distribution, or of what these leave"
        )


def _kind(key: str) -> str:
    """Whether a key must be the `same` in all runs, the processes are made for the `largest` value, or it is `free`."""
    for kind, keys in (("same", SAME), ("largest", LARGEST)):
        if any(key == one or key.startswith(f"{one}.") for one in keys):
            return kind
    return "free"


def largest(configs: Sequence[RunConfig], sequences: Sequence[int | str]) -> RunConfig:
    """The first configuration with the largest values that any has of the keys that decide memory (LARGEST).
    sequences: rollout.max_num_seqs of each as it was given."""
    first, rollouts = configs[0], [config.rollout for config in configs]
    fixed = [one for one in sequences if isinstance(one, int)]
    rollout = first.rollout.model_copy(
        update={
            **{name: max(getattr(one, name) for one in rollouts) for name in OF_ROLLOUT},
            "max_num_seqs": max(fixed) if len(fixed) == len(rollouts) else "auto",
        }
    )
    learner = first.learner.model_copy(
        update={
            "lora": max((config.learner.lora for config in configs), key=lambda lora: lora.rank),
            "groups_per_step": max(config.learner.groups_per_step for config in configs),
        }
    )
    data = first.data.model_copy(
        update={"teacher": max((config.data.teacher for config in configs), key=lambda teacher: teacher.longest or 0)}
    )
    staleness = max(config.max_staleness for config in configs)
    return first.model_copy(update={"rollout": rollout, "learner": learner, "data": data, "max_staleness": staleness})


def check_folder(folder: Path) -> None:
    """Raises WrongInput if the folder of a sweep is that of a run."""
    if there := next((name for name in ("config.yaml", METRICS_FILE, "checkpoints") if (folder / name).exists()), None):
        raise WrongInput(
            f"name: {folder} holds {there}, so it is the folder of a run, and a sweep's holds those of its runs; give "
            "another name="
        )


def check_keep(runs: Sequence[Prepared], keep: int) -> None:
    """Raises WrongInput unless runs can be dropped until `keep` are left."""
    if keep >= len(runs):
        raise WrongInput(f"--keep: must be less than the {len(runs)} runs of the sweep, got {keep}; leave it out")
    steps, every = ({get(one) for one in runs} for get in (_steps_of, _every_of))
    if len(steps) > 1:
        raise WrongInput(f"--keep: compares runs at the same steps, and these have {sorted(steps)}; give all as many")
    first = rungs(len(runs), keep, min(steps))[0]
    if not all(0 < one <= first for one in every):
        raise WrongInput(
            f"--keep: compares {len(runs)} runs of {min(steps)} steps at step {first} first, so data.eval.every must "
            f"be from 1 to {first}, got {', '.join(map(str, sorted(every)))}; set it, or raise steps"
        )


def _steps_of(one: Prepared) -> int:
    return one.total_steps


def _every_of(one: Prepared) -> int:
    return one.config.data.eval.every


def rungs(runs: int, keep: int, steps: int) -> list[int]:
    """The steps at which a half of the runs is dropped, until `keep` are left: ..., steps / 4, steps / 2."""
    halvings = math.ceil(math.log2(runs / keep))
    return [steps >> (halvings - i) for i in range(halvings)]


def told(sweep: Sweep) -> list[str]:
    """Lines for the user: which keys vary, what that means for the processes, and the runs' folders."""
    varied = list(sweep.runs[0].given)
    of_kind = {kind: [key for key in varied if _kind(key) == kind] for kind in ("largest", "free")}
    lines = [f"sweep        {len(sweep.runs)} runs on one generator and one learner, in {sweep.configs[0].output_dir}"]
    if of_kind["largest"]:
        lines.append(f"bounded      {', '.join(of_kind['largest'])}: generator and learner are made for the largest")
    if of_kind["free"]:
        lines.append(f"free         {', '.join(of_kind['free'])}: each run has its own")
    lines.append(f"equal        {', '.join(SAME)}")
    return [*lines, *(f"run          {one.name}" for one in sweep.runs)]


def folder_of(sweep: Sweep) -> Path:
    """The absolute folder that holds the runs' folders."""
    return sweep.configs[0].run_dir.parent
