"""gleaner eval: a model or an adapter on data, by the generators and reward functions of a run."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa

from cluster.config import RewardProcessConfig
from learner.config import RunConfig
from learner.config.load import absolute
from learner.driver.evaluate import accuracy_reward, greedy, sampled, scores_of
from learner.driver.failure import Findings, PreflightError
from learner.driver.input_checks import (
    Tried,
    adapter_notes,
    check_accuracy,
    check_data_prompts,
    check_environment,
    check_rewards,
    load_chat,
)
from learner.driver.machine_checks import check_placement
from learner.driver.memory import cards_present, settle, settled, size_for
from learner.driver.metrics import CUT, NEARLY_ALL, cut_off
from learner.driver.preflight import PROBLEMS, Untokenised
from learner.driver.prestart import prestarted
from learner.tools.eval_answers import answer_of
from learner.tools.eval_generators import Asked, groups, policy_of
from learner.tools.eval_scores import Estimate, Sampled, summary
from rewards.config import functions_of
from rewards.text import text_of
from rollout.data.chat import Chat
from rollout.data.problems import Renderer, fitting, load, load_whole
from rollout.data.weight_names import check_model
from rollout.schema import Problem, asked_of, failed, said_of, whole
from rollout.seeds import group_seed
from rollout.types import Adapter, Sampling, Weights


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation found.

    Attributes:
        adapter_digest: sha256 of the adapter's weights, as they were served; None without an adapter.
        reward: name of the reward function that counts; None: the environment's own rewards.
        data: the file, hub name or task that the problems are of. part: which of its problems they are, in words.
        problems: that were asked. samples: completions of each, beside the greedy one.
        metrics: greedy, and with samples mean@K, pass@k, majority@K: means over problems with an interval of 95 %
            (learner.tools.eval_scores.interval).
        unscored: problems with a completion without a score, which counts nowhere: each metric says over how many
            problems it is. failed: completions that a reward function failed on; where it is the one that counts,
            they count as 0.
        truncated: share of completions that rollout.max_completion_length cut off.
        notes: what makes the scores say little, in sentences: see `doubts`.
        seconds: start and end of the processes included.
        rows: every completion, in rollout.schema; attempt 0 is greedy, 1 sampled.
    """

    model: str
    adapter: str | None
    adapter_digest: str | None
    data: str
    part: str
    reward: str | None
    problems: int
    samples: int
    temperature: float
    metrics: dict[str, Estimate]
    unscored: int
    failed: int
    truncated: float
    notes: list[str]
    seconds: float
    rows: pa.Table = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: all but the rows."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "rows"}
        return fields | {"metrics": {name: one._asdict() for name, one in self.metrics.items()}}


def evaluate(
    config: RunConfig,
    *,
    adapter: str | None = None,
    held_out: bool = True,
    samples: int = 0,
    limit: int | None = None,
    threshold: float = 1.0,
    note: Callable[[str], None] = print,
    done: Callable[[int, int], None] = lambda more, total: None,
) -> Evaluated:
    """Evaluates config.model.path, with an adapter on it where one is given. Not from inside an event loop.

    Args:
        config: model, data, rewards, lengths, temperature and seed are read of it; nothing is written to its folder.
        adapter: folder in PEFT's format.
        held_out: the held-out problems of such a run; else all of data.path, in its order.
        samples: completions of each problem beside the greedy one, at rollout.temperature.
        limit: the first so many problems.
        threshold: the score from which on a completion is correct for pass@k.
        note: gets lines for the user.
        done: is told how many more completions there are, of how many in all; first of 0, as generation begins.

    Raises:
        PreflightError: something given is wrong; one line per mistake.
    """
    begun = time.perf_counter()
    with prestarted(config, learns=False) as early:
        config, problems, notes = _checked(config, held_out)
        for line in notes:
            note(line)
        problems = problems[:limit]
        chat = load_chat(config)
        policy = _policy(adapter, config, chat, note)
        budgets = settle(config, chat.config, size_for(config, cards_present(config)))
        config = settled(config, budgets)
        name = accuracy_reward(config.rewards, config.data.eval.reward, environment=config.env.use is not None)
        asked = [Asked(lambda _: greedy(config), 0)]
        if samples:
            asked.append(Asked(lambda index: _sampling(config, samples, problems[index]), 1))
        told = f"problems: {len(problems)}, {'greedy' if not samples else f'greedy and {samples} samples each'}"
        note(f"{told}; starting Ray and {config.rollout.workers} generator{'s' if config.rollout.workers > 1 else ''}")
        tables = asyncio.run(groups(config, budgets, policy, problems, asked, done, early.commands))
    metrics, unscored = metrics_of(tables, name, threshold, config.seed)
    rows = pa.concat_tables([table for several in tables for table in several]).combine_chunks()
    source, part = _asked(config, held_out)
    return Evaluated(
        model=config.model.source, adapter=adapter,
        adapter_digest=policy.digest if isinstance(policy, Adapter) else None,
        data=source, part=part, reward=name, problems=len(problems), samples=samples,
        temperature=config.rollout.temperature, metrics=metrics, unscored=unscored,
        failed=int(failed(whole(rows)).sum()), truncated=truncated_share(rows),
        notes=doubts(rows, name, threshold, config.rollout.max_completion_length),
        seconds=time.perf_counter() - begun, rows=rows,
    )  # fmt: skip


def _asked(config: RunConfig, held_out: bool) -> tuple[str, str]:
    """Where the problems are from, and which of them they are."""
    data, own = config.data, config.data.eval
    if not held_out:
        return data.path, f"split {data.split}" if data.split != "train" else "all problems"
    if own.path is None and own.split is None:
        return data.path, "held out of training"
    return own.path or data.path, "all problems" if own.split is None else f"split {own.split}"


def truncated_share(rows: pa.Table) -> float:
    """Of all completions, those that the length limit cut off."""
    ends: list[str] = whole(rows).column("finish_reason").to_pylist()
    return ends.count(CUT) / len(ends)


def doubts(rows: pa.Table, name: str | None, threshold: float, longest: int) -> list[str]:
    """What makes the scores of these completions say little, and what to do: nearly all were cut off, or none of them
    has a score, or all have the same one, below `threshold`. longest: rollout.max_completion_length."""
    ends, said = whole(rows), scores_of(whole(rows), name)
    scores = [_number(score) for score in said if score is not None]
    function = "the environment" if name is None else f"reward function {name}"
    found, cut = [], round(truncated_share(rows) * len(ends))
    if cut >= NEARLY_ALL * len(ends):
        found.append(f"{_of(cut, len(ends))} completions {cut_off(longest)}")
    if not scores:
        found.append(f"{function} scored none of the {len(ends)} completions: it gave None for each")
    elif len(set(scores)) == 1 and (same := scores[0]) is not None and same < threshold:
        why = "" if not found else ", of which it reads what was cut off"
        found.append(
            f"{function} gave {same:g} to {_of(len(scores), len(scores))} completions{why}: see what it says of an "
            "answer that you call right (gleaner rewards try), and read some of these (--save)"
        )
    return found


def _of(count: int, total: int) -> str:
    return f"all {total}" if count == total else f"{count} of {total}"


def _checked(config: RunConfig, held_out: bool) -> tuple[RunConfig, Sequence[Problem], tuple[str, ...]]:
    """The configuration with whole paths, the problems, and lines for the user. Raises PreflightError."""
    found, config, notes = Findings(PROBLEMS), absolute(config), tuple[str, ...]()
    if config.env.use is None and not functions_of(config.rewards):
        found.lines.append("rewards: an evaluation needs a reward function, got none; name one with --reward")
    found.of(check_accuracy, config)
    found.of(check_placement, _without_learner(config), None)
    found.of(check_model, config.model.source)
    chat = found.of(load_chat, config)
    problems = found.of(_held_out if held_out else _whole, config, chat or Untokenised())
    if chat is not None and problems:
        found.of(check_data_prompts, config, chat, (problem.messages for problem in problems))
        notes = found.of(check_rewards, config, problems[0], chat.prefilled(problems[0].prompt_ids)) or ()
        tried = found.of(check_environment, config, chat, problems[0]) or Tried()
        problems = found.of(fitting, problems, config.data, config.rollout.max_prompt_length, tried.tools)
    found.finish()
    assert problems is not None
    assert chat is not None
    return config, problems, (*chat.notes(config.rollout.stop), *notes)


def _held_out(config: RunConfig, chat: Renderer) -> list[Problem]:
    longest, deadline = config.rollout.max_prompt_length, config.cluster.deadlines.start
    _, problems = load(config.data, chat, longest, config.seed, deadline)
    if not problems:
        raise PreflightError("data.eval.every: is 0, so nothing is held out; raise it, or name problems with --data")
    return problems


def _whole(config: RunConfig, chat: Renderer) -> list[Problem]:
    longest, deadline = config.rollout.max_prompt_length, config.cluster.deadlines.start
    return load_whole(config.data, chat, longest, config.seed, deadline)


def _policy(adapter: str | None, config: RunConfig, chat: Chat, note: Callable[[str], None]) -> Adapter | Weights:
    """Raises PreflightError."""
    found = Findings(PROBLEMS)
    policy = found.of(policy_of, adapter, config.model.source)
    for line in found.of(adapter_notes, adapter, "--adapter", config.model.path, chat) or ():
        note(line)
    found.finish()
    assert policy is not None
    return policy


def _without_learner(config: RunConfig) -> RunConfig:
    """Nor with reward processes of their own: generators score what they sample."""
    gpus = config.cluster.gpus.model_copy(update={"learner": 0.0})
    alone = {"gpus": gpus, "rewards": RewardProcessConfig()}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=alone)})


def _sampling(config: RunConfig, samples: int, problem: Problem) -> Sampling:
    return sampled(config, samples, group_seed(config.seed, problem.position, attempt=1))


def metrics_of(
    tables: list[list[pa.Table]], name: str | None, threshold: float, seed: int
) -> tuple[dict[str, Estimate], int]:
    """The metrics, each over the problems that have scores enough for it, and how many problems have a completion
    without a score. Where a reward function failed, the score is 0."""
    scored = [_by_problem(several, name) for several in tables]
    unscored = sum(any(None in own for own in both) for both in zip(*scored, strict=True))
    sampled = []
    if len(tables) > 1:
        texts = [said_in(whole(rows)) for rows in tables[1]]
        sampled = [Sampled([*map(answer_of, said)], own) for said, own in zip(texts, scored[1], strict=True)]
    return summary([own[0] for own in scored[0]], sampled, threshold, seed), unscored


def said_in(rows: pa.Table) -> list[str]:
    """Of each row what the policy said: of a trajectory its turns alone, not what the environment answered. Behind the
    tag that its prompt ends in, since an answer may be what stands in that."""
    columns = (rows.column(name).to_pylist() for name in ("completion", "messages", "problem"))
    opened = {problem: asked_of(problem).prefilled for problem in set(rows.column("problem").to_pylist())}
    return [
        opened[problem] + (text if turns is None else text_of(said_of(turns) or []))
        for text, turns, problem in zip(*columns, strict=True)
    ]


def _number(score: float | None) -> float | None:
    return 0.0 if score is not None and math.isnan(score) else score


def _by_problem(tables: Sequence[pa.Table], name: str | None) -> list[list[float | None]]:
    """The scores of each table's completions. Asked of all at once: that no problem has this reward is a mistake."""
    rows = [whole(table) for table in tables]
    scores = iter(scores_of(pa.concat_tables(rows), name))
    return [[*map(_number, islice(scores, own.num_rows))] for own in rows]
