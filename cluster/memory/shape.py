"""Shapes of decoder-only models for the memory model: how many parameters of which kind a model has, read from its
config.json or from the built-in table SHAPES. Of a model with several kinds of input only the text part counts, which
is what learner and generator load. The end of the module has what learner and generator count alike.

SHAPES has the numbers of each model's public config.json. Parameter counts follow from them exactly; a test compares
them with the classes of transformers.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

from cluster.memory.layers import FAMILIES, GEMMA_3_PATTERN, Feed, Layer, Linear, Mixer, whole
from cluster.memory.quantised import FORMATS, Stored, stored_as
from cluster.reading import read_mapping


def windowed_layers(config: Mapping[str, Any], kind: str, layers: int) -> tuple[int, int]:
    """The number of layers with sliding-window attention and the tokens of their window; (0, 0) if there are none. If
    the config.json does not name each layer's type, the rule is that of transformers for this `kind` of model."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return 0, 0
    types = config.get("layer_types")
    if isinstance(types, list):
        count = types.count("sliding_attention")
    elif kind == "gemma2":
        count = ceil(layers / 2)
    elif kind == "gemma3_text":
        count = layers - layers // int(config.get("sliding_window_pattern") or GEMMA_3_PATTERN)
    elif kind in ("mistral", "ministral3"):
        count = layers
    else:
        count = max(0, layers - int(config.get("max_window_layers") or 0)) if config.get("use_sliding_window") else 0
    return (count, window) if count else (0, 0)


# By `model_type`: (RMS norms of width `hidden` per layer, RMS norms of width `head_dim` per layer). Models of other
# types have layers that are not alike, and are read by cluster.memory.layers.FAMILIES.
NORMS = {
    "llama": (2, 0),
    "mistral": (2, 0),
    "ministral3": (2, 0),
    "qwen2": (2, 0),
    "qwen3": (2, 2),
    "qwen3_vl_text": (2, 2),
    "gemma": (2, 0),
    "gemma2": (4, 0),
    "gemma3_text": (4, 2),
}
# The linear modules of a layer, which an adapter can target: name -> (input width, output width), keys of Shape.widths.
LINEAR = {
    "q_proj": ("hidden", "q"),
    "k_proj": ("hidden", "kv"),
    "v_proj": ("hidden", "kv"),
    "o_proj": ("q", "hidden"),
    "gate_proj": ("hidden", "ffn"),
    "up_proj": ("hidden", "ffn"),
    "down_proj": ("ffn", "hidden"),
}
TIED = ("gemma4_text", "lfm2")  # model types whose head is the input embedding if config.json does not say
OWNERS = {
    "SmolLM2": "HuggingFaceTB",
    "Qwen": "Qwen",
    "Llama": "meta-llama",
    "Mistral": "mistralai",
    "Gemma": "google",
    "gpt-oss": "openai",
}
VARIANT = re.compile(r"-(?:instruct|thinking|base|it|pt)(?=-|$)|-[0-9]{4}$")  # parts of a name that leave the shape
ALL: tuple[str, ...] = ("all-linear",)  # targets: every linear module, of a model with experts those of attention
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = "experts"  # in targets, and in learner.lora.targets: the matrices of all routed experts
# What config.json may leave out of text_config, since transformers' class has it (Gemma 3 as it is published).
UNSAID = {"gemma3_text": {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}}
SPLIT_BY_INPUT = (
    "o_proj",
    "down_proj",
    "out_proj",
    "w2",
)  # tensor parallelism splits their inputs, and the outputs of other modules


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Gemma 4's embeddings for each layer: their weights, the linear module that mixes them with the model's own, and
    the parameters of its norm."""

    embedding: int
    linear: Linear
    norm: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a decoder with gated feed-forward blocks; widths are in elements.

    If the layers are not all alike, `mixed` has them and how many there are of each, and ffn, heads, kv_heads and
    head_dim are those of the first layer with attention.
    """

    name: str
    kind: str  # model_type of its config.json
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # head and input embedding are one matrix
    attention_bias: bool = False  # q_proj, k_proj and v_proj have biases
    output_bias: bool = False  # o_proj has a bias
    mlp_bias: bool = False  # gate_proj, up_proj and down_proj have biases
    softcap: float | None = None  # soft-capping of the final logits (Gemma 2)
    activation: str = "silu"  # of the feed-forward block's gate, by its name in transformers; not read for Gemma
    windowed: tuple[int, int] = (0, 0)  # layers with sliding-window attention, tokens of the window
    mixed: tuple[tuple[int, Layer], ...] = ()
    per_layer: PerLayer | None = None
    stored: Stored | None = None  # how the checkpoint stores the matrices of its layers; None: in 16 or 32 bits
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)  # text settings of a mixed model
    positions: int | None = field(default=None, compare=False)  # tokens of its context, where they are known

    # The layers that are alike, and how many there are of them.
    stacks: tuple[tuple[int, Layer], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert not self.mixed or sum(count for count, _ in self.mixed) == self.layers
        object.__setattr__(self, "stacks", self.mixed or self._alike_layers())  # once: the planner asks very often

    def _alike_layers(self) -> tuple[tuple[int, Layer], ...]:
        path = {name: f"{'self_attn' if name in ATTENTION else 'mlp'}.{name}" for name in LINEAR}
        linear = [Linear(path[name], *self.linear(name)) for name in LINEAR]
        wide, narrow = self.norms
        w = self.widths
        biases = self.attention_bias * (w["q"] + 2 * w["kv"]) + self.output_bias * w["hidden"]
        mixer = Mixer(tuple(linear[:4]), biases + narrow * self.head_dim, self.heads, self.kv_heads, self.head_dim)
        feed = Feed(tuple(linear[4:]), self.ffn, other=self.mlp_bias * (2 * w["ffn"] + w["hidden"]))
        layer = Layer(mixer, feed, wide * self.hidden, wide, head_norms=narrow > 0)
        windowed, window = self.windowed
        if not windowed or windowed == self.layers:
            return ((self.layers, replace(layer, mixer=replace(mixer, window=window if windowed else 0))),)
        own = replace(layer, mixer=replace(mixer, window=window))
        return ((self.layers - windowed, layer), (windowed, own))

    @property
    def has_experts(self) -> bool:
        return any(layer.feed.experts for _, layer in self.stacks)

    def adapted(self, layer: Layer, targets: Sequence[str]) -> list[Linear]:
        """The linear modules of a layer that LoRA targets (learner.model.lora)."""
        names = targets if tuple(targets) != ALL else ATTENTION if self.has_experts else None
        return [one for one in layer.linears if names is None or one.name in names]

    def expert_widths(self, layer: Layer, targets: Sequence[str]) -> int:
        """in + out, summed over what LoRA adapts of a layer's experts: of each the gate and up projections as one
        matrix, and the down projection. 0 if the targets do not name experts."""
        experts = layer.feed.experts
        if experts is None or EXPERTS not in targets:
            return 0
        return experts.count * (2 * self.hidden + 3 * experts.ffn)

    @property
    def norms(self) -> tuple[int, int]:
        """How many RMS norms of width `hidden`, and of width `head_dim`, a layer has."""
        return NORMS[self.kind]

    @property
    def gemma(self) -> bool:
        """Whether this is a Gemma, whose norms and feed-forward blocks compute other functions
        (learner.model.fusion)."""
        return self.kind.startswith("gemma")

    @property
    def widths(self) -> dict[str, int]:
        """Widths by name: hidden, ffn, q (all query heads), kv (all key heads, or all value heads)."""
        return {
            "hidden": self.hidden,
            "ffn": self.ffn,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
        }

    def linear(self, target: str) -> tuple[int, int]:
        """(input width, output width) of a layer's linear module. Raises KeyError for a name that is not in LINEAR."""
        wide, out = LINEAR[target]
        return self.widths[wide], self.widths[out]

    def matrices(self) -> Iterator[tuple[int, Linear]]:
        """The linear modules, and how many there are of each."""
        for count, layer in self.stacks:
            yield from ((count, one) for one in layer.linears)
        if self.per_layer is not None:
            yield 1, self.per_layer.linear

    @property
    def linear_params(self) -> int:
        """Weights of the linear modules, without biases and experts: those that a 4-bit base stores in 4 bits."""
        return sum(count * one.weights for count, one in self.matrices())

    @property
    def expert_params(self) -> int:
        """Weights of the matrices of all experts, which are in memory whether a token goes to them or not."""
        return sum(count * layer.expert_weights for count, layer in self.stacks)

    @property
    def largest(self) -> int:
        """Weights of the largest linear module."""
        return max(one.weights for _, one in self.matrices())

    @property
    def other_params(self) -> int:
        """Parameters of all norms, biases, convolutions and routers."""
        norm = 0 if self.per_layer is None else self.per_layer.norm
        return sum(count * layer.other for count, layer in self.stacks) + norm + self.hidden

    @property
    def embedding_params(self) -> int:
        """Weights of the input embedding, of the head unless the two are tied, and of the embeddings per layer."""
        further = 0 if self.per_layer is None else self.per_layer.embedding
        return self.vocab * self.hidden * (1 if self.tied else 2) + further

    @property
    def params(self) -> int:
        """All parameters of the model; a tied head is counted once."""
        return self.linear_params + self.expert_params + self.other_params + self.embedding_params

    @property
    def active_params(self) -> int:
        """The parameters that are at work for a token: all but those of experts that it does not go to."""
        return self.params - sum(count * layer.idle for count, layer in self.stacks)

    def lora_params(self, rank: int, targets: tuple[str, ...] = ALL, shards: int = 1) -> int:
        """Weights of a LoRA adapter: rank * (in + out) per target and layer (Hu et al. 2021, section 4.1). With several
        shards those of one shard, which has a part of one of the two matrices (rollout.vllm.read_back)."""
        found = [(count, one) for count, layer in self.stacks for one in self.adapted(layer, targets)]
        if self.per_layer is not None and (targets == ALL or self.per_layer.linear.name in targets):
            found.append((1, self.per_layer.linear))
        of_experts = sum(count * self.expert_widths(layer, targets) for count, layer in self.stacks)
        widths = (
            count * (one.inputs // shards + one.outputs if one.name in SPLIT_BY_INPUT else
                     one.inputs + one.outputs // shards)
            for count, one in found
        )  # fmt: skip
        return rank * (sum(widths) + of_experts)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "model") -> "Shape":
        """Reads the shape from the content of a config.json; of a multimodal model only the text part counts.

        Raises:
            ValueError: the model_type is not known, or a setting that it needs is missing.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        if not isinstance(text, Mapping):
            raise ValueError(f"{name}: text_config of config.json must be a mapping, got {type(text).__name__}")
        kind = str(text.get("model_type"))
        if kind not in NORMS and kind not in FAMILIES:
            known = ", ".join((*NORMS, *FAMILIES))
            raise ValueError(f"{name}: memory of model_type {kind!r} is not known; known: {known}")
        if text is not config:
            text = UNSAID.get(kind, {}) | dict(text)
        try:
            stored = stored_as(config.get("quantization_config") or text.get("quantization_config"))
            shape = cls._mixed(config, text, kind, name) if kind in FAMILIES else cls._alike(config, text, kind, name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        longest = text.get("max_position_embeddings")
        return replace(shape, stored=stored, positions=longest if isinstance(longest, int) else None)

    @classmethod
    def _mixed(cls, config: Mapping[str, Any], text: Mapping[str, Any], kind: str, name: str) -> "Shape":
        """The shape of a model whose layers are not all alike."""
        hidden, vocab, count = whole(text, "hidden_size", "vocab_size", "num_hidden_layers")
        layers = FAMILIES[kind](text)
        attending = next((layer for layer in layers if layer.mixer.heads), None)
        if attending is None:
            raise ValueError("layer_types of config.json must name a layer of attention, and names none")
        mixer, gemma = attending.mixer, kind.startswith("gemma")
        beside = int(text.get("hidden_size_per_layer_input", 256) or 0) if gemma else 0
        rows = text.get("vocab_size_per_layer_input") or 262_144
        tie = text.get("tie_word_embeddings", text.get("tie_embedding", config.get("tie_word_embeddings")))
        return cls(
            name=name,
            kind=kind,
            hidden=hidden,
            ffn=attending.active_ffn,
            layers=count,
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            vocab=vocab,
            tied=kind in TIED if tie is None else bool(tie),
            softcap=text.get("final_logit_softcapping"),
            activation=str(text.get("hidden_act") or "silu"),
            mixed=tuple((number, layer) for layer, number in Counter(layers).items()),
            per_layer=PerLayer(
                rows * count * beside, Linear("per_layer_model_projection", hidden, count * beside), beside
            ) if beside else None,
            settings={key: value for key, value in text.items() if key != "quantization_config"},
        )  # fmt: skip

    @classmethod
    def _alike(cls, config: Mapping[str, Any], text: Mapping[str, Any], kind: str, name: str) -> "Shape":
        whole(text, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        heads = int(text["num_attention_heads"])
        bias = bool(text.get("attention_bias", False))
        gemma = kind.startswith("gemma")
        return cls(
            name=name,
            kind=kind,
            hidden=int(text["hidden_size"]),
            ffn=int(text["intermediate_size"]),
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or (256 if gemma else int(text["hidden_size"]) // heads)),
            vocab=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", gemma))),
            attention_bias=bias or kind == "qwen2",  # Qwen2 has biases that its config.json does not mention
            output_bias=bias,
            mlp_bias=bool(text.get("mlp_bias", False)),
            softcap=text.get("final_logit_softcapping"),
            activation=str(text.get("hidden_act") or "silu"),
            windowed=windowed_layers(text, kind, int(text["num_hidden_layers"])),
        )

    def to_config(self) -> dict[str, Any]:
        """The content of a config.json from which `from_config` reads this shape, its weights not quantised, and
        transformers builds the model."""
        if self.mixed:
            return dict(self.settings)
        config = {
            "model_type": self.kind,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.output_bias,
            "mlp_bias": self.mlp_bias,
            "final_logit_softcapping": self.softcap,
            "max_position_embeddings": 32768,
        }
        if not self.gemma:
            config["hidden_act"] = self.activation
        if self.windowed != (0, 0) or self.kind == "mistral":  # transformers gives Mistral a window by default
            config["sliding_window"] = self.windowed[1] or None
        return config


class UnknownModel(ValueError):
    """A model that is neither a folder nor in the table."""


def shape_of(model: str) -> Shape:
    """The shape of a model: a folder with a config.json, or a name in SHAPES (`Qwen2.5-3B`, with or without owner,
    `-Instruct` and date).

    Raises:
        UnknownModel: `model` is neither.
        ValueError: the architecture is not known, or config.json is wrong.
    """
    file = Path(model) / "config.json"
    if file.is_file():
        config = read_mapping(file)
        return Shape.from_config(config, Path(model).name)
    plain = VARIANT.sub("", model.rpartition("/")[2].lower())
    for name, shape in (SHAPES | SPARSE).items():
        if plain in (name.lower(), f"meta-{name.lower()}"):
            return shape
    known = ", ".join(SHAPES | SPARSE)
    raise UnknownModel(f"model: {model} is no folder with a config.json and not in the table: {known}")


def unshared(shape: Shape) -> str | None:
    """Why generator and learner cannot hold one base for both (memory.layout: shared), or None if they can."""
    if shape.has_experts:
        return f"{shape.name} has experts, which vLLM repacks"
    return f"{shape.name} is in {shape.stored.name}, which vLLM repacks" if shape.stored is not None else None


def hub_name(model: str, shape: Shape) -> str:
    """The Hugging Face name of a model of SHAPES that is given without its owner: of its checkpoint that follows
    instructions, since a reward needs answers to the question. A folder or a full name is returned as it is."""
    owner = next((owner for family, owner in OWNERS.items() if shape.name.startswith(family)), None)
    if "/" in model or Path(model).exists() or owner is None:
        return model
    name = model.lower() if owner == "google" else model
    if VARIANT.search(name.lower()) or name.startswith(("Qwen3", "gpt-oss")):  # these follow instructions by this name
        return f"{owner}/{name}"
    if owner == "google":
        return f"{owner}/{name}-it"
    head, version, number = name.partition("-v0")  # Mistral-7B-Instruct-v0.3
    return f"{owner}/{head}-Instruct{version}{number}"


def _table(rows: str) -> dict[str, Shape]:
    """Reads SHAPES: a model per line, with Shape's first ten fields, `softcap` and the tokens of a window (`-`:
    none)."""
    shapes = {}
    for row in rows.strip().splitlines():
        name, kind, *numbers, tied, softcap, window = row.split()
        hidden, ffn, layers, heads, kv_heads, head_dim, vocab = map(int, numbers)
        shapes[name] = Shape(
            name, kind, hidden, ffn, layers, heads, kv_heads, head_dim, vocab, tied == "tied",
            attention_bias=kind == "qwen2", softcap=None if softcap == "-" else float(softcap),
            windowed=(0, 0) if window == "-" else windowed_layers({"sliding_window": int(window)}, kind, layers),
            positions=next(tokens for family, tokens in POSITIONS.items() if name.startswith(family)),
        )  # fmt: skip
    return shapes


POSITIONS = {
    "SmolLM2": 8192, "Qwen2.5": 32768, "Qwen3": 40960, "Llama-3": 131072, "Mistral": 32768, "Gemma-2": 8192,
    "Gemma-3": 32768,
}  # fmt: skip


SHAPES = _table("""
SmolLM2-135M  llama        576  1536 30  9  3  64  49152 tied   -  -
SmolLM2-360M  llama        960  2560 32 15  5  64  49152 tied   -  -
SmolLM2-1.7B  llama       2048  8192 24 32 32  64  49152 tied   -  -
Qwen2.5-0.5B  qwen2        896  4864 24 14  2  64 151936 tied   -  -
Qwen2.5-1.5B  qwen2       1536  8960 28 12  2 128 151936 tied   -  -
Qwen2.5-3B    qwen2       2048 11008 36 16  2 128 151936 tied   -  -
Qwen2.5-7B    qwen2       3584 18944 28 28  4 128 152064 untied -  -
Qwen2.5-14B   qwen2       5120 13824 48 40  8 128 152064 untied -  -
Qwen3-0.6B    qwen3       1024  3072 28 16  8 128 151936 tied   -  -
Qwen3-1.7B    qwen3       2048  6144 28 16  8 128 151936 tied   -  -
Qwen3-4B      qwen3       2560  9728 36 32  8 128 151936 tied   -  -
Qwen3-8B      qwen3       4096 12288 36 32  8 128 151936 untied -  -
Qwen3-14B     qwen3       5120 17408 40 40  8 128 151936 untied -  -
Llama-3.2-1B  llama       2048  8192 16 32  8  64 128256 tied   -  -
Llama-3.2-3B  llama       3072  8192 28 24  8 128 128256 tied   -  -
Llama-3.1-8B  llama       4096 14336 32 32  8 128 128256 untied -  -
Mistral-7B-v0.3 mistral   4096 14336 32 32  8 128  32768 untied -  -
Gemma-2-2B    gemma2      2304  9216 26  8  4 256 256000 tied   30 4096
Gemma-2-9B    gemma2      3584 14336 42 16  8 256 256000 tied   30 4096
Gemma-3-270M  gemma3_text  640  2048 18  4  1 256 262144 tied   -  512
Gemma-3-1B    gemma3_text 1152  6912 26  4  1 256 262144 tied   -  512
""")
# A hybrid: three layers with the gated delta rule to one with attention. The text settings of its config.json, as a
# public copy of it has them; without towers and prediction heads.
SHAPES["Qwen3.5-4B"] = Shape.from_config(
    {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
    },
    "Qwen3.5-4B",
)  # fmt: skip


# Models with experts. The numbers are those that transformers' classes have as defaults (Qwen3.5), else of the
# published config.json as it is remembered; tests compare the sums with what was published. gpt-oss is in MXFP4.
SPARSE = {
    name: Shape.from_config(config, name)
    for name, config in {
        "Qwen3-30B-A3B": {
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
        },
        "Qwen3.5-35B-A3B": {
            "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
        },
        "gpt-oss-20b": {
            "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "mxfp4"},
        },
    }.items()
}  # fmt: skip


# Units of the memory model, and what learner and generator count alike.

GB = 10**9
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CONTEXT = 500 * 10**6  # CUDA context and kernels of a process with torch, with cuBLAS's workspace (8 to 32 MiB)

Parts = dict[str, int]  # bytes by part
# How the matrices of the frozen base are stored: as the checkpoint has them, in 4 bits that the run makes of them, or
# as a checkpoint of the same model would have them (cluster.memory.quantised.FORMATS).
Base = Literal["none", "nf4", "w4a16", "fp8", "mxfp4"]
Checkpointing = Literal["none", "mlp", "full"] | int
LoraRank = Literal[1, 2, 4, 8, 16, 32, 64, 128, 256]
OptimizerKind = Literal["adamw", "adamw_rounded", "adamw_8bit", "paged_adamw_8bit"]
# Device bytes per weight of the optimizer's two moments, without the scales of 8-bit blocks (another 1 %). Paged
# moments count 0, since they may lie in host memory.
STATE_BYTES: dict[OptimizerKind, int] = {"adamw": 8, "adamw_rounded": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}


def base_bytes(shape: Shape, base: Base, b: int, *, nested: bool = True) -> int:
    """Bytes of the frozen base model. base: none (as the checkpoint stores it), nf4, or a format of
    cluster.memory.quantised. b: bytes of an element that is not quantised; embeddings and head never are.

    nf4 (QLoRA 2305.14314, section 3) takes half a byte per linear weight, and a scale per 64 weights. nested: the
    layout in the learner, where a scale has 8 bits, there is a float32 scale per 256 scales, bitsandbytes keeps 272
    floats of code tables per matrix, and experts stay as they are, which are no linear modules there. Otherwise the
    layout in vLLM, which un-nests the scales as it loads: a scale is a float32 (0.5625 bytes per weight in all), with
    one code table of 16 floats per matrix.
    """
    if base == "nf4":
        linear, count = shape.linear_params, sum(count for count, _ in shape.matrices())
        if not nested:
            linear += shape.expert_params
        scales = linear // 64 + 4 * linear // (64 * 256) + 4 * 272 * count if nested else linear // 16 + 64 * count
        return b * (shape.params - linear) + linear // 2 + scales
    stored = shape.stored if base == "none" else FORMATS[base]
    if stored is None:
        return b * shape.params
    packed = [(count * one.weights, f"model.layers.0.{one.path}") for count, one in shape.matrices()]
    for count, layer in shape.stacks:
        path = f"model.layers.0.{'feed_forward' if shape.kind == 'llama4_text' else 'mlp'}.experts"
        packed.append((count * layer.expert_weights, path))
    quantised = sum(weights for weights, path in packed if stored.has(path))
    return b * (shape.params - quantised) + stored.bytes(quantised)


def total(*parts: Parts) -> int:
    """The sum of all bytes of all `parts`."""
    return sum(sum(part.values()) for part in parts)
