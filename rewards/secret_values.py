"""Secrets among the arguments of a data source or a reward: used, never shown or stored.

A configuration had better hold `env:NAME`, which is stored as it stands and looked up where it is used. What is given
in full (`token: hf_...`) is MASK in config.yaml, checkpoints, --dry-run and messages.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, PlainSerializer

MASK = "***"
_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
# The last word of a key, or its last two.
_SECRET_KEY = re.compile(
    r"(?:^|[_-])(?:password|passwd|secret|credentials?|authorization|(?:api|access|secret|private|account)[_-]?key"
    r"|token)$",
    re.IGNORECASE,
)
# A token of a text, which is no secret.
_TEXT_KEY = re.compile(
    r"(?:^|[_-])(?:pad|eos|bos|unk|cls|sep|mask|end|start|begin|stop|think(?:ing)?|answer|special|max_new|per)[_-]token$",
    re.IGNORECASE,
)
_MASKED = re.compile(r"\*{3}|(?:bearer|basic|token) \*{3}|.*://\*{3}@.*", re.IGNORECASE | re.DOTALL)
_SECRET_MAPPING = ("storage_options", "headers")  # all that stands in them
_SECRET_TEXT = re.compile(
    r"(?:(?<![A-Za-z])|(?<=\\[nrt]))sk-[A-Za-z0-9_-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|gh[opsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[abp]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]*|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)


class SecretError(ValueError):
    """An argument whose secret is not there; one sentence."""


def masked(args: Any) -> Any:
    """The arguments as they may be shown."""
    return _mapped(args, lambda value, secret: _hidden(value) if secret else scrubbed(value), False)


def scrubbed(value: Any, args: Any = None) -> Any:
    """Text without what looks like a secret, and without the secrets of `args`; what is no text as it is."""
    if not isinstance(value, str):
        return value
    for secret in sorted(set(_secrets(args)), key=len, reverse=True):
        value = value.replace(secret, MASK)
    return _SECRET_TEXT.sub(MASK, value)


def resolved(args: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The arguments with each `env:NAME` replaced by the variable. `key`: what messages call them.

    Raises SecretError where the variable is not set, or a mask stands in the secret's place.
    """

    def value_of(value: Any, secret: bool) -> Any:
        if isinstance(value, str) and _MASKED.fullmatch(value):
            raise SecretError(
                f"{key}: {MASK} is what stored configurations show in place of a secret; give it again, best by the "
                "name of an environment variable, env:NAME"
            )
        reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if reference is None:
            return value
        if reference[1] not in os.environ:
            raise SecretError(f"{key}: {value} names an environment variable that is not set; export {reference[1]}")
        return os.environ[reference[1]]

    found: dict[str, Any] = _mapped(args, value_of, False)
    return found


def _hidden(value: Any) -> Any:
    if value is None or isinstance(value, bool):  # token: true is datasets' "the one that is logged in"
        return value
    return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else MASK


def _secrets(args: Any) -> Iterator[str]:
    """The texts that `masked` would hide, but for those of one or two letters, which occur in every word."""
    found: list[str] = []

    def note(value: Any, secret: bool) -> None:
        if secret and _hidden(value) == MASK and len(str(value)) > 2:
            found.append(str(value))

    _mapped(args, note, False)
    return iter(found)


def _mapped(value: Any, change: Any, secret: bool) -> Any:
    """A copy with `change(leaf, whether a key above says that it is secret)` in place of each leaf."""
    if isinstance(value, Mapping):
        return {key: _mapped(item, change, secret or _is_secret(str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change, secret) for item in value]
    return change(value, secret)


def _is_secret(key: str) -> bool:
    return key in _SECRET_MAPPING or bool(_SECRET_KEY.search(key) and not _TEXT_KEY.search(key))


Arguments = Annotated[dict[str, Any], PlainSerializer(masked, return_type=dict[str, Any]), Field(repr=False)]
