"""Carries out gleaner rewards try: it tries reward functions on completions to rows of the data, or on the completions
that a run has saved."""

import asyncio
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from cluster.errors import WrongInput
from learner.config import RunConfig
from learner.config.load import absolute, load_config, parse_value, sentences
from learner.driver.console import escaped
from learner.driver.input_checks import prefilled_notes, requests_notes
from learner.tools import evaluation
from learner.tools.eval_meant import of_other_data
from learner.tools.reported import reported
from learner.tools.rewards_try import RewardsTryRequest
from rewards.base import opening_at_end
from rewards.call import Group
from rewards.check import try_rewards
from rewards.config import RewardConfig, adapters_of, functions_of, watches_of
from rewards.limits import DEFAULT_MEMORY
from rewards.pool import RewardPool, Scores
from rollout import ledger
from rollout.config import DataConfig, parse_size
from rollout.data import model_files, sources
from rollout.data.model_files import template_in
from rollout.data.prompts import messages_of
from rollout.data.sources import Row
from rollout.schema import asked_of, groups_of, rewards_of, said_of, whole

REFERENCES = ("answer", "ground_truth", "solution", "completion", "chosen")  # usual names of columns with the answer


@dataclass(slots=True)
class Case:
    """A row of the data. completions: the kind (reference, empty, given, generated) and the text of each."""

    id: str
    messages: list[dict[str, str]]
    columns: Row
    completions: list[tuple[str, str]] = field(default_factory=list)

    def add(self, kind: str, texts: Sequence[str]) -> None:
        self.completions += [(kind, text) for text in texts]


def read_cases(data: DataConfig, size: int, seed: int) -> list[Case]:
    """Returns the first `size` rows, in the order of the source. Raises WrongInput."""
    size = min(size, data.size or size)
    rows = sources.read(data.path, data.split, data.args, size, seed)
    name = sources.label(data.path, data.split)
    return [Case(f"{name}-{i}", messages_of(row, data, f"{name}-{i}"), row) for i, row in enumerate(rows)]


def reference_column(row: Mapping[str, Any], rewards: Sequence[RewardConfig]) -> str | None:
    """Returns the column with the reference answer: the one that an argument `column` of a reward function names, or
    one of REFERENCES. None if no such column has a text or a number."""
    named = [reward.args["column"] for reward in rewards if isinstance(reward.args.get("column"), str)]
    return next((one for one in (*named, *REFERENCES) if isinstance(row.get(one), str | int | float)), None)


def reference_of(case: Case, template: str) -> str | None:
    """Returns the reference answer of a row, by a template or the column of that name; None if it is empty. Raises
    WrongInput."""
    asked = f"{{{template}}}" if template in case.columns else template
    value = case.columns.get(template, "")
    if template in case.columns and (value is None or not str(value).strip()):
        return None
    try:
        (message,) = messages_of(case.columns, DataConfig(path="-", prompt=asked), case.id)
    except WrongInput as error:
        raise WrongInput(str(error).replace("data.prompt:", "--reference:")) from None
    return message["content"]


def read_completions(file: Path) -> list[list[str]]:
    """Returns the completions of each row. A line of the file is JSON: a text, a list of texts, or an object with
    `completion`. Raises WrongInput."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"--completions: {file} cannot be read ({error}); give a file of JSON lines") from None
    if not lines:
        raise WrongInput(f"--completions: {file} is empty; write a line for each row of the data")
    return [_texts(line, f"--completions: line {number} of {file}") for number, line in enumerate(lines, 1)]


def _texts(line: str, where: str) -> list[str]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    found = found.get("completion") if isinstance(found, dict) else found
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise WrongInput(
            f'{where} must be in JSON a text, a list of texts or {{"completion": ...}}, got {line[:60]}; correct it'
        )
    return texts


# Scoring completions as in a run.

TAG = re.compile(r"<[A-Za-z_][\w.-]*>")
STAND_IN = "completion_ids are the bytes of the texts here, since no model's folder is named that has a tokenizer.json"


@dataclass(frozen=True, slots=True)
class Scored:
    """A row with its scores. ms: milliseconds of the call of each reward function, in their order, without loading."""

    case: Case
    scores: Scores
    ms: list[float]


class Texts:
    """Makes the groups that reward functions get, with a model's tokenizer and chat template. transformers is loaded
    only if the template may open a tag for the completion.

    model: a model's folder; for anything else prompts are conversations and ids are bytes, which `note` says. data: the
    run's settings, which say how templates are used.
    """

    def __init__(self, model: str | None, data: DataConfig | None = None) -> None:
        folder = Path(model) if model is not None else None
        file = folder / "tokenizer.json" if folder is not None else None
        self._tokenizer: Any = None
        as_it_stands = data is not None and data.chat_template == "none"
        self.note, self._plain = STAND_IN, as_it_stands
        self._chat: Any = None
        if folder is not None and file is not None and file.is_file():
            from tokenizers import Tokenizer

            self._tokenizer, self.note = Tokenizer.from_file(str(file)), ""
            template = "" if as_it_stands else template_in(folder) or ""
            self._plain = not template
            if TAG.search(template):
                from rollout.data.chat import Chat  # imported here: it imports transformers

                self._chat = Chat.load(str(folder), data.chat_template_kwargs if data else None)

    def group(self, case: Case) -> Group:
        """Returns the group of a row. Its prompt is plain text if the model has no chat template."""
        texts = [text for _, text in case.completions]
        prompt = _plain(case) if self._plain else case.messages
        return Group.of(prompt, texts, [*map(self._ids, texts)], case.columns, self.prefilled(case))

    def prefilled(self, case: Case) -> str:
        """Returns the opening tag with which the row's prompt ends, or ""."""
        if self._plain:
            return opening_at_end(_plain(case))
        return "" if self._chat is None else self._chat.prefilled(self._chat.render(case.messages)[1])

    def _ids(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _plain(case: Case) -> str:
    return "\n\n".join(message["content"] for message in case.messages)


async def score(
    rewards: Sequence[RewardConfig], memory_bytes: int, texts: Texts, cases: Sequence[Case]
) -> list[Scored]:
    """Scores row after row, with its completions as one group. Raises WrongInput if on the first row a function does
    not load, or ends its process."""
    found: list[Scored] = []
    async with RewardPool(rewards, memory_bytes=memory_bytes) as pool:
        for case in cases:
            verdicts = await pool.verdicts(texts.group(case))
            unusable = [i for i, one in enumerate(verdicts) if one.status == "error" and not one.ms and not found]
            if unusable:
                raise WrongInput("\n".join(pool.sentence(i, verdicts[i]) for i in unusable))
            ms = [verdict.ms for verdict in verdicts]
            found.append(Scored(case, pool.combine(verdicts, len(case.completions), sum(ms)), ms))
    return found


# Output of a trial, as text and as JSON.

PROMPT, TEXT = 240, 100  # most characters that are shown of a prompt and of a completion
SENTENCES = 3  # most sentences on failures of one reward function
UNTOLD = (
    "no reward function tells a reference answer from an empty completion; give it the form that they read, for "
    "example --reference '<answer>{answer}</answer>'"
)


def as_text(found: Sequence[Scored], notes: Sequence[str]) -> str:
    """Returns for each row the prompt and each completion with its values, then a summary of each function."""
    lines = []
    for one in found:
        said = one.case.messages[-1]
        lines += [f"{one.case.id}  {said['role']}: {_short(said['content'], PROMPT)}"]
        kinds = [kind for kind, _ in one.case.completions]
        wide = max(map(len, kinds), default=0)
        for i, (kind, text) in enumerate(one.case.completions):
            lines.append(f"  {kind:{wide}}  {_values(one, i)}  {_short(text, TEXT) or '(nothing)'}")
    return "\n".join([*lines, "", *_functions(found), *_failures(found), *_zeroed(found), *notes, *_hint(found)])


def as_json(found: Sequence[Scored]) -> dict[str, Any]:
    """Returns the whole result for JSON; nan becomes null."""
    rows = [
        {
            "id": one.case.id, "prompt": one.case.messages, "kind": kind, "completion": text,
            "reward": one.scores.reward[i], "status": one.scores.status[i],
            "parts": {name: _finite(values[i]) for name, values in one.scores.parts.items()},
            "error": one.scores.errors[i],
        }
        for one in found
        for i, (kind, text) in enumerate(one.case.completions)
    ]  # fmt: skip
    names = list(found[0].scores.parts) if found else []
    calls = {name: {"ms": [one.ms[at] for one in found]} for at, name in enumerate(names)}
    return {"completions": rows, "functions": calls, "failures": sorted(_sentences(found))}


def failed(found: Sequence[Scored]) -> bool:
    """Whether a reward function failed on a completion."""
    return bool(_sentences(found))


def _values(one: Scored, i: int) -> str:
    parts = "  ".join(f"{name} {_number(values[i]):6}" for name, values in one.scores.parts.items())
    reward = one.scores.reward[i]
    return f"{parts}  reward {one.scores.status[i] if reward is None else _number(reward):6}"


def _functions(found: Sequence[Scored]) -> Iterator[str]:
    """Yields a line for each function: its mean for each kind of completion, and the duration of its calls."""
    names = list(found[0].scores.parts) if found else []
    wide = max(map(len, names), default=0)
    for at, name in enumerate(names):
        kinds: dict[str, list[float]] = {}
        for one in found:
            for (kind, _), value in zip(one.case.completions, one.scores.parts[name], strict=True):
                kinds.setdefault(kind, []).extend([] if _finite(value) is None else [float(value or 0)])
        means = "  ".join(f"{kind} {mean(values):.4g}" for kind, values in kinds.items() if values)
        ms = [one.ms[at] for one in found]
        yield f"{name:{wide}}  mean: {means or 'none'}; a call: {duration(median(ms))}, the slowest {duration(max(ms))}"


def _sentences(found: Sequence[Scored]) -> set[str]:
    return {sentence for one in found for sentence in one.scores.failures}


def _zeroed(found: Sequence[Scored]) -> list[str]:
    """Returns why a built-in function gave 0 to completions that are not wrong answers: one sentence of each kind."""
    return sorted({kind: sentence for one in found for kind, sentence in one.scores.zeroed.items()}.values())


def duration(ms: float) -> str:
    """Returns a duration as text in milliseconds or seconds."""
    return f"{ms:.3g} ms" if ms < 999.5 else f"{ms / 1e3:.3g} s" if ms < 1e6 else f"{ms / 1e3:.0f} s"


def _failures(found: Sequence[Scored]) -> list[str]:
    kept: list[str] = []
    for sentence in sorted(_sentences(found)):
        about = sentence.partition(":")[0]
        if sum(other.startswith(about) for other in kept) < SENTENCES:
            kept.append(sentence)
    return kept


def _hint(found: Sequence[Scored]) -> list[str]:
    """Returns a hint if all reference answers score the same as empty completions."""
    pairs = [dict(zip((kind for kind, _ in one.case.completions), one.scores.reward, strict=True)) for one in found]
    told = [(pair["reference"], pair["empty"]) for pair in pairs if {"reference", "empty"} <= pair.keys()]
    return [UNTOLD] if told and all(best == least and best is not None for best, least in told) else []


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _number(value: float | None) -> str:
    return "none" if value is None else "failed" if math.isnan(value) else f"{value:.4g}"


def _short(text: str, most: int) -> str:
    line = escaped(text).replace("\n", "\\n")
    return line if len(line) <= most else f"{line[:most]}..."


# Scoring saved rollouts with a reward function.

BINS = 10
WIDTH = 40
SHOWN = 400  # most characters that are shown of a completion


def rescore(
    use: str,
    folder: str,
    num_steps: int,
    timeout_s: float,
    arguments: Sequence[str],
    env: Sequence[str] = (),
    memory: str | int = DEFAULT_MEMORY,
) -> str:
    """Returns a report of the reward function `use` on the newest `num_steps` step files of `folder`.

    timeout_s: deadline of a call. arguments: KEY=VALUE each. env: names of environment variables that the function may
    see. memory: most memory of the reward process.
    """
    files = ledger.steps(Path(folder))[-num_steps:]
    if not files:
        raise WrongInput(f"--rollouts: {folder} holds no step-*.parquet; give the rollouts folder of a run")
    groups = [whole(group) for file in files for group in groups_of(_read(file))]
    if not groups:
        raise WrongInput(f"--rollouts: the step files of {folder} hold no completions; give others")
    try:
        memory_bytes = size_of(memory)
        config = RewardConfig(use=use, timeout_s=timeout_s, args=dict(map(argument, arguments)), env=tuple(env))
        tried = try_rewards([config], group_of(groups[0]), memory_bytes)
        scores = asyncio.run(_score(config, groups, memory_bytes))
    except ValidationError as error:
        raise WrongInput("; ".join(sentences(error, RewardConfig))) from None
    told = [*tried.notes, *prefilled_notes([config], group_of(groups[0]).prefilled)]
    return "\n".join([_report(use, files, groups, scores), *told])


def _read(file: Path) -> pa.Table:
    try:
        return ledger.read(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise WrongInput(f"--rollouts: {file} cannot be read: {reason}; take it away") from error


def size_of(text: str | int) -> int:
    """Returns the bytes of --memory. Raises WrongInput."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise WrongInput(f"--memory: {error}") from None


def argument(text: str) -> tuple[str, Any]:
    """Returns key and value of --arg. Raises WrongInput."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise WrongInput(f"--arg: must be written KEY=VALUE, got {text!r}")
    try:
        return key, parse_value(value)
    except WrongInput as error:
        raise WrongInput(f"--arg: {error}") from None


async def _score(config: RewardConfig, groups: Sequence[pa.Table], memory_bytes: int) -> list[Scores]:
    async with RewardPool([config], memory_bytes=memory_bytes) as pool:
        return [await pool.score(group_of(rows)) for rows in groups]


def group_of(rows: pa.Table) -> Group:
    """Returns the group as reward functions got it in the run."""
    problem = asked_of(rows.column("problem")[0].as_py())
    texts, ids, said = (rows.column(name).to_pylist() for name in ("completion", "completion_ids", "messages"))
    group = Group.of(problem.messages, texts, ids, problem.columns, problem.prefilled)
    played = [group.completions[i] if row is None else said_of(row) for i, row in enumerate(said)]
    return replace(group, completions=played)


def _report(use: str, files: Sequence[Path], groups: Sequence[pa.Table], scores: Sequence[Scores]) -> str:
    rewards = np.asarray([np.nan if r is None else r for s in scores for r in s.reward], dtype=float)
    status = Counter(word for s in scores for word in s.status)
    lines = [f"{use}: {len(rewards)} completions of {len(groups)} groups, {files[0].name} to {files[-1].name}"]
    lines += [f"outcomes   {', '.join(f'{name} {count}' for name, count in status.most_common())}"]
    lines += sorted({sentence for s in scores for sentence in s.failures})[:3]
    valid = rewards[~np.isnan(rewards)]
    if len(valid):
        flat = sum(np.ptp(r) == 0 for s in scores if len(r := [x for x in s.reward if x is not None]))
        lines += [f"mean {valid.mean():.4f}  std {valid.std():.4f}  min {valid.min():.4f}  max {valid.max():.4f}"]
        lines += [f"groups without a signal (all rewards equal): {flat} of {len(groups)}"]
        counts, edges = np.histogram(valid, bins=BINS)
        for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
            lines += [f"{low:9.3f} .. {high:9.3f} {count:6d} {'#' * round(WIDTH * count / counts.max())}"]
        lines += _examples(groups, rewards)
    recorded = np.concatenate([rewards_of(group) for group in groups])
    both = ~np.isnan(rewards) & ~np.isnan(recorded)
    if both.sum() > 1 and rewards[both].std() > 0 and recorded[both].std() > 0:
        lines += [f"correlation with the recorded reward: {np.corrcoef(rewards[both], recorded[both])[0, 1]:.3f}"]
    return "\n".join(lines)


def _examples(groups: Sequence[pa.Table], rewards: npt.NDArray[np.float64]) -> list[str]:
    """Returns a completion with the highest score and one with the lowest, so that users see what was scored."""
    texts = [text for group in groups for text in group.column("completion").to_pylist()]
    chosen = {"highest": int(np.nanargmax(rewards)), "lowest": int(np.nanargmin(rewards))}
    return [f"{name:8} {rewards[i]:.4f}  {escaped(texts[i])[:SHOWN]}" for name, i in chosen.items()]


# The command.

SAMPLES, STEPS = 5, 5  # default number of rows of data, and of files of rollouts
SECONDS = 10.0
# An evaluation needs a reward function, but the functions that are tried might fail in it, so generation uses this one.
ANY = RewardConfig(use="length", args={"target": 10**9})


def generate(config: RunConfig, cases: Sequence[Case], count: int, note: Callable[[str], None]) -> None:
    """Adds to each case `count` completions that a run's generators sample, the first of them greedy. A case whose
    prompt is too long gets none. Raises WrongInput, and what learner.tools.evaluation.evaluate raises."""
    if config.env.use is not None:
        raise WrongInput(
            f"--generate: the run's completions are trajectories of env.use: {config.env.use}; leave it out"
        )
    held_out = config.data.eval.model_copy(update={"reward": None})
    data = config.data.model_copy(update={"size": len(cases), "eval": held_out})
    alone = config.model_copy(update={"data": data, "rewards": [ANY]})
    rows = evaluation.evaluate(alone, held_out=False, samples=count - 1, note=note).rows
    texts: dict[str, list[str]] = {}
    for problem, text in zip(rows["problem_id"].to_pylist(), rows["completion"].to_pylist(), strict=True):
        texts.setdefault(problem, []).append(text)
    for case in cases:
        case.add("generated", texts.get(case.id, []))


@dataclass(frozen=True, slots=True)
class Meant:
    """What the options mean."""

    run: RunConfig | None  # None: no configuration was named
    data: DataConfig
    rewards: Sequence[RewardConfig]
    notes: list[str]


def run(asked: RewardsTryRequest) -> int:
    """Carries out the command. Returns the exit code: 0; 1 if a reward function failed on data; 2 for a wrong input."""
    outcome: list[bool] = []
    if asked.generate:
        code = reported(lambda: outcome.append(_tried(asked)))
        return code or int(outcome[0])
    try:
        if asked.rollouts is None:
            return int(_tried(asked))
        timeout_s = SECONDS if asked.timeout is None else asked.timeout
        memory = DEFAULT_MEMORY if asked.memory is None else asked.memory
        wanted = timeout_s, asked.arg or (), asked.env or (), memory
        print(rescore(str(asked.reward), asked.rollouts, asked.steps or STEPS, *wanted))
    except WrongInput as error:
        print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
        return 2
    return 0


def _tried(asked: RewardsTryRequest) -> bool:
    """Tries the functions and prints the result. Returns whether a reward function failed."""
    memory = None if asked.memory is None else size_of(asked.memory)
    meant = _meant(asked, _reward(asked))
    cases = _cases(asked, meant)
    if asked.generate:
        if meant.run is None:
            raise WrongInput("--generate: wants --config, which names the model; give it, or leave --generate out")
        generate(meant.run, cases, asked.generate, lambda line: print(line, file=sys.stderr))
    texts = Texts(meant.run.model.path, meant.data) if meant.run else Texts(None)
    memory = memory or (meant.run.rollout.reward_memory if meant.run else DEFAULT_MEMORY)
    found = asyncio.run(score(meant.rewards, memory, texts, cases))
    notes = [*meant.notes, *([texts.note] if texts.note else [])]
    notes += [*requests_notes(meant.rewards), *prefilled_notes(meant.rewards, texts.prefilled(cases[0]))]
    notes += [f"reward {name!r} is a watch: it has no part in the reward" for name in watches_of(meant.rewards)]
    print(json.dumps(as_json(found), indent=2) if asked.as_json else as_text(found, notes))
    return failed(found)


def _meant(asked: RewardsTryRequest, reward: RewardConfig | None) -> Meant:
    """Returns what the options mean. reward: the one that is named before the options; None: those of the
    configuration. Raises WrongInput."""
    given = {"data.path": asked.data, "data.split": asked.split, "data.prompt": asked.prompt}
    changed = {key: value for key, value in given.items() if value is not None}
    if asked.config is None:
        fields = {key.removeprefix("data."): value for key, value in changed.items()}
        try:
            data = DataConfig.model_validate(fields)
        except ValidationError as error:
            raise WrongInput("; ".join(sentences(error, DataConfig))) from None
        assert reward is not None  # learner.tools.rewards_try has looked
        return Meant(None, data, functions_of([reward]), [])
    others = of_other_data() if asked.data is not None else []
    config = load_config(asked.config, [*others, *(f"{key}={value}" for key, value in changed.items())])
    # No model is read here, so its revision is dropped, for which `absolute` would ask the hub.
    whole = absolute(config.model_copy(update={"model": config.model.model_copy(update={"revision": None})}))
    rewards = functions_of(whole.rewards)
    if reward is not None:
        of_run = zip(functions_of(config.rewards), rewards, strict=True)
        plain = reward == RewardConfig(use=reward.use)
        same = [there for here, there in of_run if plain and reward.use in (here.use, here.name)]
        rewards = tuple(same[:1]) or functions_of([reward])
    if not rewards:
        raise WrongInput(f"rewards: {asked.config} names no reward function; name one before the options")
    asks = [one.use for one in adapters_of(whole.rewards)] if reward is None else []
    notes = [f"reward models on the learner's base are not asked: {', '.join(asks)}"] if asks else []
    return Meant(whole, whole.data, rewards, notes)


def _cases(asked: RewardsTryRequest, meant: Meant) -> list[Case]:
    """Returns the rows with all completions that need no model."""
    lines = read_completions(asked.completions) if asked.completions is not None else []
    model_files.settle([meant.data.path])
    cases = read_cases(meant.data, asked.samples or len(lines) or SAMPLES, meant.run.seed if meant.run else 0)
    template = asked.reference or reference_column(cases[0].columns, meant.rewards)
    if template is None:
        meant.notes.append("no reference answers: name their column, or a template over columns, with --reference")
    for i, case in enumerate(cases):
        reference = reference_of(case, template) if template is not None else None
        case.add("reference", [reference] if reference is not None else [])
        case.add("empty", [""])
        case.add("given", [*(asked.completion or ()), *(lines[i] if i < len(lines) else [])])
    if len(lines) > len(cases):
        meant.notes.append(f"--completions: {len(lines) - len(cases)} lines are of rows behind those that were read")
    return cases


def _reward(asked: RewardsTryRequest) -> RewardConfig | None:
    """Returns the reward function that is named before the options, if any. Raises WrongInput."""
    if asked.reward is None:
        return None
    args = dict(map(argument, asked.arg or ())) or None
    said: dict[str, Any] = {"timeout_s": asked.timeout, "env": asked.env, "args": args}
    try:
        return RewardConfig(use=asked.reward, **{key: value for key, value in said.items() if value is not None})
    except ValidationError as error:
        raise WrongInput("; ".join(sentences(error, RewardConfig))) from None
