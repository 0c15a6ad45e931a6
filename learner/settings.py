"""YAML + dotted overrides -> RunConfig; every error at once, each with field, rule, value and the nearest key."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from learner.config import RunConfig


class ConfigError(ValueError):
    """The configuration is wrong; the text has one line per mistake."""


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, which PyYAML lets pass: the second block would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"{', '.join(twice)}: given twice in one block (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)


def load(path: str | None, overrides: Sequence[str]) -> RunConfig:
    """The validated configuration of a file (or none) with `a.b=value` overrides on top.

    Raises ConfigError. List items are reached by index: rewards.0.weight=2.
    """
    tree = read_yaml(Path(path)) if path is not None else {}
    for override in overrides:
        key, sign, text = override.removeprefix("--").partition("=")
        if not sign or not key:
            raise ConfigError(f"{override!r}: an override is written key=value, for example learner.learning_rate=1e-4")
        _assign(tree, key.split("."), parse_value(text), key)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e) for e in error.errors())) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML mapping; an empty file is an empty mapping."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; the ready-made ones are in configs/") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: must be a mapping of keys, got {type(tree).__name__}")
    return tree


def parse_value(text: str) -> Any:
    """The value of an override: numbers, true/false, null, [lists], {maps} and 'quoted text' as in YAML, and all else
    as it stands (to YAML, `Solve: {question}` is a mapping, and what follows a # is nothing)."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    marked = text.lstrip().startswith(("[", "{", "'", '"'))
    plain = value is None or isinstance(value, int | float)
    return value if marked or (plain and "#" not in text) else text


def _assign(tree: Any, keys: Sequence[str], value: Any, whole: str) -> None:
    for depth, key in enumerate(keys[:-1]):
        if isinstance(tree, list):
            tree = tree[_index(tree, key, whole)]
        elif isinstance(tree, dict):
            if tree.get(key) is None:
                tree[key] = {}
            tree = tree[key]
        if not isinstance(tree, dict | list):
            raise ConfigError(f"{whole}: {'.'.join(keys[: depth + 1])} is a {type(tree).__name__}, it has no keys")
    if isinstance(tree, list):
        tree[_index(tree, keys[-1], whole)] = value
    else:
        tree[keys[-1]] = value


def _index(items: list[Any], key: str, whole: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise ConfigError(f"{whole}: {key!r} must be an index below {len(items)} into a list")
    return int(key)


def _sentence(error: Mapping[str, Any]) -> str:
    """One pydantic error as: field: rule (got value); next step."""
    where = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] == "extra_forbidden":
        known = _keys_at(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{where}: required, but not given"
    message = error["msg"].removeprefix("Value error, ")
    shown = repr(error["input"])
    return f"{where}: {message}" + ("" if "got" in message else f" (got {shown[:80]})")


def _keys_at(location: Sequence[Any]) -> list[str]:
    """The keys that the model at this location knows."""
    model: Any = RunConfig
    for part in location:
        if isinstance(part, int):
            continue
        model = model.model_fields[part].annotation if part in getattr(model, "model_fields", {}) else None
        model = next((a for a in (model, *get_args(model)) if isinstance(a, type) and issubclass(a, BaseModel)), None)
        if model is None:
            return []
    return sorted(model.model_fields)


def describe() -> str:
    """Every key with its type and default, one a line, for --help."""
    lines: list[str] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            inner = next((a for a in (field.annotation, *get_args(field.annotation)) if _is_model(a)), None)
            if inner is not None and _is_model(field.annotation):
                walk(inner, f"{prefix}{name}.")
            elif inner is not None:
                walk(inner, f"{prefix}{name}.<i>.")
            else:
                default = "required" if field.is_required() else field.get_default(call_default_factory=True)
                lines.append(f"  {prefix}{name} = {default}")

    walk(RunConfig, "")
    return "\n".join(lines)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration, complete, loadable again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
