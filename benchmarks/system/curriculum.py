"""Steps to a held-out accuracy of 0.85 with and without data.curriculum, on a pool of which two thirds teach nothing.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.curriculum

The model is the demo's. A third of the pool is impossible for it (sums of three-digit numbers, of which it was shown
none), a third is solved already (any number within 100 of a one-digit sum counts), a third are the demo's problems,
and so are all of those that are held out. For each seed three runs, one after the other: without a curriculum, by its
own rollouts, and beginning with the rollouts of a run without of another seed. Each ends at its first evaluation of at
least 0.85; evaluations come every three steps, which is the grain of the answer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import Tree, accuracies, demo, finished, rows
from rollout import ledger

REACHED, EVERY, HELD_OUT = 0.85, 3, 200
KINDS = ("impossible", "solved", "solvable")
NAMES = ("without", "own", "another run's")
SUM = {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 1}  # the demo's task
HARD = {"min_terms": 3, "max_terms": 3, "min_digits": 3, "max_digits": 3}
NEAR = 100  # no answer to a one-digit sum is further off
LIMIT_S = 3600.0
REWARD = '''
import re

def within(completions, answer, tolerance, **columns):
    """1 for a number in <answer> that is at most `tolerance` from the right one."""
    found = [re.search(r"<answer>\\s*(-?[0-9]{1,9})\\s*</answer>", one[0]["content"]) for one in completions]
    return [
        float(given is not None and abs(int(given[1]) - int(right)) <= near)
        for given, right, near in zip(found, answer, tolerance)
    ]
'''


def made(task: dict[str, int], size: int, seed: int, tolerance: int, kind: str) -> list[dict[str, Any]]:
    """Rows of a chain_sum."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, **task)
    return [
        {"question": one["question"], "answer": one["answer"], "tolerance": tolerance, "kind": kind} for one in problems
    ]


def write_data(folder: Path, each: int) -> None:
    """Writes train.jsonl with `each` problems of every kind, held_out.jsonl with others of the demo's, and the reward
    function."""
    pool = [
        *made(HARD, each, 1_000_000, 0, "impossible"), *made(SUM, each, 2_000_000, NEAR, "solved"),
        *made(SUM, each, 3_000_000, 0, "solvable"),
    ]  # fmt: skip
    known = {one["question"] for one in pool}
    fresh = [one for one in made(SUM, 2 * HELD_OUT, 4_000_000, 0, "solvable") if one["question"] not in known]
    for name, lines in (("train", pool), ("held_out", fresh[:HELD_OUT])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (folder / "reward.py").write_text(REWARD)


def run_of(data: Path, seed: int, options: argparse.Namespace, curriculum: str | None) -> Tree:
    """The demo on the pool."""
    tree = demo(options.steps, EVERY) | {"seed": seed, "early_stop": {"accuracy": REACHED}}
    tree["rollout"]["workers"], tree["learner"]["groups_per_step"] = 1, options.groups
    tree["learner"]["learning_rate"] = float(options.rate)
    held_out = {"path": str(data / "held_out.jsonl"), "size": HELD_OUT, "every": EVERY}
    tree["data"] = {"path": str(data / "train.jsonl"), "curriculum": curriculum, "eval": held_out}
    tree["rewards"] = [{"use": f"{data / 'reward.py'}:within", "name": "accuracy"}, {"use": "format", "weight": 0.2}]
    return tree


def told_by(folder: Path) -> dict[str, Any]:
    """Of a run: its evaluations, and of each step how many groups had no spread and of which kind its problems were."""
    alike = {line["step"]: line.get("reward/zero_variance_groups") for line in rows(folder)}
    kinds = []
    for file in ledger.steps(folder / "rollouts"):
        table = ledger.read(file)
        firsts = table.filter(pc.equal(table.column("sample"), 0)).column("problem").to_pylist()
        kinds.append(dict(Counter(json.loads(one)["columns"]["kind"] for one in firsts)))
    return {"accuracy": accuracies(rows(folder)), "kinds": kinds, "alike": [alike[i + 1] for i in range(len(kinds))]}


def reached(curve: list[tuple[int, float]]) -> int | None:
    """The first step whose evaluation is at least REACHED."""
    return next((step for step, accuracy in curve if accuracy >= REACHED), None)


def row_of(found: dict[str, Any], seed: int, name: str) -> list[str]:
    """A line of the table: steps, their share of those without a curriculum, and what the groups were."""
    one, plain = found[f"{name} seed {seed}"], reached(found[f"without seed {seed}"]["accuracy"])
    steps, kinds = reached(one["accuracy"]), Counter[str]()
    for of_step in one["kinds"]:
        kinds.update(of_step)
    ratio = "-" if steps is None or plain is None else f"{steps / plain:.2f}"
    told = f"not in {one['accuracy'][-1][0]}" if steps is None else str(steps)
    shares = [f"{kinds[kind] / kinds.total():.2f}" for kind in KINDS]
    return [str(seed), name, told, ratio, f"{sum(one['alike']) / kinds.total():.2f}", *shares]


def page(told: dict[str, Any], found: dict[str, Any], options: argparse.Namespace) -> str:
    """The page of results, of the seeds whose runs are done."""
    done = [seed for seed in options.seeds if f"{NAMES[-1]} seed {seed}" in found]
    cells = [row_of(found, seed, name) for seed in done for name in NAMES]
    head = ["seed", "curriculum", f"steps to {REACHED}", "of those without", "groups alike", *KINDS]
    return (
        f"# Curriculum: steps on a pool of which two thirds teach nothing\n\n{as_table(head, cells)}\n\n"
        f"{3 * options.each} problems, a third of each kind; a step is {options.groups} groups of 8 completions, the "
        f"learning rate {options.rate}. The "
        "last three columns are the shares of the kinds among the groups of all steps, `groups alike` the share of "
        f"groups whose completions all had the same reward. {HELD_OUT} held-out problems, all solvable, answered "
        f"greedily every {EVERY} steps. The other run, without a curriculum and of seed {options.other}, ended at step "
        f"{found[f'without seed {options.other}']['accuracy'][-1][0]}.\n\n"
        f"Conditions: {under(told, 'No times are compared')}\n"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--other", type=int, default=10, help="seed of the run whose rollouts others begin with")
    parser.add_argument("--each", type=int, default=8, help="problems of each kind")
    parser.add_argument("--groups", type=int, default=4, help="groups of a step")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rate", default="1e-4", help="learning rate; the demo's by default")
    parser.add_argument("--name", default="curriculum", help="of the results")
    options = parser.parse_args()
    told, found = conditions(ENGINE_PACKAGES), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="gleaner-pool-") as place:
        data = Path(place)
        write_data(data, options.each)
        with finished(run_of(data, options.other, options, None), LIMIT_S) as other:
            found[f"without seed {options.other}"] = told_by(other)
            for seed in options.seeds:
                for name, curriculum in zip(NAMES, (None, "own", str(other)), strict=True):
                    with finished(run_of(data, seed, options, curriculum), LIMIT_S) as folder:
                        found[f"{name} seed {seed}"] = told_by(folder)
                    print(f"{name} seed {seed}", found[f"{name} seed {seed}"]["accuracy"], flush=True)
                save(options.name, {"conditions": told, "runs": found}, page(told, found, options))


if __name__ == "__main__":
    main()
