"""What is wrong with an environment is said before a run, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from learner.config import RunConfig
from learner.driver.input_checks import check_environment, check_environment_column
from rollout.data.chat import Chat
from rollout.schema import Problem
from tests.learner.loops import configure

MODEL = str(Path(__file__).parents[3] / "examples" / "tiny-arithmetic")
FAULTY = f"{Path(__file__).parents[2] / 'rollout' / 'env' / 'faulty.py'}:Plain"
PROGRAM = f"{Path(__file__).parents[2] / 'rollout' / 'env' / 'programs.py'}:Asking"  # begins with three tokens
PROBLEM = Problem("train-3", ({"role": "user", "content": "1 + 2"},), {"answer": "3"}, (1, 5), 3, 0)
CHAT = Chat.load(MODEL)
TOOL = '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b
'''


def config(env: dict[str, Any], **rollout: Any) -> RunConfig:
    return configure(env=env, rollout=rollout, model={"path": MODEL, "dtype": "float32"})


def test_an_environment_that_begins_and_a_template_that_carries_it_are_fine() -> None:
    assert check_environment(config({"use": FAULTY}), CHAT, PROBLEM).notes == ()
    assert check_environment(config({}), CHAT, PROBLEM).notes == ()
    assert check_environment(config({"use": PROGRAM}, max_prompt_length=3), CHAT, PROBLEM).notes == ()


@pytest.mark.parametrize(
    ("env", "rollout", "sentence"),
    [
        ({"use": FAULTY, "args": {"wrong": "reset raises"}}, {}, "env.use: .*Plain: reset: OSError: no such level"),
        ({"use": "no.such:Class"}, {}, "env.use: no.such:Class: .*'no.such' does not import"),
        (
            {"use": FAULTY},
            {"max_prompt_length": 4},
            "rollout.max_prompt_length: must hold the environment's first .* got 4",
        ),
        ({"use": PROGRAM}, {"max_prompt_length": 2}, "which take 3 tokens of problem train-3, got 2"),
        ({"use": PROGRAM, "args": {"how": "silent"}}, {}, "Asking: run: must ask the policy for a turn before it ends"),
    ],
)
def test_one_line_says_what_is_wrong(env: dict[str, Any], rollout: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongInput, match=sentence):
        check_environment(config(env, **rollout), CHAT, PROBLEM)


def test_a_template_without_tools_and_a_model_without_a_template_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOL)
    with pytest.raises(WrongInput, match="must write the tools into the prompt, and leaves out add"):
        check_environment(config({"use": "tools", "args": {"functions": [f"{tmp_path}/mine.py:add"]}}), CHAT, PROBLEM)
    plain = Chat.load(MODEL)
    plain.has_template = False
    with pytest.raises(WrongInput, match="env.use: an environment needs a model with a chat template"):
        check_environment(config({"use": FAULTY}), plain, PROBLEM)


def chat_of(template: str) -> Chat:
    """The model's, with another template, in which <|end|> stands for the token that ends a turn."""
    chat = Chat.load(MODEL)
    end = chat.tokenizer.convert_ids_to_tokens(chat.stop_ids[0])
    chat.tokenizer.chat_template = template.replace("<|end|>", end)
    return chat


def test_tokens_of_tools_are_counted_beside_the_problems_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOL)
    chat = chat_of("{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}answer:")
    env = {"use": "tools", "args": {"functions": [f"{tmp_path}/mine.py:add"]}, "tool_parser": "hermes"}
    own = chat.render([{"role": "user", "content": "1 + 2"}])[1]
    problem = replace(PROBLEM, prompt_ids=own)
    tried = check_environment(config(env, max_prompt_length=len(own)), chat, problem)  # left to data.overlong
    whole = {"use": FAULTY, "args": {"wrong": "has tools"}, "tool_parser": "hermes"}
    assert tried.tools > 50
    assert check_environment(config(whole), chat, problem).tools == 0  # it begins with messages of its own


# Ends a turn otherwise where it called the tool before.
FICKLE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>"
    "{% if m.role == 'user' and not loop.first and messages|length > 3 %}later {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_that_writes_answers_differently_is_told_or_refused() -> None:
    chat = chat_of(FICKLE)
    (note,) = check_environment(config({"use": FAULTY}), chat, PROBLEM).notes
    assert note.startswith("env: answers of role user: the model's chat template varies: with")
    with pytest.raises(WrongInput, match="env.history: refuse, and the model's chat template writes answers of role"):
        check_environment(config({"use": FAULTY, "history": "refuse"}), chat, PROBLEM)


# Writes an answer of a tool only behind a turn that has the calls in a field of their own.
SILENT = (
    "{{ tools | tojson }}{% set seen = namespace(calls=false) %}{% for m in messages %}"
    "{% if m.tool_calls %}{% set seen.calls = true %}{% endif %}"
    "{% if m.role != 'tool' or seen.calls %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_that_is_to_render_the_past_must_write_answers_behind_calls_that_are_text() -> None:
    chat = chat_of(SILENT)
    env = {"use": FAULTY, "args": {"wrong": "has tools"}, "tool_parser": "hermes"}
    assert check_environment(config(env), chat, PROBLEM).notes == ()
    with pytest.raises(WrongInput, match="env.history: template, .* role tool .* text, and leaves it out; set"):
        check_environment(config(env | {"history": "template"}), chat, PROBLEM)
    assert check_environment(config({"use": FAULTY, "history": "template"}), chat_of(FICKLE), PROBLEM).notes == ()


def test_a_row_that_names_no_class_is_refused_before_anything_runs() -> None:
    factories = {"up": "a.py:Up", "down": "a.py:Down"}
    several = config({"use": "trl_environment", "args": {"factory": factories}})
    check_environment_column(several, [{"environment": "down"}, {"environment": "up"}])
    for row, told in (
        ({"environment": "left"}, "'left'"),
        ({"episode": 0}, "None"),
        ({"environment": ["up"]}, r"\['up'\]"),
    ):
        with pytest.raises(WrongInput, match=f"training row 1 names {told}; it has up, down; add that, or correct"):
            check_environment_column(several, [{"environment": "up"}, row])
    check_environment_column(config({"use": "trl_environment", "args": {"factory": "a.py:Up"}}), [{}])
