"""The checks of the user's own functions before anything expensive starts: the rewards and a surrogate loss."""

import re
from collections.abc import Sequence
from pathlib import Path

from learner.config import RunConfig
from learner.driver.evaluate import accuracy_reward
from learner.driver.findings import PreflightError
from learner.driver.machine_checks import classifier_notes
from learner.driver.trials import GRAMMAR, LOSS, tried
from rewards.base import RewardError
from rewards.call import Group
from rewards.check import try_rewards
from rewards.config import RewardConfig, functions_of
from rewards.format import TAGS
from rewards.loader import BUILT_INS, no_file, no_function
from rewards.text import tag_of
from rewards.unit_tests import late
from rewards.withheld import withheld_notes
from rollout.data.chat import Prompt
from rollout.data.files import Row
from rollout.schema import Problem


def check_accuracy(config: RunConfig) -> None:
    """Whether data.eval.reward is one of the rewards."""
    try:
        accuracy_reward(config.rewards, config.data.eval.reward, environment=config.env.use is not None)
    except ValueError as error:
        raise PreflightError(str(error)) from None


def check_loss(config: RunConfig) -> None:
    """A surrogate of the user's, on a few tokens, in a process that has torch."""
    if config.learner.loss.own:
        tried(LOSS, config, "learner.loss.ratio", "loss")


def check_grammar(config: RunConfig) -> None:
    """Whether rollout.structured_outputs can be compiled for the model. Raises PreflightError."""
    if config.rollout.structured_outputs.form:
        tried(GRAMMAR, config, "rollout.structured_outputs", "form")


def check_uses(config: RunConfig) -> None:
    """Whether there are the built-ins, and the files of functions, that rewards name: of one that cannot be tried yet.
    Raises RewardError with a line for each."""
    wrong = []
    for reward in functions_of(config.rewards):
        place, colon, _ = reward.use.rpartition(":")
        file = place if colon else reward.use
        if file.endswith(".py") and not Path(file).is_file():
            wrong.append(f"reward {reward.name!r}: {no_file(Path(file).absolute())}; correct rewards: use")
        elif not colon and not file.endswith(".py") and reward.use not in BUILT_INS:
            wrong.append(f"reward {reward.name!r}: {no_function(reward.use)}")
    if wrong:
        raise RewardError("\n".join(wrong))


def dummies(prompt: Prompt, columns: Row, prefilled: str = "") -> Group:
    """Two completions of a problem to try reward functions on. prefilled: the opening tag that its prompt ends in."""
    return Group.of(prompt, ["", "0"], [[0], [0]], columns, prefilled)


def try_functions(config: RunConfig, group: Group) -> tuple[str, ...]:
    """Each function once, in a worker process like those of the run. Lines about those that work. Raises RewardError,
    PreflightError."""
    functions = functions_of(config.rewards)
    if not functions:
        return ()
    for i, reward in enumerate(config.rewards):
        size = config.rollout.num_generations
        if reward.use == "unit_tests" and (wrong := late(reward.args, size, reward.timeout_s)):
            raise PreflightError(f"rewards.{i}.{wrong}")
    return try_rewards(functions, group, config.rollout.reward_memory).notes


def check_rewards(
    config: RunConfig, problem: Problem, prefilled: str, tried: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Lines about the functions, and about what their settings mean for this model. Raises as try_functions.

    prefilled: the opening tag that prompts end in, or "". tried: what try_functions said of a problem like this one;
    None: they were not tried.
    """
    if tried is None:
        tried = try_functions(config, dummies(problem.messages, problem.columns, prefilled))
    functions = functions_of(config.rewards)
    return (*tried, *requests_notes(functions), *classifier_notes(config), *prefilled_notes(functions, prefilled))


def requests_notes(functions: Sequence[RewardConfig]) -> list[str]:
    """What users should know of where requests of their functions go."""
    return [note for i, reward in enumerate(functions) for note in withheld_notes(reward, f"rewards.{i}")]


def prefilled_notes(functions: Sequence[RewardConfig], prefilled: str) -> list[str]:
    """What users should know of a tag that prompts end in: completions begin inside of it."""
    if not prefilled or not functions:
        return []
    told = (
        f"data: prompts end with {prefilled!r}, so that completions begin inside of that tag: built-in rewards that "
        "look for it read them with it in front; regex and your own functions do not (a parameter `prefilled` has it)"
    )
    notes = [told]
    tag = tag_of(prefilled)
    for i, reward in enumerate(functions):
        tags = reward.args.get("tags", TAGS)
        if reward.use == "format" and tag not in tags:
            notes.append(
                f"rewards.{i}: format wants the tags {', '.join(map(str, tags))} and nothing around them, and "
                f"completions begin inside of <{tag}>: none can score; set args.tags, for example [{tag}, answer]"
            )
        pattern = str(reward.args.get("pattern", ""))
        anchored = reward.args.get("full") or re.match(r"(\(\?[a-zA-Z]+\))?(\^|\\A)", pattern)
        if reward.use == "regex" and (anchored or f"<{tag}>" in pattern):
            notes.append(
                f"rewards.{i}: args.pattern {pattern!r} is held against completions without the {prefilled!r} that "
                "prompts end with; let it begin behind that"
            )
    return notes
