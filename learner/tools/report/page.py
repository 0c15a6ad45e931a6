"""Makes a run's report as one HTML page, from completions, summary and the files in `page/`. Data are packed in blocks
that the page's script unpacks; the page loads nothing from elsewhere.

Its Content-Security-Policy names its script and style by their digests, so nothing else may run or be loaded. What a
model wrote is data, and is shown by textContent only.
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

Block = str
"""A value packed as base64 of gzip of ASCII JSON, in which nothing can end a script element."""


def packed(value: Any) -> Block:
    """Packs a value; the same value gives the same block. With gzip level 6 completions are 5 % smaller than with level
    1, in twice the time."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)).decode("ascii")


def unpacked(block: Block) -> Any:
    """Returns the value that was packed."""
    return json.loads(gzip.decompress(base64.b64decode(block)))


SHOWN = 160  # most characters of a prompt in the list
LOGPROB_PARTS = 100  # logprobs are kept as integers, in hundredths of a nat
Mismatch = Mapping[str, Sequence[list[float] | None]]  # learner.driver.record.read


@dataclass(frozen=True, slots=True)
class Step:
    """What the page shows of a step. Letters: N groups.

    Attributes:
        step: number of the step.
        block: packed list [N] of the groups.
        lines: [N] entries of the index: problem, beginning of the prompt, rewards, statuses, errors in words.
        token_ids: the token ids that occur.
    """

    step: int
    block: Block
    lines: list[dict[str, Any]]
    token_ids: set[int]


def read_step(
    file: Path, most: int | None = None, *, advantage: str | None, trained: int | None = None, tokens: bool
) -> Step:
    """Reads at most `most` groups of a step file. Raises WrongInput if it cannot be read.

    advantage: the row of ADVANTAGES that the run used; None: it used none. trained: number of groups, the first ones,
    that were trained on; the others, which dynamic sampling replaced, have no advantage (None: all were). tokens:
    whether token ids and logprobs are included.
    """
    try:
        rows = ledger.read(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        said = " ".join(str(error).split())[:200]
        raise WrongInput(f"rollouts: {file.name} cannot be read: {said}; take it away") from error
    tables = groups_of(rows)
    mismatch = _mismatch(file) if tokens else {}
    whole = [np.flatnonzero(lasts(table)) for table in tables]  # indices of the last row of each trajectory
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
    rows = table.drop_columns(["routed_experts"]).to_pylist()  # megabytes, of which the page shows none
    problem = asked_of(rows[0]["problem"])
    samples = [row["sample"] for row in rows]
    made = [_completion(rows[i], tokens) | {"rows": samples.count(rows[i]["sample"])} for i in whole]
    if advantages is not None:
        for one, value in zip(made, advantages.tolist(), strict=True):
            one["advantage"] = round(value, 3) if math.isfinite(value) else None  # None if the reward was not finite
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
        "seed": str(row["seed"]),  # a text, since JavaScript's numbers cannot hold all seeds exactly
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
    """Rounds the numbers of a turn, except integers: start and stop are indices of tokens."""
    return {key: value if isinstance(value, int) else _finite(value) for key, value in row.items()}


def mismatch_file(file: Path) -> Path:
    """Returns the file with the mismatch of the step whose rollouts are in `file`."""
    return file.parent.parent / record.MISMATCH_FOLDER / file.name


def _mismatch(file: Path) -> Mismatch:
    """Reads the mismatch of a step; empty if the run kept none, or its file is being written."""
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
    """Replaces numbers that are not finite, which JSON does not have, by texts such as NaN."""
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
    """Returns [start, stop) of each run of true flags."""
    edges = np.flatnonzero(np.diff(np.asarray([False, *flags, False], np.int8)))
    return [[int(a), int(b)] for a, b in zip(edges[::2], edges[1::2], strict=True)]


# The steps that go into a page with a limit: the first and the last, then steps ever closer between them.

MOST_COMPLETIONS = 2**14  # most completions of a page: reading and packing them takes seconds
MOST_ERRORS = 50  # most different error sentences


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of a run's completions that goes into the page.

    Attributes:
        blocks: step -> its packed groups.
        index: what the list and its filters need of every group, in the order of steps.
        token_ids: the token ids that occur in the blocks.
        remarks: sentences on what was left out, and why.
    """

    blocks: dict[int, Block] = field(default_factory=dict)
    index: dict[str, list[Any]] = field(default_factory=dict)
    token_ids: set[int] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)


def spread(steps: Sequence[int]) -> list[int]:
    """Returns the steps in an order whose beginnings are evenly spread: for 1 to 5 it is 1, 5, 3, 2, 4.

    steps: ascending. Except for the first and the last, the order depends on the steps' numbers alone, so that the
    report of a run that goes on keeps the steps that it has read.
    """
    between = sorted(steps[1:-1], key=lambda step: f"{step - 1:064b}"[::-1])  # the van der Corput sequence
    return [*dict.fromkeys((*steps[:1], *steps[-1:])), *between]


def sampled(files: Sequence[Path], read: Callable[[Path, int | None], Step], limit: int) -> Sample:
    """Returns as many steps as fit into `limit` bytes of blocks and MOST_COMPLETIONS completions. If the first step
    alone is larger, its first groups are taken.

    read: reads a file, and so many of its groups (None: all), as read_step does.
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
    """Returns the index as columns: for each group its step, its place in the step's block, and the values of its
    line."""
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
    """Returns [sentence, completions, first step, last step] for the errors, the most frequent first."""
    found: dict[str, list[int]] = {}
    for step, _, line in rows:
        for error in line["errors"]:
            found.setdefault(error, []).append(step)
    most = sorted(found.items(), key=lambda one: -len(one[1]))[:MOST_ERRORS]
    return [[error, len(steps), min(steps), max(steps)] for error, steps in most]


ONE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token of a byte


def bytes_of(token: str) -> list[int] | None:
    """Returns the bytes of a token that is a part of a character. token: as written in the vocabulary. None if it is
    written neither as in SentencePiece nor as in GPT-2."""
    if (one := ONE.fullmatch(token)) is not None:
        return [int(one[1], 16)]
    return [LETTERS[letter] for letter in token] if set(token) <= LETTERS.keys() else None


def _letters() -> dict[str, int]:
    """Returns GPT-2's letters of bytes: a byte that Latin-1 can print is its own letter; the n-th of the others is
    U+0100 + n."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


LETTERS = _letters()


FILE = "tokenizer.json"
MOST = 2**28  # most bytes of the file; the largest published ones have a tenth


class Words:
    """Translates token ids to text, with the tokenizer of a model folder or of a hub model in the cache; the hub is not
    asked. `missing` says why there is no tokenizer."""

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
        """Returns the text of each id as within a text, also of special tokens; bytes of UTF-8 if it is a part of a
        character. Each is decoded after an ordinary token, since many tokenizers drop the first space of a text."""
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
    except (OSError, ValueError):  # the name cannot be that of a file
        return None
    try:
        name, revision = split(model)
        cached = try_to_load_from_cache(name, FILE, revision=revision)
    except HFValidationError:  # the name is a path that does not exist
        return None
    return Path(cached) if isinstance(cached, str) else None


SCRIPTS = (
    "text.js", "blocks.js", "chart.js", "phases.js", "overview.js", "tokens.js", "group.js", "browse.js", "main.js",
)  # fmt: skip


def page(title: str, blocks: Mapping[str, Block], *, live: bool = False) -> Iterator[str]:
    """Yields pieces of the page's text, in order. blocks: name -> data, which the page's script finds by that name.

    live: whether the script may request blocks that are not in the page from the server.
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
    yield from (_element(name, blocks[name]) for name in first)  # the script draws them while the rest is loaded
    yield f"<script>{script}</script>\n"
    yield from (_element(name, block) for name, block in blocks.items() if name not in first)
    yield "</body>\n</html>\n"


def _element(name: str, block: Block) -> str:
    return f'<script type="text/plain" id="block-{name}">{block}</script>\n'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def blocks_of(folder: Path, against: Path | None, limit: int) -> tuple[str, dict[str, Block]]:
    """Returns title and blocks of a run's page: head, index, pieces, and step-<number> for the completions of each
    step.

    limit: most bytes of the steps' blocks. Raises WrongInput.
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
    """Returns what the page shows besides completions."""
    return summary(runs) | {"colours": words.missing, "title": title_of(runs)}


def title_of(runs: Sequence[Run]) -> str:
    """Returns the page's title: the names of the runs."""
    return printable(" against ".join(run.name for run in runs))


def model_of(run: Run) -> str | None:
    """Returns the model whose tokenizer the run used, with its revision; None if the configuration does not say."""
    model = run.config.get("model")
    if not isinstance(model, dict) or not model.get("path"):
        return None
    revision = model.get("revision")
    return joined(str(model["path"]), None if revision is None else str(revision))


def advantage_of(run: Run) -> str | None:
    """Returns the kind of advantage that GRPO used; None for PPO, whose advantages need its values."""
    learner = run.config.get("learner")
    if not isinstance(learner, dict) or learner.get("algorithm") != "grpo":
        return None
    loss = learner.get("loss")
    kind = loss.get("advantage") if isinstance(loss, dict) else None
    return kind if isinstance(kind, str) and kind in ADVANTAGES else None


def trained_of(run: Run) -> int | None:
    """Returns the number of groups, the first ones of a step's file, that were trained on; None if it is not known."""
    learner = run.config.get("learner")
    count = learner.get("groups_per_step") if isinstance(learner, dict) else None
    return count if type(count) is int and count > 0 else None
