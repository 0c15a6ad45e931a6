"""A chat template that leaves out what a message says is refused, by name, before anything is trained on it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from learner.driver.input_checks import check_data_prompts, check_environment, check_prompts
from rollout.data.chat import Chat
from rollout.schema import Problem
from tests.learner.driver.test_env_check import FAULTY, MODEL, TOOL
from tests.learner.driver.test_env_check import config as configured
from tests.learner.driver.test_preflight import check, config, model

__all__ = ["config", "model"]  # fixtures

# Phi-3-mini's, as published: it knows no role system.
PHI = (
    "{% for message in messages %}{% if (message['role'] == 'user') %}{{'<|user|>' + message['content'] + '<|end|>' + "
    "'<|assistant|>'}}{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>'}}{% endif %}"
    "{% endfor %}"
)
LAST = "{{ messages[-1].content }}"
REFUSES = "{{ raise_exception('no') if 'said' in messages[0].content }}"
USER, SYSTEM, ANSWER = ("user", "2+2=?"), ("system", "Be brief."), ("assistant", "4")


def conversation(*messages: tuple[str, str]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": text} for role, text in messages)


def chat_of(template: str | None) -> Chat:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return Chat(tokenizer, EOS_IDS, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("template", "last", "told"),
    [
        (PHI, [SYSTEM, USER], r"role system says, .*; put it into the user's text \(data\.prompt: .*, or give another"),
        (LAST, [USER, ANSWER, USER], "role user says, in a conversation of roles user, assistant, user; take that"),
    ],
)
def test_what_the_template_leaves_out_is_named(template: str, last: list[tuple[str, str]], told: str) -> None:
    with pytest.raises(WrongInput, match=f"^data: the chat template of org/m leaves out what a message of {told}"):
        check_prompts(chat_of(template), "org/m", [conversation(USER), conversation(*last)])


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (PHI, [USER, ANSWER, USER]),
        (PHI, [("system", " "), USER]),  # there is nothing to leave out
        (REFUSES, [USER]),  # only the trial
    ],
)
def test_what_is_written_is_taken(template: str, messages: list[tuple[str, str]]) -> None:
    check_prompts(chat_of(template), "org/m", [conversation(*messages)])


def test_without_a_template_all_is_written() -> None:
    chat = chat_of(None)
    check_prompts(chat, "org/m", [chat.render(conversation(SYSTEM, USER))[0]])


def test_a_start_refuses_a_system_message_that_would_not_be_read(
    config: dict[str, Any], tmp_path: Path, model: Path, no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(model, tmp_path / "phi")
    (copy / "chat_template.jinja").write_text(PHI)
    assert check(config, "--dry-run", f"model.path={copy}", capsys=capsys)[0] == 0
    code, _, err = check(config, "--dry-run", f"model.path={copy}", "data.system=Be brief.", capsys=capsys)
    assert code == 2
    assert f"data: the chat template of {copy} leaves out what a message of role system says" in err
    turns = [{"role": role, "content": text} for role, text in (SYSTEM, USER)]
    Path("held.jsonl").write_text(json.dumps({"question": turns, "answer": 4}) + "\n")
    code, _, err = check(config, "--dry-run", f"model.path={copy}", "data.eval.path=held.jsonl", capsys=capsys)
    assert (code, "role system says" in err) == (2, True)


def test_what_an_environment_begins_with_is_tried_instead(tmp_path: Path) -> None:
    """Which may be the problem's own messages."""
    (tmp_path / "mine.py").write_text(TOOL)
    chat = Chat.load(MODEL)
    chat.tokenizer.chat_template = PHI
    problem = Problem("train-3", conversation(SYSTEM, USER), {"answer": "4"}, (1, 5), 3, 0)
    begins = configured({"use": FAULTY})
    check_data_prompts(begins, chat, [problem.messages])
    assert check_environment(begins, chat, problem).notes == ()
    with pytest.raises(WrongInput, match="role system says"):
        check_environment(
            configured({"use": "tools", "args": {"functions": [f"{tmp_path}/mine.py:add"]}}), chat, problem
        )
