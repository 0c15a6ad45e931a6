"""Tries a user's own surrogate objective on a few tokens before anything expensive starts. learner.driver.input_checks
runs this module as a process, which reads a configuration as JSON on stdin and prints a list of sentences as its last
line.
"""

import inspect
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.errors import WrongInput
from learner.algo.loss import KEY, MAX_LOG_RATIO, Tokens, function_of
from learner.algo.surrogates import LossConfig, Objective
from learner.config import RunConfig
from rewards.base import said


def try_surrogate(config: LossConfig) -> None:
    """Calls the surrogate objective on six tokens of three completions, forward and backward.

    Raises WrongInput with a message of one line if the function cannot be loaded, has no parameter for a given setting,
    raises, or does not return for each token a finite objective with a finite gradient and a bool.
    """
    function = function_of(config.ratio)
    takes = inspect.signature(function).parameters
    named = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    for name, value in config.arguments.items():
        if name not in takes and not named:
            raise WrongInput(
                f"learner.loss.bounds.{name}: {config.ratio} has no parameter {name}; add it to the function, or leave "
                f"it out (got {value})"
            )
    tokens = _example()
    try:
        wrong = _wrong_with(function(tokens, **config.arguments), tokens)
    except Exception as error:
        text = f"{type(error).__name__}: {said(error)}{_line_of(error, function)}"
        raise WrongInput(f"{KEY}: {config.ratio} raised {text}") from error
    if wrong:
        raise WrongInput(f"{KEY}: {config.ratio} {wrong}; docs/losses.md shows one that works")


def _line_of(error: Exception, function: Callable[..., Objective]) -> str:
    """Returns ` (my_loss.py, line 3)`, the place of the error if it lies in the function's file, else ''."""
    file = inspect.getsourcefile(function)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file is not None and lines else ""


def _example() -> Tokens:
    """Returns tokens with ratios near 1 and far from 1, one of them a sampler's placeholder, and advantages of either
    sign and 0."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1, -4.0])
    log_ratio = torch.tensor([0.0, 0.1, -2.0, 2.0, -0.3, MAX_LOG_RATIO])
    advantages = torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5, 0.0])
    return Tokens.of(logprobs, log_ratio, advantages, torch.tensor([2, 3, 1]))


def _wrong_with(returned: Any, tokens: Tokens) -> str:
    """Returns what is wrong with the values that a user's function returned, as a message that follows the function's
    name; '' if nothing is."""
    n, dtype = len(tokens.unit), tokens.unit.dtype
    if not (isinstance(returned, tuple) and len(returned) == 2 and all(isinstance(one, Tensor) for one in returned)):
        got = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        return f"must return two tensors, the objective and which tokens were clipped, got {got}"
    objective, clipped = returned
    if objective.shape != (n,) or objective.dtype != dtype:
        got = f"{list(objective.shape)} {objective.dtype}"
        return f"must return one objective per token, [{n}] {dtype} of {n} tokens, got {got}"
    if clipped.shape != (n,) or clipped.dtype != torch.bool:
        got = f"{list(clipped.shape)} {clipped.dtype}"
        return f"must say of each token whether it was clipped, [{n}] torch.bool of {n} tokens, got {got}"
    if not objective.requires_grad:
        return "returns an objective without gradient: it must be made of tokens.ratio, tokens.logprobs or weighted()"
    (slopes,) = torch.autograd.grad(objective.sum(), tokens.unit, allow_unused=True)
    if slopes is None:
        return "returns an objective that does not depend on the logprobs"
    for what, values in (("objective", objective), ("gradient", slopes)):
        if not values.isfinite().all():
            shown = ", ".join(f"{value:.3g}" for value in values.tolist())
            ratios = ", ".join(f"{value:.3g}" for value in tokens.sg_ratio.tolist())
            return f"must have a finite {what}, got [{shown}] for ratios of [{ratios}]"
    return ""


def wrong_with(loss: LossConfig) -> list[str]:
    """Returns a sentence on what is wrong with the surrogate objective; an empty list if nothing is."""
    try:
        try_surrogate(loss)
    except WrongInput as error:
        return [str(error)]
    return []


if __name__ == "__main__":
    print(json.dumps(wrong_with(RunConfig.model_validate_json(sys.stdin.read()).learner.loss)))
