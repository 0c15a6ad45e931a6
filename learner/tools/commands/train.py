"""gleaner train."""

from typing import Annotated

import typer

from learner.tools.arguments import epilog

EPILOG = epilog(
    "gleaner train --config my.yaml --dry-run",
    "gleaner train --config my.yaml learner.lora.rank=32 seed=1",
    "gleaner train --config my.yaml --dry-run --assume-gpus 2xh100",
    "gleaner train --keys | grep memory",
    failed="the run failed",
)
ANYTHING = {"ignore_unknown_options": True}  # --a.b=1 is taken like a.b=1


def _key_names(incomplete: str) -> list[str]:
    from learner.config.load import keys

    return [f"{key.name}=" for key in keys() if key.name.startswith(incomplete)]


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings that replace the file's; docs/configuration.md has them all.",
            autocompletion=_key_names,
        ),
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The YAML file of the run; see configs/.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print placement and notes, start nothing.")
    ] = False,
    assume_gpus: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --dry-run: check as if cards were here: h100, 80GiB, 2x24GiB."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --dry-run: print every setting, too.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every key with its choices and default.")] = False,
) -> int:
    """Train a model on your own reward.

    As python -m learner.main does. The same command goes on where a run stopped; Ctrl-C once ends it after the step,
    with a checkpoint.
    """
    if keys:
        from learner.config.load import describe

        print(describe())
        return 0
    from learner.main import main

    options = {"--config": config, "--assume-gpus": assume_gpus}
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    flags = {"--dry-run": dry_run, "--verbose": verbose}
    return main([*words, *(name for name, given in flags.items() if given), *(overrides or [])])
