"""What is wrong with what a user gave."""


class WrongInput(ValueError):
    """Settings, files, a model, data or functions that a run, or a command, cannot be started with.

    The text has one line for each mistake: the field, the rule, the value, and what to do. A command prints it and ends
    with exit code 2 (learner.main, learner.tools.reported); the checks of a start keep it, so that none hides another
    (learner.driver.failure.Findings). Subclasses are those that somebody answers in another way.
    """
