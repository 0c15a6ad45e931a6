"""gleaner plan."""

from typing import Annotated, Literal

import typer

from cluster.memory.shape import LoraRank
from learner.tools.arguments import epilog, natural, positive

EPILOG = epilog(
    "gleaner plan --gpu rtx4090",
    "gleaner plan --gpu 24GiB --model Llama-3.1-8B --base shared",
    "gleaner plan --gpu 80 --algorithm ppo --base shared --model Qwen2.5-7B --json",
    failed="the one model that was asked for does not fit",
)


def plan(
    gpu: Annotated[
        str, typer.Option(metavar="CARD", help="A card, or the memory of one: rtx4090, 24 (GB as sold), 24GiB.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Name in the table, or a folder with a config.json; else five usual sizes.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every model of the built-in table.")] = False,
    cards: Annotated[Literal[1, 2], typer.Option(help="2: one for each role.")] = 1,
    base: Annotated[
        Literal["own", "shared"], typer.Option(help="shared: one base for both roles (memory.layout), of LoRA.")
    ] = "own",
    algorithm: Annotated[
        Literal["grpo", "ppo"], typer.Option(help="ppo: a value model beside the policy, both LoRA on one base.")
    ] = "grpo",
    generations: Annotated[int, typer.Option(parser=positive, metavar="N", help="Completions per problem.")] = 8,
    prompt: Annotated[int, typer.Option(parser=positive, metavar="N", help="Longest prompt, in tokens.")] = 256,
    completion: Annotated[int, typer.Option(parser=positive, metavar="N", help="Longest completion, in tokens.")] = 786,
    sequences: Annotated[int, typer.Option(parser=positive, metavar="N", help="Most that are decoded at once.")] = 64,
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="auto: 16 bits.")] = "auto",
    staleness: Annotated[int, typer.Option(parser=natural, metavar="N", help="max_staleness.")] = 0,
    rank: Annotated[LoraRank, typer.Option(help="Of the adapter.")] = 16,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Main memory of the machine, 64GiB; else of this one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every number, by role and part, in bytes.")] = False,
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Stacked bars; needs gleaner-rl[plan].")] = None,
) -> int:
    """Say which models fit a card, and how.

    Generator and learner together, with the settings to paste into a configuration.
    """
    given = dict(locals())
    from learner.tools.plan import Asked, run

    return run(Asked(**given))
