"""The learner's logits are the model's own; what no setting of a config names is found by trying, in every type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

from learner.model.logprob import PLAIN, Logits, logits_of, token_logprobs
from tests.learner.model.test_policy import SMALL, make_policy, save_model
from tests.rollout.data.test_weight_names import changed, having

IDS = torch.tensor([[5, 6, 7, 8, 9, 4, 3]])


@pytest.mark.parametrize(
    ("config", "logits"),
    [
        (LlamaConfig(**SMALL), PLAIN),
        (Gemma2Config(**SMALL, final_logit_softcapping=2.0), Logits(cap=2.0)),
        (Gemma2Config(**SMALL, final_logit_softcapping=None), PLAIN),
        (Gemma3TextConfig(**SMALL), PLAIN),
        (GraniteConfig(**SMALL, logits_scaling=4.0), Logits(scale=0.25)),
        (CohereConfig(**SMALL), Logits(scale=0.0625)),
        (HyperCLOVAXConfig(**SMALL, logits_scaling=0.5), Logits(scale=0.5)),  # which others divide by
    ],
)
def test_logprobs_are_those_of_the_models_own_logits(tmp_path: Path, config: Any, logits: Logits) -> None:
    config.initializer_range = 0.5  # logits far from 0, so that a cap bends them
    path = save_model(config, tmp_path)
    policy = make_policy(path)
    assert policy.logits == logits
    lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        wanted = lm(input_ids=IDS).logits[0].log_softmax(-1)[:-1].gather(1, IDS[0, 1:, None])[:, 0]
        states = policy.hidden(IDS)[:-1]
    found = token_logprobs(states, policy.head, IDS[0, 1:], 1.0, logits=policy.logits)
    assert float((found - wanted).abs().max()) < 1e-5


def test_names_of_the_config_are_read() -> None:
    assert logits_of(GraniteConfig(logits_scaling=8.0)) == Logits(scale=0.125)
    assert logits_of(CohereConfig(logit_scale=None)) == PLAIN


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["factor", "cap", "one word"])
def test_what_no_setting_names_is_found_in_every_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str
) -> None:
    """On small weights, whose logits are near 0: in bfloat16 rounding hides each of these from a look at the logits."""
    path = save_model(LlamaConfig(**SMALL, initializer_range=0.02), tmp_path)
    make_policy(path, dtype=dtype)
    plain = LlamaForCausalLM.forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(self, *args, **kwargs)
        if kind == "factor":
            out.logits = out.logits * 1.02
        elif kind == "cap":
            out.logits = 200 * (out.logits / 200).tanh()
        else:
            out.logits[..., -1] -= 1.0
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", changed)
    with pytest.raises(ValueError, match="does something to its logits after the output embedding"):
        make_policy(path, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers_that_a_type_does_not_hold_are_told_as_such(tmp_path: Path, dtype: str) -> None:
    path = save_model(LlamaConfig(**SMALL), tmp_path)
    most = torch.full((SMALL["intermediate_size"], SMALL["hidden_size"]), {"float32": 3e38, "float16": 6e4}[dtype])
    changed(tmp_path, having(model__layers__0__mlp__up_proj__weight=most))
    with pytest.raises(ValueError, match=f"^model.dtype: .* numbers in {dtype} that are not finite, though all of its"):
        make_policy(path, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_change_before_the_head_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    path = save_model(LlamaConfig(**SMALL), tmp_path)

    def divided(self: Any, input_ids: Any, **_: Any) -> Any:  # as MiniCPM does, by a number of its config
        states = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(states / 1.05))

    monkeypatch.setattr(LlamaForCausalLM, "forward", divided)
    with pytest.raises(ValueError, match="does something to its final states"):
        make_policy(path, dtype=dtype)
