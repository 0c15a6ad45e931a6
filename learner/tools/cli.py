"""gleaner: the console script. `gleaner run` is python -m learner.main; `gleaner plan` says what fits a card, `gleaner
doctor` what a machine lacks; `gleaner rewards try` scores saved rollouts; `gleaner reward-model train` learns from
pairs."""

import argparse
import difflib
import sys
from collections.abc import Sequence

from learner.tools.arguments import positive
from rewards.memory import DEFAULT

USAGE = """\
usage: gleaner run --config FILE [key=value ...]
       gleaner plan --gpu CARD [--model MODEL | --all] [--help]
       gleaner doctor [--json] [--help]
       gleaner rewards try REWARD --rollouts DIR [--help]
       gleaner reward-model train PAIRS --model MODEL --out DIR [--help]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatches to the subcommand; exit codes as in learner.main."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:
        from learner.main import main as run

        return run(words[1:])
    if words[:1] == ["plan"]:
        from learner.tools.plan import main as plan

        return plan(words[1:])
    if words[:1] == ["doctor"]:
        from learner.tools.doctor import main as doctor

        return doctor(words[1:])
    if words[:2] == ["rewards", "try"]:
        return _rewards_try(words[2:])
    if words[:2] == ["reward-model", "train"]:
        from learner.tools.reward_model import main as train

        return train(words[2:])
    if words in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    given = " ".join(words)
    known = "run, plan, doctor, rewards try or reward-model train"
    wrong = f"error: gleaner: must be followed by {known}, got {given or 'nothing'}"
    whole = {
        "run": "run",
        "plan": "plan",
        "doctor": "doctor",
        "rewards": "rewards try",
        "reward-model": "reward-model train",
    }
    near = difflib.get_close_matches(given.partition(" ")[0], whole, n=1)
    print(f"{wrong}; did you mean {whole[near[0]]}?" if near else wrong, file=sys.stderr)
    print(USAGE, file=sys.stderr)
    return 2


def _rewards_try(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gleaner rewards try", description="Score saved rollouts with a reward and show the distribution."
    )
    parser.add_argument("use", metavar="REWARD", help="built-in name, package.module:function or path/file.py:function")
    parser.add_argument("--rollouts", required=True, metavar="DIR", help="runs/<name>/rollouts")
    parser.add_argument("--steps", type=positive, default=5, help="how many of the newest steps to score (default 5)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for one group (default 10)")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="argument of the reward")
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="a variable that it may see")
    parser.add_argument("--memory", default=DEFAULT, metavar="SIZE", help="the most that it may hold (default 4GiB)")
    args = parser.parse_args(argv)
    from learner.tools.rescore import RescoreError, rescore

    try:
        print(rescore(args.use, args.rollouts, args.steps, args.timeout, args.arg, args.env, args.memory))
    except RescoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
