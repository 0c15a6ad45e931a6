"""What is appended behind a sampled turn is what the template writes there, and the sampled ids stay as they are."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from cluster.errors import WrongInput
from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from rollout.data.chat import Chat
from rollout.data.observation import (
    UnclosedTurn,
    Verdict,
    check,
    hidden_tools,
    keeps_past,
)

TINY = Path(__file__).parents[3] / "examples" / "tiny-arithmetic"
USER = {"role": "user", "content": "2+2=?"}
TOOL = {"role": "tool", "content": "4", "name": "add"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"value": 2}}}
OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# As GLM's: a turn has no end of its own, and the policy stops by opening the role that follows.
ROLES = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% else %}{{ '<|observation|>' if m.role == 'tool' else '<|user|>' }}{{ m.content }}{% endif %}{% endfor %}" + OPEN
)
# As gpt-oss's: a conversation's last turn ends with <|return|>, one that is past with <|end|>. Tools are unknown.
RETURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}"
    + OPEN
)
CHATML_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_of(template: str, stops: Sequence[str] = ("<|im_end|>", "<|endoftext|>"), more: Sequence[str] = ()) -> Chat:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": [*stops, *more]})
    ids = tokenizer.convert_tokens_to_ids(list(stops))
    return Chat(tokenizer, ids, VOCAB_SIZE + 20)


def text_of(chat: Chat, ids: Sequence[int]) -> str:
    return chat.decode(ids, special=True)


CHATML = chat_of(CHATML_TOOLS)


def test_sampled_ids_stay_where_the_text_encodes_to_others() -> None:
    chat = Chat.load(str(TINY))
    prompt = chat.render([USER])[1]
    word = chat.render([{"role": "user", "content": "answer"}])[1][1:-2]
    spelt = [chat.render([{"role": "user", "content": letter}])[1][1] for letter in "answer"]
    sampled = [*spelt, chat.stop_ids[0]]  # letter by letter, as no tokenizer would write it
    assert chat.decode(spelt) == "answer"
    assert len(word) < len(spelt)
    ids = (*prompt, *sampled, *chat.observe([USER], closed_by=sampled[-1]))
    again = chat.render([USER, {"role": "assistant", "content": "answer"}, USER])[1]
    assert text_of(chat, ids) == text_of(chat, again)
    assert ids != again
    assert ids[len(prompt) : len(prompt) + len(sampled)] == tuple(sampled)


@given(said=st.text(max_size=30), answers=st.lists(st.text(max_size=30), min_size=1, max_size=3), cut=st.booleans())
def test_appended_is_what_the_whole_render_says(said: str, answers: list[str], cut: bool) -> None:
    """ChatML keeps the past as it was, so that prompt, turn and observation are the whole conversation."""
    messages = [{"role": "tool", "content": answer} for answer in answers]
    turn = {"role": "assistant", "content": said, "tool_calls": [CALL] * len(answers)}
    full = CHATML.render([USER, turn, *messages])[1]
    end = EOS_IDS[0]
    past = CHATML.render([USER, turn])[1]
    upto = past[: max(index for index, token in enumerate(past) if token == end) + 1]
    seen = CHATML.observe(messages, None if cut else end)
    assert (upto[:-1] if cut else upto) + seen == full


def test_a_stop_token_that_opens_the_observation_is_written_once() -> None:
    chat = chat_of(ROLES, ["<|user|>", "<|observation|>"], ["<|assistant|>"])
    user, observation = chat.stop_ids
    assert text_of(chat, chat.observe([TOOL], closed_by=observation)) == "4<|assistant|>"
    assert text_of(chat, chat.observe([TOOL], closed_by=None)) == "<|observation|>4<|assistant|>"
    assert text_of(chat, chat.observe([TOOL, USER], closed_by=observation)) == "4<|user|>2+2=?<|assistant|>"
    assert text_of(chat, chat.observe([USER], closed_by=user)) == "2+2=?<|assistant|>"
    with pytest.raises(UnclosedTurn, match=f"roles tool must end with token {observation}, .* got {user}$"):
        chat.observe([TOOL], closed_by=user)


def test_a_turn_that_the_template_ends_anew_keeps_its_sampled_end() -> None:
    chat = chat_of(RETURNS, ["<|return|>"], ["<|end|>", "<|user|>", "<|tool|>", "<|assistant|>"])
    (returned,) = chat.stop_ids
    assert text_of(chat, chat.observe([USER], closed_by=returned)) == "<|user|>2+2=?<|end|><|assistant|>"
    assert text_of(chat, chat.observe([USER], closed_by=None)) == "<|end|><|user|>2+2=?<|end|><|assistant|>"
    assert text_of(chat, chat.observe([TOOL], closed_by=returned)) == "<|tool|>4<|end|><|assistant|>"


@pytest.mark.parametrize("header", ["<|{{ m.role }}|>", "<|start|>{{ m.role }}:"])
def test_what_opens_an_observation_is_not_taken_for_the_end_of_the_turn(header: str) -> None:
    """A turn that is past has no end here, so that nothing says what the sampled end would be followed by."""
    template = RETURNS.replace("<|{{ m.role }}|>", header).replace("'<|end|>'", "''")
    template = template.replace("<|assistant|>", header.replace("{{ m.role }}", "assistant"))
    chat = chat_of(template, ["<|return|>"], ["<|start|>", "<|user|>", "<|assistant|>"])
    with pytest.raises(WrongInput, match=r"ends a turn that is past with none of the model's stop tokens"):
        chat.observe([USER], closed_by=chat.stop_ids[0])


def test_the_first_stop_token_behind_a_turn_ends_it() -> None:
    chat = chat_of(CHATML_TOOLS.replace("<|im_end|>", "<|im_end|><|endoftext|>"))
    seen = text_of(chat, chat.observe([USER], EOS_IDS[0]))
    assert seen == "<|endoftext|>\n<|im_start|>user\n2+2=?<|im_end|><|endoftext|>\n<|im_start|>assistant\n"


EOM = CHATML_TOOLS.replace("<|im_end|>", "{{ '<|eom|>' if m.tool_calls else '<|im_end|>' }}")


@pytest.mark.parametrize(
    "template",
    [
        EOM,
        "{% for m in messages if m.tool_calls | length > 1 %}{{ raise_exception() }}{% endfor %}" + EOM,
        EOM.replace("c.function.arguments}", "'' + c.function.arguments}"),
    ],
    ids=["two calls", "one call", "arguments as text"],
)
def test_answers_stand_behind_the_end_of_a_turn_with_calls(template: str) -> None:
    chat = chat_of(template, ["<|im_end|>", "<|eom|>"])
    seen = chat.observe([TOOL, {"role": "tool", "content": "5"}], chat.stop_ids[1])
    assert text_of(chat, seen).startswith("\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>tool\n5<|im_end|>")


def test_a_template_that_refuses_a_second_call_takes_two_answers() -> None:
    chat = chat_of(
        "{% for m in messages if m.tool_calls | length > 1 %}{{ raise_exception() }}{% endfor %}" + CHATML_TOOLS
    )
    seen = chat.observe([TOOL, {"role": "tool", "content": "5"}], EOS_IDS[0])
    assert text_of(chat, seen) == (
        "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML_TOOLS.replace("in messages", "in messages if m.role != 'tool'"), "drops or repeats a message"),
        (
            "{{ raise_exception('no tools') if messages[-1].role == 'tool' }}" + CHATML_TOOLS,
            "refuses roles .*: no tools",
        ),
        (CHATML_TOOLS.replace("in messages", "in messages | reverse"), "or changes their order"),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}", "with none of .* but with '.n.tool. '"),
        (
            CHATML_TOOLS.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}"),
            "must hold it as tool_call_id",
        ),
    ],
)
def test_a_template_that_cannot_take_the_observation_is_refused(template: str, message: str) -> None:
    with pytest.raises(WrongInput, match=f"^model.path: .*{message}"):
        chat_of(template).observe([TOOL], EOS_IDS[0])


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": "x"}], [{"role": "tool", "content": None}]])
def test_what_is_no_observation_is_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(WrongInput, match=r"^trajectory: an (observation|environment) .*must"):
        CHATML.observe(messages, EOS_IDS[0])


def test_what_the_tokenizer_refuses_is_a_chat_error() -> None:
    with pytest.raises(WrongInput, match="^model.path: the model's tokenizer refuses .*TextEncodeInput"):
        CHATML.observe([{"role": "user", "content": "a\ud83d"}], EOS_IDS[0])


def test_without_a_template_there_is_one_turn() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    chat = Chat(tokenizer, EOS_IDS, VOCAB_SIZE)
    with pytest.raises(WrongInput, match="several turns needs a chat template"):
        chat.observe([USER], EOS_IDS[0])
    with pytest.raises(WrongInput, match="tools need a chat template"):
        chat.render([USER], [{"type": "function", "function": {"name": "add"}}])


def test_tools_reach_the_template() -> None:
    chat = chat_of("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + CHATML_TOOLS)
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert text_of(chat, chat.render([USER], tools)[1]) == "[add]" + text_of(chat, chat.render([USER])[1])


# A template whose tail depends on the past is found out before a run, with the first difference.

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
