"""What is appended behind a sampled turn is what the template writes there, and the sampled ids stay as they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from rollout.data.chat import Chat
from rollout.data.hub import ChatError
from rollout.data.observation import UnclosedTurn

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
    with pytest.raises(ChatError, match=r"ends a turn that is past with none of the model's stop tokens"):
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
    with pytest.raises(ChatError, match=f"^model.path: .*{message}"):
        chat_of(template).observe([TOOL], EOS_IDS[0])


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": "x"}], [{"role": "tool", "content": None}]])
def test_what_is_no_observation_is_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatError, match=r"^trajectory: an (observation|environment) .*must"):
        CHATML.observe(messages, EOS_IDS[0])


def test_what_the_tokenizer_refuses_is_a_chat_error() -> None:
    with pytest.raises(ChatError, match="^model.path: the model's tokenizer refuses .*TextEncodeInput"):
        CHATML.observe([{"role": "user", "content": "a\ud83d"}], EOS_IDS[0])


def test_without_a_template_there_is_one_turn() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    chat = Chat(tokenizer, EOS_IDS, VOCAB_SIZE)
    with pytest.raises(ChatError, match="several turns needs a chat template"):
        chat.observe([USER], EOS_IDS[0])
    with pytest.raises(ChatError, match="tools need a chat template"):
        chat.render([USER], [{"type": "function", "function": {"name": "add"}}])


def test_tools_reach_the_template() -> None:
    chat = chat_of("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + CHATML_TOOLS)
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert text_of(chat, chat.render([USER], tools)[1]) == "[add]" + text_of(chat, chat.render([USER])[1])
