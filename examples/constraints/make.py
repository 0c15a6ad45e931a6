"""Writes train.jsonl and held_out.jsonl: prompts with one constraint each that a program can check, as IFEval's (Zhou
et al. 2023, arXiv:2311.07911).

    python -m examples.constraints.make

Nothing that is held out is in a training prompt: neither its topic, nor the words in which the constraint is put, nor,
where the constraint has one, its value (a number, a word, a phrase). So a policy cannot do well by having seen it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
HELD_OUT = 15  # topics
TOPICS = (
    "airplanes", "apples", "balloons", "bears", "bees", "bicycles", "bread", "bridges", "butterflies", "cameras",
    "candles", "castles", "cats", "cheese", "chess", "chocolate", "clocks", "clouds", "coffee", "deserts", "dogs",
    "dolphins", "elephants", "farms", "football", "forests", "gardens", "guitars", "honey", "horses", "islands",
    "kites", "lakes", "lemons", "libraries", "lions", "maps", "mirrors", "mountains", "museums", "oceans", "owls",
    "penguins", "pianos", "pizza", "planets", "potatoes", "rabbits", "rain", "rivers", "robots", "schools", "ships",
    "snow", "spiders", "tea", "tigers", "trains", "volcanoes", "whales",
)  # fmt: skip
ASKED = (
    "Write a short paragraph about {topic}.",
    "Tell me something interesting about {topic}.",
    "Explain to a child why people like {topic}.",
    "Describe {topic} in a few words.",
)
ASKED_LATER = ("Say something nice about {topic}.", "Give me a fun fact about {topic}.")


class Kind(NamedTuple):
    """A kind of constraint: the wordings of training and those that are held out, with the values of both. A kind
    without values has an empty one."""

    wordings: Sequence[str]
    held_wordings: Sequence[str]
    values: Sequence[str] = ("",)
    held_values: Sequence[str] = ("",)


KINDS = {
    "bullets": Kind(
        ("Your answer must be exactly {value} bullet points, each on a line of its own, starting with * and a space.",
         "Answer with exactly {value} bullet points, one on each line, and begin each line with * and a space."),
        ("Write exactly {value} bullet points. Each of them is a line that starts with * and a space.",),
        ("2", "3", "5"), ("4",),
    ),
    "title": Kind(
        ("Begin your answer with a title, wrapped in double angular brackets, such as <<poem of joy>>.",
         "The first thing in your answer must be a title in double angular brackets, like <<a new day>>."),
        ("Start with a title in double angular brackets, as in <<old stories>>, and then answer.",),
    ),
    "phrase": Kind(
        ("Finish your response with this exact phrase: {value}", "End your answer with the exact words: {value}"),
        ("Let your answer end with these words: {value}",),
        ("Any other questions?", "That is all I know.", "Thank you for reading.", "Now you know why.",
         "Ask me for more.", "I hope this helps.", "See you next time.", "And that is the truth."),
        ("Is there anything else?", "That was my answer.", "Have a lovely day."),
    ),
    "start": Kind(
        ("Begin your response with the words: {value}", "Start your answer with exactly these words: {value}"),
        ("Let your answer begin with these words: {value}",),
        ("Let me explain", "Here is a thought", "Many people know", "In my opinion", "First of all", "To be honest",
         "It is often said", "Some people say"),
        ("Believe it or not", "As far as I know", "Most of us think"),
    ),
    "keyword": Kind(
        ("Include the word {value} in your response.", "Use the word {value} at least once."),
        ("Make use of the word {value} in your answer.",),
        ("curious", "gentle", "ancient", "bright", "famous", "quiet", "simple", "golden", "clever", "hidden"),
        ("wonderful", "brave", "strange"),
    ),
    "sentences": Kind(
        ("Answer in exactly {value}.", "Your whole answer must be exactly {value} long."),
        ("Reply with exactly {value}.",),
        ("one sentence", "three sentences"), ("two sentences",),
    ),
    "postscript": Kind(
        ("At the end of your response, add a postscript starting with P.S.",
         "Close your answer with a postscript that begins with P.S."),
        ("Write a postscript after your answer. It has to start with P.S.",),
    ),
    "no_comma": Kind(
        ("Do not use any commas in your response.", "Write your answer without a single comma."),
        ("Avoid all commas in your answer.",),
    ),
}  # fmt: skip


def rows(topics: Sequence[str], *, held_out: bool, rng: random.Random) -> Iterator[dict[str, str]]:
    """A row for each topic and kind."""
    for topic in topics:
        for name, kind in KINDS.items():
            asked = rng.choice(ASKED_LATER if held_out else ASKED).format(topic=topic)
            value = rng.choice(kind.held_values if held_out else kind.values)
            wording = rng.choice(kind.held_wordings if held_out else kind.wordings).format(value=value)
            yield {"question": f"{asked} {wording}", "kind": name, "value": value, "topic": topic}


def files() -> dict[str, str]:
    """The content of both files, by name."""
    rng = random.Random(0)
    topics = rng.sample(TOPICS, len(TOPICS))
    made = {
        "train.jsonl": [*rows(topics[HELD_OUT:], held_out=False, rng=rng)],
        "held_out.jsonl": [*rows(topics[:HELD_OUT], held_out=True, rng=rng)],
    }
    for each in made.values():
        rng.shuffle(each)
    return {name: "".join(json.dumps(row) + "\n" for row in each) for name, each in made.items()}


def main() -> None:
    for name, content in files().items():
        (HERE / name).write_text(content)


if __name__ == "__main__":
    main()
