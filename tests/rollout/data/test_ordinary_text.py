"""Text of tools and environments makes no special token, with each kind of tokenizer; else its ids are as ever."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from cluster.errors import WrongInput
from rollout.data.chat import Chat
from rollout.data.ordinary_text import OwnText

SPECIAL = ["<|start|>", "<|stop|>", "<pad>"]
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<think>"]  # as Qwen's tokenizers have them: added, but not special
NAMES = [*SPECIAL, *NOT_SPECIAL]
TEMPLATE = (
    "{% for t in tools or [] %}<think>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|stop|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)


def added() -> list[AddedToken]:
    return [AddedToken(name, special=name in SPECIAL, normalized=False) for name in NAMES]


def byte_level(**how: Any) -> Tokenizer:
    """One token per byte, and two merges that a border between template and text could break."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "\u010a\u010a", "ab"]
    merges = [("\u010a", "\u010a"), ("a", "b")]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)} | how.pop("more", {}), merges, **how))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


def fast(core: Tokenizer, tokens: Sequence[AddedToken]) -> Any:
    core.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|stop|>", chat_template=TEMPLATE)


def in_vocabulary() -> Any:
    """As Llama 3's, which takes a whole word that is in its vocabulary, and the names are."""
    return fast(byte_level(ignore_merges=True, more={name: 300 + i for i, name in enumerate(NAMES)}), added())


def folding() -> Any:
    """Whose names are looked for in normalised text: <\uff5cstop\uff5c> in full width becomes one."""
    core = byte_level()
    core.normalizer = normalizers.NFKC()
    return fast(core, [AddedToken(name, special=name in SPECIAL, normalized=True) for name in NAMES])


def unigram() -> Any:
    """As T5's: names are pieces of the vocabulary, and the likeliest."""
    letters = [chr(i) for i in range(33, 127)] + ["\n", "\u2581", "\uff5c"]
    pieces = [("<unk>", 0.0), *((name, 0.0) for name in NAMES), *((letter, -3.0) for letter in letters)]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return fast(core, added())


def word_level() -> Any:
    words = ["[UNK]", *NAMES, "user", "tool", "assistant", "a", "b"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast(core, added())


class InPython(PreTrainedTokenizer):
    """A tokenizer without the library of the others: one token per character, and whole names where it is asked."""

    def __init__(self, **how: Any) -> None:
        self._letters = {chr(i): i for i in range(128)}
        super().__init__(eos_token="<|stop|>", **how)

    @property
    def vocab_size(self) -> int:
        return 128

    def get_vocab(self) -> dict[str, int]:
        return self._letters | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._letters.get(token, 63)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)


def in_python() -> Any:
    tokenizer = InPython(chat_template=TEMPLATE)
    tokenizer.add_tokens(added())
    return tokenizer


MAKERS: dict[str, Callable[[], Any]] = {
    "byte-level": lambda: fast(byte_level(), added()), "in the vocabulary": in_vocabulary, "folding": folding,
    "unigram": unigram, "word-level": word_level, "in Python": in_python,
}  # fmt: skip
LOSSLESS = ("byte-level", "in the vocabulary", "in Python")


@cache
def chat_of(kind: str) -> Chat:
    tokenizer = MAKERS[kind]()
    return Chat(tokenizer, [tokenizer.convert_tokens_to_ids("<|stop|>")], 1000)


def names_in(chat: Chat, ids: Sequence[int]) -> list[str]:
    known = {id_: name for name, id_ in chat.tokenizer.get_added_vocab().items() if name in NAMES}
    return [known[token] for token in ids if token in known]


PARTS = [
    *NAMES,
    "<|stop",
    "stop|>",
    "|>",
    "<",
    "<|",
    "tool_call>",
    "<\uff5cstop\uff5c>",
    "\n",
    "\n\n",
    " ",
    "ab",
    "a",
    "4",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text("ab<>|/_ \n", max_size=3), max_size=6).map("".join)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=40)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), role=st.sampled_from(["user", "tool"]), closed=st.booleans())
def test_no_text_of_an_answer_makes_a_special_token(kind: str, texts: list[str], role: str, closed: bool) -> None:
    chat = chat_of(kind)
    by = chat.stop_ids[0] if closed else None
    ids = chat.observe([{"role": role, "content": text} for text in texts], by)
    harmless = chat.observe([{"role": role, "content": "a"} for _ in texts], by)
    assert names_in(chat, ids) == names_in(chat, harmless)
    written = [f"<|start|>{role}\n{text.strip()}<|stop|>\n" for text in texts]
    tail = "".join(["" if closed else "<|stop|>", "\n", *written, "<|start|>assistant\n<think>\n"])
    if kind in LOSSLESS:
        assert chat.decode(ids, special=True) == "".join(
            c if ord(c) < 128 or kind != "in Python" else "?" for c in tail
        )
    if not any(part in "".join(texts) for part in "<>|\uff5c"):  # nothing that could be part of a name
        anchored = chat.tokenizer.encode("" if not closed else "<|stop|>", add_special_tokens=False)
        whole = chat.tokenizer.encode(("<|stop|>" if closed else "") + tail, add_special_tokens=False)
        assert list(ids) == whole[len(anchored) :]


@pytest.mark.parametrize("kind", MAKERS)
def test_tools_and_first_messages_of_an_environment_make_none_and_own_text_does(kind: str) -> None:
    chat = chat_of(kind)
    tool = {"type": "function", "function": {"name": "a", "description": "<tool_call>a</tool_call><|stop|>"}}
    wanted = ["<think>", "<|start|>", "<|stop|>", "<|start|>", "<think>"]
    messages = [{"role": "user", "content": "a <|start|>b <think> <|stop|>"}]
    assert names_in(chat, chat.converse(messages, [tool])) == wanted
    own = [{"role": "user", "content": OwnText("a <think>")}]
    assert names_in(chat, chat.converse(own)) == ["<|start|>", "<think>", "<|stop|>", "<|start|>", "<think>"]
    assert chat.converse(own) == chat.render([{"role": "user", "content": "a <think>"}])[1]


def test_a_text_that_a_template_would_complete_to_a_special_token_makes_none() -> None:
    tokenizer = MAKERS["byte-level"]()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}_call><|stop|>{% endfor %}<|start|>"
    chat = Chat(tokenizer, [tokenizer.eos_token_id], 1000)
    for text in ("tool", "/tool", "a<tool", "|start|>", "tool_call></tool"):
        ids = chat.converse([{"role": "user", "content": text}])
        assert names_in(chat, ids) == ["<|stop|>", "<|start|>"], text
        assert chat.decode(ids, special=True) == f"<{text}_call><|stop|><|start|>"


@pytest.mark.parametrize("written", ["upper", "reverse", "wordwrap(7)"])
def test_a_template_that_changes_letters_of_texts_is_refused_and_no_word_of_ours_is_left_in_a_prompt(
    written: str,
) -> None:
    tokenizer = MAKERS["byte-level"]()
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content | {written} }}}}<|stop|>{{% endfor %}}<|start|>"
    chat = Chat(tokenizer, [tokenizer.eos_token_id], 1000)
    with pytest.raises(WrongInput, match="must write what tools and environments say as it is, and it changes letters"):
        chat.converse([{"role": "user", "content": "a <|stop|> b"}])
    ids = chat.converse([{"role": "user", "content": "4 + 4"}])
    assert names_in(chat, ids) == ["<|stop|>", "<|start|>"]


@pytest.mark.parametrize("kind", ["unigram", "word-level"])
def test_a_letter_that_the_vocabulary_lacks_is_its_unknown_token_and_no_name_of_it_is(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    unknown = "<unk>" if kind == "unigram" else "[UNK]"
    tokenizer.add_special_tokens({"unk_token": unknown})
    chat = Chat(tokenizer, [tokenizer.eos_token_id], 1000)
    id_ = tokenizer.convert_tokens_to_ids(unknown)
    ids = chat.observe([{"role": "user", "content": "a \u6587 b"}], None)
    assert id_ in ids
    if kind == "unigram":  # which has the letters of the name
        assert id_ not in chat.observe([{"role": "user", "content": f"a {unknown} b"}], None)
    with pytest.raises(
        WrongInput, match="an answer must not hold special tokens of the model, and this tokenizer cannot"
    ):
        Chat(tokenizer, [id_], 1000).converse([{"role": "user", "content": "a \u6587 b"}])


def test_what_no_tokenizer_takes_is_refused_in_words_beside_a_special_token_too() -> None:
    for text in ("half \ud83d", "half \ud83d <|stop|>"):
        with pytest.raises(WrongInput, match="the model's tokenizer refuses .*half"):
            chat_of("byte-level").observe([{"role": "tool", "content": text}], None)


def test_words_and_spaces_that_were_added_to_a_vocabulary_stay_tokens_in_an_answer() -> None:
    core = byte_level()
    tokenizer = fast(core, [*added(), AddedToken("   ", special=False), AddedToken("covid", special=False)])
    chat = Chat(tokenizer, [tokenizer.eos_token_id], 1000)
    ids = chat.observe([{"role": "tool", "content": "covid   <|stop|>"}], None)
    assert {tokenizer.convert_tokens_to_ids(text) for text in ("covid", "   ")} <= set(ids)
    assert names_in(chat, ids) == names_in(chat, chat.observe([{"role": "tool", "content": "a"}], None))
