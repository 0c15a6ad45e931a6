"""A surrogate objective by its name: one of the table, or a user's own from a file, which is tried on a few tokens."""

import inspect
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from learner.algo.loss_config import LossConfig
from learner.algo.surrogates import SURROGATES, Objective
from learner.algo.tokens import MAX_LOG_RATIO, Tokens
from rewards.base import RewardLoadError, said
from rewards.loader import load

KEY = "learner.loss.ratio"


class SurrogateError(ValueError):
    """A user's surrogate that cannot be trained with; the text is one line."""


@cache
def function_of(ratio: str) -> Callable[..., Objective]:
    """The function that learner.loss.ratio names: of SURROGATES, or `path/file.py:function` or
    `package.module:function`, which this process then imports. Raises SurrogateError if that leads to no function."""
    if ratio in SURROGATES:
        return SURROGATES[ratio].function
    try:
        return cast(Callable[..., Objective], load(ratio))
    except RewardLoadError as error:
        raise SurrogateError(f"{KEY}: {error}") from error


def objective_of(tokens: Tokens, config: LossConfig) -> Objective:
    """([N] objective, [N] bool) by config.ratio and its settings. Raises what a user's function raises."""
    return function_of(config.ratio)(tokens, **config.bounds)


def try_surrogate(config: LossConfig) -> None:
    """Calls it on six tokens of three completions, forward and backward.

    Raises SurrogateError, one line: it does not load, does not take a setting that is given, raises, or returns
    something else than a finite objective with a finite gradient and a bool of each token.
    """
    function = function_of(config.ratio)
    takes = inspect.signature(function).parameters
    named = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    for name, value in config.bounds.items():
        if name not in takes and not named:
            raise SurrogateError(
                f"learner.loss.{name}: {config.ratio} has no parameter {name}; add it to the function, or leave it out "
                f"(got {value})"
            )
    tokens = _example()
    try:
        wrong = _wrong_with(objective_of(tokens, config), tokens)
    except Exception as error:
        text = f"{type(error).__name__}: {said(error)}{_line_of(error, function)}"
        raise SurrogateError(f"{KEY}: {config.ratio} raised {text}") from error
    if wrong:
        raise SurrogateError(f"{KEY}: {config.ratio} {wrong}; docs/losses.md shows one that works")


def _line_of(error: Exception, function: Callable[..., Objective]) -> str:
    """` (my_loss.py, line 3)` if the function's own file was reached."""
    file = inspect.getsourcefile(function)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file is not None and lines else ""


def _example() -> Tokens:
    """Near the sampler, far from it, and a placeholder of the sampler's; advantages of either sign and 0."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1, -4.0])
    log_ratio = torch.tensor([0.0, 0.1, -2.0, 2.0, -0.3, MAX_LOG_RATIO])
    advantages = torch.tensor([1.0, 1.0, -0.5, -0.5, -0.5, 0.0])
    return Tokens.of(logprobs, log_ratio, advantages, torch.tensor([2, 3, 1]))


def _wrong_with(returned: Any, tokens: Tokens) -> str:
    """What is wrong with a function's answer, to follow its name; '' if nothing is."""
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
