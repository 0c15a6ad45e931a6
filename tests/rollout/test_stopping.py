"""What ends a completion: which strings are tokens, and which are text."""

from __future__ import annotations

import pytest

from cluster.errors import WrongInput
from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from rollout.data.chat import Chat


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
