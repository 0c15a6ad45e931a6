"""gleaner rewards try on data: what its options mean."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from learner.config import RunConfig
from learner.config.load import ConfigError, absolute, load_config, sentences
from learner.driver.input_checks import prefilled_notes, requests_notes
from learner.tools.other_data import of_other_data
from learner.tools.reward_trial.cases import (
    Case,
    TrialError,
    read_cases,
    read_completions,
    reference_column,
    reference_of,
)  # fmt: skip
from learner.tools.reward_trial.scoring import Texts, score
from learner.tools.reward_trial.view import as_json, as_text, failed
from rewards.base import RewardError
from rewards.config import RewardConfig, adapters_of, functions_of
from rewards.memory import DEFAULT
from rollout.config import DataConfig
from rollout.data import hub
from rollout.data.chat_error import ChatError
from rollout.data.sources import ProblemsError

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


def run(asked: Asked) -> int:
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
        from learner.tools.reward_trial.generated import generate

        if meant.run is None:
            raise TrialError("--generate: wants --config, which names the model; give it, or leave --generate out")
        generate(meant.run, cases, asked.generate, lambda line: print(line, file=sys.stderr))
    texts = Texts(meant.run.model.path, meant.data) if meant.run else Texts(None)
    memory = asked.memory or (meant.run.rollout.reward_memory if meant.run else DEFAULT)
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
