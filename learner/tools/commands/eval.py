"""gleaner eval."""

from pathlib import Path
from typing import Annotated

import typer

from learner.tools.arguments import epilog, natural, positive, rate

EPILOG = epilog(
    "gleaner eval --run runs/demo-seed0",
    "gleaner eval --config configs/local_cpu.yaml --samples 8 --limit 50",
    "gleaner eval --config my.yaml --adapter runs/my-run/adapter --data test.jsonl --save test.parquet",
    "gleaner eval --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k --split test --reward number "
    "data.args='{name: main}'",
)


def evaluate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings as of gleaner train: seed=1 cluster.gpus.generator=1."),
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The YAML file of a run.")] = None,
    run_folder: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="A run's folder: its configuration, and the policy it has learned."),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Hub name or folder, without an adapter.")] = None,
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="A LoRA adapter in PEFT's format.")] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Problems, as data.path, all of them; else those that the run holds out."),
    ] = None,
    split: Annotated[str | None, typer.Option(metavar="SPLIT", help="Of --data; else train.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column or template, as data.prompt.")] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="REWARD", help="Reward function; may be given several times, the first is accuracy."),
    ] = None,
    samples: Annotated[
        int, typer.Option(parser=natural, metavar="K", help="Completions of each problem beside the greedy one.")
    ] = 0,
    temperature: Annotated[
        float | None, typer.Option(parser=rate, metavar="T", help="Of the samples; else rollout.temperature.")
    ] = None,
    limit: Annotated[int | None, typer.Option(parser=positive, metavar="N", help="Only the first N problems.")] = None,
    threshold: Annotated[
        float, typer.Option(metavar="SCORE", help="From which score on a completion is correct, for pass@k.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="The result as an object.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE.parquet", help="Every completion with its rewards, as in a run's rollouts."),
    ] = None,
) -> int:
    """Score a model or an adapter on data.

    By the generators and reward functions of a run: greedy, and with --samples K also mean@K, pass@k and majority@K,
    each with an interval of 95 % over the problems, by Wilson where scores are 0 or 1, else by the bootstrap.
    """
    given = dict(locals())
    from learner.tools.eval_command import Asked, run

    return run(Asked(**given))
