"""Whether a model computes packed rows exactly: settled at start-up, by trying, on the device and in the type in use.

What a model does to tokens between the layers cannot be read off its class (state-space layers, learned biases, kernels
that ignore segments), and an attention that leaks from one completion into the next trains silently on garbage.

A few completions are computed packed, and in rows of their own by the model's own attention. Three questions follow:

1. Does anything leak? Other ids in what a completion must not see change no bit of its logprobs, and get no gradient of
   them. No tolerance is needed, since the shapes stay (on a card LEAK). Of a model with experts the gradient alone says
   so: other ids go to other experts, which then compute other numbers of tokens and round otherwise.
2. Does each layer, given the states that the rows had before it, give the states that they had after it? Errors of
   rounding then do not pile up over the layers, as they do in logprobs: of a real model in bfloat16 (SmolLM2-135M) a
   right packing differs by 0.007 of what the layers add, a single position that is off by one by 0.11, while the
   logprobs of both differ by 0.1 nats.
3. Are logprobs and gradients the same? This sees what lies before and behind the layers.

A difference within TOLERANCE is taken for rounding. Where there is more, it is measured how much rounding explains, by
the rows in another attention of transformers, which rounds elsewhere: up to NOISE times as much is taken for it.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.batch.micro_batch import MicroBatch, Rows, micro_batches
from learner.model.attention import kernels
from learner.model.logprob import Logits, begin_anew, policy_logprobs, with_head
from rollout.architecture import has_experts

# Whether a model's logits are what learner.model.logprob takes them for: settled by trying, in float32 over a wide
# range.
#
# The products of its output embedding are replaced by known numbers, and what the model makes of them is compared. So
# neither the rounding of bfloat16 nor small weights hide a factor or a cap that no known setting of the config names.

WIDEST = 50.0  # of the numbers, either sign: beyond what trained models say, and within float32
HEAD_TOLERANCE = {torch.float32: 1e-4}  # share of the largest; a model that rounds its logits itself: as below
ROUNDED = 5e-3
SAME_STATES = 1e-2  # relative norm of a difference; the same computation twice


@torch.no_grad()
def check_head(lm: Any, logits: Logits, hidden: Callable[[Tensor], Tensor], path: str) -> None:
    """Raises ValueError if the logits of `lm` are not `logits` of head @ hidden.

    Args:
        hidden: ids [1, L] -> [L, H] the final states that the learner multiplies with the head.
    """
    head = lm.get_output_embeddings()
    ids = torch.arange(1, min(9, len(head.weight)), device=head.weight.device)[None]
    states: list[Tensor] = []
    products: list[Tensor] = []

    def replace(module: Any, inputs: Any, output: Tensor) -> Tensor:
        states.append(inputs[0])
        products.append(torch.linspace(-WIDEST, WIDEST, output.numel(), device=output.device).view(output.shape))
        return products[-1].clone()

    handle = head.register_forward_hook(replace)
    try:
        own: Tensor = lm(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    if len(products) != 1 or own.shape != products[0].shape:
        raise ValueError(
            f"model.path: {path} does not make its logits with its output embedding alone; train another architecture"
        )
    ours = hidden(ids).float()
    if bool((~torch.isfinite(ours)).any()):  # though its weights are: learner.model.base
        kind = str(head.weight.dtype).removeprefix("torch.")
        raise ValueError(
            f"model.dtype: {path} computes numbers in {kind} that are not finite, though all of its weights are; set a "
            "type of a wider range (bfloat16, float32), or give another model"
        )
    moved = float((states[0].flatten(0, -2).float() - ours).norm() / ours.norm().clamp(min=1e-6))
    if not moved <= SAME_STATES:
        raise ValueError(
            f"model.path: {path} does something to its final states before the output embedding (they differ by "
            f"{moved:.1e} of their norm); its logprobs would be wrong. Train another architecture"
        )
    wanted = logits.of_(products[0], 1.0)
    error = float((own.float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
    if not error <= HEAD_TOLERANCE.get(own.dtype, ROUNDED):
        raise ValueError(
            f"model.path: {path} does something to its logits after the output embedding that its config does not name "
            f"(they differ by {error:.1e} of the largest); its logprobs would be wrong. Train another architecture"
        )


log = logging.getLogger(__name__)


class Difference(NamedTuple):
    """Between two ways to compute the same rows."""

    logprobs: float  # root mean square, nats
    gradient: float  # norm, as a share of the gradient's own
    layers: float  # of the token that differs most: root mean square over the layers of the difference of what a layer
    # adds to its state, as a share of what it adds

    def __str__(self) -> str:
        return (
            f"{self.logprobs:.1e} nats in logprobs, {self.gradient:.1e} of the gradient's norm and {self.layers:.1e} "
            "of what layers add"
        )

    def within(self, limit: "Difference") -> bool:
        return all(own <= most for own, most in zip(self, limit, strict=True))

    def at_least(self, other: "Difference") -> "Difference":
        return Difference(*map(max, self, other))


# Differences that rounding explains without a further look.
TOLERANCE = {
    torch.float32: Difference(1e-4, 1e-3, 1e-4),
    torch.float16: Difference(1e-1, 1e-1, 5e-3),
    torch.bfloat16: Difference(3e-1, 3e-1, 4e-2),
}
NOISE = 4
LEAK = 1e-3  # nats of a logprob, share of a gradient: on a card; on a CPU it is 0
GROUPS = ((5, (7, 1, 4)), (3, (6, 2)))  # tokens of a prompt, tokens of its completions
TRIAL_IDS = 1000
PADDING = 0  # the slot of padding; a slot is a token of the trial
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
    reasons = [_by_config(config)]
    if reasons == [""]:
        trial = _Trial(lm, logits, predicting, dtype)
        for name in kernels(trial.device, dtype):
            try:
                lm.set_attn_implementation(name)
                if config._attn_implementation != name:
                    raise NotImplementedError("its attention cannot be exchanged")
                reasons.append(trial.objection())
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


class _Measured(NamedTuple):
    """What passes over the trial gave. A slot is a token of it; that of a prompt serves all its completions."""

    logprobs: Tensor  # [slots], nats; 0 of a prompt's tokens
    gradient: Tensor  # [slots, E] of the weighted sum of the logprobs to the embeddings
    before: list[Tensor]  # [slots, H] states before each layer
    after: list[Tensor]  # [slots, H] states after it


class _Trial:
    """The completions, their rows by the model's own attention, and how much rounding explains.

    Args: those of `enable`. Micro-batches are made with slots in the place of ids, by the code that makes those of
    training; so it is known what stands where in them, and each pass puts ids in the place of slots.
    """

    def __init__(self, lm: Any, logits: Logits, predicting: Callable[[MicroBatch], Tensor], dtype: torch.dtype) -> None:
        self._lm, self._logits, self._predicting, self._dtype = lm, logits, predicting, dtype
        head = lm.get_output_embeddings().weight
        self.device: torch.device = head.device
        self._groups, count = _slots()
        vocab = min(len(head), TRIAL_IDS)
        self._ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, count))
        self._others = (self._ids + 1) % vocab  # where something is changed
        self._apart, self._packed = (_of_slots(self._groups, packed=packed) for packed in (False, True))
        self._experts = has_experts(lm.config.to_dict())
        self._own: str = lm.config._attn_implementation
        self._rows = self._measure(self._apart, self._ids)

    def objection(self) -> str:
        """Why packed rows by the attention that is set are not those of the model's own; empty if they are."""
        packed = self._measure(self._packed, self._ids)
        found, limit = self._difference(self._packed, packed), TOLERANCE[self._dtype]
        if not found.within(limit):
            limit = limit.at_least(self._rounding)
        if not found.within(limit):
            return (
                f"rows differ by {found}, where rounding in {str(self._dtype).removeprefix('torch.')} explains {limit}"
            )
        most = LEAK if self.device.type == "cuda" else 0.0
        for changed, kept in _changes(*self._groups):
            nats, share = self._leak(packed, changed, kept)
            if share > most or (nats > most and not self._experts):
                return (
                    f"completions depend on tokens that they must not see: {nats:.1e} nats of their logprobs, "
                    f"{share:.1e} of their gradient"
                )
        return ""

    @cached_property
    def _rounding(self) -> Difference:
        """NOISE times what another attention of transformers makes of the rows; 0 where the model has no other."""
        if self._own == "eager":
            return Difference(0.0, 0.0, 0.0)
        with self._attention("eager"):
            noise = self._difference(self._apart, self._measure(self._apart, self._ids))
        return Difference(*(NOISE * own for own in noise))

    def _leak(self, packed: _Measured, changed: list[int], kept: list[int]) -> tuple[float, float]:
        """(largest change of a logprob of the completions `kept` by other ids in `changed`, nats; the share of their
        gradient that goes there)."""
        ids, chosen = self._ids.clone(), torch.zeros(len(self._ids))
        ids[changed], chosen[kept] = self._others[changed], 1.0
        found = self._measure(self._packed, ids, chosen)
        nats = (found.logprobs[kept] - packed.logprobs[kept]).abs().max()
        share = found.gradient[changed].norm() / found.gradient.norm()
        return float(nats), float(share.nan_to_num())  # a gradient that overflows float16 says nothing

    def _difference(self, batch: MicroBatch, found: _Measured) -> Difference:
        """Of the batch by the attention that is set, which gave `found`, from the rows by the model's own."""
        rows = self._rows
        nats = ((found.logprobs - rows.logprobs).square().sum() / batch.targets.numel()).sqrt()
        share = (found.gradient - rows.gradient).norm() / rows.gradient.norm()
        # Where float16 overflowed in rows too: training scales the loss until it does not.
        share = share if rows.gradient.isfinite().all() else torch.zeros(())
        return Difference(float(nats), float(share), self._by_layer(batch))

    def _by_layer(self, batch: MicroBatch) -> float:
        """Difference.layers: each layer of the batch gets the state of the rows. The first layer's own state, which it
        is not given, counts as a layer too: it holds what the model adds to the embeddings (learned positions)."""
        given, wanted = ([state[batch.ids] for state in states] for states in (self._rows.before, self._rows.after))
        with torch.no_grad(), _states(self._layers if given else [], given) as (before, after):
            self._predicting(self._with_ids(batch, self._ids))
        eps = torch.finfo(self._dtype).eps
        shares = [
            _share(found, state_after, state_after.float() - state.float(), state, eps)
            for found, state, state_after in zip(after, given, wanted, strict=True)
        ]
        if not shares:
            raise NotImplementedError("its layers cannot be compared one by one")
        shares.append(_share(before[0], given[0], given[0], given[0], eps))
        of_tokens = torch.stack(shares).square().mean(0).sqrt()
        return float(of_tokens[(batch.ids != PADDING).to(self.device)].max())

    def _measure(self, slots: MicroBatch, ids: Tensor, chosen: Tensor | None = None) -> _Measured:
        """By the attention that is set; the gradient of the `chosen` logprobs ([slots], 1 or 0) alone."""
        embedded: list[Tensor] = []

        def keep(module: Any, inputs: Any, output: Tensor) -> None:
            embedded.append(output if output.requires_grad else output.requires_grad_())

        batch = self._with_ids(slots, ids)
        weights = 1 + batch.advantages  # another one for each completion
        if chosen is not None:
            weights = weights * chosen[slots.targets].to(self.device)
        handle = self._lm.get_input_embeddings().register_forward_hook(keep)
        try:
            with _states(self._layers) as (before, after):
                states = self._predicting(batch)
                found, _ = with_head(self._lm, policy_logprobs, states, batch.targets, 1.0, logits=self._logits)
                (to_embeddings,) = torch.autograd.grad(found, embedded.pop(), weights)
        finally:
            handle.remove()
        places, targets = slots.ids.flatten().to(self.device), slots.targets.to(self.device)
        logprobs = torch.zeros(len(ids), device=self.device).index_copy_(0, targets, found.detach().float())
        gradient = torch.zeros(len(ids), to_embeddings.shape[-1], device=self.device)
        gradient.index_add_(0, places, to_embeddings.flatten(0, 1).float())
        of_slots = ([_by_slot(state, places, len(ids)) for state in kept] for kept in (before, after))
        return _Measured(logprobs, gradient, *of_slots)

    @cached_property
    def _layers(self) -> list[nn.Module]:
        return [module for module in self._lm.modules() if isinstance(module, GradientCheckpointingLayer)]

    def _with_ids(self, slots: MicroBatch, ids: Tensor) -> MicroBatch:
        return replace(slots, ids=ids[slots.ids], targets=ids[slots.targets]).to(self.device)

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        before = self._lm.config._attn_implementation
        self._lm.set_attn_implementation(name)
        try:
            yield
        finally:
            self._lm.set_attn_implementation(before)


class _Group(NamedTuple):
    """Slots of a prompt and of the completions that share it."""

    prompt: list[int]
    completions: list[list[int]]

    @property
    def all(self) -> list[int]:
        return [*self.prompt, *_joined(self.completions)]


def _slots() -> tuple[list[_Group], int]:
    """(the groups of GROUPS, how many slots there are: from PADDING on)."""
    following = itertools.count(PADDING + 1)
    groups = [
        _Group(_take(following, size), [_take(following, length) for length in lengths]) for size, lengths in GROUPS
    ]
    return groups, next(following)


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(numbers, count))


def _of_slots(groups: list[_Group], *, packed: bool) -> MicroBatch:
    """All completions, packed or in rows of their own; the advantage of a token is the number of its completion."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    prompts = [np.array(prompt, np.int32) for prompt, _ in pairs]
    lengths = np.array([len(completion) for _, completion in pairs])
    tokens = np.concatenate([np.array(completion, np.int32) for _, completion in pairs])
    rows = Rows([], prompts, tokens, np.zeros(len(tokens), np.float32), np.zeros_like(tokens), lengths, lengths < 0)
    numbers = np.arange(len(pairs), dtype=np.float64)
    every = np.ones(len(pairs), dtype=bool)
    (batch,) = micro_batches(rows, np.repeat(numbers, lengths), numbers, every, 10_000, packed=packed)
    return batch


def _changes(a: _Group, b: _Group) -> Iterator[tuple[list[int], list[int]]]:
    """(slots to change, slots of completions that must not notice)."""
    yield [*b.all, *_joined(a.completions[1:])], a.completions[0]
    yield [*a.all, *_joined(b.completions[:-1])], b.completions[-1]


def _joined(completions: Sequence[Sequence[int]]) -> list[int]:
    return [slot for completion in completions for slot in completion]


def _by_slot(states: Tensor, places: Tensor, count: int) -> Tensor:
    """[count, H] from [B, L, H], at places that hold these slots; of a prompt in several rows any of them."""
    return states.new_zeros(count, states.shape[-1]).index_copy_(0, places, states.flatten(0, 1))


def _share(found: Tensor, wanted: Tensor, whole: Tensor, state: Tensor, eps: float) -> Tensor:
    """[B, L] norm of the difference, as a share of that of `whole` [B, L, H] or of the state's rounding, the larger."""
    norm = whole.float().norm(dim=-1).maximum(eps * state.float().norm(dim=-1))
    share: Tensor = (found.float() - wanted.float()).norm(dim=-1) / norm.clamp_min(torch.finfo(torch.float32).tiny)
    return share


@contextmanager
def _states(layers: list[Any], given: Sequence[Tensor] = ()) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """(states before each layer, states after it) of the pass inside, in the order of the first calls. Where states are
    `given`, each layer computes with its own of them instead."""
    before: list[Tensor] = []
    after: list[Tensor] = []
    begun: set[nn.Module] = set()  # checkpointing runs a layer again in the backward pass

    def enter(layer: Any, args: Any, kwargs: Any) -> Any:
        if layer in begun:
            return None
        begun.add(layer)
        before.append((args[0] if args else kwargs["hidden_states"]).detach())
        if not given:
            return None
        own = given[len(before) - 1]
        return ((own, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": own})

    def leave(layer: Any, inputs: Any, output: Any) -> None:
        if len(after) < len(before):
            after.append((output if isinstance(output, Tensor) else output[0]).detach())

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield before, after
    finally:
        for handle in handles:
            handle.remove()
