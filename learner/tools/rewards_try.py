"""gleaner rewards list: the built-in reward functions as their sources describe them. Nothing of them is imported: one
takes seconds to load, and another may lack its package.
"""

import ast
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from learner.config import RunConfig
from learner.config.load import ConfigError, absolute, load_config, sentences
from learner.driver.input_checks import prefilled_notes, requests_notes
from learner.tools.eval_command import of_other_data
from learner.tools.evaluation import evaluate
from learner.tools.reward_trial import (
    Case,
    RescoreError,
    Texts,
    TrialError,
    argument,
    as_json,
    as_text,
    failed,
    read_cases,
    read_completions,
    reference_column,
    reference_of,
    rescore,
    score,
    size_of,
)  # fmt: skip
from rewards.base import RewardError
from rewards.config import RewardConfig, adapters_of, functions_of
from rewards.limits import DEFAULT_MEMORY
from rewards.loader import BUILT_INS
from rollout.config import DataConfig
from rollout.data import hub
from rollout.data.hub import ChatError
from rollout.data.sources import ProblemsError

GIVEN = ("prompts", "completions", "completion_ids")  # by every call; other parameters that are no args are columns


class BuiltIn(NamedTuple):
    """One function. columns: of the data, that it reads whatever its args say; args: name -> default, as written, or
    `required`."""

    name: str
    says: str
    columns: tuple[str, ...]
    args: dict[str, str]


def built_ins() -> list[BuiltIn]:
    """All of them, by name."""
    return [_described(name, *place.split(":")) for name, place in sorted(BUILT_INS.items())]


def built_ins_text(found: list[BuiltIn]) -> str:
    """Two or three lines each, and how one is used."""
    lines = []
    for one in found:
        lines.append(f"{one.name:20} {one.says}")
        if one.columns:
            lines.append(f"{'':20} columns: {', '.join(one.columns)}")
        if one.args:
            lines.append(f"{'':20} args: {', '.join(f'{name}={value}' for name, value in one.args.items())}")
    return "\n".join([*lines, "rewards: [{use: NAME, weight: 1.0, args: {...}}]; docs/rewards.md says more"])


def _described(name: str, module: str, what: str) -> BuiltIn:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    (node,) = [node for node in tree.body if isinstance(node, kinds) and node.name == what]
    summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
    columns: tuple[str, ...] = ()
    if isinstance(node, ast.ClassDef):  # settings
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        pairs = [(ast.unparse(one.target), one.value) for one in fields]
    else:
        columns = tuple(one.arg for one in node.args.args if one.arg not in GIVEN)
        names = [one.arg for one in node.args.kwonlyargs]
        pairs = list(zip(names, node.args.kw_defaults, strict=True))
    args = {arg: "required" if default is None else ast.unparse(default) for arg, default in pairs}
    return BuiltIn(name, " ".join(summary.split()), columns, args)


# Completions of the configured model, to be tried like the others.

# Some reward function has to be there, and those that are tried may fail: they are asked afterwards, as of the others.
ANY = RewardConfig(use="length", args={"target": 10**9})


def generate(config: RunConfig, cases: Sequence[Case], count: int, note: Callable[[str], None]) -> None:
    """Adds to each case `count` completions, the first of them greedy; none to one whose prompt is too long and left
    out. Starts a run's generators. Raises what learner.tools.evaluation.evaluate does, TrialError."""
    if config.env.use is not None:
        raise TrialError(
            f"--generate: the run's completions are trajectories of env.use: {config.env.use}; leave it out"
        )
    held_out = config.data.eval.model_copy(update={"reward": None})
    data = config.data.model_copy(update={"size": len(cases), "eval": held_out})
    alone = config.model_copy(update={"data": data, "rewards": [ANY]})
    rows = evaluate(alone, held_out=False, samples=count - 1, note=note).rows
    texts: dict[str, list[str]] = {}
    for problem, text in zip(rows["problem_id"].to_pylist(), rows["completion"].to_pylist(), strict=True):
        texts.setdefault(problem, []).append(text)
    for case in cases:
        case.add("generated", texts.get(case.id, []))


# gleaner rewards try on data: what its options mean.

SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """What is tried on which rows. reward: None, or what the command line says of one function."""

    reward: RewardConfig | None
    config: str | None
    data: str | None
    split: str | None
    prompt: str | None
    samples: int | None
    reference: str | None
    completion: Sequence[str]
    completions: Path | None
    generate: int
    memory: int | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class Meant:
    """run: None where no configuration was named."""

    run: RunConfig | None
    data: DataConfig
    rewards: Sequence[RewardConfig]
    notes: list[str]


WRONG = (TrialError, ConfigError, ProblemsError, RewardError, ChatError)


def run_on_data(asked: Asked) -> int:
    """Exit code: 0; 1 if a reward function failed on a completion; 2 if something given is wrong, which is printed."""
    outcome: list[bool] = []
    if asked.generate:
        from learner.tools.reported import reported  # with all that starts a run

        code = reported(lambda: outcome.append(_tried(asked)), wrong=WRONG)
        return code or int(outcome[0])
    try:
        return int(_tried(asked))
    except WRONG as error:
        print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        return 2


def _tried(asked: Asked) -> bool:
    """Prints what was found. True if a reward function failed."""
    meant = _meant(asked)
    cases = _cases(asked, meant)
    if asked.generate:
        if meant.run is None:
            raise TrialError("--generate: wants --config, which names the model; give it, or leave --generate out")
        generate(meant.run, cases, asked.generate, lambda line: print(line, file=sys.stderr))
    texts = Texts(meant.run.model.path, meant.data) if meant.run else Texts(None)
    memory = asked.memory or (meant.run.rollout.reward_memory if meant.run else DEFAULT_MEMORY)
    found = asyncio.run(score(meant.rewards, memory, texts, cases))
    notes = [*meant.notes, *([texts.note] if texts.note else [])]
    notes += [*requests_notes(meant.rewards), *prefilled_notes(meant.rewards, texts.prefilled(cases[0]))]
    print(json.dumps(as_json(found), indent=2) if asked.as_json else as_text(found, notes))
    return failed(found)


def _meant(asked: Asked) -> Meant:
    """Raises ConfigError, TrialError."""
    given = {"data.path": asked.data, "data.split": asked.split, "data.prompt": asked.prompt}
    changed = {key: value for key, value in given.items() if value is not None}
    if asked.config is None:
        fields = {key.removeprefix("data."): value for key, value in changed.items()}
        try:
            data = DataConfig.model_validate(fields)
        except ValidationError as error:
            raise TrialError("; ".join(sentences(error, DataConfig))) from None
        assert asked.reward is not None  # options.py has looked
        return Meant(None, data, functions_of([asked.reward]), [])
    others = of_other_data() if asked.data is not None else []
    config = load_config(asked.config, [*others, *(f"{key}={value}" for key, value in changed.items())])
    # Without its revision, for which the hub would be asked: no model is read here.
    whole = absolute(config.model_copy(update={"model": config.model.model_copy(update={"revision": None})}))
    rewards = functions_of(whole.rewards)
    if asked.reward is not None:
        of_run = zip(functions_of(config.rewards), rewards, strict=True)
        plain = asked.reward == RewardConfig(use=asked.reward.use)
        same = [there for here, there in of_run if plain and asked.reward.use in (here.use, here.name)]
        rewards = tuple(same[:1]) or functions_of([asked.reward])
    if not rewards:
        raise TrialError(f"rewards: {asked.config} names no reward function; name one before the options")
    asks = [reward.use for reward in adapters_of(whole.rewards)] if asked.reward is None else []
    notes = [f"reward models on the learner's base are not asked: {', '.join(asks)}"] if asks else []
    return Meant(whole, whole.data, rewards, notes)


def _cases(asked: Asked, meant: Meant) -> list[Case]:
    """The rows with all completions that need no model."""
    lines = read_completions(asked.completions) if asked.completions is not None else []
    hub.settle([meant.data.path])
    cases = read_cases(meant.data, asked.samples or len(lines) or SAMPLES, meant.run.seed if meant.run else 0)
    template = asked.reference or reference_column(cases[0].columns, meant.rewards)
    if template is None:
        meant.notes.append("no reference answers: name their column, or a template over columns, with --reference")
    for i, case in enumerate(cases):
        reference = reference_of(case, template) if template is not None else None
        case.add("reference", [reference] if reference is not None else [])
        case.add("empty", [""])
        case.add("given", [*asked.completion, *(lines[i] if i < len(lines) else [])])
    if len(lines) > len(cases):
        meant.notes.append(f"--completions: {len(lines) - len(cases)} lines are of rows behind those that were read")
    return cases


# gleaner rewards try: which of its two forms is meant, on saved rollouts or on data, and what goes with it.

OF_ROLLOUTS = ("steps",)
OF_DATA = (
    "config", "data", "split", "prompt", "samples", "reference", "completion", "completions", "generate", "json",
)  # fmt: skip
OF_ONE = ("timeout", "arg", "env")  # a reward function that is named before the options
SECONDS, STEPS = 10.0, 5


def run(given: dict[str, Any]) -> int:
    """Exit code: 0; 1 if a reward function failed on data; 2 if something given is wrong, which is printed.

    given: of learner.tools.commands.rewards.try_reward, by name; what was not given is None or empty.
    """
    try:
        _check(given)
        if given["rollouts"] is not None:
            timeout_s = SECONDS if given["timeout"] is None else given["timeout"]
            memory = DEFAULT_MEMORY if given["memory"] is None else given["memory"]
            wanted = (timeout_s, given["arg"] or (), given["env"] or (), memory)
            print(rescore(given["reward"], given["rollouts"], given["steps"] or STEPS, *wanted))
            return 0
        return run_on_data(_asked(given))
    except (TrialError, RescoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(given: dict[str, Any]) -> None:
    """Raises TrialError for options that do not go together."""
    used = [name for name, value in given.items() if not (value is None or value is False or value == [])]
    if "rollouts" in used and (wrong := [name for name in OF_DATA if name in used]):
        raise TrialError(f"{_named(wrong)}: does not go with --rollouts, whose completions are scored; leave it out")
    if not {"rollouts", "config", "data"} & set(used):
        raise TrialError(
            "--config, --data or --rollouts: one is required: the configuration of a run to come, a file of rows, or "
            "the rollouts of a run"
        )
    if "rollouts" not in used and (wrong := [name for name in OF_ROLLOUTS if name in used]):
        raise TrialError(f"{_named(wrong)}: goes with --rollouts alone; leave it out")
    if "reward" not in used and "config" not in used:
        raise TrialError("REWARD: required without --config; name a reward function before the options")
    if "reward" not in used and (wrong := [name for name in OF_ONE if name in used]):
        raise TrialError(f"{_named(wrong)}: is of one function, and --config has its own; name one before the options")


def _named(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _asked(given: dict[str, Any]) -> Asked:
    """Raises TrialError, RescoreError."""
    return Asked(
        reward=_reward(given), config=given["config"], data=given["data"], split=given["split"],
        prompt=given["prompt"], samples=given["samples"], reference=given["reference"],
        completion=given["completion"] or (), completions=given["completions"], generate=given["generate"] or 0,
        memory=None if given["memory"] is None else size_of(given["memory"]), as_json=given["json"],
    )  # fmt: skip


def _reward(given: dict[str, Any]) -> RewardConfig | None:
    if given["reward"] is None:
        return None
    said = {"timeout_s": given["timeout"], "env": given["env"], "args": dict(map(argument, given["arg"] or ())) or None}
    try:
        return RewardConfig(use=given["reward"], **{key: value for key, value in said.items() if value is not None})
    except ValidationError as error:
        raise TrialError("; ".join(sentences(error, RewardConfig))) from None
