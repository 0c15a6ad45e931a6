"""What a reward is, and the errors of this package.

A reward is a function (plain or `async def`) of a group of completions, in TRL's convention, so that functions
written for TRL or open-r1 work unchanged:

    def my_reward(prompts, completions, completion_ids, answer, **kwargs) -> list[float | None]

* It is called with keyword arguments only: `prompts`, `completions`, `completion_ids` (token ids of each completion)
  and one list per data column, each already repeated once per completion. All lists have the same length.
* A function without `**kwargs` receives only the parameters that it names; one with `**kwargs` receives every column.
  The columns `prompt`, `completion` and `completion_ids` of the data are not passed on, as in TRL, less a `prompt` or
  `completion` that an arg of a built-in names (`column: completion`).
* Where the model has a chat template a prompt is a list of messages, also where the data gives a text, and a completion
  is `[{"role": "assistant", "content": "..."}]`. Without one both are strings. `text.text_of` reads both.
* `args` of the configuration are passed on every call and win over a column of the same name.
* It returns one number per completion, as a list or anything else that has them in order (a tuple, an array, a
  generator), or None for one that it does not score. As in TRL, the other functions' sum
  then counts, so each task of a mixed data set can have a function of its own. A completion without any score is
  left out of training (status `none`); TRL gives it 0. NaN, infinity, a number beyond 1e30 or anything else that is
  not a number is a failure: the sample gets status `nan` and no reward.
* A function with the parameters of verl, OpenRLHF or ms-swift, or one of a single completion, is used as it is
  (rewards.call).
* Calls of an `async def` for several groups are under way at once, on one event loop.

Of TRL's extras, `trainer_state` has `global_step`, `max_steps` and `epoch`; what `log_metric(name, value)` is given is
`log/<name>` in metrics.jsonl, the mean over groups; what `log_extra(column, values)` is given stands beside each
completion in the rollouts (rewards.logged). `environments` is not provided: a reward function runs in its own process,
far from them. One that demands it is refused before training starts.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from cluster.errors import WrongInput

Values = Iterable[float | None]
Reward = Callable[..., Values | Awaitable[Values]]

JUDGE = "judge"  # the `use` of a language model that is asked
ADAPTER = "adapter:"  # how the `use` of a reward model on the learner's base begins
LARGEST = 1e30  # of a reward: weighted sums of them, too, are held in float32, which ends at 3.4e38
TRL_EXTRAS = ("environments",)


class Zeroed(list[float]):
    """What a reward function of ours returns: its values, and why a completion has nan, or 0 for another reason than a
    wrong answer (it was late, say, or ended its process), by its place in the group."""

    def __init__(self, values: Sequence[float], why: Mapping[int, str]) -> None:
        super().__init__(values)
        self.why = dict(why)


class RewardError(WrongInput):
    """A reward that cannot be used. Carries one sentence and nothing else, so that it survives pickling."""


class RewardFailed(RewardError):
    """A reward function with `on_error: fail` gave no score for at least one sample."""


def writable(text: str) -> str:
    """The text with each half of a surrogate pair, which no file or Arrow column takes, as Python writes it."""
    return text.encode(errors="backslashreplace").decode()


def said(error: BaseException) -> str:
    """The text of an exception that is not ours, in one line, whatever its __str__ does."""
    try:
        return writable(" ".join(str(error).split()))
    except BaseException as second:
        return f"its text cannot be read, since its __str__ raises {type(second).__name__}"


def counts(number: float) -> bool:
    """Whether it can be a reward or a part of one: finite, and of at most LARGEST."""
    return abs(number) <= LARGEST
