"""The chat template is applied once and exactly; what cannot work is refused with a next step. What ends a
completion: which strings are tokens, and which are text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from cluster.errors import WrongInput
from examples.random_model import CHAT_TEMPLATE, EOS_IDS, VOCAB_SIZE, make_tokenizer
from rollout.data.chat import Chat

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
    with pytest.raises(WrongInput, match="no chat template, .* got a conversation of roles system, user, assistant"):
        chat_of(tokenizer).render(turns)


@pytest.mark.parametrize("text", ["2+2=", "<|im_start|>user\n2+2=?<|im_end|>\n<|im_start|>assistant\n<think>\n"])
def test_with_chat_template_none_the_model_continues_the_text(tmp_path: Path, text: str) -> None:
    save_model(tmp_path, {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_IDS[0]})
    chat = Chat.load(str(tmp_path), template="none")
    prompt, ids = chat.render([{"role": "user", "content": text}])
    assert prompt == text
    assert list(ids) == make_tokenizer().encode(text)
    assert text.count("<|im_start|>") == sum(
        token == chat.tokenizer.convert_tokens_to_ids("<|im_start|>") for token in ids
    )
    assert chat.prefilled(ids) == ("<think>\n" if text.endswith("<think>\n") else "")
    assert chat.notes(()) == ()
    with pytest.raises(
        WrongInput, match=r"data.chat_template is none, so a prompt must be one text, got .* user, assis"
    ):
        chat.render([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])


def test_a_rendered_text_begins_once(tmp_path: Path) -> None:
    tokenizer = without_template()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    chat = chat_of(tokenizer)
    for text, ones in (("1", 1), ("<|im_start|>1", 1), ("<|im_start|><|im_start|>1", 2)):
        assert list(chat.render([{"role": "user", "content": text}])[1]) == [start] * ones + make_tokenizer().encode(
            "1"
        )


@pytest.mark.parametrize("tokens", [("<|im_start|>",), ("<|im_end|>", "<|im_start|>")])
def test_a_prompt_with_marks_of_turns_is_told(tokens: tuple[str, ...]) -> None:
    chat = chat_of(make_tokenizer())
    chat.render([{"role": "user", "content": "<think> 1 + 1 </s>"}])
    assert chat.notes(()) == ()
    for text in ("2", "".join(f"{token}user\n1" for token in tokens)):
        chat.render([{"role": "user", "content": text}])
    (note,) = chat.notes(())
    assert note.startswith(f"data: 1 of the prompts looked at hold {', '.join(map(repr, tokens))} in a message")
    assert "set data.chat_template: none" in note


def test_a_role_that_the_template_refuses_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(WrongInput, match=r"system, user, and says: System role not supported; .*data\.system: null"):
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


def ends_prompts_with(token: str, tokenizer: Any) -> Any:
    """As a tokenizer with add_eos_token writes it: behind every text that it is given."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {token}", special_tokens=[(token, tokenizer.convert_tokens_to_ids(token))]
    )
    return tokenizer


@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("text", ["1 + 1 =", "Q: a<|im_end|>b\n\nA:", "ends in space "])
def test_no_plain_prompt_ends_with_a_stop_token_that_the_tokenizer_appends(token: str, text: str) -> None:
    plain = without_template().encode(text)
    chat = chat_of(ends_prompts_with(token, without_template()))
    assert chat.tokenizer.encode(text)[-1] in EOS_IDS
    assert chat.render([{"role": "user", "content": text}]) == (text, tuple(plain))
    assert chat.notes(()) == (f"data: the tokenizer ends prompts with the stop token {token!r}, which is left out",)
    with pytest.raises(
        WrongInput, match=r"^data: a prompt must not end with a stop token, .* one ends with '<\|im_end"
    ):
        chat.render([{"role": "user", "content": f"{text}<|im_end|>\n"[:-1]}])


def test_nor_with_a_special_token_of_rollout_stop() -> None:
    tokenizer = without_template()
    tokenizer.add_tokens([AddedToken("<|sep|>", special=True)])
    chat = Chat(ends_prompts_with("<|sep|>", tokenizer), EOS_IDS, VOCAB_SIZE + 20, stop=["<|sep|>", "\n"])
    assert chat.tokenizer.decode(chat.render([{"role": "user", "content": "1 + 1 ="}])[1]) == "1 + 1 ="
    other = Chat(chat.tokenizer, EOS_IDS, VOCAB_SIZE + 20)
    assert other.tokenizer.decode(other.render([{"role": "user", "content": "1 + 1 ="}])[1]) == "1 + 1 =<|sep|>"


OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("end", ["{{ eos_token }}", "<|im_end|><|endoftext|>"])
@pytest.mark.parametrize("template", [TURNS + OPENING, "{% for m in messages %}[{{ m.content }}] {% endfor %}"])
def test_nor_one_that_a_template_puts_behind_the_opening_of_the_answer(template: str, end: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template + end
    without = make_tokenizer()
    without.chat_template = template
    chat = chat_of(tokenizer)
    assert chat.render(CONVERSATION)[1] == chat_of(without).render(CONVERSATION)[1]
    assert any(
        note.startswith("data: the chat template ends prompts with the stop token '<|") for note in chat.notes(())
    )
    if OPENING in template:
        assert chat.observe([CONVERSATION[1]], None) == chat_of(without).observe([CONVERSATION[1]], None)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",  # DialoGPT's
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}",
    ],
)
def test_a_template_whose_prompts_end_with_the_users_own_end_is_refused(template: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(
        WrongInput, match=r"^model.path: the chat template must open the assistant's turn, .* '<\|im_end"
    ):
        chat_of(tokenizer).render(CONVERSATION)


def chat_with(template: str, stops: Sequence[str], added: Sequence[str], special: bool = True) -> Chat:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken(token, special=special) for token in added])
    return Chat(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)), VOCAB_SIZE + 20)


LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TULU = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHATML_AND_END = TURNS + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}" + OPENING
TWO = TURNS.replace("<|im_end|>", "</said><|over|>") + OPENING


@pytest.mark.parametrize(
    ("template", "stops", "added", "taken"),
    [
        (CHAT_TEMPLATE, ["<|endoftext|>"], [], "<|im_end|>"),
        (CHATML_AND_END, ["<|endoftext|>"], [], "<|im_end|>"),
        (CHAT_TEMPLATE, ["<|im_end|>"], [], None),
        (LLAMA3, ["<|endoftext|>"], ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
        (GEMMA, ["<|endoftext|>"], ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
        (MISTRAL, ["</s>"], ["[INST]", "[/INST]", "</s>"], None),
        (MISTRAL, ["<|endoftext|>"], ["[INST]", "[/INST]", "</s>"], "</s>"),
        (GLM, ["<|endoftext|>"], ["<|user|>", "<|assistant|>"], "<|user|>"),
        (GLM, ["<|endoftext|>", "<|user|>"], ["<|user|>", "<|assistant|>"], None),
        (HARMONY, ["<|return|>"], ["<|start|>", "<|message|>", "<|end|>", "<|return|>"], None),
        (HARMONY, ["<|endoftext|>"], ["<|start|>", "<|message|>", "<|end|>", "<|return|>"], "<|return|>"),
        (TULU, ["<|im_end|>"], ["<|user|>", "<|assistant|>"], None),
        (
            GLM.replace("{% if add_generation_prompt %}<|assistant|>{% endif %}", "<|assistant|>"),
            ["<|endoftext|>"],
            ["<|user|>", "<|assistant|>"],
            "<|user|>",
        ),
        (TURNS, ["<|endoftext|>"], [], "<|im_end|>"),
        (TWO, ["<|endoftext|>"], ["<|over|>"], "<|over|>"),
        (TWO, ["<|endoftext|>"], ["</said>", "<|over|>"], "</said>"),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_the_token_that_a_template_ends_turns_with_is_a_stop_token(
    template: str, stops: list[str], added: list[str], taken: str | None, special: bool
) -> None:
    chat = chat_with(template, stops, added, special)
    named = [chat.decode([one], special=True) for one in chat.stop_ids]
    assert named == [*stops, *([taken] if taken else [])]
    assert chat.stops(())[0] == chat.stop_ids
    told = f"model.path: the chat template ends turns with {taken!r}, which is no end token of the model: it is taken"
    assert [note.startswith(told) for note in chat.notes(())] == [True] * (taken is not None)
    if taken:  # also one that the tokenizer does not call special is none of the text that reward functions read
        said = [*chat.tokenizer.encode("It is 4.", add_special_tokens=False), chat.stop_ids[-1]]
        assert (chat.decode(said), chat.decode(said, special=True)) == ("It is 4.", f"It is 4.{taken}")


@pytest.mark.parametrize(
    ("template", "text", "named"),
    [
        ("{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}Assistant: ",
         "\nUser:", '["\\nUser:"]'),
        ("{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n###\n\n{% endfor %}### assistant:\n",
         "\n\n###\n\n###", '["\\n\\n###\\n\\n###"]'),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }} [/{{ m.role }}]{% endfor %}[assistant]",
         "[/assistant", '["[/assistant"]'),
        (CHAT_TEMPLATE.replace("im_end", "done"), "<|done|>", '["<|done|>"]'),  # no token of the tokenizer
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "", "what ends an answer"),
    ],
)  # fmt: skip
def test_where_no_token_ends_a_turn_the_setting_that_does_is_told(template: str, text: str, named: str) -> None:
    chat = chat_with(template, ["<|endoftext|>"], ["\n\n", "  "], special=False)  # as Gemma's and Pythia's tokenizers
    (told,) = chat.notes(())
    assert told.startswith("rollout.stop: the chat template ")
    assert repr(text) in told or not text
    assert told.endswith(f"set rollout.stop to {named}")
    assert chat.notes(["</answer>"]) == ()  # the user has named one
    assert [chat.decode([one], special=True) for one in chat.stop_ids] == ["<|endoftext|>"]


@pytest.mark.parametrize("template", ["{{ raise_exception('alternate') }}", "{{ messages[0].content }}"])
def test_a_template_that_takes_no_answer_says_nothing_of_its_end(template: str) -> None:
    assert chat_with(template, ["<|endoftext|>"], []).notes(()) == ()


def test_a_template_that_only_an_answer_lets_run_for_ever_is_killed() -> None:
    tokenizer, ever = make_tokenizer(), "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    tokenizer.chat_template = f"{{% if messages|length > 1 %}}{ever}{{% endif %}}a"
    with pytest.raises(WrongInput, match="the model's chat template did not come to an end within 0.2 s"):
        chat_of(tokenizer).try_template(0.2, ["user"])


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, {"vocab_size": 250})
    with pytest.raises(WrongInput, match=r"vocab_size 250, and the tokenizer has id 255"):
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
        with pytest.raises(WrongInput, match=told):
            chat.render([{"role": "user", "content": "an <image>"}])


def test_a_template_with_the_time_has_that_of_its_loading() -> None:
    """Else a group whose trajectories begin at midnight would have two prompts."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%H:%M:%S.%f') }} {{ messages[-1].content }}"
    chat = chat_of(tokenizer)
    assert len({chat.render(CONVERSATION)[1] for _ in range(3)}) == 1
    assert chat_of(tokenizer).render(CONVERSATION)[1] != chat.render(CONVERSATION)[1]


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(WrongInput, match="generation must be able to end"):
        Chat(make_tokenizer(), (), VOCAB_SIZE)


def test_what_is_not_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongInput, match="folder must exist, got .*/absent; check the path"):
        Chat.load(str(tmp_path / "absent"))
    with pytest.raises(WrongInput, match=r"with a config\.json, got"):
        Chat.load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "model_type": "llama"}')
    with pytest.raises(WrongInput, match="must hold a tokenizer that transformers can load"):
        Chat.load(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WrongInput, match="org/model is neither a folder here nor a hub model in the cache"):
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
    with pytest.raises(WrongInput, match=f"^data.chat_template_kwargs: {message}"):
        Chat(tokenizer, EOS_IDS, VOCAB_SIZE, template_kwargs={name: False})


def test_a_variable_without_a_template_to_read_it_is_refused() -> None:
    with pytest.raises(WrongInput, match=r"^data\.chat_template_kwargs: needs a chat template, and this tokenizer has"):
        Chat(without_template(), EOS_IDS, VOCAB_SIZE, template_kwargs={"enable_thinking": False})


def test_end_tokens_of_config_count_where_generation_config_is_missing(tmp_path: Path) -> None:
    never = [VOCAB_SIZE, -1]  # -1: how some files say that there is none
    save_model(tmp_path, {"vocab_size": VOCAB_SIZE, "eos_token_id": [7, *never]})
    assert Chat.load(str(tmp_path)).stop_ids == (EOS_IDS[0], 7)


@pytest.mark.parametrize(
    ("template", "prefilled"),
    [
        (TURNS + OPENING[:-11] + "<think>\n{% endif %}", "<think>\n"),
        (TURNS + OPENING + "<reasoning>", "<reasoning>"),
        (TURNS + OPENING[:-11] + "<think>\n\n</think>\n\n{% endif %}", ""),
        (TURNS + OPENING, ""),
        (None, "<answer> "),
    ],
)
@pytest.mark.parametrize("added", [["<think>", "<reasoning>"], []])
def test_the_tag_that_prompts_end_in_is_known(template: str | None, prefilled: str, added: list[str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens(added)
    chat = Chat(tokenizer, EOS_IDS, VOCAB_SIZE + 20)
    _, ids = chat.render([{"role": "user", "content": "1 + 1 = <answer> "}])
    assert chat.prefilled(ids) == prefilled


def test_a_tokenizer_that_names_no_added_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MistralCommonBackend, which transformers takes where there is a tekken.json alone; to load it takes 20 s."""
    monkeypatch.setattr("rollout.data.chat.load_tokenizer", lambda path: SimpleNamespace(eos_token_id=2))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 131072}))
    with pytest.raises(WrongInput, match=r"^model.path: the tokenizer of .* SimpleNamespace, .* a tokenizer.json$"):
        Chat.load(str(tmp_path))


# What ends a completion: which strings are tokens, and which are text.


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(), EOS_IDS, VOCAB_SIZE)


def test_a_special_token_ends_by_its_id_and_other_strings_by_the_text(chat: Chat) -> None:
    assert chat.stops(()) == (EOS_IDS, ())
    assert chat.stops(["</answer>", "<|im_start|>", "<|im_end|>", "\n\n"]) == ((*EOS_IDS, 257), ("</answer>", "\n\n"))
    with pytest.raises(
        WrongInput, match=r"rollout\.stop: '</answer><\|im_end\|>' must not mix the special token '<\|im"
    ):
        chat.stops(["</answer><|im_end|>"])
