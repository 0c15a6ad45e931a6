"""gleaner reward-model train: preference pairs -> a reward model as an adapter with a scalar head, for `rewards` with
`use: adapter:<folder>`."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from cluster import machine
from cluster.memory.shape import LoraRank
from learner.config import ModelConfig
from learner.config.settings import (
    AUTO_TOKEN_BUDGET,
    LearnerConfig,
    LoraConfig,
    ScheduleConfig,
)
from learner.tools.bradley_terry import (
    EVAL,
    Pair,
    PairsError,
    read_pairs,
)
from rollout.data import hub
from rollout.data.chat import Chat
from rollout.data.files import ProblemsError
from rollout.data.hub import ChatError
from rollout.data.weight_files import WeightsError
from rollout.data.weight_names import check_model

if TYPE_CHECKING:  # torch: slow to import, and a mistake in the pairs is told without it
    from learner.tools.bradley_terry import PairLearner

LINES = 10  # of progress
CHANCE = 0.5  # of ordering a pair right


@dataclass(frozen=True, slots=True)
class Asked:
    """What learner.tools.commands.reward_model takes, under its names."""

    pairs: str
    model: str
    out: Path
    split: str | None
    held_out: str | None
    eval_split: str | None
    epochs: int
    batch: int
    learning_rate: float
    rank: LoraRank
    dtype: Literal["bfloat16", "float16", "float32"]
    base: Literal["none", "nf4"]
    checkpointing: Literal["none", "full"]
    max_length: int
    token_budget: int | None  # None: a run's
    seed: int


def run(asked: Asked) -> int:
    """Exit code: 0; 2 if something given is wrong, or too much for the machine."""
    machine.sleeping_threads()
    made = not asked.out.exists()
    hub.settle([asked.model, asked.pairs, asked.held_out])
    try:
        check_model(asked.model, "--model")
        train, held_out = _data(asked)
        _train(asked, train, held_out)
    except (PairsError, ProblemsError, ChatError, ValueError, OSError, FloatingPointError) as error:
        if made and asked.out.is_dir() and not any(asked.out.iterdir()):
            asked.out.rmdir()
        told = str(error).splitlines() if isinstance(error, WeightsError) else [" ".join(str(error).split())]
        print("\n".join(f"error: {line}" for line in told), file=sys.stderr)
        return 2
    return 0


def _data(asked: Asked) -> tuple[list[Pair], list[Pair]]:
    """(pairs to learn from, held-out pairs): of those that are short enough."""
    if asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
        raise PairsError(f"--out: must be a new folder, {asked.out} is there already; give another")
    try:  # now, and not when all is learned
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PairsError(
            f"--out: must be a folder that can be made, got {asked.out} ({error.strerror}); give another"
        ) from None
    if asked.eval_split is not None and asked.held_out is None:
        raise PairsError("--eval-split: is of what --eval names, which is not given; give both")
    chat = Chat.load(asked.model)
    pairs = _usable(read_pairs(asked.pairs, chat, asked.split), asked.max_length)
    if asked.held_out is not None:
        return pairs, _usable(read_pairs(asked.held_out, chat, asked.eval_split, EVAL), asked.max_length)
    prompts = sorted({pair.prompt for pair in pairs})
    chosen = np.random.default_rng(asked.seed).permutation(len(prompts))[: len(prompts) // 10]
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


def _train(asked: Asked, train: list[Pair], held_out: list[Pair]) -> None:
    started, steps = time.perf_counter(), asked.epochs * -(-len(train) // asked.batch)
    learner = _learner(asked, steps)
    print(f"{len(train)} pairs to learn from, {len(held_out)} held out, {steps} steps")
    rng = np.random.default_rng(asked.seed)
    for _ in range(asked.epochs):
        order = rng.permutation(len(train))
        for first in range(0, len(train), asked.batch):
            said = learner.learn([train[i] for i in order[first : first + asked.batch]])
            if learner.step % max(steps // LINES, 1) == 0:
                print(f"step {learner.step}/{steps} loss {said.loss:.4f} accuracy {said.accuracy:.3f}")
    after = learner.judge(held_out)
    learner.adapter.save(asked.out, asked.model)
    print(f"held-out accuracy {after.accuracy:.3f}, mean margin {after.margin:.3f}")
    if after.accuracy < CHANCE:
        print("that is worse than chance: are chosen and rejected swapped, here or there?")
    print(f"{asked.out}: use it as rewards: [{{use: 'adapter:{asked.out}'}}] ({time.perf_counter() - started:.0f} s)")


def _learner(asked: Asked, steps: int) -> "PairLearner":
    import torch

    from learner.model.policy import Policy
    from learner.model.roles import ScoredRole
    from learner.tools.bradley_terry import ROLE, PairLearner
    from learner.trainer.float32_products import choose_library
    from learner.trainer.memory_limit import TokenBudget, device_of

    on_card = torch.cuda.is_available()
    if not on_card:
        choose_library()
    lora = LoraConfig(rank=asked.rank, alpha=2 * asked.rank)
    schedule = ScheduleConfig(kind="linear")
    config = LearnerConfig(lora=lora, learning_rate=asked.learning_rate, schedule=schedule)
    policy = Policy(
        ModelConfig(path=asked.model, dtype=asked.dtype, base=asked.base),
        lora,
        checkpointing=asked.checkpointing,
        seed=asked.seed,
        device=device_of("cuda" if on_card else "cpu"),
        roles=[ScoredRole(ROLE, None, trained=True, key="--model")],
    )
    budget = TokenBudget(asked.token_budget or AUTO_TOKEN_BUDGET)
    return PairLearner(policy, config, budget, dtype=asked.dtype, total_steps=steps)
