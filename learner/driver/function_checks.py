"""The checks of the user's own functions before anything expensive starts: the rewards and a surrogate loss."""

from learner.config import RunConfig
from learner.driver.evaluate import accuracy_reward
from learner.driver.findings import PreflightError
from learner.driver.machine_checks import classifier_notes
from learner.driver.trials import LOSS, Trial
from rewards.call import Group
from rewards.check import try_rewards
from rewards.config import functions_of
from rewards.unit_tests import late
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
        trial = Trial(LOSS, config, "learner.loss.ratio", "loss")
        try:
            trial.finish()
        finally:
            trial.close()


def check_rewards(config: RunConfig, problem: Problem) -> tuple[str, ...]:
    """Each function once, on two dummy completions of the first problem, in a worker process like those of the run.
    Lines about those that work."""
    functions = functions_of(config.rewards)
    if not functions:
        return ()
    for i, reward in enumerate(config.rewards):
        size = config.rollout.num_generations
        if reward.use == "unit_tests" and (wrong := late(reward.args, size, reward.timeout_s)):
            raise PreflightError(f"rewards.{i}.{wrong}")
    group = Group.of(problem.messages, ["", "0"], [[0], [0]], problem.columns)
    try_rewards(functions, group, config.rollout.reward_memory)
    return classifier_notes(config)
