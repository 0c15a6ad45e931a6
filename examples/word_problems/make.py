"""Writes train.jsonl and held_out.jsonl: word problems of one step, with two numbers from 2 to 9.

    python -m examples.word_problems.make

Nothing that is held out is in training: neither its two numbers, in either order and whatever the operation (a sum
would tell a difference), nor the wording of the problem, nor its name and its things. So what a policy gains there is
not remembered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import NamedTuple

from examples.task_files import contents, write

HERE = Path(__file__).parent
HELD_PAIRS = 9  # of the 36 unordered pairs from 2 to 9
ROWS, HELD_ROWS = 150, 50  # for each operation
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry")
HELD_NAMES = ("Ivan", "Julia", "Kate", "Leo")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "eggs", "pencils", "shells", "cards", "balls")
HELD_THINGS = ("stones", "oranges", "photos", "buttons")


class Operation(NamedTuple):
    """Wordings of training and held-out ones. {whole}: a + b."""

    wordings: Sequence[str]
    held_wordings: Sequence[str]


OPERATIONS = {
    "times": Operation(
        ("{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?",
         "There are {b} {things} in a bag. {name} buys {a} bags. How many {things} is that?",
         "{name} makes {b} {things} every day. How many {things} does {name} make in {a} days?",
         "{a} friends have {b} {things} each. How many {things} do they have together?",
         "{name} puts {b} {things} on each of {a} tables. How many {things} are on the tables?",
         "{name} gives {b} {things} to each of {a} children. How many {things} does {name} give?",
         "Each of {a} baskets contains {b} {things}. How many {things} are in the baskets?",
         "{name} needs {b} {things} for one cake. {name} bakes {a} cakes. How many {things} does {name} need?",
         "One drawer has {b} {things}. How many {things} do {a} such drawers have?",
         "In a hall there are {a} rows. Every row has {b} {things}. How many {things} are in the hall?",
         "{name} sees {a} cars. In each car lie {b} {things}. How many {things} does {name} see?",
         "{name} walks past {a} houses and finds {b} {things} at each. How many {things} does {name} find?"),
        ("{name} fills {a} shelves. On each shelf there are {b} {things}. How many {things} are on the shelves?",
         "A packet holds {b} {things}. {name} has {a} packets. How many {things} does {name} have?"),
    ),
    "plus": Operation(
        ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
         "{name} finds {a} {things} on Monday and {b} {things} on Tuesday. How many {things} does {name} find in all?",
         "There are {a} red {things} and {b} blue {things}. How many {things} are there?",
         "{name} buys {a} {things}. Then {name} buys {b} more {things}. How many {things} did {name} buy?",
         "A box held {a} {things}. {name} put {b} {things} into it. How many {things} does the box hold now?",
         "{name} picked {a} {things} and a friend picked {b}. How many {things} did they pick?",
         "{name} has {a} {things} at home and {b} {things} at school. How many {things} does {name} have in all?",
         "There were {a} {things} in the garden. Later {b} {things} came. How many {things} are in the garden now?",
         "{a} {things} lie in the sink, {b} {things} under the bed. How many {things} is that together?",
         "One bag has {a} {things}, another bag has {b}. How many {things} are in both bags?",
         "{name} used {a} {things} in the morning and {b} in the evening. How many {things} did {name} use?",
         "{name} counted {a} {things}. A brother counted {b} other {things}. How many {things} did they count?"),
        ("{name} had {a} {things}. A friend brought {b} {things}. How many {things} does {name} have now?",
         "There are {a} {things} on a chair and {b} {things} on the floor. How many {things} are there in all?"),
    ),
    "minus": Operation(
        ("{name} has {whole} {things} and gives {b} away. How many {things} are left?",
         "There were {whole} {things} on the table. {name} took {b} of them. How many {things} are still there?",
         "{name} had {whole} {things} and lost {b}. How many {things} does {name} have now?",
         "Of {whole} {things}, {b} are broken. How many {things} are not broken?",
         "A shop had {whole} {things}. It sold {b}. How many {things} does it still have?",
         "{name} needs {whole} {things} and has {b}. How many more {things} does {name} need?",
         "There are {whole} {things} in a box. {name} takes out {b}. How many {things} are in the box now?",
         "{name} carried {whole} {things} and dropped {b} of them. How many {things} does {name} still carry?",
         "{name} made {whole} {things}. A friend used {b} of them. How many {things} remain?",
         "{whole} {things} were on a tree. {b} {things} fell down. How many {things} are left on the tree?",
         "{name} has {whole} {things}. {b} of them are red and the others are blue. How many {things} are blue?",
         "{name} collected {whole} {things}, but {b} got wet. How many {things} stayed dry?"),
        ("{name} bought {whole} {things} and sold {b}. How many {things} remain?",
         "A basket held {whole} {things}. {name} removed {b}. How many {things} does the basket hold now?"),
    ),
}  # fmt: skip


Row = dict[str, object]


def rows(operation: str, pairs: Sequence[tuple[int, int]], rng: random.Random, *, held: bool) -> Iterator[Row]:
    """Problems of an operation on these pairs, without an end."""
    wordings = OPERATIONS[operation].held_wordings if held else OPERATIONS[operation].wordings
    while True:
        a, b = rng.sample(pair := rng.choice(pairs), len(pair))
        named = {
            "name": rng.choice(HELD_NAMES if held else NAMES),
            "things": rng.choice(HELD_THINGS if held else THINGS),
        }
        answer = {"times": a * b, "plus": a + b, "minus": a}[operation]
        question = rng.choice(wordings).format(a=a, b=b, whole=a + b, **named)
        yield {"question": question, "answer": answer, "operation": operation, "numbers": sorted(pair)}


def different(found: Iterator[Row], count: int) -> list[Row]:
    """The first `count` of them that ask something else than those before."""
    kept: dict[object, Row] = {}
    while len(kept) < count:
        row = next(found)
        kept.setdefault(row["question"], row)
    return list(kept.values())


def files() -> dict[str, str]:
    """The content of both files, by name."""
    rng = random.Random(0)
    made: dict[str, list[Row]] = {"train.jsonl": [], "held_out.jsonl": []}
    pairs = [*combinations_with_replacement(range(2, 10), 2)]
    rng.shuffle(pairs)
    for operation in OPERATIONS:
        made["train.jsonl"] += different(rows(operation, pairs[HELD_PAIRS:], rng, held=False), ROWS)
        made["held_out.jsonl"] += different(rows(operation, pairs[:HELD_PAIRS], rng, held=True), HELD_ROWS)
    return contents(made, rng)


if __name__ == "__main__":
    write(HERE, files())
