"""A template whose tail depends on the past is found out before a run, with the first difference."""

import re
from typing import Any

import pytest
from tokenizers import normalizers

from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from rollout.data.chat import Chat
from rollout.data.observation import (
    Verdict,
    check,
    hidden_tools,
    keeps_past,
)
from tests.rollout.data.test_observation import CHATML_TOOLS, RETURNS, ROLES, chat_of

TOOLS = [{"type": "function", "function": {"name": "lookUp", "parameters": {"type": "object", "properties": {}}}}]
ROLE_STOPS = (["<|user|>", "<|observation|>"], ["<|assistant|>"])
RETURN_STOPS = (["<|return|>"], ["<|end|>"])
# As Qwen3's: thinking is dropped from turns before the last message of a user.
FORGETS = (
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% set seen = namespace(last=false) %}"
    "{% for m in messages %}{% if m == last %}{% set seen.last = true %}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if seen.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
)
# As DeepSeek-V3's: an opening mark before the first answer of a conversation only.
FIRST = CHATML_TOOLS.replace(
    "{{ m.content }}",
    "{{ '[answers]' if m.role == 'tool' and messages[:loop.index0] | selectattr('role', 'equalto', 'tool')"
    " | list | length == 0 }}{{ m.content }}",
)
# As Mistral's: the system message is written into the last message of the user.
SYSTEM_LAST = CHATML_TOOLS.replace(
    "{{ m.content }}",
    "{{ messages[0].content if loop.last and m.role == 'user' and messages[0].role == 'system' }}{{ m.content }}",
)


# One opens the next turn with thinking if there was some; the other moves text behind the answer, as Gemma-4's.
OPENS = CHATML_TOOLS.replace(
    "assistant\n{% endif %}",
    "assistant\n{{ '<think>' if messages | selectattr('reasoning_content', 'defined') | list }}{% endif %}",
)
MOVES = CHATML_TOOLS.replace(
    "{{ m.content }}",
    "{{ m.content if m.role != 'assistant' or 'Q7x' not in m.content }}"
    "{{ messages[loop.index0 - 1].content if m.role == 'tool' and '</think>' in messages[loop.index0 - 1].content }}",
)
EARLIER = "with no thinking and an earlier round: it writes 'probe0Q7x.* where it else writes '.answers.probe0Q7x"
FIELD = "with thinking in a field of its own: it writes '<think>' where it else writes ''"
SYSTEM = "with no thinking and a system message: it writes 'Be brief.probe0Q7x.* where it else writes 'probe0Q7x"


@pytest.mark.parametrize(
    ("chat", "tool", "user"),
    [
        (chat_of(CHATML_TOOLS), "", ""),
        (chat_of(ROLES, *ROLE_STOPS), "", ""),
        (chat_of(RETURNS, *RETURN_STOPS), "", ""),
        (chat_of(FORGETS), "", ""),
        (chat_of(FIRST), EARLIER, ""),
        (chat_of(SYSTEM_LAST), "", SYSTEM),
        (chat_of(OPENS), FIELD, FIELD),
    ],
    ids=["chatml", "roles", "returns", "forgets", "first", "system last", "opens"],
)
def test_a_dozen_conversations(chat: Chat, tool: str, user: str) -> None:
    for roles, reason in ((("tool",), tool), (("tool", "tool"), tool), (("user",), user)):
        verdict = check(chat.observations, roles)
        assert verdict.state == ("varies" if reason else "exact"), roles
        assert re.match(reason or "$", verdict.reason)


def test_text_that_is_moved_behind_an_answer_is_seen() -> None:
    verdict = check(chat_of(MOVES).observations, ("tool",))
    assert verdict.state == "varies"
    assert verdict.reason.startswith("with thinking in the text: it writes 'think>")


def test_a_tokenizer_that_knows_no_border_at_the_end_of_a_turn_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}!{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
    )
    chat = Chat(tokenizer, tokenizer.convert_tokens_to_ids(["!"]), VOCAB_SIZE)  # a letter like any other
    assert check(chat.observations, ("user",)) == Verdict("exact")
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    reason = "ends turns with '!', behind which the tokenizer gives other ids than alone"
    assert check(chat.observations, ("user",)) == Verdict("refused", reason)


def test_a_template_without_tools_is_refused_for_tools_alone() -> None:
    chat = chat_of(CHATML_TOOLS.replace("in messages", "in messages if m.role != 'tool'"))
    assert check(chat.observations, ("user",)) == Verdict("exact")
    verdict = check(chat.observations, ("tool",), TOOLS)
    assert verdict == Verdict("refused", "drops or repeats a message of roles assistant, tool, or changes their order")


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_before_an_observation() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML_TOOLS
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")  # as SentencePiece's
    chat = Chat(tokenizer, EOS_IDS, VOCAB_SIZE)
    assert chat.decode(tokenizer.encode("4")) == "_4"
    assert check(chat.observations, ("user",)) == Verdict("exact")
    question = {"role": "user", "content": "4"}
    full = chat.render([question, {"role": "assistant", "content": "5"}, question])[1]
    seen = chat.observe([question], EOS_IDS[0])
    assert full[-len(seen) - 1 :] == (EOS_IDS[0], *seen)


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        (chat_of(CHATML_TOOLS), {"tool": (True, True), "user": (True, True)}),
        (chat_of(ROLES, *ROLE_STOPS), {"tool": (True, True), "user": (True, True)}),
        (chat_of(RETURNS, *RETURN_STOPS), {"tool": (False, False), "user": (False, False)}),
        (chat_of(FORGETS), {"tool": (True, True), "user": (True, False)}),
    ],
    ids=["chatml", "roles", "returns", "forgets"],
)
def test_which_templates_keep_the_past(chat: Chat, expected: dict[str, Any]) -> None:
    found = {
        role: tuple(keeps_past(chat.observations, (role,), thinking=thinking) for thinking in (False, True))
        for role in expected
    }
    assert found == expected


def test_tools_that_the_prompt_does_not_show() -> None:
    assert hidden_tools(chat_of(CHATML_TOOLS).observations, TOOLS) == ["lookUp"]
    shown = chat_of("{{ tools | tojson if tools }}" + CHATML_TOOLS)
    assert hidden_tools(shown.observations, TOOLS) == []
