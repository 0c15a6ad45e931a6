"""The chat template is applied once and exactly; what cannot work is refused with a next step."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.random_model import CHAT_TEMPLATE, EOS_IDS, VOCAB_SIZE, make_tokenizer
from rollout.data.chat import Chat, ChatError

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2=?"}]


def chat_of(tokenizer: Any) -> Chat:
    return Chat(tokenizer, EOS_IDS, VOCAB_SIZE)


def without_template() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def save_model(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_messages_become_the_template_and_the_opening_of_the_answer() -> None:
    tokenizer = make_tokenizer()
    prompt, ids = chat_of(tokenizer).render(CONVERSATION)
    assert prompt == tuple(CONVERSATION)
    assert all(isinstance(token, int) for token in ids)  # not the keys of a BatchEncoding
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2=?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_template_the_prompt_is_plain_text() -> None:
    tokenizer = without_template()
    prompt, ids = chat_of(tokenizer).render(CONVERSATION)
    assert prompt == "Be brief.\n\n2+2=?"
    assert tokenizer.decode(ids) == prompt
    turns = [*CONVERSATION, {"role": "assistant", "content": "4"}]
    with pytest.raises(ChatError, match="no chat template, .* got a conversation of roles system, user, assistant"):
        chat_of(tokenizer).render(turns)


def test_a_role_that_the_template_refuses_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ChatError, match=r"system, user, and says: System role not supported; .*data\.system: null"):
        chat_of(tokenizer).render(CONVERSATION)


def test_decoding_drops_special_tokens_and_changes_nothing_else() -> None:
    tokenizer = make_tokenizer()
    said = " so , it is 4 .  <answer>4</answer>\n"
    ids = [*tokenizer.encode(said), EOS_IDS[0]]
    assert chat_of(tokenizer).decode(ids) == said


def test_stop_ids_are_those_of_tokenizer_and_generation_config(tmp_path: Path) -> None:
    generation = {"eos_token_id": [EOS_IDS[1], EOS_IDS[0], 7]}
    chat = Chat.load(str(save_model(tmp_path, {"vocab_size": VOCAB_SIZE}, generation)))
    assert chat.stop_ids == (EOS_IDS[0], EOS_IDS[1], 7)
    (tmp_path / "generation_config.json").unlink()
    assert Chat.load(str(tmp_path)).stop_ids == (EOS_IDS[0],)


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, {"vocab_size": 250})
    with pytest.raises(ChatError, match=r"vocab_size 250, and the tokenizer has id 255"):
        Chat.load(str(tmp_path))
    save_model(tmp_path, {"text_config": {"vocab_size": VOCAB_SIZE}})  # where models with several parts have it
    assert Chat.load(str(tmp_path)).has_template


def test_a_special_token_beyond_the_model_is_refused_where_a_prompt_holds_it() -> None:
    """Gemma 3's tokenizer has one for images, of which its text models know nothing."""
    for tokenizer in (make_tokenizer(), without_template()):
        tokenizer.add_tokens(["<image>"], special_tokens=True)
        beyond = tokenizer.convert_tokens_to_ids("<image>")
        chat = Chat(tokenizer, EOS_IDS, beyond)
        assert max(chat.render(CONVERSATION)[1]) < beyond
        told = rf"^data: the text holds '<image>', a special token .*id {beyond}.* vocab_size {beyond}, does not have"
        with pytest.raises(ChatError, match=told):
            chat.render([{"role": "user", "content": "an <image>"}])


def test_a_template_with_the_time_has_that_of_its_loading() -> None:
    """Else a group whose trajectories begin at midnight would have two prompts."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%H:%M:%S.%f') }} {{ messages[-1].content }}"
    chat = chat_of(tokenizer)
    assert len({chat.render(CONVERSATION)[1] for _ in range(3)}) == 1
    assert chat_of(tokenizer).render(CONVERSATION)[1] != chat.render(CONVERSATION)[1]


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(ChatError, match="generation must be able to end"):
        Chat(make_tokenizer(), (), VOCAB_SIZE)


def test_what_is_not_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChatError, match="folder must exist, got .*/absent; check the path"):
        Chat.load(str(tmp_path / "absent"))
    with pytest.raises(ChatError, match=r"with a config\.json, got"):
        Chat.load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "model_type": "llama"}')
    with pytest.raises(ChatError, match="must hold a tokenizer that transformers can load"):
        Chat.load(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ChatError, match="org/model is neither a folder here nor a hub model in the cache"):
        Chat.load("org/model")


def test_loading_a_plain_tokenizer_imports_no_torch(tmp_path: Path) -> None:
    save_model(tmp_path, {"vocab_size": VOCAB_SIZE})
    code = (
        f"import sys; from rollout.data.chat import Chat; Chat.load({str(tmp_path)!r}); print('torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False"]


SWITCH = CHAT_TEMPLATE + (
    "{%- if not enable_thinking is defined %}{%- set enable_thinking = true %}{% endif %}"
    "{%- set opening = '' %}{% for tool in tools or [] %}{% generation %}{{ tool }}{% endgeneration %}{% endfor %}"
    "{{ '' if enable_thinking else '<think>\\n\\n</think>' }}"
)


def test_variables_of_the_chat_template_reach_it() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SWITCH
    plain = chat_of(tokenizer).render(CONVERSATION)[1]
    off = Chat(tokenizer, EOS_IDS, VOCAB_SIZE, template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(off.render(CONVERSATION)[1]) == tokenizer.decode(plain) + "<think>\n\n</think>"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("enable_thinkin", "enable_thinkin must be a variable .* else it is ignored; did you mean enable_thinking"),
        ("opening", "opening must be a variable .*; it reads enable_thinking, tools$"),  # it sets this one itself
        ("messages", "messages must not be set"),
        ("add_generation_prompt", "add_generation_prompt must not be set"),
    ],
)
def test_a_variable_that_the_template_would_ignore_is_refused(name: str, message: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SWITCH
    with pytest.raises(ChatError, match=f"^data.chat_template_kwargs: {message}"):
        Chat(tokenizer, EOS_IDS, VOCAB_SIZE, template_kwargs={name: False})


def test_a_variable_without_a_template_to_read_it_is_refused() -> None:
    with pytest.raises(ChatError, match=r"^data\.chat_template_kwargs: needs a chat template, and this tokenizer has"):
        Chat(without_template(), EOS_IDS, VOCAB_SIZE, template_kwargs={"enable_thinking": False})


def test_end_tokens_of_config_count_where_generation_config_is_missing(tmp_path: Path) -> None:
    never = [VOCAB_SIZE, -1]  # -1: how some files say that there is none
    save_model(tmp_path, {"vocab_size": VOCAB_SIZE, "eos_token_id": [7, *never]})
    assert Chat.load(str(tmp_path)).stop_ids == (EOS_IDS[0], 7)
