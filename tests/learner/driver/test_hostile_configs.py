"""The door under attack: whatever a file or an override holds, it ends in one sentence."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import WrongInput
from learner.config.load import load_config
from tests.learner.driver.test_config_io import NEEDED, refusal

# What a file or a command line may hold, tuned to YAML's own signs: brackets, anchors, tags, dates, numbers.
HOSTILE = st.lists(
    st.sampled_from(
        ["[", "]", "{", "}", ":", ",", "&a ", "*a", "!!int ", "!!python/name:os ", "- ", "#", "'", '"', "|\n"]
    )
    | st.sampled_from(
        ["9" * 5000, "2024-99-99", "0x" + "f" * 40, "1e999", ".inf", "1:99:99", "~", "\0", "\ud800", "\n"]
    )
    | st.text(max_size=4),
    max_size=12,
).map("".join)
KEYS = st.sampled_from(
    ["model", "path", "data", "args", "rewards", "0", "use", "rollout", "kv_cache", "steps", "", "²"]
)


def what_is_said(path: str | None, overrides: list[str]) -> str | None:
    """What is said of a configuration that is refused; any exception but WrongInput goes on to the test."""
    try:
        load_config(path, overrides)
    except WrongInput as error:
        return str(error)
    return None


@given(overrides=st.lists(st.tuples(st.lists(KEYS, min_size=1, max_size=4), HOSTILE), max_size=3))
def test_no_override_ends_in_anything_but_a_sentence(overrides: list[tuple[list[str], str]]) -> None:
    assert what_is_said(None, [*NEEDED, *(f"{'.'.join(keys)}={value}" for keys, value in overrides)]) != ""


@given(text=HOSTILE)
def test_no_file_ends_in_anything_but_a_sentence(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert what_is_said(str(path), NEEDED) != ""


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("name: \xe9t\xe9\n".encode("latin-1"), "must be UTF-8 text, got the byte 0xe9 at 6; give a YAML file"),
        (b"steps: " + b"9" * 10_000, "a number must have at most 400 letters"),
        (b"data: " + b"[" * 5000 + b"]" * 5000, "lists and mappings must be nested at most 32 deep"),
        (b"data: " + b"[" * 40 + b"]" * 40, "lists and mappings must be nested at most 32 deep"),
        (b"data: {args: &all {again: *all}}", "lists and mappings must be nested at most 32 deep"),
        (LAUGHS.encode(), "must hold at most 100000 values, aliases counted as often as they are used"),
        (b"seed: 2024-99-99", "not YAML: month must be in 1..12"),
        (b'name: "a\\0b"', "text must not hold a null character"),
        (
            b"rewards: [{use: f.py:f, args: {v: !!binary /w==}}]",
            "rewards.0.args.v: must not be bytes (!!binary), got b'\\xff'; write it as text",
        ),
        (b"data: {args: {? !!binary aGk= : 1}}", "data.args.b'hi': must not be bytes (!!binary), got b'hi'"),
        (b"steps: 99999999999999999999", "a whole number must lie within 64 bits"),
    ],
)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    (said,) = refusal(path=path)
    assert said.startswith((f"--config {path}: {sentence}", f"--config: {path} {sentence}"))
