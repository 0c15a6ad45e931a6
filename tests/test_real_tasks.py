"""The tasks of the demos with a real model: what is held out, and what the rewards of one count as kept."""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.constraints import make
from examples.constraints.rewards import constraint, shuffled
from examples.word_problems import make as word_problems

ABOUT = "A kite is light and flies high above the green hills in the wind"  # an answer without an end


PROMPT = [{"role": "user", "content": "Write a short paragraph about kites."}]


def scored(kind: str, value: str, text: str, topic: str = "kites", prompt: Any = PROMPT) -> float:
    (score,) = constraint([prompt], [[{"role": "assistant", "content": text}]], [kind], [value], [topic])
    return float(score)


def rows_of(task: ModuleType) -> list[list[dict[str, Any]]]:
    """Of training and held out."""
    return [
        [json.loads(line) for line in task.files()[name].splitlines()] for name in ("train.jsonl", "held_out.jsonl")
    ]


@pytest.mark.parametrize("task", [make, word_problems])
def test_the_files_are_what_the_command_writes(task: ModuleType) -> None:
    assert {name: (task.HERE / name).read_text() for name in task.files()} == task.files()


def test_nothing_held_out_is_in_a_training_prompt() -> None:
    train, held = rows_of(make)
    assert (len(train), len(held)) == (240, 120)
    prompts = " ".join(row["question"] for row in train)
    assert not {row["topic"] for row in held} & {row["topic"] for row in train}
    assert not [row for row in held if f" {row['topic']}" in prompts]
    for kind in make.KINDS.values():
        assert not set(kind.wordings) & set(kind.held_wordings)
        assert not set(kind.values) & set(kind.held_values) - {""}
    assert not [row["value"] for row in held if row["value"] and re.search(rf"\b{row['value']}\b", prompts)]


def test_a_teachers_examples_keep_their_constraints_and_show_no_prompt() -> None:
    rows = [row for rows in rows_of(make) for row in rows]
    prompts = " ".join(row["question"] for row in rows)
    for name, worked in make.WORKED.items():
        examples = make.shown(name, "?")[:-1]
        for place, (topic, value) in enumerate(zip(make.WORKED_TOPICS, worked.values, strict=True)):
            question, answer = examples[2 * place : 2 * place + 2]
            assert value in question["content"]
            assert scored(name, value, answer["content"], topic, [question]) == 1.0
            assert not re.search(rf"\b({topic}|{value or topic})\b", prompts)
    for row in rows:
        assert row["shown"][:-1] == make.shown(row["kind"], "")[:-1]
        assert row["shown"][-1] == {"role": "user", "content": row["question"]}


@pytest.mark.parametrize(
    ("kind", "value", "kept", "broken"),
    [
        ("title", "", f"<<Kites>>\n{ABOUT}.", [f"Kites\n{ABOUT}.", "<<Kites>>\nThey fly.", f"<<Kites>>\n{ABOUT}"]),
        ("keyword", "hills", f"{ABOUT}.", [ABOUT, f"{ABOUT}.".replace("hills", "hillside")]),
        ("postscript", "", f"{ABOUT}. P.S. It is fun", [f"P.S. {ABOUT}", f"{ABOUT}. P.S.", f"{ABOUT}. P.S. P.S. I am"]),
        ("highlight", "", f"{ABOUT} *here*.", [f"{ABOUT}.", f"*{ABOUT}*.", f"{ABOUT} *or* *so*.", f"{ABOUT} *1*."]),
        ("highlight", "", f"{ABOUT} of **well-known** hills.", []),
        ("placeholder", "", f"{ABOUT} of [place].", [f"{ABOUT}.", f"{ABOUT} []. I", f"Kites. [{ABOUT}]"]),
        ("number", "12", f"{ABOUT} of 12.", [f"{ABOUT} 120.", f"{ABOUT} 12", f"{ABOUT} 12.5.", f"{ABOUT} 12,000."]),
        ("number", "3", f"In 3 of us, {ABOUT}.", [f"3. {ABOUT}.", f"1. {ABOUT}.\n3) So it is."]),
        ("number", "1000", f"{ABOUT} of 1,000 hills.", []),
    ],
)  # fmt: skip
def test_what_keeps_a_constraint(kind: str, value: str, kept: str, broken: list[str]) -> None:
    assert scored(kind, value, kept) == 1.0
    assert [scored(kind, value, text) for text in broken] == [0.0] * len(broken)
    assert scored(kind, value, kept, topic="chess") == 0.0


@pytest.mark.parametrize(("topic", "text"), [
    ("cats", "Education is a way to see the world with other eyes."), ("kites", "kite a b c d e f g h i j k l m."),
    ("lions", "A million of us have seen the world with other eyes."), ("rain", "A train will take that brain far."),
])  # fmt: skip
def test_what_is_no_answer_on_the_topic(topic: str, text: str) -> None:
    assert scored("keyword", "a", text, topic) == 0.0


def test_a_copy_of_the_prompt_earns_nothing() -> None:
    for rows in rows_of(make):
        for row in rows:
            for text in (row["question"], f"{row['question']} {row['value']} P.S. I like this."):
                prompt = [{"role": "user", "content": row["question"]}]
                assert scored(row["kind"], row["value"], text, row["topic"], prompt) == 0.0, row


def test_an_answer_that_does_all_that_is_ever_asked_keeps_no_constraint_with_a_mark() -> None:
    for row in [row for rows in rows_of(make) for row in rows]:
        topic, value = row["topic"], row["value"]
        text = f"<<{topic}>> Many people find {topic} *wonderful* [name] {value}. P.S. They are great."
        assert scored(row["kind"], value, text, topic) == 0.0


def test_the_topic_is_in_the_answer_and_not_in_its_title_alone() -> None:
    assert scored("title", "", "<<Kites>> This is something that many people like.") == 0.0


def test_shuffled_rewards_are_the_same_ones_in_another_order() -> None:
    completions: list[Any] = [[{"content": f"{ABOUT}{end}"}] for end in [".", "", "."] + [""] * 5]
    columns = (["keyword"] * 8, ["light"] * 8, ["kites"] * 8)
    prompts = [PROMPT] * 8
    own, found = constraint(prompts, completions, *columns), shuffled(prompts, completions, *columns)
    assert (sorted(found), found) == (sorted(own), shuffled(prompts, completions, *columns))
    assert found != own


def test_no_word_problem_has_numbers_wording_name_or_thing_of_training() -> None:
    train, held = rows_of(word_problems)
    assert (len(train), len(held)) == (450, 150)
    prompts = " ".join(row["question"] for row in train)
    pairs, later = ({tuple(row["numbers"]) for row in rows} for rows in (train, held))
    assert not pairs & later
    assert (len(pairs), len(later)) == (36 - word_problems.HELD_PAIRS, word_problems.HELD_PAIRS)
    for wordings in word_problems.OPERATIONS.values():
        for other in wordings.held_wordings:  # the nearest two are at 0.84
            assert max(SequenceMatcher(None, other, one).ratio() for one in wordings.wordings) < 0.85
    assert not [word for word in (*word_problems.HELD_NAMES, *word_problems.HELD_THINGS) if word in prompts]


def test_the_answers_of_word_problems() -> None:
    for row in [row for rows in rows_of(word_problems) for row in rows]:
        a, b = map(int, re.findall(r"\d+", row["question"]))
        assert row["answer"] == {"times": a * b, "plus": a + b, "minus": a - b}[row["operation"]]
        assert row["numbers"] == sorted([a - b, b] if row["operation"] == "minus" else [a, b])


@pytest.mark.parametrize(("task", "config"), [(make, "real_cpu"), (word_problems, "real_numbers_cpu")])
def test_the_demos_read_these_files(task: ModuleType, config: str) -> None:
    text = (Path(__file__).parents[1] / "configs" / f"{config}.yaml").read_text()
    assert all(f"examples/{task.HERE.name}/{name}" in text for name in task.files())
