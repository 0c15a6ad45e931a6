"""What ends a completion on the real vLLM. Its engines take the shared one with them, see conftest.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.random_model import make_tiny_model
from rollout.data.chat import Chat
from rollout.types import Sampling
from tests.rollout.engine_case import PROMPT, EngineCase, run

SAMPLING = Sampling(n=16, max_tokens=400, seed=0)
ELSEWHERE = 7  # the end token of config.json, as a base model's before it was trained on ChatML


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer ends with <|im_end|>; its configuration names another token, which it never samples."""
    path = make_tiny_model(tmp_path_factory.mktemp("stopping"), family="Llama")
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": ELSEWHERE}))
    return path


def test_end_tokens_of_the_tokenizer_and_strings_end_completions(model: Path) -> None:
    pytest.importorskip("vllm")
    chat = Chat.load(str(model))
    ids, strings = chat.stops(["U", "<|endoftext|>"])
    assert ids == (258, ELSEWHERE, 256)
    own = EngineCase(model, stop_ids=ids, stop=strings)
    assert own.engine._thread._turns.engine.tokenizer is not None
    run(own.push())
    seen = set()
    for completion in run(own.engine.generate(PROMPT, SAMPLING)):
        tokens, text = completion.token_ids.tolist(), chat.decode(completion.token_ids.tolist())
        ends = set(ids) | {chat.tokenizer.convert_tokens_to_ids("U")}
        assert not set(tokens[:-1]) & ends  # nothing comes behind an end
        assert (completion.finish_reason == "stop") == (tokens[-1] in ends)
        assert text.count("U") == text.endswith("U")
        own.check(completion, PROMPT, own.newest)
        seen.add(tokens[-1])
    assert {258, 256, max(ends - set(ids))} <= seen
    run(own.engine.close())


def test_top_p_top_k_and_min_p_take_tokens_out_and_leave_the_logprobs_of_the_others(model: Path) -> None:
    """Those of the whole distribution, which the learner scores; another engine would give those of what is kept."""
    pytest.importorskip("vllm")
    own = EngineCase(model, truncates=True, stop_ids=(ELSEWHERE,))
    run(own.push())

    def out_of(**kept: float) -> dict[str, int]:
        """How many sampled tokens each would have taken out."""
        found = {"top_p": 0, "top_k": 0, "min_p": 0}
        for completion in run(own.engine.generate(PROMPT, Sampling(n=6, max_tokens=40, seed=0, **kept))):  # type: ignore[arg-type]
            own.check(completion, PROMPT, own.newest)
            ids = PROMPT + completion.token_ids.tolist()
            every = np.exp(own.distributions([own.newest] * (len(ids) - 1), ids)[len(PROMPT) - 1 :])
            for row, token in zip(every, completion.token_ids, strict=True):
                likelier = row[row > row[token]]
                found["top_p"] += likelier.sum() >= 0.5 + 1e-4
                found["top_k"] += len(likelier) >= 3
                found["min_p"] += row[token] < 0.3 * row.max() - 1e-5
        return found

    assert min(out_of().values()) > 5
    for name, value in {"top_p": 0.5, "top_k": 3, "min_p": 0.3}.items():
        assert out_of(**{name: value})[name] == 0
    run(own.engine.close())


def test_without_strings_no_tokenizer_is_loaded_and_end_tokens_end_completions_as_well(model: Path) -> None:
    pytest.importorskip("vllm")
    own = EngineCase(model, stop_ids=Chat.load(str(model)).stops(())[0])
    assert own.engine._thread._turns.engine.tokenizer is None
    run(own.push())
    whole = run(own.engine.generate(PROMPT, SAMPLING))
    for completion in whole:
        tokens = completion.token_ids.tolist()
        assert not {258, ELSEWHERE} & set(tokens[:-1])
        assert (completion.finish_reason == "stop") == (tokens[-1] in (258, ELSEWHERE))
    assert any(c.token_ids[-1] == 258 for c in whole)
    run(own.engine.close())
