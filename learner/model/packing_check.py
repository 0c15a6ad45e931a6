"""Whether a model computes packed rows exactly: settled at start-up, by trying, on the device and in the type in use.

What a model does to tokens between the layers cannot be read off its class (state-space layers, learned biases, kernels
that ignore segments), and an attention that leaks from one completion into the next trains silently on garbage.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.batch.micro_batch import MicroBatch, micro_batches
from learner.batch.rows import Rows
from learner.model.head import begin_anew, with_head
from learner.model.logits import Logits
from learner.model.logprob import policy_logprobs
from learner.model.packed_attention import kernels

log = logging.getLogger(__name__)

# Largest difference that rounding explains: root mean square of logprobs in nats, relative norm of the gradient.
# A token that sees one it must not changes either by far more.
TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.float16: (3e-2, 5e-2), torch.bfloat16: (1e-1, 3e-1)}
PROMPTS = ((5, (7, 1, 4)), (3, (6, 2)))  # tokens of a prompt, tokens of its completions
TRIAL_IDS = 1000
LAYER_TYPES = {"full_attention", "sliding_attention"}
WINDOW_IN_MASK = ("phimoe", "qwen2_moe")  # their attention is not given it, and packed there is no mask


def enable(
    lm: Any,
    logits: Logits,
    predicting: Callable[[MicroBatch], Tensor],
    dtype: torch.dtype,
    attention: str | None = None,
) -> bool:
    """Sets the fastest attention that gives the same logprobs and gradients packed as row by row; True if one does.

    Otherwise the model keeps its own attention and a warning says why; micro-batches must then be padded.

    Args:
        lm: a causal language model of transformers, its layers as they will be trained.
        logits: what it does to the products of its output embedding.
        predicting: a micro-batch -> [N, H] final hidden states of `lm` that predict its completion tokens.
        dtype: that it computes in.
        attention: taken without the trial, for a model without content (learner.tools.meta_run).
    """
    if attention is not None:
        lm.set_attn_implementation(attention)
        return True
    own, config = lm.config._attn_implementation, lm.config.get_text_config()
    head = lm.get_output_embeddings().weight
    batches = [micro_batches(*_trial(len(head)), token_budget=budget, packed=budget > 1) for budget in (1, 10_000)]
    wanted = _measure(lm, logits, predicting, batches[0])
    reasons = [_by_config(config)]
    for name in kernels(head.device, dtype) if reasons == [""] else []:
        try:
            lm.set_attn_implementation(name)
            if config._attn_implementation != name:
                raise NotImplementedError("its attention cannot be exchanged")
            reasons.append(_difference(wanted, _measure(lm, logits, predicting, batches[1]), dtype))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any library or kernel may refuse in its own way; the warning carries its words
            reasons.append(str(error) if isinstance(error, NotImplementedError) else f"{name}: {error!r}")
            begin_anew(lm)
        if reasons[-1] == "":
            if slower := "; ".join(filter(None, reasons)):
                log.warning("%s is packed by %s, which is slower: %s", config.model_type, name, slower)
            return True
    lm.set_attn_implementation(own)
    log.warning("%s cannot be packed (%s): completions are padded, each with its own prompt", config.model_type,
                "; ".join(filter(None, reasons)))  # fmt: skip
    return False


def _by_config(config: Any) -> str:
    """What a trial of a few tokens cannot see: attention that changes with the distance. Empty if there is none."""
    strange = set(getattr(config, "layer_types", None) or []) - LAYER_TYPES
    chunk = getattr(config, "attention_chunk_size", None)
    reasons = [f"layers of {', '.join(sorted(strange))}"] if strange else []
    window = getattr(config, "sliding_window", None) if config.model_type in WINDOW_IN_MASK else None
    if window and window < config.max_position_embeddings:  # 0: there is none
        reasons.append(f"a window of {window} that its attention is told by a mask alone")
    return "; ".join([*reasons, f"attention in chunks of {chunk}"] if chunk else reasons)


def _trial(vocab: int) -> tuple[Rows, Any, Any, Any]:
    """A few random rows, with the row's number in place of the advantage of its tokens."""
    rng = np.random.default_rng(0)

    def draw(length: int) -> Any:
        return rng.integers(0, min(vocab, TRIAL_IDS), length).astype(np.int32)

    pairs = [(prompt, draw(length)) for size, sizes in PROMPTS for prompt in [draw(size)] for length in sizes]
    prompts, completions = ([pair[i] for pair in pairs] for i in (0, 1))
    lengths = np.array([len(completion) for completion in completions])
    tokens = np.concatenate(completions)
    rows = Rows([], prompts, tokens, np.zeros(len(tokens), np.float32), np.zeros_like(tokens), lengths, lengths < 0)
    numbers = np.arange(len(pairs), dtype=np.float64)
    return rows, np.repeat(numbers, lengths), numbers, np.ones(len(pairs), dtype=bool)


def _measure(
    lm: Any, logits: Logits, predicting: Callable[[MicroBatch], Tensor], batches: list[MicroBatch]
) -> tuple[Tensor, Tensor]:
    """([N] logprobs in the order of the rows, [ids, E] gradient of their weighted sum to the input embeddings)."""
    embedded: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        embedded.append(output if output.requires_grad else output.requires_grad_())

    logprobs, numbers = [], []
    embedding = lm.get_input_embeddings()
    device = embedding.weight.device
    gradient = torch.zeros(TRIAL_IDS, embedding.weight.shape[1], device=device)
    handle = embedding.register_forward_hook(keep)
    try:
        for batch in (batch.to(device) for batch in batches):
            states = predicting(batch)
            found, _ = with_head(lm, policy_logprobs, states, batch.targets, 1.0, logits=logits)
            slopes = 1 + batch.advantages
            (grad,) = torch.autograd.grad(found, embedded.pop(), slopes)
            gradient.index_add_(0, batch.ids.flatten(), grad.flatten(0, 1).float())
            logprobs.append(found.detach())
            numbers.append(batch.advantages)
    finally:
        handle.remove()
    order = torch.cat(numbers).argsort(stable=True)
    return torch.cat(logprobs)[order], gradient


def _difference(wanted: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], dtype: torch.dtype) -> str:
    """Empty if they agree."""
    nats = float((found[0] - wanted[0]).square().mean().sqrt())
    share = float((found[1] - wanted[1]).norm() / wanted[1].norm())
    if not wanted[1].isfinite().all():  # float16 overflowed row by row too; training scales the loss until it does not
        share = 0.0
    agree = nats <= TOLERANCE[dtype][0] and share <= TOLERANCE[dtype][1]
    return "" if agree else f"logprobs differ by {nats:.1e} nats, gradients by {share:.1e} of their norm"
