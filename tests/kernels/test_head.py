"""The kernel of the head in Triton's interpreter against torch's operations, and compiled for cards that are not here.

float32: what the interpreter makes of 16 bits is not what a card makes of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.model import logprob
from learner.model.logprob import (
    PLAIN,
    Logits,
    policy_logprobs,
    taught_logprobs,
    token_entropies,
    token_logprobs,
)
from tests.learner.model.test_logprob import CAPPED, SCALED, kl_of, likeliest, naive, slopes_of


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the trial torch's operations would fail, so that all values are the kernel's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    for width in (7, 64, 90, 128):
        assert logprob._kernel_agrees(torch.device("cpu"), torch.float32, width)
    monkeypatch.setattr(logprob, "_take", None)


@pytest.mark.parametrize("how", [PLAIN, SCALED, CAPPED, Logits(scale=2.0, cap=30.0)])
@pytest.mark.parametrize("vocab_tile", [7, 64, 90, 128])
def test_values_and_gradients_are_the_formulas(how: Logits, vocab_tile: int, as_on_a_card: None) -> None:
    torch.manual_seed(vocab_tile)
    hidden, head, targets = torch.randn(11, 24), torch.randn(90, 24) * 2, torch.randint(0, 90, (11,))
    grad = torch.randn(11)
    values, entropy = naive(hidden.double(), head.double(), targets, 0.7, how)
    slope = slopes_of(hidden.double(), head.double(), targets, 0.7, grad, how)[0]
    options: Any = {"logits": how, "token_tile": 4, "vocab_tile": vocab_tile}
    states = hidden.clone().requires_grad_()
    found, own_entropy = policy_logprobs(states, head, targets, 0.7, **options)
    trained, trained_entropy = policy_logprobs(states, head.clone().requires_grad_(), targets, 0.7, **options)
    alone = token_logprobs(hidden, head, targets, 0.7, **options)
    for value in (found, trained, alone):
        assert (value - values).abs().max() <= 2e-6 * values.abs().max()
    for value in (own_entropy, trained_entropy, token_entropies(hidden, head, targets, 0.7, **options)):
        assert (value - entropy).abs().max() <= 1e-5
    own_slope = torch.autograd.grad(found, states, grad)[0]
    assert (own_slope - slope).norm() <= 2e-6 * slope.norm()


@pytest.mark.parametrize("how", [PLAIN, Logits(scale=2.0, cap=30.0)])
def test_the_kl_to_a_teacher_is_the_formulas(how: Logits, as_on_a_card: None) -> None:
    torch.manual_seed(0)
    hidden, head, targets = torch.randn(11, 24), torch.randn(90, 24) * 0.5, torch.randint(0, 90, (11,))
    top = likeliest(11, 90, 3)
    states = hidden.double().requires_grad_()
    (slope,) = torch.autograd.grad(kl_of(states, head.double(), top, 0.7, how).sum(), states)
    for trained in (False, True):
        own = hidden.clone().requires_grad_()
        weights = head.clone().requires_grad_(trained)
        options: Any = {"logits": how, "token_tile": 4, "vocab_tile": 7}
        found = taught_logprobs(own, weights, targets, top._replace(logprobs=top.logprobs.float()), 0.7, **options)
        (own_slope,) = torch.autograd.grad(found.kl.sum(), own)
        assert (own_slope - slope).norm() <= 1e-5 * slope.norm()


def test_extreme_logits_stay_finite(as_on_a_card: None) -> None:
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(30, 8)
    logprobs, entropy = policy_logprobs(hidden * 1e4, head, torch.arange(4), 0.5, vocab_tile=7)
    slope = torch.autograd.grad(logprobs.sum(), hidden)[0]
    assert all(torch.isfinite(t).all() for t in (logprobs, entropy, slope))


@pytest.mark.parametrize("wrong", range(5), ids=["label", "decay", "weights", "top", "total"])
def test_a_kernel_that_computes_something_else_is_not_used(
    wrong: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = logprob._take_by_kernel

    def other(products: torch.Tensor, place: torch.Tensor, sums: logprob._Sums, *options: Any) -> Any:
        answers = [*real(products, place, sums, *options), *sums[:2]]
        if (answer := answers[wrong]) is not None:
            answer += 0.1
        return tuple(answers[:3])

    logprob._kernel_agrees.cache_clear()
    assert logprob._kernel_agrees(torch.device("cpu"), torch.float32, 64)
    logprob._kernel_agrees.cache_clear()
    monkeypatch.setattr(logprob, "_take_by_kernel", other)
    assert not logprob._kernel_agrees(torch.device("cpu"), torch.float32, 64)
    assert "the head's kernel: not used" in caplog.text
    logprob._kernel_agrees.cache_clear()


COMPILES = """
import subprocess, tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from learner.model.logprob import _kernel

names = "products", "place", "top", "total", "spread", "label", "decay", "weights", "width", "step", "scale", "cap"
for capability, weights in ((75, "*fp16"), (80, "*bf16"), (90, "*bf16")):  # a T4, an A100, an H100
    for capped in (False, True):
        types = "*fp32", "*i64", *["*fp32"] * 5, weights, "i32", "i32", "fp32", "fp32"
        options = {"CAPPED": capped, "WEIGHTED": True, "BLOCK": 8192}
        signature = dict(zip(names, types, strict=True)) | dict.fromkeys(options, "constexpr")
        source = triton.compiler.ASTSource(_kernel(), signature, options)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 16})
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "kernel.ptx").write_text(made.asm["ptx"])
            ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
            target = f"sm_{capability}{'a' if capability == 90 else ''}"
            command = [ptxas, "-v", f"--gpu-name={target}", Path(folder) / "kernel.ptx", "-o", Path(folder) / "cubin"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "0 bytes spill stores, 0 bytes spill loads" in told, told
        print(capability, capped)
"""


def test_it_compiles_for_cards_that_are_not_here(tmp_path: Path) -> None:
    """By ptxas, which spills no register to memory. In a process of its own, in which Triton interprets nothing."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    made = subprocess.run([sys.executable, "-c", COMPILES], env=env, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert len(made.stdout.splitlines()) == 6
