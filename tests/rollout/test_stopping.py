"""What ends a completion: which strings are tokens, and a string that is sampled in two parts."""

from __future__ import annotations

import numpy as np
import pytest

from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from rollout.data.chat import Chat, ChatError
from rollout.stopping import cut
from rollout.types import Completion


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(), EOS_IDS, VOCAB_SIZE)


def sampled(chat: Chat, text: str, finish_reason: str = "length") -> Completion:
    ids = chat._tokenizer.encode(text)
    row = np.arange(len(ids))
    return Completion(np.array(ids, np.int32), -row.astype(np.float32), finish_reason, row.astype(np.int32))


def test_a_special_token_ends_by_its_id_and_other_strings_by_the_text(chat: Chat) -> None:
    assert chat.stops(()) == (EOS_IDS, ())
    assert chat.stops(["</answer>", "<|im_start|>", "<|im_end|>", "\n\n"]) == ((*EOS_IDS, 257), ("</answer>", "\n\n"))
    with pytest.raises(
        ChatError, match=r"rollout\.stop: '</answer><\|im_end\|>' must not mix the special token '<\|im"
    ):
        chat.stops(["</answer><|im_end|>"])


def test_a_completion_is_cut_behind_the_token_that_completes_a_string(chat: Chat) -> None:
    whole = sampled(chat, "<answer>4é</answer>\nand more</answer>")
    found = cut(whole, ("nowhere", "é</answer>"), chat.decode)
    length = len("<answer>4é</answer>".encode())  # a token is a byte
    assert chat.decode(found.token_ids.tolist()) == "<answer>4é</answer>"
    assert found.finish_reason == "stop"
    for name in ("token_ids", "logprobs", "versions"):
        assert getattr(found, name).tolist() == getattr(whole, name)[:length].tolist()


def test_what_has_no_such_string_stays(chat: Chat) -> None:
    whole = sampled(chat, "<answer>4</answe<|pad|>r")  # special tokens are no part of the text
    assert cut(whole, ("</answe>",), chat.decode) is whole
    assert cut(whole, ("</answer",), chat.decode).token_ids.tolist() == whole.token_ids.tolist()
