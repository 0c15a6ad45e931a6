"""From a row to the messages of a prompt: columns, parts of nested ones, templates, content parts."""

import contextlib
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import WrongInput
from rollout.config import DataConfig
from rollout.data.prompts import NoPrompt, messages_of, prompts_of

ROW: dict[str, Any] = {
    "question": "1+1?",
    "level": 3,
    "problem": {"text": "Add.", "parts": ["a", {"b": "c"}], "none": None},
    "a.b": "dotted",
    "chat": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}],
    "image": [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
    "calls": [{"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}],
}


def text_of(prompt: str) -> str:
    (message,) = messages_of(ROW, DataConfig(path="d", prompt=prompt), "row-0")
    return message["content"]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("question", "1+1?"),
        ("problem.text", "Add."),
        ("problem[text]", "Add."),
        ("{problem[text]} {problem.text}", "Add. Add."),
        ("{problem[parts][0]}{problem.parts[1].b}", "ac"),
        ("a.b", "dotted"),
        ("{a.b}", "dotted"),
        ("Level {level:03d}: {question!r} {{x}}", "Level 003: '1+1?' {x}"),
        ("chat", "Hi\nyou"),
    ],
)
def test_what_a_prompt_may_be(prompt: str, text: str) -> None:
    assert text_of(prompt) == text


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("{problem}", r"\{problem\} must be a text or a number, and it is a mapping of text, parts, none; write for"),
        ("{problem[txt]}", r"there is no 'txt' in 'problem\[txt\]': what it is looked for in has text, parts, none"),
        ("problem.parts[7]", "there is no '7' in .* is a list of 2"),
        ("question.text", "there is no 'text' in 'question.text': what it is looked for in is a str"),
        ("{problem.none}", "not empty; row-0 gives None"),
        ("{question.__class__.__mro__}", "there is no '__class__'"),
        ("{problem[text}", "got .*write a literal brace twice"),
        ("{}", "there is no column ''"),
        ("{level:s}", "cannot be written as ':s' .*Unknown format code"),
        ("{question:>99999999999}", "cannot be written as .*a width must be below 10000"),
        ("{question:{level}}", "cannot be written as"),
        ("{question!x}", "cannot be written as '!x:'"),
        ("image", "content parts must be .*text: .*and row-0 has one of type 'image'; take it out"),
        ("calls", "row-0 has tool_calls"),
    ],
)
def test_what_it_may_not_be(prompt: str, sentence: str) -> None:
    with pytest.raises(WrongInput, match=sentence) as caught:
        text_of(prompt)
    assert str(caught.value).startswith("data.prompt: ")


PIECES = st.sampled_from([*"{}[].:!<>^0,%sdfrx", "question", "problem", "text", "level", "999999", "__class__"])


@given(prompt=st.lists(PIECES, max_size=10).map("".join) | st.text(string.printable, max_size=8))
def test_no_template_ends_in_anything_but_a_sentence(prompt: str) -> None:
    with contextlib.suppress(WrongInput):
        assert text_of(prompt).strip()


def test_an_answer_in_the_prompt_is_refused() -> None:
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(WrongInput, match="row 3 ends with an assistant's message, .* name a column without it"):
        messages_of({"q": talk}, DataConfig(path="d", prompt="q"), "row 3")
    asked = [*talk, {"role": "user", "content": "3+3?"}]
    assert messages_of({"q": asked}, DataConfig(path="d", prompt="q"), "row 3") == asked


PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
ROLES = st.sampled_from(["role", "content", "type", "text", "tool_calls"]) | st.text(max_size=2)
VALUES = st.recursive(PLAIN, lambda v: st.lists(v, max_size=3) | st.dictionaries(ROLES, v, max_size=3), max_leaves=8)


@given(value=VALUES, prompt=st.sampled_from(["q", "{q}", "q.text", "{q[0]}", "{q:d}", "{q!r}"]))
def test_no_row_ends_in_anything_but_a_sentence(value: object, prompt: str) -> None:
    with contextlib.suppress(WrongInput):
        messages = messages_of({"q": value}, DataConfig(path="d", prompt=prompt, system="S"), "row-0")
        assert all(isinstance(m["role"], str) and m["content"].strip() for m in messages)


def test_rows_without_a_prompt_are_left_out_while_they_are_fewer_than_half() -> None:
    config = DataConfig(path="d")
    there, missing = {"question": "1+1?"}, {"question": None}
    assert [index for index, _ in prompts_of([there, missing, there], config, "d")] == [0, 2]
    with pytest.raises(NoPrompt, match="^data.prompt: .* d-1 gives None"):
        list(prompts_of([there, missing], config, "d"))
