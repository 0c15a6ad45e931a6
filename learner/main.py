"""python -m learner.main --config configs/local_cpu.yaml [key=value ...]: parse, build the house, run."""

import argparse
import asyncio
import sys
import traceback
from collections.abc import Sequence

from learner import settings

EPILOG = "Every key and its default (override with key=value; list items by index, e.g. rewards.0.weight=2):\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; --help lists every key of the configuration."""
    parser = argparse.ArgumentParser(
        prog="learner.main",
        description="GRPO with LoRA: train a model on your own reward.",
        epilog=EPILOG + settings.describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; see configs/")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print config and placement, stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of the file")
    args, more = parser.parse_known_args(argv)
    args.overrides += more  # --a.b=1 is taken like a.b=1
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done or stopped with a checkpoint, 1 the run failed, 2 the configuration or its inputs are wrong."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        config = settings.load(args.config, args.overrides)
    except settings.ConfigError as error:
        print(f"config: {error}".replace("\n", "\nconfig: "), file=sys.stderr)
        return 2
    from learner import house, preflight, run_lock  # heavy imports wait until the configuration is known to be right

    try:
        config = preflight.place_output(config)
        if args.dry_run:
            print(preflight.report(preflight.prepare(config)))
            return 0
        with run_lock.held(config.run_dir):
            return asyncio.run(house.live(preflight.prepare(config)))
    except preflight.PROBLEMS as error:  # some of them only a cluster that was joined can tell
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BaseExceptionGroup as group:
        return _fail(_first(group))
    except Exception as error:
        return _fail(error)


def _fail(error: BaseException) -> int:
    """The whole story for whoever debugs, and its one sentence last, where the eye is."""
    traceback.print_exception(error, file=sys.stderr)
    print(f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}", file=sys.stderr)
    return 1


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
