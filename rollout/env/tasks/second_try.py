"""Tasks of reasoning_gym with another try after a wrong answer."""

from collections.abc import Mapping

from rewards.base import check_tag, tagged
from rewards.built_in.reasoning_gym import reasoning_gym
from rollout.env.protocol import Start, Step, Turn, own_messages
from rollout.schema import Problem


class SecondTry:
    """Scores every turn as the reward function reasoning_gym does, and says so when the answer is wrong.

    The reward is the score of the last try, times `discount` for every try before it. A turn without an answer in the
    tag is a try, too.
    Needs the columns `answer` and `metadata`, which reasoning_gym's tasks have (data.path: rg:...).
    """

    def __init__(self, tries: int = 2, discount: float = 0.5, strict: bool = True, tag: str = "answer") -> None:
        """`strict`: only a full score counts, see rewards.built_in.reasoning_gym. Raises ValueError for what makes no
        sense."""
        if tries < 1:
            raise ValueError(f"env.args: tries must be >= 1, got {tries}")
        if not 0 <= discount <= 1:
            raise ValueError(f"env.args: discount must lie in 0..1, got {discount}")
        self._tries, self._discount, self._strict, self._tag = tries, discount, strict, check_tag(tag)
        self._tried, self._reward = 0, 0.0

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Shows the problem. Raises ValueError if it lacks a column."""
        missing = sorted({"answer", "metadata"} - set(problem.columns))
        if missing:
            raise ValueError(
                f"env.use second_try: problems must have the columns answer and metadata, and {', '.join(missing)} is "
                "missing; take a reasoning_gym task, data.path: rg:..."
            )
        self._answer, self._metadata = str(problem.columns["answer"]), problem.columns["metadata"]
        return Start(own_messages(problem))

    async def step(self, turn: Turn) -> Step:
        """Scores the answer; one that is not fully right is told so while tries are left."""
        (score,) = reasoning_gym([turn.text], [self._answer], [self._metadata], strict=self._strict, tag=self._tag)
        self._reward = score * self._discount**self._tried
        self._tried += 1
        if score >= 1.0 or self._tried == self._tries:
            return Step(done=True, metrics={"solved": float(score >= 1.0)})
        if tagged(turn.text, self._tag) is None:
            told = f"There is no answer: write it between <{self._tag}> and </{self._tag}>."
        else:
            told = "That is not right. Try again."
        return Step(({"role": "user", "content": told},))

    async def score(self) -> Mapping[str, float]:
        """The reward, 0..1."""
        return {"second_try": self._reward}

    async def close(self) -> None:
        """Holds nothing."""
