"""The log-prob head against three other ways, forward and backward of a clipped GRPO loss with a frozen head.

    naive        log_softmax of all logits, then gather
    checkpoint   the same in chunks of 256 tokens under torch.utils.checkpoint
    Liger        LigerFusedLinearGRPOLoss in plain torch (compiled=False), if installed
    gleaner      learner.model.logprob.policy_logprobs

How to run it: see benchmarks/common.py. Errors are those of d loss / d hidden against naive, ||a - b|| / ||b||.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.common import as_table, as_text, conditions, cpu_seconds, installed, peak_mib, relative_error, save
from learner.model.logprob import policy_logprobs, token_logprobs

TEMPERATURE, LOW, HIGH = 0.9, 0.2, 0.28
CHUNK = 256
COMPLETIONS = 8


@dataclass(frozen=True, slots=True)
class Case:
    hidden: Tensor  # [N, H]
    head: Tensor  # [V, H]
    targets: Tensor  # [N]
    behavior: Tensor  # [N] logprobs of the sampler, near the model's, so that some ratios are clipped
    advantages: Tensor  # [completions]


def make_case(tokens: int, hidden_size: int, vocab: int) -> Case:
    torch.manual_seed(0)
    hidden, head = torch.randn(tokens, hidden_size), torch.randn(vocab, hidden_size) * 0.05
    targets = torch.randint(0, vocab, (tokens,))
    behavior = token_logprobs(hidden, head, targets, TEMPERATURE) + 0.1 * torch.randn(tokens)
    return Case(hidden, head, targets, behavior, torch.randn(COMPLETIONS))


def naive_logprobs(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return (hidden @ head.t() / TEMPERATURE).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def chunked_logprobs(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    parts = [
        checkpoint(naive_logprobs, states, head, ids, use_reentrant=False)
        for states, ids in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return torch.cat(parts)


def our_logprobs(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return policy_logprobs(hidden, head, targets, TEMPERATURE)[0]


def by_logprobs(logprobs: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Case, Tensor], None]:
    """The loss of PPO's clip over the logprobs that a function gives."""

    def work(case: Case, hidden: Tensor) -> None:
        ratio = (logprobs(hidden, case.head, case.targets) - case.behavior).exp()
        advantages = case.advantages.repeat_interleave(len(ratio) // COMPLETIONS)
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
        torch.autograd.backward(-objective.mean())

    return work


def by_liger(case: Case, hidden: Tensor) -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, chunk_size=1, epsilon_low=LOW, epsilon_high=HIGH,
        loss_type="dapo", temperature=TEMPERATURE,
    )  # fmt: skip
    shape = (COMPLETIONS, len(hidden) // COMPLETIONS)
    value, _ = loss(
        hidden.view(*shape, -1),
        case.head,
        case.targets.view(shape),
        torch.ones(shape),
        case.advantages,
        old_per_token_logps=case.behavior.view(shape),
        num_items_in_batch=torch.tensor(float(len(hidden))),
    )
    torch.autograd.backward(value)


def measure(case: Case, ways: dict[str, Callable[[Case, Tensor], None]], repeats: int) -> list[dict[str, Any]]:
    """The ways take turns, so that all of them see the same neighbours; the best of the repeats counts."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, dict[str, Any]] = {}
    wanted: Tensor | None = None
    for name, way in ways.items():
        hidden = case.hidden.clone().requires_grad_()
        peak = peak_mib(partial(way, case, hidden))
        assert hidden.grad is not None
        wanted = hidden.grad if wanted is None else wanted
        found[name] = {"peak_mib": peak, "gradient_error": relative_error(hidden.grad, wanted)}
    for _ in range(repeats):
        for name, way in ways.items():
            hidden = case.hidden.clone().requires_grad_()
            seconds[name].append(cpu_seconds(partial(way, case, hidden)))
    vocab = len(case.head)
    return [{"vocab": vocab, "way": name, "cpu_seconds": min(seconds[name]), **found[name]} for name in ways]


def report(rows: list[dict[str, Any]], told: dict[str, Any], options: argparse.Namespace) -> str:
    naive = {row["vocab"]: row for row in rows if row["way"] == "naive"}
    cells = [
        [
            f"{row['vocab']}",
            row["way"],
            f"{row['cpu_seconds']:.2f}",
            f"{naive[row['vocab']]['cpu_seconds'] / row['cpu_seconds']:.2f} x",
            f"{row['peak_mib']:.1f}",
            f"1/{naive[row['vocab']]['peak_mib'] / row['peak_mib']:.0f}",
            "reference" if row["way"] == "naive" else f"{row['gradient_error']:.0e}",
        ]
        for row in rows
    ]
    header = ["V", "head", "CPU-s", "speed", "peak MiB", "of naive", "gradient error"]
    return (
        f"# Log-prob head, frozen: forward and backward of {options.tokens} tokens, H = {options.hidden_size}\n\n"
        f"{as_table(header, cells)}\n\n"
        "Peak: most bytes of new tensors at once, the gradient of the hidden states included. The best of "
        f"{options.repeats} repeats, in which the heads took turns.\n\nConditions: {as_text(told)}\n\n"
        "Liger runs in plain torch here (compiled=False), without the compilation and the Triton it has on CUDA: the "
        "table says nothing about Liger on a GPU.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help=f"a multiple of {COMPLETIONS}")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    told = conditions()
    ways = {"naive": by_logprobs(naive_logprobs), "checkpoint": by_logprobs(chunked_logprobs)}
    if installed("liger_kernel"):
        ways["Liger"] = by_liger
    ways["gleaner"] = by_logprobs(our_logprobs)
    rows = []
    for vocab in options.vocab:
        rows += measure(make_case(options.tokens, options.hidden_size, vocab), ways, options.repeats)
    save("head_op", {"conditions": told, "rows": rows}, report(rows, told, options))


if __name__ == "__main__":
    main()
