"""gleaner rewards try, gleaner rewards list."""

from typing import Annotated

import typer

from learner.tools.arguments import positive
from learner.tools.commands.epilog import epilog
from rewards.memory import DEFAULT, GIB

TRY_EPILOG = epilog(
    "gleaner rewards try my_rewards.py:accuracy --rollouts runs/demo-seed0/rollouts",
    "gleaner rewards try regex --arg pattern='[0-9]+' --rollouts runs/demo-seed0/rollouts --steps 1",
)
LIST_EPILOG = epilog("gleaner rewards list", "gleaner rewards list --json | jq '.[].name'")


def try_reward(
    reward: Annotated[
        str,
        typer.Argument(metavar="REWARD", help="Built-in name, package.module:function or path/file.py:function."),
    ],
    rollouts: Annotated[str, typer.Option(metavar="DIR", help="The rollouts folder of a run: runs/<name>/rollouts.")],
    steps: Annotated[
        int, typer.Option(parser=positive, metavar="N", help="How many of the newest steps to score.")
    ] = 5,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For one group.")] = 10.0,
    arg: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Argument of the reward; may be given several times.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A variable that it may see; may be given several times.")
    ] = None,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="The most that it may hold.")] = f"{DEFAULT // GIB}GiB",
) -> int:
    """Score saved rollouts with a reward.

    As training would; the distribution is shown, and a completion with the highest and the lowest score.
    """
    from learner.tools.rescore import RescoreError, rescore

    try:
        print(rescore(reward, rollouts, steps, timeout, arg or (), env or (), memory))
    except RescoreError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    return 0


def list_rewards(
    as_json: Annotated[bool, typer.Option("--json", help="The same as a list of objects.")] = False,
) -> int:
    """List the built-in reward functions.

    What each looks at, the data columns that it reads, and its args.
    """
    from learner.tools.built_ins import as_text, built_ins

    found = built_ins()
    if as_json:
        import json

        print(json.dumps([one._asdict() for one in found], indent=2))
    else:
        print(as_text(found))
    return 0
