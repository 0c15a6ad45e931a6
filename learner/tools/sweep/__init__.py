"""gleaner sweep: several runs on one generator and one learner. This module has the command line; drive.py runs the
sweep."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from learner.driver import process
from learner.main import Request, concluded, epilog, guarded, positive

if TYPE_CHECKING:
    from cluster.config import Deadlines
    from learner.config import RunConfig
    from learner.driver.memory import Cards
    from learner.driver.preflight import Prepared
    from learner.tools.sweep.runs import Sweep


FILE = "sweep.json"  # in the folder of a sweep


@dataclass(frozen=True, slots=True)
class SweepRequest(Request):
    """Train several runs side by side, on one base: seeds, rates, rewards.

    A key with several values makes the runs, several keys all combinations. Each is a run folder of its own, in that of
    the sweep. While one run trains the others generate, so a card has work for both roles, and the base is there once.
    The same command goes on where it stopped.
    """

    EPILOG = epilog(
        "gleaner sweep my.yaml seed=0,1,2",
        "gleaner sweep my.yaml seed=0,1 learner.learning_rate=1e-5,3e-5 steps=200",
        "gleaner sweep my.yaml learner.lora.rank=8,32 learner.learning_rate=1e-4,3e-5 --zip",
        "gleaner sweep my.yaml learner.learning_rate=1e-5,3e-5,1e-4,3e-4 --keep 1",
        "gleaner sweep my.yaml seed=0,1,2 --dry-run --assume-gpus rtx4090",
        failed="a run failed",
    )
    CONTEXT: ClassVar = {"ignore_unknown_options": True}

    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file that all runs begin with.")]
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE,...",
            help="Settings that replace the file's; several values, separated by commas, make several runs. A list "
            "as one value stands in brackets, a text with commas in quotes.",
        ),
    ] = None
    zip: Annotated[
        bool, typer.Option("--zip", help="Pair the values of the keys instead of combining all with all.")
    ] = False
    keep: Annotated[
        int | None,
        typer.Option(
            parser=positive,
            metavar="N",
            help="Stop early: at halves of the steps the better half by held-out accuracy goes on, until N are left.",
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say which keys are equal, start nothing.")
    ] = False
    assume_gpus: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --dry-run: check as if cards were here: h100, 80GiB, 2x24GiB."),
    ] = None


def run(asked: SweepRequest) -> int:
    """Exit code: 0 all runs are done, or stopped with a checkpoint; 1 a run failed; 2 an input is wrong; 130 stopped by
    a signal before the runs began, or at once."""
    return guarded(lambda: concluded(lambda: _run(asked), "the last checkpoints"), "the runs")


def _run(asked: SweepRequest) -> int:
    from cluster.errors import WrongInput
    from learner.driver.memory import cards_of
    from learner.tools.sweep.runs import check_folder, sweep_of
    from rollout.data import model_files

    process.streams_are_commentary()
    assumed = cards_of(asked.assume_gpus) if asked.assume_gpus is not None else None
    if assumed is not None and not asked.dry_run:
        raise WrongInput("--assume-gpus: a sweep needs the cards themselves; give it with --dry-run")
    count = None if assumed is None else assumed.count
    sweep = sweep_of(asked.config, asked.overrides or (), zipped=asked.zip, cards=count)
    first = sweep.configs[0]
    check_folder(first.run_dir.parent)
    model_files.settle([first.model.path, first.model.reference, first.data.path, first.data.eval.path])
    return _dry_run(sweep, asked.keep, assumed) if asked.dry_run else _train(sweep, asked.keep)


def _dry_run(sweep: "Sweep", keep: int | None, cards: "Cards | None") -> int:
    from learner.driver.preflight import report
    from learner.tools.sweep.runs import told

    prepared = _prepared(sweep, keep, cards)
    print("\n".join(told(sweep)))
    print(report(prepared[0], cards))
    return 0


def _train(sweep: "Sweep", keep: int | None) -> int:
    from cluster import files
    from learner.tools.sweep import drive
    from learner.tools.sweep.runs import folder_of

    with ExitStack() as locks:
        for folder in (folder_of(sweep), *(config.run_dir for config in sweep.configs)):
            locks.enter_context(files.lock_held(folder))
        return asyncio.run(drive.run(sweep, _prepared(sweep, keep), keep))


def _prepared(sweep: "Sweep", keep: int | None, cards: "Cards | None" = None) -> list["Prepared"]:
    """All runs, checked. Raises WrongInput with a line for each mistake."""
    from learner.driver.failure import Findings
    from learner.driver.preflight import prepare
    from learner.tools.sweep.runs import check_keep

    found = Findings()
    prepared = [found.of(prepare, _shared(config, len(sweep.runs)), cards) for config in sweep.configs]
    found.finish()
    runs = _planned([one for one in prepared if one is not None], sweep.configs, cards)
    if keep is not None:
        check_keep(runs, keep)
    return [_patient(one, len(runs)) for one in runs]


def _planned(runs: list["Prepared"], given: "list[RunConfig]", cards: "Cards | None") -> list["Prepared"]:
    """The runs with one memory plan, for processes that are large enough for each of them. given: their configurations
    as they were given. Raises WrongInput."""
    from learner.driver.memory import cards_present, settle, size_for
    from learner.tools.sweep.runs import largest
    from rollout.data.model_files import CONFIG, read_json

    asked = [one.rollout.max_num_seqs for one in given]
    config = largest([one.config for one in runs], asked)
    cards = cards or cards_present(config)
    card = size_for(config, cards)
    budgets = settle(config, read_json(config.model.source, CONFIG), card, None if cards is None else cards.kind)
    chosen = {name: getattr(budgets.learner, name) for name in ("checkpointing", "token_budget")}
    planned = []
    for one, sequences in zip(runs, asked, strict=True):
        own = replace(budgets, learner=one.config.learner.model_copy(update=chosen))
        decoded = {"max_num_seqs": budgets.sequences if sequences == "auto" else sequences}
        rollout = one.config.rollout.model_copy(update=decoded)
        planned.append(replace(one, budgets=own, config=one.config.model_copy(update={"rollout": rollout})))
    return planned


def _shared(config: Any, runs: int) -> Any:
    """The configuration of one of several runs, whose memory is planned for all of them."""
    memory = config.memory.shared_by(runs)
    if config.memory.layout == "auto" and config.cluster.gpus.one_card:
        memory = memory.model_copy(update={"layout": "slices"})  # never alternating: others generate meanwhile
    return config.model_copy(update={"memory": memory})


def _patient(prepared: "Prepared", runs: int) -> "Prepared":
    """The run with deadlines for processes that work for all runs."""
    cluster = prepared.config.cluster
    longer: Deadlines = cluster.deadlines.model_copy(
        update={name: runs * getattr(cluster.deadlines, name) for name in ("group", "push", "step")}
    )
    config = prepared.config.model_copy(update={"cluster": cluster.waiting(longer)})
    return replace(prepared, config=config)
