"""gleaner rewards try, gleaner rewards list."""

from pathlib import Path
from typing import Annotated

import typer

from learner.tools.arguments import epilog, positive
from rewards.limits import DEFAULT_MEMORY, GIB

TRY_EPILOG = epilog(
    "gleaner rewards try --config my.yaml",
    "gleaner rewards try my_rewards.py:accuracy --data train.jsonl --samples 2 --completion 42",
    "gleaner rewards try --config my.yaml --reference '<answer>{answer}</answer>' --completions said.jsonl",
    "gleaner rewards try --config my.yaml --samples 2 --generate 4",
    "gleaner rewards try my_rewards.py:accuracy --rollouts runs/demo-seed0/rollouts",
    "gleaner rewards try regex --arg pattern='[0-9]+' --rollouts runs/demo-seed0/rollouts --steps 1",
)
LIST_EPILOG = epilog("gleaner rewards list", "gleaner rewards list --json | jq '.[].name'")


Name = Annotated[
    str | None,
    typer.Argument(
        metavar="REWARD",
        help="Built-in name, package.module:function or path/file.py:function; else all of --config. One that --config "
        "has is tried with its settings there.",
    ),
]
Config = Annotated[str | None, typer.Option(metavar="FILE", help="The YAML file of a run to come: its data, rewards.")]
Data = Annotated[str | None, typer.Option(metavar="PATH", help="Rows, as data.path.")]
Split = Annotated[str | None, typer.Option(metavar="SPLIT", help="As data.split.")]
Prompt = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column or template, as data.prompt.")]
Samples = Annotated[
    int | None,
    typer.Option(parser=positive, metavar="N", help="How many rows of the data; else 5, or as --completions."),
]
Reference = Annotated[
    str | None,
    typer.Option(
        metavar="TEMPLATE",
        help="What a right completion says: a column, or a template such as '<answer>{answer}</answer>'; else the "
        "column that the rewards read, or answer or solution.",
    ),
]
Completion = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="A completion to each row; may be given several times.")
]
Completions = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON lines, one for each row: a text, a list of texts, or {completion: ...}."),
]
Generate = Annotated[
    int | None,
    typer.Option(parser=positive, metavar="N", help="N completions of the model to each row, too; the first greedy."),
]
Rollouts = Annotated[
    str | None, typer.Option(metavar="DIR", help="The rollouts folder of a run, runs/<name>/rollouts, and no data.")
]
Steps = Annotated[
    int | None, typer.Option(parser=positive, metavar="N", help="With --rollouts: how many of the newest; else 5.")
]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="For one group; else 10.")]
Arg = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Argument of REWARD; may be given several times.")
]
Env = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A variable that REWARD may see; may be given several times.")
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help=f"The most that it may hold; else as --config, or {DEFAULT_MEMORY // GIB}GiB."),
]
AsJson = Annotated[bool, typer.Option("--json", help="On data: all of it as an object.")]


def try_reward(
    reward: Name = None,
    config: Config = None,
    data: Data = None,
    split: Split = None,
    prompt: Prompt = None,
    samples: Samples = None,
    reference: Reference = None,
    completion: Completion = None,
    completions: Completions = None,
    generate: Generate = None,
    rollouts: Rollouts = None,
    steps: Steps = None,
    timeout: Timeout = None,
    arg: Arg = None,
    env: Env = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> int:
    """Try reward functions before a run: on rows of the data, or on saved rollouts.

    On data: on the reference answer of each row, on nothing at all, and on what is given or generated; every value is
    shown, what failed in its words, and how long the calls took. On rollouts: as training would score them; the
    distribution is shown, and a completion with the highest and the lowest score.
    """
    given = dict(locals())
    from learner.tools.rewards_try import run

    return run({**given, "json": given.pop("as_json")})


def list_rewards(
    as_json: Annotated[bool, typer.Option("--json", help="The same as a list of objects.")] = False,
) -> int:
    """List the built-in reward functions.

    What each looks at, the data columns that it reads, and its args.
    """
    from learner.tools.rewards_try import built_ins, built_ins_text

    found = built_ins()
    if as_json:
        import json

        print(json.dumps([one._asdict() for one in found], indent=2))
    else:
        print(built_ins_text(found))
    return 0
