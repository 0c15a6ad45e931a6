"""Two trials of a model at start-up, on the device and in the dtype in use: `check_head` tries whether its logits are
what learner.model.logprob computes, and `enable` whether it computes packed rows exactly.

Whether packing works cannot be read off a model's class (state-space layers, learned biases, kernels that ignore
segments or states). With an attention that leaks from one completion into the next, training would silently be wrong.

`enable` computes a few completions packed, and in separate rows by the model's own attention. Three questions follow:

1. Does anything leak? Other token ids in what a completion must not see must not change a bit of its logprobs, and must
   get no gradient from them. No tolerance is needed on a CPU, since the shapes stay the same; on a GPU it is LEAK. For
   a model with experts only the gradient counts: other ids go to other experts, which then compute other numbers of
   tokens and round differently.
2. Does each layer, given the states that the rows had before it, give the states that they had after it? Rounding
   errors then do not accumulate over the layers, as they do in logprobs. For a real model in bfloat16 (SmolLM2-135M) a
   correct packing differs by 0.007 of what the layers add, and a single position that is off by one by 0.11, while the
   logprobs of both differ by 0.1 nats.
3. Are logprobs and gradients the same? This finds faults before and after the layers.

A difference within TOLERANCE is taken for rounding. If it is larger, the effect of rounding is measured by computing
the rows with another attention of transformers, which rounds differently; up to NOISE times that effect is allowed.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from learner.model.recurrence import CHUNK, carry_states, forget_layouts, functions, recurrent_layers
from rollout.architecture import has_experts

# Limits of check_head.

WIDEST = 50.0  # largest magnitude of the trial's numbers: beyond the logits of trained models, and exact in float32
HEAD_TOLERANCE = {torch.float32: 1e-4}  # allowed difference of logits of that dtype, as a share of the largest
ROUNDED = 5e-3  # the same for other dtypes, to which the model itself rounds its logits
SAME_STATES = 1e-2  # allowed relative norm of the difference between hidden states that are computed twice


@torch.no_grad()
def check_head(lm: Any, logits: Logits, hidden: Callable[[Tensor], Tensor], path: str) -> None:
    """Raises ValueError if the logits of `lm` are not `logits` of head @ hidden.

    The products of the output embedding are replaced by known float32 numbers of a wide range, and the model's logits
    are compared. So neither bfloat16's rounding nor small weights hide a factor or a cap that the config does not name.

    Args:
        hidden: ids [1, L] -> [L, H] final hidden states that the learner multiplies with the head.
        path: the model's name, for messages.
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
    if bool((~torch.isfinite(ours)).any()):  # the weights are finite: learner.model.base has checked them
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
    """The difference between two ways to compute the same rows."""

    logprobs: float  # root mean square of the logprobs' differences, nats
    gradient: float  # norm of the gradients' difference, as a share of the gradient's norm
    # For the token that differs most, the root mean square over the layers of the difference in what a layer adds to
    # the token's state, as a share of what it adds.
    layers: float

    def __str__(self) -> str:
        return (
            f"{self.logprobs:.1e} nats in logprobs, {self.gradient:.1e} of the gradient's norm and {self.layers:.1e} "
            "of what layers add"
        )

    def within(self, limit: "Difference") -> bool:
        return all(own <= most for own, most in zip(self, limit, strict=True))

    def at_least(self, other: "Difference") -> "Difference":
        return Difference(*map(max, self, other))


# Differences that are taken for rounding without a measurement.
TOLERANCE = {
    torch.float32: Difference(1e-4, 1e-3, 1e-4),
    torch.float16: Difference(1e-1, 1e-1, 5e-3),
    torch.bfloat16: Difference(3e-1, 3e-1, 4e-2),
}
NOISE = 4
LEAK = 1e-3  # allowed change of a logprob in nats, and share of a gradient, on a GPU; on a CPU both must be 0
Lengths = tuple[tuple[int, tuple[int, ...]], ...]  # for each group the tokens of its prompt, and of its completions
GROUPS: Lengths = ((5, (7, 1, 4)), (3, (6, 2)))
RECURRENT: Lengths = ((CHUNK + 2, (CHUNK + 6, 1, 4)), (3, (6, 2)))  # with states that go from chunk to chunk
TRIAL_IDS = 1000
PADDING = 0  # the slot of padding; a slot is the number of a token of the trial
LAYER_TYPES = {"full_attention", "sliding_attention"}
WINDOW_IN_MASK = ("phimoe", "qwen2_moe")  # models whose window is only in the mask, which packed rows do not have


def enable(
    lm: Any,
    logits: Logits,
    predicting: Callable[[MicroBatch], Tensor],
    dtype: torch.dtype,
    attention: str | None = None,
) -> bool:
    """Sets the fastest attention of learner.model.attention with which the model computes packed rows exactly. Layers
    that carry a state along then compute them by learner.model.recurrence.

    Returns whether there is one. Otherwise the model keeps its own attention and layers, a warning says why, and
    micro-batches must be padded.

    Args:
        lm: a causal language model of transformers, with its layers as they will be trained.
        logits: how the model makes logits of the products of its output embedding.
        predicting: a micro-batch -> [N, H] final hidden states of `lm` that predict its completion tokens.
        dtype: the dtype that the model computes in.
        attention: name of an attention that is set without a trial, for a model on the meta device
            (learner.tools.meta_run); None: the attention is tried.
    """
    recurrent = recurrent_layers(lm)
    layers = [layer for found in recurrent.values() for layer in found]
    if attention is not None:
        lm.set_attn_implementation(attention)
        carry_states(layers)
        return True
    own, config = lm.config._attn_implementation, lm.config.get_text_config()
    reasons = [_by_config(config, recurrent)]
    if reasons == [""]:
        trial = _Trial(lm, logits, predicting, dtype, RECURRENT if layers else GROUPS)
        for name, by in itertools.product(kernels(trial.device, dtype), functions(layers)):
            try:
                lm.set_attn_implementation(name)
                carry_states(layers, by)
                if config._attn_implementation != name:
                    raise NotImplementedError("its attention cannot be exchanged")
                reasons.append(trial.objection())
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # libraries and kernels may raise any exception; the warning repeats its message
                reasons.append(str(error) if isinstance(error, NotImplementedError) else f"{name}: {error!r}")
                begin_anew(lm)
            if reasons[-1] == "":
                if slower := "; ".join(filter(None, reasons)):
                    ways = f"{name} and {by}" if layers else name
                    log.warning("%s is packed by %s, which is slower: %s", config.model_type, ways, slower)
                return True
        forget_layouts(layers)
    lm.set_attn_implementation(own)
    log.warning("%s cannot be packed (%s): completions are padded, each with its own prompt", config.model_type,
                "; ".join(filter(None, reasons)))  # fmt: skip
    return False


def _by_config(config: Any, recurrent: Mapping[str, Sequence[nn.Module]]) -> str:
    """Returns reasons against packing that a trial of a few tokens cannot find: attention that changes with the
    distance of tokens, and layers of a type that is not known. It is empty if there are none.

    recurrent: the layers that learner.model.recurrence knows, by their type.
    """
    types = list(getattr(config, "layer_types", None) or [])
    known = {kind for kind in types if types.count(kind) == len(recurrent.get(kind, ()))}
    strange = set(types) - LAYER_TYPES - known
    chunk = getattr(config, "attention_chunk_size", None)
    reasons = [f"layers of {', '.join(sorted(strange))}"] if strange else []
    window = getattr(config, "sliding_window", None) if config.model_type in WINDOW_IN_MASK else None
    if window and window < config.max_position_embeddings:  # 0: there is none
        reasons.append(f"a window of {window} that its attention is told by a mask alone")
    return "; ".join([*reasons, f"attention in chunks of {chunk}"] if chunk else reasons)


class _Measured(NamedTuple):
    """The results of a forward and backward pass over the trial's tokens. A slot is the number of a token; a prompt's
    slots serve all its completions."""

    logprobs: Tensor  # [slots], nats; 0 for a prompt's tokens
    gradient: Tensor  # [slots, E], gradient of the weighted sum of the logprobs by the embeddings
    before: list[Tensor]  # for each layer [slots, H] states before the layer
    after: list[Tensor]  # for each layer [slots, H] states after the layer


class _Trial:
    """The trial's completions, computed in separate rows by the model's own attention, and the comparison with them.

    Micro-batches are made by the code that makes those of training, with slots instead of token ids, so that it is
    known which token is where in them; each pass replaces slots by ids.

    lengths: of the trial's prompts and completions; for the other arguments see `enable`.
    """

    def __init__(
        self, lm: Any, logits: Logits, predicting: Callable[[MicroBatch], Tensor], dtype: torch.dtype, lengths: Lengths
    ) -> None:
        self._lm, self._logits, self._predicting, self._dtype = lm, logits, predicting, dtype
        head = lm.get_output_embeddings().weight
        self.device: torch.device = head.device
        self._groups, count = _slots(lengths)
        vocab = min(len(head), TRIAL_IDS)
        self._ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, count))
        self._others = (self._ids + 1) % vocab  # the ids of tokens that are changed to look for leaks
        self._apart, self._packed = (_of_slots(self._groups, packed=packed) for packed in (False, True))
        self._experts = has_experts(lm.config.to_dict())
        self._own: str = lm.config._attn_implementation
        self._rows = self._measure(self._apart, self._ids)

    def objection(self) -> str:
        """Returns why packed rows, by the attention that is set, differ from the rows by the model's own attention;
        empty if they do not."""
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
        """NOISE times the difference between the rows by the model's own attention and those by another attention of
        transformers; 0 where the model has no other."""
        if self._own == "eager":
            return Difference(0.0, 0.0, 0.0)
        with self._attention("eager"):
            noise = self._difference(self._apart, self._measure(self._apart, self._ids))
        return Difference(*(NOISE * own for own in noise))

    def _leak(self, packed: _Measured, changed: list[int], kept: list[int]) -> tuple[float, float]:
        """Returns (largest change, in nats, of a logprob of the completions `kept` when the ids in `changed` are
        others; the share of the gradient of those logprobs that is at `changed`)."""
        ids, chosen = self._ids.clone(), torch.zeros(len(self._ids))
        ids[changed], chosen[kept] = self._others[changed], 1.0
        found = self._measure(self._packed, ids, chosen)
        nats = (found.logprobs[kept] - packed.logprobs[kept]).abs().max()
        share = found.gradient[changed].norm() / found.gradient.norm()
        return float(nats), float(share.nan_to_num())  # a gradient that overflowed in float16 shows no leak

    def _difference(self, batch: MicroBatch, found: _Measured) -> Difference:
        """Returns the difference between `found`, computed for the batch by the attention that is set, and the rows by
        the model's own attention."""
        rows = self._rows
        nats = ((found.logprobs - rows.logprobs).square().sum() / batch.targets.numel()).sqrt()
        share = (found.gradient - rows.gradient).norm() / rows.gradient.norm()
        # If float16 overflowed in the rows, too, gradients cannot be compared; in training the loss scale prevents it.
        share = share if rows.gradient.isfinite().all() else torch.zeros(())
        return Difference(float(nats), float(share), self._by_layer(batch))

    def _by_layer(self, batch: MicroBatch) -> float:
        """Returns Difference.layers; each layer of the batch gets the states of the rows. The state with which the
        batch comes to the first layer counts as a layer, too: it holds what the model adds to the embeddings (learned
        positions)."""
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
        """Runs a forward and backward pass with the attention that is set. chosen: [slots], 1 for the tokens whose
        logprobs the gradient is of, else 0; None: all tokens."""
        embedded: list[Tensor] = []

        def keep(module: Any, inputs: Any, output: Tensor) -> None:
            embedded.append(output if output.requires_grad else output.requires_grad_())

        batch = self._with_ids(slots, ids)
        weights = 1 + batch.advantages  # each completion has another weight
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
    """The slots of a prompt, and of the completions that share it."""

    prompt: list[int]
    completions: list[list[int]]

    @property
    def all(self) -> list[int]:
        return [*self.prompt, *_joined(self.completions)]


def _slots(lengths: Lengths) -> tuple[list[_Group], int]:
    """Returns (groups of these lengths, the number of slots with that of PADDING)."""
    following = itertools.count(PADDING + 1)
    groups = [_Group(_take(following, prompt), [_take(following, own) for own in rest]) for prompt, rest in lengths]
    return groups, next(following)


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(numbers, count))


def _of_slots(groups: list[_Group], *, packed: bool) -> MicroBatch:
    """Returns the micro-batch of all completions, packed or in separate rows. The advantage of a token is the number of
    its completion."""
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
    """Yields (slots to change, slots of a completion that must not see them)."""
    yield [*b.all, *_joined(a.completions[1:])], a.completions[0]
    yield [*a.all, *_joined(b.completions[:-1])], b.completions[-1]


def _joined(completions: Sequence[Sequence[int]]) -> list[int]:
    return [slot for completion in completions for slot in completion]


def _by_slot(states: Tensor, places: Tensor, count: int) -> Tensor:
    """Returns states [count, H] by slot from [B, L, H]; places: the slot of each token. A prompt in several rows gives
    the states of any of them."""
    return states.new_zeros(count, states.shape[-1]).index_copy_(0, places, states.flatten(0, 1))


def _share(found: Tensor, wanted: Tensor, whole: Tensor, state: Tensor, eps: float) -> Tensor:
    """Returns [B, L] the norm of the difference of two [B, L, H], as a share of the larger of the norm of `whole` and
    the rounding of `state`."""
    norm = whole.float().norm(dim=-1).maximum(eps * state.float().norm(dim=-1))
    share: Tensor = (found.float() - wanted.float()).norm(dim=-1) / norm.clamp_min(torch.finfo(torch.float32).tiny)
    return share


@contextmanager
def _states(layers: list[Any], given: Sequence[Tensor] = ()) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yields two lists that the pass in this block fills: states before each layer and states after it, in the order in
    which the layers are first called. If states are `given`, each layer computes with its own of those instead."""
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
