"""The error for wrong input of the user."""


class WrongInput(ValueError):
    """The user gave settings, files, a model, data or functions with which a run or a command cannot start.

    The text has one line for each mistake: the field, the rule, the value, and what to do. A command prints it and ends
    with exit code 2 (learner.main, learner.tools.reported). The checks at the start of a run collect these errors, so
    that the user sees all of them (learner.driver.failure.Findings). A caller may handle a subclass differently.
    """
