"""Writes train.jsonl and held_out.jsonl: prompts with one constraint each that a program can check, as IFEval's (Zhou
et al. 2023, arXiv:2311.07911).

    python -m examples.constraints.make

Nothing that is held out is in a training prompt: neither its topic, nor the words in which the constraint is put, nor,
where the constraint has one, its value (a number, a word, a phrase). So a policy cannot do well by having seen it.

The column `shown` is a prompt for a teacher (data.teacher.prompt): two worked examples of the same kind of constraint,
then the question. Their topics and values are in no prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from examples.task_files import contents, write

HERE = Path(__file__).parent
HELD_OUT = 20  # topics
TOPICS = (
    "airplanes", "apples", "balloons", "bears", "bees", "bicycles", "bread", "bridges", "butterflies", "cameras",
    "candles", "castles", "cats", "cheese", "chess", "chocolate", "clocks", "clouds", "coffee", "deserts", "dogs",
    "dolphins", "elephants", "farms", "football", "forests", "gardens", "guitars", "honey", "horses", "islands",
    "kites", "lakes", "lemons", "libraries", "lions", "maps", "mirrors", "mountains", "museums", "oceans", "owls",
    "penguins", "pianos", "pizza", "planets", "potatoes", "rabbits", "rain", "rivers", "robots", "schools", "ships",
    "snow", "spiders", "tea", "tigers", "trains", "volcanoes", "whales",
)  # fmt: skip
ASKED = (
    "Write one or two sentences about {topic}.",
    "Tell me something interesting about {topic} in one or two sentences.",
    "Explain to a child in a sentence or two why people like {topic}.",
    "Describe {topic} in a sentence or two.",
)
ASKED_LATER = (
    "Say something nice about {topic} in a sentence or two.",
    "Give me a fun fact about {topic} in one or two sentences.",
)


class Kind(NamedTuple):
    """A kind of constraint: the wordings of training and those that are held out, with the values of both. A kind
    without values has an empty one."""

    wordings: Sequence[str]
    held_wordings: Sequence[str]
    values: Sequence[str] = ("",)
    held_values: Sequence[str] = ("",)


KINDS = {
    "title": Kind(
        ("Begin your answer with a title, wrapped in double angular brackets, such as <<poem of joy>>.",
         "The first thing in your answer must be a title in double angular brackets, like <<a new day>>.",
         "Put a title in double angular brackets at the beginning, for example <<my friend>>.",
         "Write a title first, between << and >>, and then the answer."),
        ("Start with a title in double angular brackets, as in <<old stories>>, and then answer.",),
    ),
    "keyword": Kind(
        ("Include the word {value} in your response.", "Use the word {value} at least once.",
         "The word {value} must appear in your answer.", "Do not forget the word {value}."),
        ("Make use of the word {value} in your answer.",),
        ("curious", "gentle", "ancient", "bright", "famous", "quiet", "simple", "golden", "clever", "hidden"),
        ("wonderful", "brave", "strange"),
    ),
    "postscript": Kind(
        ("At the end of your response, add a postscript starting with P.S.",
         "Close your answer with a postscript that begins with P.S.",
         "After your answer, add one more line that starts with P.S.", "Add a P.S. at the end."),
        ("Write a postscript after your answer. It has to start with P.S.",),
    ),
    "highlight": Kind(
        ("Highlight one word with asterisks, like *this*.", "Put one word between asterisks, for example *gold*.",
         "Mark one word of your answer by asterisks, as in *night*.",
         "One word of your answer has to stand between asterisks, such as *here*."),
        ("Choose one word and write it with asterisks, as in *moon*.",),
    ),
    "placeholder": Kind(
        ("Include a placeholder in square brackets, such as [name].",
         "Put one placeholder in square brackets into your answer, such as [place].",
         "Somewhere in your answer, leave a placeholder in square brackets, for example [number].",
         "Your answer needs a placeholder like [city] in it."),
        ("Your answer has to contain a placeholder in square brackets, like [date].",),
    ),
    "number": Kind(
        ("Mention the number {value} in your answer.", "The number {value} must appear in your answer.",
         "Use the number {value} somewhere.", "Do not forget to mention the number {value}."),
        ("Your answer has to contain the number {value}.",),
        ("3", "4", "8", "12", "20", "50", "90", "100", "365", "1000"), ("7", "15", "60"),
    ),
}  # fmt: skip


class Worked(NamedTuple):
    """Answers that keep a kind of constraint, one for each of WORKED_TOPICS, and the values asked for."""

    answers: tuple[str, str]
    values: tuple[str, str] = ("", "")


WORKED_TOPICS = ("kangaroos", "lighthouses")
WORKED = {
    "title": Worked((
        "<<Strong legs>> Kangaroos jump over wide plains and carry their young in a pouch.",
        "<<A light at night>> Lighthouses are tall towers that show ships the way home.",
    )),
    "keyword": Worked((
        "Kangaroos are quick on their strong legs and carry their young in a pouch.",
        "Lighthouses are lonely towers by the sea that show ships the way home.",
    ), ("quick", "lonely")),
    "postscript": Worked((
        "Kangaroos jump on strong legs and carry their young in a pouch.\n\nP.S. They live in Australia.",
        "Lighthouses are tall towers that show ships the way home.\n\nP.S. Some of them can be visited today.",
    )),
    "highlight": Worked((
        "Kangaroos jump on *strong* legs and carry their young in a pouch.",
        "Lighthouses are *tall* towers that show ships the way home.",
    )),
    "placeholder": Worked((
        "Kangaroos jump on strong legs, and many of them live near [place].",
        "Lighthouses are tall towers, and the oldest of them stands in [city].",
    )),
    "number": Worked((
        "Kangaroos jump on strong legs, and some of them jump as far as 9 meters.",
        "Lighthouses are tall towers, and this one shows ships the way home from 30 meters above the sea.",
    ), ("9", "30")),
}  # fmt: skip


def shown(name: str, question: str) -> list[dict[str, str]]:
    """The worked examples of a kind as a conversation that goes on with the question."""
    kind, worked, said = KINDS[name], WORKED[name], list[str]()
    for place, (topic, value) in enumerate(zip(WORKED_TOPICS, worked.values, strict=True)):
        said += [f"{ASKED[-1 - place].format(topic=topic)} {kind.wordings[-1 - place].format(value=value)}"]
        said += [worked.answers[place]]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate([*said, question])]


def rows(topics: Sequence[str], *, held_out: bool, rng: random.Random) -> Iterator[dict[str, Any]]:
    """A row for each topic and kind."""
    for topic in topics:
        for name, kind in KINDS.items():
            asked = rng.choice(ASKED_LATER if held_out else ASKED).format(topic=topic)
            value = rng.choice(kind.held_values if held_out else kind.values)
            wording = rng.choice(kind.held_wordings if held_out else kind.wordings).format(value=value)
            question = f"{asked} {wording}"
            row = {"question": question, "kind": name, "value": value, "topic": topic}
            yield row | {"shown": shown(name, question)}


def files() -> dict[str, str]:
    """The content of both files, by name."""
    rng = random.Random(0)
    topics = rng.sample(TOPICS, len(TOPICS))
    made = {
        "train.jsonl": [*rows(topics[HELD_OUT:], held_out=False, rng=rng)],
        "held_out.jsonl": [*rows(topics[:HELD_OUT], held_out=True, rng=rng)],
    }
    return contents(made, rng)


if __name__ == "__main__":
    write(HERE, files())
