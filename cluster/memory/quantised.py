"""How a quantised checkpoint stores the matrices of its layers, read from quantization_config in config.json: for the
planner, which counts bytes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What the name of a module of a decoder's layer begins with. A tower's layers, which are not counted, have other names.
LAYER = re.compile(r"^(?:(?:model|language_model|decoder|transformer)\.)*layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class Stored:
    """A format of weights. name: for users. bits: of a weight. group: weights that share a scale; 0: so many that it
    does not count (a row, a block of 128 x 128). scale, zero: bits of a scale and of a zero point. ignored: modules
    that are not quantised, by name or as `re:` and a regular expression. experts: whether only experts are
    quantised."""

    name: str
    bits: int
    group: int = 0
    scale: int = 0
    zero: int = 0
    ignored: tuple[str, ...] = ()
    experts: bool = False

    def has(self, path: str) -> bool:
        """Whether the module of this path in layer 0 is stored in this format. A module is taken for one that is not
        quantised if that is so in some layer."""
        if self.experts:
            return path.endswith(".experts")
        return not any(_names(one, path) for one in self.ignored)

    def bytes(self, weights: int) -> int:
        """Bytes of so many weights with their scales and zero points."""
        shared = (self.scale + self.zero) * weights // self.group if self.group else 0
        return (self.bits * weights + shared) // 8


def _names(ignored: str, path: str) -> bool:
    if ignored.startswith("re:"):
        inner = path.removeprefix("model.")
        whole = [f"{prefix}.{inner}" for prefix in ("language_model.model", "model.language_model")]
        names = whole if "language_model" in ignored else [path]
        return any(re.match(ignored.removeprefix("re:"), name) for name in names)
    within = path.partition(".layers.0.")[2]
    found = re.sub(r"^(?:model\.)?language_model\.(?:model\.)?", "", LAYER.sub("", ignored))
    return found == within or within.startswith(f"{found}.") or within.endswith(f".{found}")


# The formats that `gleaner plan` compares, as checkpoints commonly have them: 4 bits with a 16-bit scale for 128
# weights; 8 bits with a scale per row or block; MXFP4 (OCP Microscaling Formats 1.0), 8 bits of exponent for 32.
FORMATS = {
    "w4a16": Stored("W4A16", 4, 128, 16),
    "fp8": Stored("FP8", 8),
    "mxfp4": Stored("MXFP4", 4, 32, 8),
}


def stored_as(config: Mapping[str, Any] | None) -> Stored | None:
    """The format that a quantization_config describes; None if there is none. Raises ValueError for one that is not
    known, or that lacks a setting."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config of config.json must be a mapping, got {type(config).__name__}")
    method = config.get("quant_method")
    ignored = _ignored(config)
    if method == "compressed-tensors":
        return _compressed(config, ignored)
    if method in ("gptq", "awq"):
        bits, group = config.get("bits"), config.get("group_size")
        if bits not in (2, 3, 4, 8) or type(group) is not int:
            raise ValueError("quantization_config of config.json must give bits (2, 3, 4 or 8) and group_size")
        return Stored(f"{method.upper()} of {bits} bits", bits, max(group, 0), 16, bits, ignored)
    if method == "fp8":
        return Stored("FP8", 8, ignored=ignored)
    if method == "mxfp4":
        return Stored("MXFP4", 4, 32, 8, experts=True)
    raise ValueError(
        f"quantization_config of config.json must have a quant_method whose bytes are known (compressed-tensors, gptq, "
        f"awq, fp8, mxfp4), got {method!r}"
    )


def _ignored(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that are not quantised."""
    lists = (config.get(key) for key in ("ignore", "ignored_layers", "modules_to_not_convert"))
    found = tuple(map(str, next(filter(None, lists), ())))
    for one in found:
        try:
            re.compile(one.removeprefix("re:") if one.startswith("re:") else "")
        except re.error:
            raise ValueError(
                f"ignore of quantization_config must hold regular expressions, got {one!r}; mend config.json"
            ) from None
    return found


def _compressed(config: Mapping[str, Any], ignored: Sequence[str]) -> Stored:
    """A checkpoint of compressed-tensors. With several groups of modules that differ in their weights' type the bytes
    are not known here."""
    groups = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    bits, kind = (groups[0].get(key) for key in ("num_bits", "type")) if groups else (None, None)
    if type(bits) is not int or kind not in ("int", "float") or any(one != groups[0] for one in groups):
        raise ValueError(
            "quantization_config of config.json must have config_groups whose weights are all of one num_bits and type"
        )
    name = f"FP{bits}" if kind == "float" else f"W{bits}A{'16' if _weights_only(config) else '8'}"
    zero = 0 if kind == "float" or groups[0].get("symmetric", True) else bits
    return Stored(name, bits, max(groups[0].get("group_size") or 0, 0), 16, zero, tuple(ignored))


def _weights_only(config: Mapping[str, Any]) -> bool:
    return all(not group.get("input_activations") for group in config["config_groups"].values())
