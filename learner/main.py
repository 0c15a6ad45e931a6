"""python -m learner.main --config configs/local_cpu.yaml [key=value ...]: parse, check, run."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from learner.driver import process

if TYPE_CHECKING:  # heavy imports wait until the configuration is known to be right
    from learner.config import RunConfig
    from learner.config.load import WrongSettings

EPILOG = "Every key and its default (override with key=value; list items by index, e.g. rewards.0.weight=2):\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; --help lists every key of the configuration."""
    from learner.config import load  # here and below: once it is known that our packages are ours

    parser = argparse.ArgumentParser(
        prog="learner.main",
        description="GRPO with LoRA: train a model on your own reward.",
        epilog=EPILOG + load.describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; see configs/")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print placement and notes, stop")
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: print every setting, too")
    parser.add_argument(
        "--assume-gpus", metavar="SIZE", help="with --dry-run: check as if cards were here: h100, 80GiB, 2x24GiB"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of the file")
    args, more = parser.parse_known_args(argv)
    args.overrides += more  # --a.b=1 is taken like a.b=1
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done or stopped with a checkpoint, 1 the run failed, 2 the configuration or its inputs are wrong,
    130 stopped by Ctrl-C, or another request to end, before it began or in haste."""
    process.keep_streams()
    process.ours_first()
    try:
        with process.interrupting():
            if wrong := process.hidden_package() or process.wrong_place():
                print(f"error: {wrong}", file=sys.stderr)
                return 2
            return _run(parse(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # once it has begun, learner.driver.launch stops it with a checkpoint
        print("stopped before the run began", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    """What the command line asks for. Raises KeyboardInterrupt if it is asked to end before it has begun."""
    from learner.config import load
    from learner.driver import failure

    if args.config is None and not args.overrides:
        print("config: --config: required, but not given; gleaner init my-run writes a first one", file=sys.stderr)
        return 2
    try:
        config = load.load_config(args.config, args.overrides)
    except load.ConfigError as error:
        print(f"config: {error}".replace("\n", "\nconfig: "), file=sys.stderr)
        if isinstance(error, load.WrongSettings):
            _tell_more(error)
        return 2
    if args.assume_gpus is not None and not args.dry_run:
        print("error: --assume-gpus: a run needs the cards themselves; give it with --dry-run", file=sys.stderr)
        return 2
    if args.verbose and not args.dry_run:
        print("error: --verbose: is of --dry-run; a run writes its settings to config.yaml", file=sys.stderr)
        return 2
    from rollout.data import hub

    hub.settle([config.model.path, config.model.reference, config.data.path, config.data.eval.path])
    try:
        return _dry_run(config, args.assume_gpus, verbose=args.verbose) if args.dry_run else _train(config)
    except SystemExit as error:  # what SIGTERM is while Ray starts
        raise KeyboardInterrupt from error
    except asyncio.CancelledError as error:  # the second Ctrl-C of a run, or a request to end during its start
        begun = "stopped at once; the same command goes on from its last checkpoint"
        print(f"stopped {error.args[0]}" if error.args else begun, file=sys.stderr)
        return 130
    except (Exception, BaseExceptionGroup) as several:
        from learner.driver.preflight import PROBLEMS

        cause = failure.first_of(several)
        if isinstance(cause, PROBLEMS):  # some of them only a cluster that was joined can tell
            print(f"error: {cause}".replace("\n", "\nerror: "), file=sys.stderr)
            return 2
        return _fail(cause)


def _tell_more(wrong: "WrongSettings") -> None:
    """What else is wrong: files, columns and reward functions that the other settings name."""
    if (others := wrong.others()) is None:
        return
    from learner.driver.failure import PreflightError
    from learner.driver.preflight import look
    from rollout.data import hub

    config, sections = others
    hub.settle([config.model.path, config.data.path, config.data.eval.path])
    try:
        look(config, sections=sections).finish()
    except PreflightError as error:
        print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
    except Exception as error:  # what half a configuration meets must not stand before what is known to be wrong
        logging.getLogger("learner").debug("the other settings could not be looked at: %r", error)


def _dry_run(config: "RunConfig", assumed: str | None, *, verbose: bool) -> int:
    from learner.driver import memory as known_cards
    from learner.driver import preflight, roles

    cards = None if assumed is None else known_cards.cards_of(assumed)
    prepared = preflight.rehearse(config, cards)
    on_nodes = [] if cards is not None else asyncio.run(roles.rehearse_nodes(prepared))
    print(preflight.report(prepared, cards, on_nodes, verbose=verbose))
    return 0


def _train(config: "RunConfig") -> int:
    from learner.driver.preflight import look

    process.streams_are_commentary()
    first = look(config)
    if first.wrong:
        first.finish()
    from cluster import files
    from learner.driver import launch, preflight

    with files.lock_held(first.config.run_dir):
        return asyncio.run(launch.run(preflight.prepare_rest(first)))


def _fail(error: BaseException) -> int:
    """Prints the whole traceback for debugging, and its one sentence last, where it is read first."""
    from cluster.actor import ClusterLost
    from learner.driver import failure

    text, code = failure.tell(error)
    print(text, file=sys.stderr, flush=True)
    if isinstance(error, ClusterLost):
        leave(code)  # Ray's threads in here crash on the way out, once a part of Ray is gone
    return code


def leave(code: int) -> NoReturn:
    """Ends the process, all of whose files and processes are closed, without the interpreter's own end, which takes
    half a second to undo imports. Whatever asks it to end now gets what it asks for."""
    process.end_unheard()
    os._exit(process.streams_outcome(code))


if __name__ == "__main__":
    process.end_as_command()
    leave(main())
