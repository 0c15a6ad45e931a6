"""gleaner reward-model train: preference pairs -> a reward model as an adapter with a scalar head, for `rewards` with
`use: adapter:<folder>`."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from learner.config import ModelConfig
from learner.config.learner import AUTO_TOKEN_BUDGET, LearnerConfig, LoraConfig, ScheduleConfig
from learner.model.adapter_config import RANKS
from learner.tools.arguments import natural, positive, rate
from learner.tools.pairs import EVAL, Pair, PairsError, read_pairs
from rollout.data.chat import Chat, ChatError
from rollout.data.files import ProblemsError

if TYPE_CHECKING:  # torch: slow to import, and a mistake in the pairs is told without it
    from learner.tools.bradley_terry import PairLearner

LINES = 10  # of progress
CHANCE = 0.5  # of ordering a pair right


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 if something given is wrong, or too much for the machine."""
    args = _parser().parse_args(argv)
    try:
        train, held_out = _data(args)
        _train(args, train, held_out)
    except (PairsError, ProblemsError, ChatError, ValueError, OSError, FloatingPointError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gleaner reward-model train", description=__doc__)
    parser.add_argument("pairs", help="JSON lines, Parquet or a hub data set with prompt, chosen and rejected")
    parser.add_argument("--model", required=True, help="the base: the model.path of the run that is to use it")
    parser.add_argument("--split", help="of a hub data set or a saved folder, such as train_prefs (default train)")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--eval", metavar="PAIRS", help="held-out pairs; without it a tenth of the prompts is held out")
    parser.add_argument("--eval-split", metavar="SPLIT", help="of what --eval names (default train)")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--batch", type=positive, default=32, help="pairs per update (default 32)")
    parser.add_argument("--learning-rate", type=rate, default=2e-4)
    parser.add_argument("--rank", type=int, choices=RANKS, default=16, help="of the adapter (default 16)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--base", choices=("none", "nf4"), default="none", help="nf4: the base in 4 bits")
    parser.add_argument("--checkpointing", choices=("none", "full"), default="none", help="full: less memory")
    parser.add_argument("--max-length", type=positive, default=2048, help="longer pairs are left out (default 2048)")
    parser.add_argument("--token-budget", type=positive, default=AUTO_TOKEN_BUDGET, help="tokens of a micro-batch")
    parser.add_argument("--seed", type=natural, default=0)
    return parser


def _data(args: argparse.Namespace) -> tuple[list[Pair], list[Pair]]:
    """(pairs to learn from, held-out pairs): of those that are short enough."""
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise PairsError(f"--out: must be a new folder, {args.out} is there already; give another")
    try:  # now, and not when all is learned
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PairsError(
            f"--out: must be a folder that can be made, got {args.out} ({error.strerror}); give another"
        ) from None
    if args.eval_split is not None and args.eval is None:
        raise PairsError("--eval-split: is of what --eval names, which is not given; give both")
    chat = Chat.load(args.model)
    pairs = _usable(read_pairs(args.pairs, chat, args.split), args.max_length)
    if args.eval is not None:
        return pairs, _usable(read_pairs(args.eval, chat, args.eval_split, EVAL), args.max_length)
    prompts = sorted({pair.prompt for pair in pairs})
    chosen = np.random.default_rng(args.seed).permutation(len(prompts))[: len(prompts) // 10]
    apart = {prompts[i] for i in chosen}  # whole prompts: pairs of one prompt are much alike
    train, held_out = ([p for p in pairs if (p.prompt in apart) == away] for away in (False, True))
    if not held_out:
        raise PairsError(
            f"pairs: must have ten prompts or more, so that some are held out, got {len(prompts)}; give held-out pairs "
            "of their own with --eval"
        )
    return train, held_out


def _usable(pairs: list[Pair], longest: int) -> list[Pair]:
    """Those that prefer one answer to another and are short enough. What is left out is said."""
    differ = [pair for pair in pairs if pair.chosen != pair.rejected]
    if len(differ) < len(pairs):
        print(f"{len(pairs) - len(differ)} of {len(pairs)} pairs have the same answer twice and are left out")
    kept = [pair for pair in differ if pair.longest <= longest]
    if len(kept) < len(differ):
        print(f"{len(differ) - len(kept)} of {len(pairs)} pairs are longer than {longest} tokens and are left out")
    if not differ:
        raise PairsError("pairs: must prefer one answer to another, and all have the same answer twice; give others")
    if not kept:
        raise PairsError(f"--max-length: must leave pairs to learn from, all have more than {longest} tokens; raise it")
    return kept


def _train(args: argparse.Namespace, train: list[Pair], held_out: list[Pair]) -> None:
    started, steps = time.perf_counter(), args.epochs * -(-len(train) // args.batch)
    learner = _learner(args, steps)
    print(f"{len(train)} pairs to learn from, {len(held_out)} held out, {steps} steps")
    rng = np.random.default_rng(args.seed)
    for _ in range(args.epochs):
        order = rng.permutation(len(train))
        for first in range(0, len(train), args.batch):
            said = learner.learn([train[i] for i in order[first : first + args.batch]])
            if learner.step % max(steps // LINES, 1) == 0:
                print(f"step {learner.step}/{steps} loss {said.loss:.4f} accuracy {said.accuracy:.3f}")
    after = learner.judge(held_out)
    learner.adapter.save(args.out, args.model)
    print(f"held-out accuracy {after.accuracy:.3f}, mean margin {after.margin:.3f}")
    if after.accuracy < CHANCE:
        print("that is worse than chance: are chosen and rejected swapped, here or there?")
    print(f"{args.out}: use it as rewards: [{{use: 'adapter:{args.out}'}}] ({time.perf_counter() - started:.0f} s)")


def _learner(args: argparse.Namespace, steps: int) -> "PairLearner":
    import torch

    from learner.model.policy import Policy
    from learner.model.roles import ScoredRole
    from learner.tools.bradley_terry import ROLE, PairLearner
    from learner.trainer.float32_products import choose_library
    from learner.trainer.memory_limit import TokenBudget, device_of

    on_card = torch.cuda.is_available()
    if not on_card:
        choose_library()
    lora = LoraConfig(rank=args.rank, alpha=2 * args.rank)
    schedule = ScheduleConfig(kind="linear")
    config = LearnerConfig(lora=lora, learning_rate=args.learning_rate, schedule=schedule)
    policy = Policy(
        ModelConfig(path=args.model, dtype=args.dtype, base=args.base),
        lora,
        checkpointing=args.checkpointing,
        seed=args.seed,
        device=device_of("cuda" if on_card else "cpu"),
        roles=[ScoredRole(ROLE, None, trained=True, key="--model")],
    )
    budget = TokenBudget(args.token_budget)
    return PairLearner(policy, config, budget, dtype=args.dtype, total_steps=steps)
