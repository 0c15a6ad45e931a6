"""gleaner: the console script. `gleaner run` is python -m learner.main; `gleaner plan` says what fits a card;
`gleaner rewards try` scores saved rollouts."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatches to the subcommand; exit codes as in learner.main."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:
        from learner.main import main as run

        return run(words[1:])
    if words[:1] == ["plan"]:
        from learner.plan_cli import main as plan

        return plan(words[1:])
    if words[:2] == ["rewards", "try"]:
        return _rewards_try(words[2:])
    print(
        "usage: gleaner run --config FILE [key=value ...]\n"
        "       gleaner plan --gpu SIZE [--model MODEL | --all] [--help]\n"
        "       gleaner rewards try REWARD --rollouts DIR [--help]"
    )
    return 0 if words in (["--help"], ["-h"]) else 2


def _rewards_try(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gleaner rewards try", description="Score saved rollouts with a reward and show the distribution."
    )
    parser.add_argument("use", metavar="REWARD", help="built-in name, package.module:function or path/file.py:function")
    parser.add_argument("--rollouts", required=True, metavar="DIR", help="runs/<name>/rollouts")
    parser.add_argument("--steps", type=int, default=5, help="how many of the newest steps to score (default 5)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for one group (default 10)")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="argument of the reward")
    args = parser.parse_args(argv)
    from learner.rescore import RescoreError, rescore

    try:
        print(rescore(args.use, args.rollouts, args.steps, args.timeout, args.arg))
    except RescoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
