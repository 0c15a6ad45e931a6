"""One page out of its parts: the files in `page/`, and data that a browser unpacks. Nothing in it is fetched.

The page's own script and style are named by their digests in its Content-Security-Policy, and nothing else may run or
be asked for: what a model wrote is data, and is shown by textContent only.
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from cluster.reading import printable
from learner.algo.advantage import ADVANTAGES
from learner.tools.report.completions import Block, packed, read_step, sampled
from learner.tools.report.run_folder import Run, read_runs
from learner.tools.report.summary import summary
from rollout.data.hub import joined, split

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
