"""The command line of gleaner eval, and the output of its result. Other modules are imported when the command runs, so
that --help is fast."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from learner.main import (
    Request,
    epilog,
    natural,
    positive,
    rate,
)

if TYPE_CHECKING:
    from learner.tools.evaluation import Evaluated


@dataclass(frozen=True, slots=True)
class EvalRequest(Request):
    """Score a model or an adapter on data.

    By the generators and reward functions of a run: greedy, and with --samples K also mean@K, pass@k and majority@K,
    each with an interval of 95 % over the problems, by Wilson where scores are 0 or 1, else by the bootstrap.
    """

    EPILOG = epilog(
        "gleaner eval --run runs/demo-seed0",
        "gleaner eval --config configs/local_cpu.yaml --samples 8 --limit 50",
        "gleaner eval --config my.yaml --adapter runs/my-run/adapter --data test.jsonl --save test.parquet",
        "gleaner eval --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k --split test --reward number "
        "data.args='{name: main}'",
    )

    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings as of gleaner train: seed=1 cluster.gpus.generator=1."),
    ] = None
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The YAML file of a run.")] = None
    run_folder: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="A run's folder: its configuration, and the policy it has learned."),
    ] = None
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Hub name or folder, without an adapter.")] = None
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="A LoRA adapter in PEFT's format.")] = None
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Problems, as data.path, all of them; else those that the run holds out."),
    ] = None
    split: Annotated[str | None, typer.Option(metavar="SPLIT", help="Of --data; else train.")] = None
    prompt: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column or template, as data.prompt.")] = None
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="REWARD", help="Reward function; may be given several times, the first is accuracy."),
    ] = None
    samples: Annotated[
        int, typer.Option(parser=natural, metavar="K", help="Completions of each problem beside the greedy one.")
    ] = 0
    temperature: Annotated[
        float | None, typer.Option(parser=rate, metavar="T", help="Of the samples; else rollout.temperature.")
    ] = None
    limit: Annotated[int | None, typer.Option(parser=positive, metavar="N", help="Only the first N problems.")] = None
    threshold: Annotated[
        float, typer.Option(metavar="SCORE", help="From which score on a completion is correct, for pass@k.")
    ] = 1.0
    as_json: Annotated[bool, typer.Option("--json", help="The result as an object.")] = False
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE.parquet", help="Every completion with its rewards, as in a run's rollouts."),
    ] = None


EVERY_S = 10.0  # seconds between two lines of progress


class EvalProgress:
    """A context manager that shows the progress of an evaluation on stderr: a bar on a terminal, else a line at
    times."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._count = 0
        self._began = self._told = 0.0  # times of time.monotonic

    def __enter__(self) -> "EvalProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def done(self, more: int, total: int) -> None:
        """Counts `more` completions of `total`; it is called with 0 when generation begins."""
        now = time.monotonic()
        if more == 0:
            self._begin(now, total)
        self._count += more
        if self._bar is not None:
            self._bar.update(self._task, advance=more)
        elif more and now - self._told >= EVERY_S:
            from cluster.memory.seconds import duration

            self._told = now
            left = duration((now - self._began) * (total - self._count) / self._count)
            self.note(f"completions {self._count} of {total}, {left} left")

    def _begin(self, now: float, total: int) -> None:
        self._began = self._told = now
        if self._console.is_terminal:
            columns = TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()


def run(asked: EvalRequest) -> int:
    """Exit code: as of learner.tools.reported."""
    from learner.tools.reported import reported

    return reported(lambda: _evaluate(asked))


def _evaluate(asked: EvalRequest) -> None:
    import pyarrow.parquet as pq

    from cluster.files import writing
    from learner.tools.eval_meant import meant
    from learner.tools.evaluation import evaluate
    from rollout.data import model_files

    config, adapter = meant(asked)
    model_files.settle([config.model.path, config.data.path, config.data.eval.path])
    with EvalProgress() as progress:
        result = evaluate(
            config, adapter=adapter, held_out=asked.data is None, samples=asked.samples, limit=asked.limit,
            threshold=asked.threshold, note=progress.note, done=progress.done,
        )  # fmt: skip
    if asked.as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show(result)
    if asked.save is not None:
        with writing(asked.save):
            pq.write_table(result.rows, asked.save)


def show(result: "Evaluated") -> None:
    """Prints the result as a table for people."""
    table = Table("metric", "value", "95 % interval", "by", "problems")
    for name, one in result.metrics.items():
        table.add_row(name, f"{one.value:.3f}", one.between(" .. "), one.method, str(one.problems))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)
    on = f" with {result.adapter}" if result.adapter else ""
    console.print(f"{result.model}{on}, {result.data} ({result.part}), problems: {result.problems}", markup=False)
    console.print(f"score: {result.reward or 'the rewards of the environment'}, {result.seconds:.0f} s", markup=False)
    console.print(table)
    console.print(f"cut off at rollout.max_completion_length: {result.truncated:.1%} of the completions")
    for note in result.notes:
        console.print(note, markup=False)
    if result.unscored:
        console.print(
            f"{result.unscored} problems have a completion without a score, which counts nowhere: each metric is over "
            "the problems with scores enough for it"
        )
    if result.failed:
        console.print(
            f"a reward function failed on {result.failed} completions; where it is the score, they count as 0"
        )
