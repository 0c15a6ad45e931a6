"""YAML -> plain values, bounded: what comes out can be validated, shown and stored without surprises."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from cluster.reading import MIB, Unreadable, read_given, read_text

MOST = MIB // 2  # bytes of a file: PyYAML takes seconds for it
GIVEN = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")
LONGEST_NUMBER = 400  # letters: to base 60, which YAML knows, its time goes by their square
MAX_DEPTH = 32  # of nested lists and mappings
MAX_VALUES = 100_000  # an alias counts as often as it is used: a few lines may stand for billions
MAX_INT = 2**63


class ConfigError(ValueError):
    """The configuration is wrong; the text has one line per mistake."""


class NotYaml(ConfigError):
    """A text that YAML does not take."""


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, which PyYAML lets pass: the second block would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key.value, str))
        twice = sorted(key for key, count in keys.items() if count > 1)
        if twice:
            raise ConfigError(f"{', '.join(twice)}: given twice in one block (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
            raise ConfigError(f"a number must have at most {LONGEST_NUMBER} letters (line {node.start_mark.line + 1})")
        found: str = super().construct_scalar(node)
        return found


class _Dumper(yaml.SafeDumper):
    """Writes text that _Loader would take for a number in quotes."""


# 1e-4 is a number: YAML 1.1, which PyYAML reads, wants a dot in it.
for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), [*"-+0123456789"])


def dump(tree: Any) -> str:
    """A tree as read_yaml reads it."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML mapping; an empty file is an empty mapping. It may be a pipe that this process was started with, such as
    /dev/stdin or what a shell makes of <(...). Raises ConfigError."""
    try:
        return mapping_of(read_given(path, MOST) if GIVEN.fullmatch(str(path)) else read_text(path, MOST))
    except Unreadable as error:
        raise ConfigError(f"--config: {error}; give a YAML file, such as those in configs/") from None
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path}: {said}; the ready-made ones are in configs/") from None


def mapping_of(text: str) -> dict[str, Any]:
    """The mapping that a YAML text holds; an empty text is an empty mapping. Raises ConfigError."""
    tree = _parse(text)
    check_plain(tree)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"must be a mapping of keys, got {type(tree).__name__}")
    return tree


def parse_value(text: str) -> Any:
    """The value of an override: numbers, true/false, null, [lists], {maps} and 'quoted text' as in YAML, and all else
    as it stands (to YAML, `Solve: {question}` is a mapping, and what follows a # is nothing). Raises ConfigError."""
    try:
        value = _parse(text)
    except NotYaml:
        value = text
    marked = text.lstrip().startswith(("[", "{", "'", '"'))
    plain = value is None or isinstance(value, int | float)
    value = value if marked or (plain and "#" not in text) else text
    check_plain(value)
    return value


def _parse(text: str) -> Any:
    """The values of a YAML text; NotYaml where it is none, ConfigError where it repeats a key or is nested too deep."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(_too_deep()) from None
    except Exception as error:  # besides YAMLError whatever PyYAML meets in a value that its tag does not promise
        raise NotYaml(f"not YAML: {' '.join(str(error).split())[:300]}") from None


def check_plain(tree: Any) -> None:
    """Raises ConfigError where a tree is too deep (or holds itself) or too large, or has a value that no file holds."""
    left = MAX_VALUES
    waiting: list[tuple[Any, tuple[Any, ...]]] = [(tree, ())]
    while waiting:
        value, where = waiting.pop()
        left -= 1
        if left < 0:
            raise ConfigError(f"must hold at most {MAX_VALUES} values, aliases counted as often as they are used")
        if len(where) > MAX_DEPTH:
            raise ConfigError(_too_deep())
        if isinstance(value, dict):
            waiting += [(item, (*where, key)) for key, inner in value.items() for item in (key, inner)]
        elif isinstance(value, list | tuple | set):
            waiting += [(item, (*where, place)) for place, item in enumerate(value)]
        elif isinstance(value, bytes):  # which JSON has no form for
            raise ConfigError(f"{_dotted(where)}must not be bytes (!!binary), got {value[:40]!r}; write it as text")
        elif isinstance(value, int) and abs(value) > MAX_INT:
            raise ConfigError("a whole number must lie within 64 bits; write it as text in quotes")
        elif isinstance(value, str):
            _check_text(value)


def _dotted(where: tuple[Any, ...]) -> str:
    return f"{' '.join('.'.join(map(str, where)).split())[:200]}: " if where else ""


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ConfigError(f"text must not hold a null character, got {text[:40]!r}; remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"text must be UTF-8, got {text[:40]!r}; write it in UTF-8") from None


def _too_deep() -> str:
    return f"lists and mappings must be nested at most {MAX_DEPTH} deep; take levels out"
