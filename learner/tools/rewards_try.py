"""The command lines of gleaner rewards list and gleaner rewards try. `list` describes the built-in reward functions
from their sources and imports none: one takes seconds to load, and another may lack its package. reward_trial.py, which
carries out `try`, is imported when the command runs.
"""

import ast
import json
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from learner.main import Request, epilog, positive
from rewards.limits import DEFAULT_MEMORY, GIB


@dataclass(frozen=True, slots=True)
class RewardsListRequest(Request):
    """List the built-in reward functions.

    What each looks at, the data columns that it reads, and its args.
    """

    EPILOG = epilog("gleaner rewards list", "gleaner rewards list --json | jq '.[].name'")

    as_json: Annotated[bool, typer.Option("--json", help="The same as a list of objects.")] = False


def list_rewards(asked: RewardsListRequest) -> int:
    """Exit code: 0."""
    found = built_ins()
    print(json.dumps([one._asdict() for one in found], indent=2) if asked.as_json else built_ins_text(found))
    return 0


# Parameters that every call gives. Other positional parameters are columns of the data; keyword-only ones are settings.
GIVEN = ("prompts", "completions", "completion_ids")


class BuiltIn(NamedTuple):
    """The description of a built-in reward function."""

    name: str
    says: str
    columns: tuple[str, ...]  # columns of the data that it reads whatever its args are
    args: dict[str, str]  # name -> default as written in the source, or `required`


def built_ins() -> list[BuiltIn]:
    """Returns the descriptions of all built-in reward functions, by name."""
    from rewards.loader import BUILT_INS

    return [_described(name, *place.split(":")) for name, place in sorted(BUILT_INS.items())]


def built_ins_text(found: list[BuiltIn]) -> str:
    """Returns two or three lines about each function, and a line on its use."""
    lines = []
    for one in found:
        lines.append(f"{one.name:20} {one.says}")
        if one.columns:
            lines.append(f"{'':20} columns: {', '.join(one.columns)}")
        if one.args:
            lines.append(f"{'':20} args: {', '.join(f'{name}={value}' for name, value in one.args.items())}")
    return "\n".join([*lines, "rewards: [{use: NAME, weight: 1.0, args: {...}}]; docs/rewards.md says more"])


def _described(name: str, module: str, what: str) -> BuiltIn:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    (node,) = [node for node in tree.body if isinstance(node, kinds) and node.name == what]
    summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
    columns: tuple[str, ...] = ()
    if isinstance(node, ast.ClassDef):  # settings
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        pairs = [(ast.unparse(one.target), one.value) for one in fields]
    else:
        columns = tuple(one.arg for one in node.args.args if one.arg not in GIVEN)
        names = [one.arg for one in node.args.kwonlyargs]
        pairs = list(zip(names, node.args.kw_defaults, strict=True))
    args = {arg: "required" if default is None else ast.unparse(default) for arg, default in pairs}
    return BuiltIn(name, " ".join(summary.split()), columns, args)


@dataclass(frozen=True, slots=True)
class RewardsTryRequest(Request):
    """Try reward functions before a run: on rows of the data, or on saved rollouts.

    On data: on the reference answer of each row, on nothing at all, and on what is given or generated; every value is
    shown, what failed in its words, and how long the calls took. On rollouts: as training would score them; the
    distribution is shown, and a completion with the highest and the lowest score.
    """

    EPILOG = epilog(
        "gleaner rewards try --config my.yaml",
        "gleaner rewards try my_rewards.py:accuracy --data train.jsonl --samples 2 --completion 42",
        "gleaner rewards try --config my.yaml --reference '<answer>{answer}</answer>' --completions said.jsonl",
        "gleaner rewards try --config my.yaml --samples 2 --generate 4",
        "gleaner rewards try my_rewards.py:accuracy --rollouts runs/demo-seed0/rollouts",
        "gleaner rewards try regex --arg pattern='[0-9]+' --rollouts runs/demo-seed0/rollouts --steps 1",
    )

    reward: Annotated[
        str | None,
        typer.Argument(
            metavar="REWARD",
            help="Built-in name, package.module:function or path/file.py:function; else all of --config. One that "
            "--config has is tried with its settings there.",
        ),
    ] = None
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The YAML file of a run to come: its data, rewards.")
    ] = None
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Rows, as data.path.")] = None
    split: Annotated[str | None, typer.Option(metavar="SPLIT", help="As data.split.")] = None
    prompt: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column or template, as data.prompt.")] = None
    samples: Annotated[
        int | None,
        typer.Option(parser=positive, metavar="N", help="How many rows of the data; else 5, or as --completions."),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="What a right completion says: a column, or a template such as '<answer>{answer}</answer>'; else the "
            "column that the rewards read, or answer or solution.",
        ),
    ] = None
    completion: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A completion to each row; may be given several times.")
    ] = None
    completions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSON lines, one for each row: a text, a list of texts, or {completion: ...}."
        ),
    ] = None
    generate: Annotated[
        int | None,
        typer.Option(
            parser=positive, metavar="N", help="N completions of the model to each row, too; the first greedy."
        ),
    ] = None
    rollouts: Annotated[
        str | None, typer.Option(metavar="DIR", help="The rollouts folder of a run, runs/<name>/rollouts, and no data.")
    ] = None
    steps: Annotated[
        int | None, typer.Option(parser=positive, metavar="N", help="With --rollouts: how many of the newest; else 5.")
    ] = None
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="For one group; else 10.")] = None
    arg: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Argument of REWARD; may be given several times.")
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variable that REWARD may see; may be given several times."),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help=f"The most that it may hold; else as --config, or {DEFAULT_MEMORY // GIB}GiB."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="On data: all of it as an object.")] = False


# Options that go with one form of the command: on saved rollouts, or on data.

OF_ROLLOUTS = ("steps",)
OF_DATA = (
    "config", "data", "split", "prompt", "samples", "reference", "completion", "completions", "generate", "json",
)  # fmt: skip
OF_ONE = ("timeout", "arg", "env")  # options of a reward function that is named before the options


def try_rewards(asked: RewardsTryRequest) -> int:
    """Exit code: 0; 1 if a reward function failed on data; 2 if something given is wrong, which is printed."""
    if wrong := _wrong(asked):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    from learner.tools import reward_trial

    return reward_trial.run(asked)


def _wrong(asked: RewardsTryRequest) -> str:
    """Returns a sentence about options that do not go together, or ''."""
    given = {name.removeprefix("as_"): value for name, value in asdict(asked).items()}
    used = [name for name, value in given.items() if not (value is None or value is False or value == [])]
    if "rollouts" in used and (wrong := [name for name in OF_DATA if name in used]):
        return f"{_named(wrong)}: does not go with --rollouts, whose completions are scored; leave it out"
    if not {"rollouts", "config", "data"} & set(used):
        return (
            "--config, --data or --rollouts: one is required: the configuration of a run to come, a file of rows, or "
            "the rollouts of a run"
        )
    if "rollouts" not in used and (wrong := [name for name in OF_ROLLOUTS if name in used]):
        return f"{_named(wrong)}: goes with --rollouts alone; leave it out"
    if "reward" not in used and "config" not in used:
        return "REWARD: required without --config; name a reward function before the options"
    if "reward" not in used and (wrong := [name for name in OF_ONE if name in used]):
        return f"{_named(wrong)}: is of one function, and --config has its own; name one before the options"
    return ""


def _named(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)
