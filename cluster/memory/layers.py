"""The decoder layers of a model, read from the text settings of its config.json: linear modules, experts, what
attention caches, and what a layer carries along as a state. cluster.memory.shape puts them together to a Shape.

Modules have the names and sizes of transformers' classes, which tests compare on the meta device. Letters: h hidden
width, E experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

GEMMA_3_PATTERN = 6  # every sixth layer of Gemma 3 and 4 attends to all tokens
HYBRID_PATTERN = 4  # every fourth layer of Qwen3-Next and Qwen3.5 attends
Text = Mapping[str, Any]


class Linear(NamedTuple):
    """A linear module: its path within the layer, its input and its output width."""

    path: str
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        """The last part of the path, by which learner.lora.targets names it."""
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """The module of the layer that holds it; empty for the layer itself."""
        return self.path.rpartition(".")[0]

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Mixer:
    """The part of a layer that mixes tokens: attention, linear attention or a short convolution.

    other: parameters beyond the linear modules. heads, kv_heads, head_dim: of attention, heads 0 if there is none.
    cached: whether it has keys and values of its own in the KV cache (not if it reads those of an earlier layer).
    window: tokens that it attends to; 0: all. convolved, recurrent: elements of a sequence's state, of the convolution
    in the model's type, and of linear attention. state_heads, state_keys, state_values: heads of linear attention that
    have a state, and widths of all its keys and values. gated: whether attention's output has a gate.
    """

    linear: tuple[Linear, ...]
    other: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    cached: bool = True
    window: int = 0
    convolved: int = 0
    recurrent: int = 0
    state_heads: int = 0
    state_keys: int = 0
    state_values: int = 0
    gated: bool = False

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, which is that of all value heads."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a feed-forward block. count: all of them, which are in memory. chosen: those that a token goes to.
    weights, other: matrix weights, and further parameters, of one expert."""

    count: int
    chosen: int
    ffn: int
    weights: int
    other: int = 0


@dataclass(frozen=True, slots=True)
class Feed:
    """A feed-forward block. ffn: width of the part that every token goes through, 0 if there is none. router:
    parameters that choose experts. other: further parameters."""

    linear: tuple[Linear, ...]
    ffn: int
    experts: Experts | None = None
    router: int = 0
    other: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer. linear: linear modules in neither part. norms: parameters of norms of width h. head_norms:
    whether queries and keys have norms. wide_norms: how many norms of width h there are."""

    mixer: Mixer
    feed: Feed
    norms: int
    wide_norms: int = 2
    head_norms: bool = False
    linear: tuple[Linear, ...] = ()

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear modules, which an adapter can target."""
        return (*self.mixer.linear, *self.feed.linear, *self.linear)

    @property
    def expert_weights(self) -> int:
        """Weights of the matrices of all experts."""
        return 0 if self.feed.experts is None else self.feed.experts.count * self.feed.experts.weights

    @property
    def other(self) -> int:
        """Parameters that are in no matrix of a linear module or an expert."""
        experts = self.feed.experts
        biases = 0 if experts is None else experts.count * experts.other
        return self.norms + self.mixer.other + self.feed.other + self.feed.router + biases

    @property
    def params(self) -> int:
        return sum(one.weights for one in self.linears) + self.expert_weights + self.other

    @property
    def idle(self) -> int:
        """Parameters of the experts that a token does not go to."""
        experts = self.feed.experts
        return 0 if experts is None else (experts.count - experts.chosen) * (experts.weights + experts.other)

    @property
    def feed_work(self) -> int:
        """Weights of the feed-forward block that a token is multiplied by."""
        dense, experts = sum(one.weights for one in self.feed.linear), self.feed.experts
        return dense + (0 if experts is None else experts.chosen * experts.weights)

    @property
    def active_ffn(self) -> int:
        """Width of all feed-forward blocks that a token goes through."""
        experts = self.feed.experts
        return self.feed.ffn + (0 if experts is None else experts.chosen * experts.ffn)


def whole(text: Text, *names: str) -> list[int]:
    """The values of settings that must be whole numbers of at least 1. Raises ValueError that names those which are
    not."""
    wrong = [name for name in names if type(text.get(name)) is not int or text[name] < 1]
    if wrong:
        raise ValueError(f"config.json must give {', '.join(wrong)} as whole numbers of at least 1")
    return [text[name] for name in names]


def layer_types(text: Text, known: tuple[str, ...]) -> list[str] | None:
    """The kind of each layer, if config.json names them. Raises ValueError for a kind that is not in `known`, or if
    there are not as many as layers."""
    types = text.get("layer_types")
    if types is None:
        return None
    (count,) = whole(text, "num_hidden_layers")
    if not isinstance(types, list) or len(types) != count or not set(types) <= set(known):
        raise ValueError(
            f"layer_types of config.json must name {count} layers (num_hidden_layers), each one of {', '.join(known)}"
        )
    return types


def attention(
    text: Text, *, norms: bool = False, gated: bool = False, out: str = "o_proj", window: int = 0,
    lacks: tuple[str, ...] = (),
) -> Mixer:  # fmt: skip
    """Softmax attention; with attention_bias its modules have biases.

    Args:
        norms: whether queries and keys have a norm per head. gated: whether q_proj also gives a gate as wide as the
            queries. out: name of the last module. lacks: modules that this layer does not have; without k_proj it has
            neither norm of keys nor place in the cache.
    """
    hidden, heads = whole(text, "hidden_size", "num_attention_heads")
    kv_heads, head_dim = int(text.get("num_key_value_heads") or heads), int(text.get("head_dim") or hidden // heads)
    q, kv = heads * head_dim, kv_heads * head_dim
    modules = (
        Linear("self_attn.q_proj", hidden, q * (2 if gated else 1)),
        Linear("self_attn.k_proj", hidden, kv),
        Linear("self_attn.v_proj", hidden, kv),
        Linear(f"self_attn.{out}", q, hidden),
    )
    linear = tuple(one for one in modules if one.name not in lacks)
    other = sum(one.outputs for one in linear) if text.get("attention_bias") else 0
    cached = "k_proj" not in lacks
    other += head_dim * (1 + cached) if norms else 0
    return Mixer(linear, other, heads, kv_heads, head_dim, cached, window, gated=gated)


# The modules of linear attention, by family: name -> its output in (keys, values, heads).
DELTA_INPUTS: dict[str, dict[str, tuple[int, int, int]]] = {
    "qwen3_next": {"in_proj_qkvz": (2, 2, 0), "in_proj_ba": (0, 0, 2)},
    "qwen3_5": {"in_proj_qkv": (2, 1, 0), "in_proj_z": (0, 1, 0), "in_proj_b": (0, 0, 1), "in_proj_a": (0, 0, 1)},
    "olmo_hybrid": {
        "q_proj": (1, 0, 0), "k_proj": (1, 0, 0), "v_proj": (0, 1, 0), "g_proj": (0, 1, 0), "a_proj": (0, 0, 1),
        "b_proj": (0, 0, 1),
    },
}  # fmt: skip


def gated_delta(text: Text, family: str) -> Mixer:
    """Linear attention by the gated delta rule (2412.06464); family: of DELTA_INPUTS. Its state: the last inputs of the
    convolution over queries, keys and values, and a matrix per value head."""
    names = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")
    hidden, key_dim, value_dim, key_heads, value_heads, taps = whole(
        text, "hidden_size", *(f"linear_{name}" for name in names)
    )
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * keys + values
    inputs = [
        Linear(f"linear_attn.{name}", hidden, of_keys * keys + of_values * values + of_heads * value_heads)
        for name, (of_keys, of_values, of_heads) in DELTA_INPUTS[family].items()
    ]
    last = Linear(f"linear_attn.{'o_proj' if family == 'olmo_hybrid' else 'out_proj'}", values, hidden)
    other = 2 * value_heads + mixed * taps + value_dim  # decay and step of each head, convolution, norm
    state = value_heads * value_dim * key_dim
    return Mixer(
        (*inputs, last), other, cached=False, convolved=mixed * (taps - 1), recurrent=state, state_heads=value_heads,
        state_keys=keys, state_values=values,
    )  # fmt: skip


def short_convolution(text: Text) -> Mixer:
    """The gated short convolution of LFM2 (2511.23404), whose state is its last inputs."""
    hidden, taps = whole(text, "hidden_size", "conv_L_cache")
    bias = bool(text.get("conv_bias"))
    linear = (Linear("conv.in_proj", hidden, 3 * hidden), Linear("conv.out_proj", hidden, hidden))
    other = hidden * taps + (5 * hidden if bias else 0)
    return Mixer(linear, other, cached=False, convolved=hidden * (taps - 1))


def gated_mlp(hidden: int, ffn: int, *, names: tuple[str, str, str] = (
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)) -> Feed:  # fmt: skip
    """A gated feed-forward block. names: of the gate's, the other input's and the output module."""
    gate, up, down = names
    return Feed((Linear(gate, hidden, ffn), Linear(up, hidden, ffn), Linear(down, ffn, hidden)), ffn)


def with_experts(hidden: int, experts: Experts, *, shared: int = 0, path: str = "mlp", bias: bool = False) -> Feed:
    """A block of experts, beside one of width `shared` through which every token goes. bias: whether the router has
    one."""
    at = f"{path}.shared_expert"
    names = (f"{at}.gate_proj", f"{at}.up_proj", f"{at}.down_proj")
    beside = gated_mlp(hidden, shared, names=names).linear if shared else ()
    return Feed(beside, shared, experts, router=(hidden + bias) * experts.count)


# The families: settings -> the model's layers.


def _qwen_experts(text: Text, hidden: int, *, shared: bool) -> Feed:
    """Experts as in Qwen3-MoE, Qwen3-Next and Qwen3.5-MoE; the latter two have a shared expert with a gate."""
    ffn, chosen = whole(text, "moe_intermediate_size", "num_experts_per_tok")
    count = expert_count(text)
    beside = whole(text, "shared_expert_intermediate_size")[0] if shared else 0
    feed = with_experts(hidden, Experts(count, chosen, ffn, 3 * hidden * ffn), shared=beside)
    return replace(feed, linear=(*feed.linear, Linear("mlp.shared_expert_gate", hidden, 1))) if shared else feed


def expert_count(text: Text) -> int:
    """The number of experts: num_experts, or num_local_experts as newer versions of transformers write it."""
    name = "num_local_experts" if text.get("num_experts") is None and "num_local_experts" in text else "num_experts"
    return whole(text, name)[0]


def _feeds(text: Text, hidden: int, *, shared: bool) -> list[Feed]:
    """The feed-forward block of each layer of a Qwen with experts, some of which may be dense."""
    (count,) = whole(text, "num_hidden_layers")
    step, dense = int(text.get("decoder_sparse_step") or 1), text.get("mlp_only_layers") or ()
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(count)]
    blocks = {True: _qwen_experts(text, hidden, shared=shared)}
    if not all(sparse):
        blocks[False] = gated_mlp(hidden, *whole(text, "intermediate_size"))
    return [blocks[one] for one in sparse]


def qwen3_moe(text: Text) -> list[Layer]:
    (hidden,) = whole(text, "hidden_size")
    mixer = attention(text, norms=True)
    return [Layer(mixer, feed, 2 * hidden, head_norms=True) for feed in _feeds(text, hidden, shared=False)]


def mixtral(text: Text) -> list[Layer]:
    hidden, count, ffn, chosen = whole(
        text, "hidden_size", "num_hidden_layers", "intermediate_size", "num_experts_per_tok"
    )
    window = text.get("sliding_window") or 0
    feed = with_experts(hidden, Experts(expert_count(text), chosen, ffn, 3 * hidden * ffn))
    return [Layer(attention(text, window=window), feed, 2 * hidden)] * count


def hybrid(text: Text, family: str, *, sparse: bool) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: three layers of linear attention, then one of gated attention."""
    hidden, count = whole(text, "hidden_size", "num_hidden_layers")
    every = int(text.get("full_attention_interval") or HYBRID_PATTERN)
    types = layer_types(text, ("linear_attention", "full_attention")) or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)
    ]
    mixers = {"full_attention": attention(text, norms=True, gated=True)}
    if "linear_attention" in types:
        mixers["linear_attention"] = gated_delta(text, family)
    feeds = (
        _feeds(text, hidden, shared=True) if sparse else [gated_mlp(hidden, *whole(text, "intermediate_size"))] * count
    )
    return [
        Layer(mixers[kind], feed, 2 * hidden, head_norms=kind == "full_attention")
        for kind, feed in zip(types, feeds, strict=True)
    ]


def olmo_hybrid(text: Text) -> list[Layer]:
    """Linear attention with a module for each input, and attention whose norms are as wide as all heads."""
    hidden, count, ffn = whole(text, "hidden_size", "num_hidden_layers", "intermediate_size")
    types = layer_types(text, ("linear_attention", "full_attention")) or [
        "full_attention" if (i + 1) % HYBRID_PATTERN == 0 else "linear_attention" for i in range(count)
    ]
    delta, softmax, feed = gated_delta(text, "olmo_hybrid"), attention(text), gated_mlp(hidden, ffn)
    softmax = replace(softmax, other=softmax.other + softmax.queries + softmax.keys)
    return [
        Layer(softmax if kind == "full_attention" else delta, feed, 2 * hidden, head_norms=kind == "full_attention")
        for kind in types
    ]


def lfm2(text: Text) -> list[Layer]:
    """Convolutions, and attention in some layers. The feed-forward width is two thirds of what config.json says,
    rounded up, if block_auto_adjust_ff_dim is set (transformers.models.lfm2, Lfm2MLP)."""
    hidden, count = whole(text, "hidden_size", "num_hidden_layers")
    (ffn,) = whole(text, "block_ff_dim" if "block_ff_dim" in text else "intermediate_size")
    if text.get("block_auto_adjust_ff_dim", True):
        ffn = int(2 * ffn / 3)
        if (times := text.get("block_ffn_dim_multiplier", 1.0)) is not None:
            (multiple,) = whole({"block_multiple_of": 256, **text}, "block_multiple_of")
            ffn = multiple * ceil(int(times * ffn) / multiple)
    types = layer_types(text, ("conv", "full_attention"))
    if types is None:
        chosen = text.get("full_attn_idxs")
        if not isinstance(chosen, list):
            raise ValueError("config.json must give layer_types or full_attn_idxs as a list")
        types = ["full_attention" if i in chosen else "conv" for i in range(count)]
    feed = gated_mlp(hidden, ffn, names=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"))
    mixers = {"conv": short_convolution(text), "full_attention": attention(text, norms=True, out="out_proj")}
    return [Layer(mixers[kind], feed, 2 * hidden, head_norms=kind == "full_attention") for kind in types]


def gpt_oss(text: Text) -> list[Layer]:
    """Windows in every other layer, a sink per head, and experts with biases."""
    hidden, count, ffn, chosen = whole(
        text, "hidden_size", "num_hidden_layers", "intermediate_size", "num_experts_per_tok"
    )
    types = layer_types(text, ("sliding_attention", "full_attention")) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(count)
    ]
    experts = Experts(expert_count(text), chosen, ffn, 3 * hidden * ffn, 2 * ffn + hidden)
    feed = with_experts(hidden, experts, bias=True)
    plain = attention({"attention_bias": True, **text})
    plain = replace(plain, other=plain.other + plain.heads)
    windowed = replace(plain, window=whole(text, "sliding_window")[0] if "sliding_attention" in types else 0)
    return [Layer(windowed if kind == "sliding_attention" else plain, feed, 2 * hidden) for kind in types]


def llama4(text: Text) -> list[Layer]:
    """Experts in every n-th layer, with a shared one. Attention in chunks caches all tokens, as vLLM does unless it is
    told otherwise (config/vllm.py)."""
    hidden, count, ffn, chosen = whole(
        text, "hidden_size", "num_hidden_layers", "intermediate_size", "num_experts_per_tok"
    )
    step = int(text.get("interleave_moe_layer_step") or 1)
    listed = text.get("moe_layers")
    sparse = set(listed if isinstance(listed, list) else range(step - 1, count, step))
    experts = Experts(expert_count(text), chosen, ffn, 3 * hidden * ffn)
    feeds = {True: with_experts(hidden, experts, shared=ffn, path="feed_forward")}
    if len(sparse) < count:
        names = ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")
        feeds[False] = gated_mlp(hidden, *whole(text, "intermediate_size_mlp"), names=names)
    mixer = attention(text)
    return [Layer(mixer, feeds[i in sparse], 2 * hidden) for i in range(count)]


def gemma4(text: Text) -> list[Layer]:
    """Heads of another width in layers that attend to all tokens (global_head_dim), in some models without a value
    module (attention_k_eq_v); last layers that read the keys and values of earlier ones (num_kv_shared_layers), some
    with feed-forward blocks twice as wide (use_double_wide_mlp); an embedding for each layer; experts beside the dense
    block (enable_moe_block)."""
    hidden, count, ffn, window = whole(text, "hidden_size", "num_hidden_layers", "intermediate_size", "sliding_window")
    types = layer_types(text, ("sliding_attention", "full_attention")) or [
        "sliding_attention" if (i + 1) % GEMMA_3_PATTERN else "full_attention" for i in range(count)
    ]
    types = [*types[:-1], "full_attention"]
    first_shared = count - int(text.get("num_kv_shared_layers") or 0)
    beside = int(text.get("hidden_size_per_layer_input", 256) or 0)
    linear = () if not beside else (
        Linear("per_layer_input_gate", hidden, beside), Linear("per_layer_projection", beside, hidden)
    )  # fmt: skip
    found = []
    for i, kind in enumerate(types):
        shares, everywhere = i >= first_shared, kind == "full_attention"
        wide = bool(text.get("use_double_wide_mlp")) and shares and first_shared > 0
        feed, norms = gated_mlp(hidden, ffn * (2 if wide else 1)), 5 if beside else 4
        if text.get("enable_moe_block"):
            feed, norms = _gemma4_experts(text, hidden, feed), norms + 3
        lacks = ("k_proj", "v_proj") if shares else ("v_proj",) if everywhere and text.get("attention_k_eq_v") else ()
        own = _gemma4_settings(text, i, everywhere=everywhere)
        mixer = attention(own, norms=True, window=0 if everywhere else window, lacks=lacks)
        found.append(Layer(mixer, feed, norms * hidden, norms, head_norms=True, linear=linear))
    return found


def _gemma4_settings(text: Text, layer: int, *, everywhere: bool) -> Text:
    """The settings of one layer. transformers writes what differs from the other layers as per_layer_config; published
    files have global_head_dim and num_global_key_value_heads."""
    text = {"head_dim": 256, **text}
    if "per_layer_config" in text:
        differs = {int(index): settings for index, settings in text["per_layer_config"].items()}  # "05" in some files
        return {**text, **differs.get(layer, {})}
    if not everywhere:
        return text
    heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return {**text, "head_dim": text.get("global_head_dim") or 512, **({"num_key_value_heads": heads} if heads else {})}


def _gemma4_experts(text: Text, hidden: int, dense: Feed) -> Feed:
    count, chosen, ffn = whole(text, "num_experts", "top_k_experts", "moe_intermediate_size")
    router = hidden + count  # a scale for each element and each expert
    linear = (*dense.linear, Linear("router.proj", hidden, count))
    return Feed(linear, dense.ffn, Experts(count, chosen, ffn, 3 * hidden * ffn), router)


# By `model_type`: how its layers are read.
FAMILIES: dict[str, Callable[[Text], list[Layer]]] = {
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe_text": qwen3_moe,
    "mixtral": mixtral,
    "qwen3_next": lambda text: hybrid(text, "qwen3_next", sparse=True),
    "qwen3_5_text": lambda text: hybrid(text, "qwen3_5", sparse=False),
    "qwen3_5_moe_text": lambda text: hybrid(text, "qwen3_5", sparse=True),
    "olmo_hybrid": olmo_hybrid,
    "lfm2": lfm2,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "gemma4_text": gemma4,
}
