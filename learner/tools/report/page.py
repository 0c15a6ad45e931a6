"""A run's report as one page: its completions and the files in `page/`, as data that a browser unpacks. Nothing in it
is fetched.

The page's own script and style are named by their digests in its Content-Security-Policy, and nothing else may run or
be asked for: what a model wrote is data, and is shown by textContent only.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from cluster.errors import WrongInput
from cluster.reading import printable
from learner.algo.advantage import ADVANTAGES
from learner.driver import record
from learner.tools.report.summary import Run, read_runs, summary
from rollout import ledger
from rollout.data.model_files import joined, split
from rollout.schema import asked_of, groups_of, lasts, rewards_of, said_of

# The completions of a step as the page shows them: groups, and a line of the index for each.

# Values on their way into a page: JSON, gzip, base64. A browser unpacks one block when it is asked for.

Block = str
"""Base64 of gzip of ASCII JSON: nothing in it can end a script element."""


def packed(value: Any) -> Block:
    """Level 6 makes 5 % less of completions than level 1, in twice the time; the same value gives the same block."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)).decode("ascii")


def unpacked(block: Block) -> Any:
    """What was packed."""
    return json.loads(gzip.decompress(base64.b64decode(block)))


SHOWN = 160  # characters of a prompt in the list
LOGPROB_PARTS = 100  # a logprob is kept in hundredths of a nat, as a whole number
Mismatch = Mapping[str, Sequence[list[float] | None]]  # learner.driver.record.read


@dataclass(frozen=True, slots=True)
class Step:
    """One step file. Letters: N groups.

    Attributes:
        step: its number.
        block: packed list [N] of what the page shows of a group.
        lines: [N] of the index: problem, beginning of the prompt, rewards (None: none), statuses, what failed in words.
        token_ids: those that occur.
    """

    step: int
    block: Block
    lines: list[dict[str, Any]]
    token_ids: set[int]


def read_step(
    file: Path, most: int | None = None, *, advantage: str | None, trained: int | None = None, tokens: bool
) -> Step:
    """At most `most` groups of a step file.

    advantage: the row of ADVANTAGES that the run used, None where it used none. trained: how many of the groups, the
    first, were trained on; the others, which dynamic sampling replaced, have no advantage (None: all). tokens: whether
    ids and logprobs go in, too. Raises WrongInput.
    """
    try:
        rows = ledger.read(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        said = " ".join(str(error).split())[:200]
        raise WrongInput(f"rollouts: {file.name} cannot be read: {said}; take it away") from error
    tables = groups_of(rows)
    mismatch = _mismatch(file) if tokens else {}
    whole = [np.flatnonzero(lasts(table)) for table in tables]  # the row that says how a trajectory ended
    rewards = [rewards_of(table)[kept] for table, kept in zip(tables, whole, strict=True)]
    scaled: list[npt.NDArray[np.float64] | None] = [None] * len(rewards)
    if advantage and rewards:
        scaled[:trained] = ADVANTAGES[advantage](rewards[:trained])
    groups = [_group(*parts, tokens, mismatch) for parts in zip(tables[:most], whole[:most], scaled, strict=False)]
    used = {i for group in groups for one in group["completions"] for i in one.get("ids", ())}
    return Step(int(file.stem.removeprefix("step-")), packed(groups), [_line(group) for group in groups], used)


def _group(
    table: pa.Table,
    whole: npt.NDArray[np.int64],
    advantages: npt.NDArray[np.float64] | None,
    tokens: bool,
    mismatch: Mismatch,
) -> dict[str, Any]:
    rows = table.to_pylist()
    problem = asked_of(rows[0]["problem"])
    samples = [row["sample"] for row in rows]
    made = [_completion(rows[i], tokens) | {"rows": samples.count(rows[i]["sample"])} for i in whole]
    if advantages is not None:
        for one, value in zip(made, advantages.tolist(), strict=True):
            one["advantage"] = round(value, 3) if math.isfinite(value) else None  # of a reward that is not finite
    first = rows[0]
    if len(differences := mismatch.get(first["group_id"], ())) == len(rows):
        for i, one in zip(whole, made, strict=True):
            if (values := differences[i]) is not None:
                one["mismatch"] = [_finite(value, 2) for value in values]
    return {
        "id": first["group_id"], "problem": first["problem_id"], "epoch": first["epoch"], "attempt": first["attempt"],
        "prompt": _packable(problem.messages), "columns": _packable(problem.columns), "completions": made,
    }  # fmt: skip


def _completion(row: dict[str, Any], tokens: bool) -> dict[str, Any]:
    sampled = len(row["completion_ids"]) if row["loss_mask"] is None else sum(row["loss_mask"])
    made = {
        "text": row["completion"], "length": sampled, "end": row["finish_reason"],
        "reward": _finite(row["reward"]), "status": row["reward_status"], "worker": row["worker"],
        "seed": str(row["seed"]),  # beyond what JavaScript's numbers hold exactly
        "parts": [[part["name"], _finite(part["value"])] for part in row["reward_parts"]],
        "versions": [row["policy_version_min"], row["policy_version_max"]],
    }  # fmt: skip
    if row["reward_error"] is not None:
        made["error"] = row["reward_error"]
    if row["messages"] is not None:
        made["messages"] = _packable(said_of(row["messages"]))
    if row["turns"]:
        made["turns"] = [_turn(turn) for turn in row["turns"]]
    if row["env_metrics"]:
        made["env"] = [[part["name"], _finite(part["value"])] for part in row["env_metrics"]]
    if row["logged"]:
        made["logged"] = [
            [one["name"], _finite(one["value"]) if one["text"] is None else one["text"]] for one in row["logged"]
        ]
    if tokens:
        made["ids"] = row["completion_ids"]
        made["logprobs"] = [_hundredths(value) for value in row["behavior_logprobs"]]
        if row["policy_version_min"] != row["policy_version_max"]:
            made["token_versions"] = row["token_versions"]
        if row["loss_mask"] is not None:
            made["observed"] = _runs([not sampled for sampled in row["loss_mask"]])
    return made


def _turn(row: Mapping[str, float | None]) -> dict[str, float | None]:
    """Whole numbers as they are: start and stop are places of tokens."""
    return {key: value if isinstance(value, int) else _finite(value) for key, value in row.items()}


def mismatch_file(file: Path) -> Path:
    """Of the step that the rollouts are of."""
    return file.parent.parent / record.MISMATCH_FOLDER / file.name


def _mismatch(file: Path) -> Mismatch:
    """Of the step that the rollouts are of; empty where the run kept none, or its file is being written."""
    try:
        return record.read_mismatch(mismatch_file(file))
    except (OSError, ValueError, pa.ArrowException):
        return {}


def _line(group: dict[str, Any]) -> dict[str, Any]:
    prompt = group["prompt"]
    if isinstance(prompt, list):
        prompt = str(prompt[-1].get("content", "")) if prompt and isinstance(prompt[-1], dict) else ""
    return {
        "problem": group["problem"],
        "prompt": " ".join(str(prompt).split())[:SHOWN],
        "rewards": [one["reward"] for one in group["completions"]],
        "statuses": [one["status"] for one in group["completions"]],
        "errors": [one["error"] for one in group["completions"] if "error" in one],
    }


def _packable(value: Any) -> Any:
    """A column may hold NaN, which JSON has not: as text, as Python writes it in JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {key: _packable(one) for key, one in value.items()}
    return [_packable(one) for one in value] if isinstance(value, list) else value


def _finite(value: float | None, digits: int = 5) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _hundredths(logprob: float) -> int | None:
    return round(logprob * LOGPROB_PARTS) if math.isfinite(logprob) else None


def _runs(flags: list[bool]) -> list[list[int]]:
    """[start, stop) of each run of true ones."""
    edges = np.flatnonzero(np.diff(np.asarray([False, *flags, False], np.int8)))
    return [[int(a), int(b)] for a, b in zip(edges[::2], edges[1::2], strict=True)]


# Which steps go into a page that has a limit: first and last, then ever closer between them.

MOST_COMPLETIONS = 2**14  # of a page: to read and pack them takes seconds, and nobody reads them all
MOST_ERRORS = 50  # different sentences of what failed


@dataclass(frozen=True, slots=True)
class Sample:
    """What was kept of a run's completions.

    Attributes:
        blocks: step -> its packed groups.
        index: what the list and its filters need of every group that was kept, in the order of steps.
        token_ids: those that occur in the blocks.
        remarks: what was left out, and why.
    """

    blocks: dict[int, Block] = field(default_factory=dict)
    index: dict[str, list[Any]] = field(default_factory=dict)
    token_ids: set[int] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)


def spread(steps: Sequence[int]) -> list[int]:
    """The steps in an order of which every beginning lies evenly: of 1 to 5 it is 1, 5, 3, 2, 4.

    steps: ascending. Behind the first and the last, a step has its place by its own number, whatever others there are:
    as a run goes on, its report keeps what it has read.
    """
    between = sorted(steps[1:-1], key=lambda step: f"{step - 1:064b}"[::-1])  # the van der Corput sequence
    return [*dict.fromkeys((*steps[:1], *steps[-1:])), *between]


def sampled(files: Sequence[Path], read: Callable[[Path, int | None], Step], limit: int) -> Sample:
    """As many steps as `limit` bytes of blocks hold, until they have MOST_COMPLETIONS; of a first one that is larger
    than all of it, the first groups.

    read: a file and how many groups of it, None for all (completions.read_step).
    """
    kept: list[Step] = []
    made = Sample()
    room, completions = limit, 0
    by_step = {int(file.stem.removeprefix("step-")): file for file in files}
    for number in spread(sorted(by_step)):
        try:
            step = read(by_step[number], None)
            while len(step.block) > room and not kept and len(step.lines) > 1:
                step = read(by_step[number], len(step.lines) // 2)
        except WrongInput as error:
            made.remarks.append(f"{error}.")
            continue
        completions += sum(len(line["rewards"]) for line in step.lines)
        if len(step.block) > room or (completions > MOST_COMPLETIONS and kept):
            limits = f"--limit ({limit / 2**20:.3g} MiB)" if len(step.block) > room else f"{MOST_COMPLETIONS:,}"
            made.remarks.append(
                f"Completions of {len(kept)} of {len(files)} steps are shown, evenly spread: all of them would be more "
                f"than {limits}; gleaner rollouts show has the others."
            )
            break
        room -= len(step.block)
        kept.append(step)
        made.blocks[step.step] = step.block
        made.token_ids.update(step.token_ids)
    made.index.update(_index(sorted(kept, key=lambda step: step.step)))
    return made


def _index(steps: Sequence[Step]) -> dict[str, list[Any]]:
    """Columns: for each group its step, its place in the block of the step, and the values of its line."""
    rows = [(step.step, place, line) for step in steps for place, line in enumerate(step.lines)]
    texts = list(dict.fromkeys((line["problem"], line["prompt"]) for *_, line in rows))
    places = {text: place for place, text in enumerate(texts)}
    return {
        "step": [step for step, *_ in rows],
        "place": [place for _, place, _ in rows],
        "problem": [places[line["problem"], line["prompt"]] for *_, line in rows],
        "rewards": [line["rewards"] for *_, line in rows],
        "failed": [sum(status not in ("ok", "none") for status in line["statuses"]) for *_, line in rows],
        "problems": [list(text) for text in texts],
        "errors": _errors(rows),
    }


def _errors(rows: Sequence[tuple[int, int, dict[str, Any]]]) -> list[list[Any]]:
    """[sentence, completions, first step, last step] of what failed, most first."""
    found: dict[str, list[int]] = {}
    for step, _, line in rows:
        for error in line["errors"]:
            found.setdefault(error, []).append(step)
    most = sorted(found.items(), key=lambda one: -len(one[1]))[:MOST_ERRORS]
    return [[error, len(steps), min(steps), max(steps)] for error, steps in most]


# The bytes that a token stands for, where they are a part of a character and so no text of their own.

ONE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece


def bytes_of(token: str) -> list[int] | None:
    """token: as the vocabulary has it. None if it is written in neither of the usual ways."""
    if (one := ONE.fullmatch(token)) is not None:
        return [int(one[1], 16)]
    return [LETTERS[letter] for letter in token] if set(token) <= LETTERS.keys() else None


def _letters() -> dict[str, int]:
    """GPT-2's: a byte that Latin-1 prints is its own letter; of the others, the n-th is U+0100 + n."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


LETTERS = _letters()


# Token ids as the pieces of text that they stand for, from files on this machine: a report asks no hub.

FILE = "tokenizer.json"
MOST = 2**28  # bytes: the largest that are published have a tenth


class Words:
    """The tokenizer of a model folder, or of a hub model in the cache; `missing` says why there is none."""

    def __init__(self, model: str | None) -> None:
        self._tokenizer: Any = None
        self.missing = ""
        file = _file_of(model) if model else None
        if file is None:
            self.missing = f"Tokens are not coloured: {FILE} of {model or 'the model'} is not on this machine."
            return
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library has no exceptions of its own
            self.missing = f"Tokens are not coloured: {FILE} of {model} cannot be read: {str(error)[:200]}"

    @property
    def known(self) -> bool:
        """Whether ids can be turned into text."""
        return self._tokenizer is not None

    def pieces(self, ids: Iterable[int]) -> dict[int, str | list[int]]:
        """Each id's text as it stands inside a text, special tokens too; bytes of UTF-8 where they are no whole text.

        Behind an ordinary token, since many tokenizers drop the space before the first one of a text.
        """
        some, size = [*ids], self._tokenizer.get_vocab_size()
        anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        before = self._tokenizer.decode(anchor, skip_special_tokens=False)
        known = [i for i in some if 0 <= i < size]
        texts = self._tokenizer.decode_batch([[*anchor, i] for i in known], skip_special_tokens=False)
        found: dict[int, str | list[int]] = {}
        for i, text in zip(known, texts, strict=True):
            parts = bytes_of(self._tokenizer.id_to_token(i)) if "\ufffd" in text else None
            found[i] = parts or text.removeprefix(before)
        return {i: found.get(i, f"<{i}>") for i in some}


def _file_of(model: str) -> Path | None:
    file = Path(model) / FILE
    try:
        if file.is_file():
            return file if file.stat().st_size <= MOST else None
    except (OSError, ValueError):  # what no file is called
        return None
    try:
        name, revision = split(model)
        cached = try_to_load_from_cache(name, FILE, revision=revision)
    except HFValidationError:  # a path that is not here
        return None
    return Path(cached) if isinstance(cached, str) else None


SCRIPTS = (
    "text.js", "blocks.js", "chart.js", "phases.js", "overview.js", "tokens.js", "group.js", "browse.js", "main.js",
)  # fmt: skip


def page(title: str, blocks: Mapping[str, Block], *, live: bool = False) -> Iterator[str]:
    """Pieces of the page's text, in order. blocks: name -> data, found by the page's script under that name.

    live: the script may ask its own server for blocks that are not in the page.
    """
    folder = files("learner.tools.report").joinpath("page")
    style = folder.joinpath("style.css").read_text("utf-8")
    script = "".join(folder.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    policy = [
        "default-src 'none'", f"script-src '{_digest(script)}'", f"style-src '{_digest(style)}'",
        "img-src data:", "base-uri 'none'", "form-action 'none'", *(["connect-src 'self'"] if live else []),
    ]  # fmt: skip
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n"
    )
    body = folder.joinpath("body.html").read_text("utf-8")
    yield body
    first = [name for name in blocks if not name.startswith("step-")]
    yield from (_element(name, blocks[name]) for name in first)  # before the script, which draws while the rest comes
    yield f"<script>{script}</script>\n"
    yield from (_element(name, block) for name, block in blocks.items() if name not in first)
    yield "</body>\n</html>\n"


def _element(name: str, block: Block) -> str:
    return f'<script type="text/plain" id="block-{name}">{block}</script>\n'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# A run folder -> the blocks of its page.


def blocks_of(folder: Path, against: Path | None, limit: int) -> tuple[str, dict[str, Block]]:
    """Title and blocks of the whole page: head, index, pieces, and step-<number> for the completions of each step.

    limit: bytes that the steps may take. Raises WrongInput.
    """
    runs = read_runs(folder, against)
    run = runs[0]
    words = Words(model_of(run))
    found = sampled(
        run.rollouts,
        partial(read_step, advantage=advantage_of(run), trained=trained_of(run), tokens=words.known),
        limit,
    )
    run.remarks.extend(found.remarks)
    head = head_of(runs, words)
    pieces = words.pieces(sorted(found.token_ids)) if words.known else {}
    blocks = {"head": packed(head), "index": packed(found.index), "pieces": packed(pieces)}
    blocks |= {f"step-{step}": block for step, block in sorted(found.blocks.items())}
    return title_of(runs), blocks


def head_of(runs: Sequence[Run], words: Words) -> dict[str, Any]:
    """What the page shows besides completions."""
    return summary(runs) | {"colours": words.missing, "title": title_of(runs)}


def title_of(runs: Sequence[Run]) -> str:
    """Names of the runs."""
    return printable(" against ".join(run.name for run in runs))


def model_of(run: Run) -> str | None:
    """Where the run's tokenizer is."""
    model = run.config.get("model")
    if not isinstance(model, dict) or not model.get("path"):
        return None
    revision = model.get("revision")
    return joined(str(model["path"]), None if revision is None else str(revision))


def advantage_of(run: Run) -> str | None:
    """The kind of advantage that GRPO used; None for PPO, whose advantages need its values."""
    learner = run.config.get("learner")
    if not isinstance(learner, dict) or learner.get("algorithm") != "grpo":
        return None
    loss = learner.get("loss")
    kind = loss.get("advantage") if isinstance(loss, dict) else None
    return kind if isinstance(kind, str) and kind in ADVANTAGES else None


def trained_of(run: Run) -> int | None:
    """How many groups of a step's file were trained on, the first; None if the configuration does not say."""
    learner = run.config.get("learner")
    count = learner.get("groups_per_step") if isinstance(learner, dict) else None
    return count if type(count) is int and count > 0 else None
