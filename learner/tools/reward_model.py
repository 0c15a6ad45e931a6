"""The command line of gleaner reward-model train, which trains a reward model on preference pairs. bradley_terry.py,
which carries it out, is imported when the command runs, so that --help is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.memory.shape import LoraRank
from learner.driver import process
from learner.main import (
    Request,
    epilog,
    natural,
    positive,
    rate,
)


@dataclass(frozen=True, slots=True)
class RewardModelRequest(Request):
    """Learn a reward model from preference pairs.

    It is an adapter with a scalar head, which a run uses by rewards: [{use: "adapter:FOLDER"}].
    """

    EPILOG = epilog(
        "gleaner reward-model train pairs.jsonl --model Qwen/Qwen2.5-0.5B-Instruct --out judge",
        "gleaner reward-model train HuggingFaceH4/ultrafeedback_binarized --split train_prefs --model BASE --out judge",
        failed="it failed on the way",
    )

    pairs: Annotated[
        str,
        typer.Argument(metavar="PAIRS", help="JSON lines, Parquet or a hub data set with prompt, chosen and rejected."),
    ]
    model: Annotated[str, typer.Option(help="The base: the model.path of the run that is to use it.")]
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")]
    split: Annotated[
        str | None, typer.Option(help="Of a hub data set or a saved folder, such as train_prefs; else train.")
    ] = None
    held_out: Annotated[
        str | None,
        typer.Option("--eval", metavar="PAIRS", help="Held-out pairs; else a tenth of the prompts is held out."),
    ] = None
    eval_split: Annotated[str | None, typer.Option(metavar="SPLIT", help="Of what --eval names; else train.")] = None
    epochs: Annotated[int, typer.Option(parser=positive, metavar="N", help="Passes over the pairs.")] = 1
    batch: Annotated[int, typer.Option(parser=positive, metavar="N", help="Pairs per update.")] = 32
    learning_rate: Annotated[
        float,
        typer.Option(parser=rate, metavar="RATE", help="Reached in a twentieth of the steps; then it falls evenly."),
    ] = 2e-4
    rank: Annotated[LoraRank, typer.Option(help="Of the adapter.")] = 16
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Type that is computed in: the run's model.dtype.")
    ] = "bfloat16"
    base: Annotated[Literal["none", "nf4"], typer.Option(help="nf4: the base in 4 bits.")] = "none"
    checkpointing: Annotated[Literal["none", "full"], typer.Option(help="full: less memory, slower.")] = "none"
    max_length: Annotated[int, typer.Option(parser=positive, metavar="N", help="Longer pairs are left out.")] = 2048
    token_budget: Annotated[
        int | None, typer.Option(parser=positive, metavar="N", help="Tokens of a micro-batch; else as in a run.")
    ] = None
    seed: Annotated[int, typer.Option(parser=natural, metavar="N", help="Of order, split and new weights.")] = 0


def run(asked: RewardModelRequest) -> int:
    """Exit code: 0; 2 if something given is wrong, or too much for the machine."""
    process.streams_are_commentary()
    from learner.tools import bradley_terry

    return bradley_terry.run(asked)
