"""Sampling by one uniform number: the token that the cumulative probabilities say, as often as its probability."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from rollout.vllm.cpu import draw, install_cpu_sampling

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="cards sample by vLLM's own kernels")
LARGEST = 1 - 2**-53  # that torch.rand gives in float64


@given(st.sampled_from([1, 2, 100, 127, 1024, 1025, 1152, 2000, 4097]), st.integers(0, 2**32), st.floats(0, LARGEST))
def test_it_is_where_the_cumulative_probabilities_pass_the_number(vocabulary: int, seed: int, number: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = (4 * torch.randn(3, vocabulary, generator=generator)).log_softmax(-1)
    uniform = torch.tensor([[number], [0.0], [LARGEST]], dtype=torch.float64)
    found = draw(logprobs, uniform)
    probabilities = logprobs.exp().double()
    ends = probabilities.cumsum(-1)
    for row, token in enumerate(found.tolist()):
        point = float(uniform[row, 0] * ends[row, -1])
        slack = 1e-5  # sums of float32 in blocks
        assert ends[row, token] - probabilities[row, token] - slack <= point <= ends[row, token] + slack


@pytest.mark.parametrize("vocabulary", [5, 300, 1025, 1300])
@pytest.mark.parametrize("allowed", [(0,), (4,), (1, 3), (2, -1), (-1,)])
def test_what_has_no_probability_is_never_drawn(vocabulary: int, allowed: tuple[int, ...]) -> None:
    logits = torch.full((1, vocabulary), -torch.inf)
    logits[0, list(allowed)] = torch.tensor([0.0, 2.0])[: len(allowed)]
    numbers = torch.cat([torch.linspace(0, LARGEST, 50, dtype=torch.float64), torch.tensor([2.0**-53, LARGEST])])[
        :, None
    ]
    found = draw(logits.log_softmax(-1).expand(len(numbers), -1), numbers)
    assert set(found.tolist()) == {token % vocabulary for token in allowed}


@pytest.mark.parametrize("vocabulary", [130, 1300])
def test_a_row_of_nan_gives_some_token_of_the_vocabulary(vocabulary: int) -> None:
    found = draw(torch.full((2, vocabulary), torch.nan), torch.tensor([[0.0], [LARGEST]], dtype=torch.float64))
    assert all(0 <= token < vocabulary for token in found.tolist())


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The sampler's way on a CPU, as engines of gleaner have it, whatever was installed before."""
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", _upstream)
    install_cpu_sampling()
    install_cpu_sampling()  # twice is once
    forward: Any = TopKTopPSampler.forward_cpu
    return lambda mode, *args: forward(SimpleNamespace(logprobs_mode=mode), *args)


@pytest.mark.parametrize("vocabulary", [300, 1300])
def test_tokens_come_as_often_as_they_are_probable(sample: Any, vocabulary: int) -> None:
    """20,000 rows whose seeds follow on each other, as those of a group do: chi-square, of a mean of vocabulary - 1."""
    rows = 20_000
    logits = torch.linspace(0, 5, vocabulary).expand(rows, -1).clone()
    generators = {row: torch.Generator().manual_seed(7_000 + row) for row in range(rows)}
    expected = logits[0].double().softmax(-1) * rows
    for _ in range(2):  # the first and the second token of each
        tokens, logprobs = sample("processed_logprobs", logits, generators, None, None)
        torch.testing.assert_close(logprobs, logits.log_softmax(-1))
        counts = torch.bincount(tokens, minlength=vocabulary)
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - (vocabulary - 1)) < 5 * (2 * vocabulary) ** 0.5


def test_a_row_is_drawn_by_its_own_generator_whatever_stands_beside_it(sample: Any) -> None:
    logits = torch.randn(6, 500)

    def tokens(rows: list[int]) -> list[int]:
        generators = {index: torch.Generator().manual_seed(row) for index, row in enumerate(rows)}
        found: Tensor = sample("processed_logprobs", logits[rows].clone(), generators, None, None)[0]
        return found.tolist()

    together = tokens([0, 1, 2, 3, 4, 5])
    assert tokens([4, 2]) == [together[4], together[2]]
    assert len(set(together)) > 1


def test_top_k_and_other_kinds_of_logprobs(sample: Any) -> None:
    logits = torch.arange(40.0).expand(64, -1)
    tokens, logprobs = sample("processed_logprobs", logits.clone() / 9, {}, torch.full((64,), 3), None)
    assert set(tokens.tolist()) == {37, 38, 39}
    assert bool((logprobs[:, :37] == -torch.inf).all())
    tokens, logprobs = sample("raw_logprobs", logits.clone() / 9, {}, torch.full((64,), 3), None)
    assert (set(tokens.tolist()), logprobs) == ({37, 38, 39}, None)
    assert sample("raw_logits", logits, {}, None, None) == "upstream's"


def _upstream(*_: Any) -> str:
    return "upstream's"
