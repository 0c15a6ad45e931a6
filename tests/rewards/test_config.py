"""Configuration: strict at the door, unique names, and light to import. Secrets among arguments are used and never
shown.
"""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.errors import WrongInput
from rewards.config import MASK, RewardConfig, masked, resolved, resolved_names, scrubbed, trained_on, watches_of


@pytest.mark.parametrize(
    "bad",
    [
        {"weight": float("nan")},
        {"timeout_s": 0},
        {"on_error": "zero"},
        {"wieght": 1},
        {"use": ""},
        {"use": "adapter:"},
        {"watch": True, "weight": 0.0},
        {"watch": True, "on_error": "fail"},
    ],
)
def test_bad_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        RewardConfig(**{"use": "number", **bad})


def test_a_name_alone_is_a_reward() -> None:
    assert RewardConfig.model_validate("my.py:accuracy") == RewardConfig(use="my.py:accuracy")


def test_names_are_short_and_unique() -> None:
    uses = ["number", "a.py:acc", "pkg.mod:acc", "b.py:acc"]
    rewards = [RewardConfig(use=use) for use in uses] + [RewardConfig(use="number", name="acc_2")]
    assert resolved_names(rewards) == ["number", "acc", "acc_2", "acc_3", "acc_2_2"]


def test_a_watch_has_no_share_in_the_reward_and_every_other_setting_of_a_function() -> None:
    given = [{"use": "number"}, {"use": "number", "watch": True, "timeout_s": 2}, {"use": "adapter:a/b", "watch": True}]
    rewards = [RewardConfig.model_validate(one) for one in given]
    assert [one.share for one in rewards] == [1.0, None, None]
    assert [one.name for one in trained_on(rewards)] == ["number"]
    assert watches_of(rewards) == ("number_2", "b")
    assert [RewardConfig.model_validate(one.model_dump()) for one in rewards] == rewards  # as config.yaml has it


def test_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, rewards.config; print([m for m in sys.modules if m.split('.')[0] in {'pebble','numpy','torch'}])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Secrets among arguments are used and never shown.

HF = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    "key",
    ["token", "use_auth_token", "hf_token", "password", "db_password", "api_key", "OPENAI_API_KEY", "credentials",
     "aws_secret_access_key", "client_secret"],
)  # fmt: skip
def test_what_a_key_calls_a_secret_is_masked(key: str) -> None:
    assert masked({key: "abc", "name": "main"}) == {key: MASK, "name": "main"}
    assert masked({"deep": [{key: ["abc", 17]}]}) == {"deep": [{key: [MASK, MASK]}]}
    assert masked({key: "env:MY_TOKEN"}) == {key: "env:MY_TOKEN"}  # a name, no secret
    assert masked({key: True}) == {key: True}  # datasets': the one that is logged in
    assert masked({key: None}) == {key: None}


@pytest.mark.parametrize(
    "key",
    ["max_tokens", "eos_token", "stop_token", "think_token", "max_new_token", "tokenizer", "key", "monkey"],
)
def test_other_keys_are_not(key: str) -> None:
    assert masked({key: "abc"}) == {key: "abc"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HF, MASK),
        (f"Bearer {HF}", f"Bearer {MASK}"),
        ("sk-proj-" + "a" * 20, MASK),
        ("Bearer%20sk-proj-" + "a" * 20, f"Bearer%20{MASK}"),
        ("MY_sk-proj-" + "a" * 20, f"MY_{MASK}"),
        (repr("x\nsk-proj-" + "a" * 20), f"'x\\n{MASK}'"),
        ("AKIA" + "Q" * 16, MASK),
        ("https://me:pa55@host/data.json", f"https://{MASK}@host/data.json"),
        ("skill-level", "skill-level"),
        ("acme/multi-task-classification-model", "acme/multi-task-classification-model"),
        ("risk-adjusted-performance-of-it", "risk-adjusted-performance-of-it"),
        ("s3://bucket/a:b", "s3://bucket/a:b"),
    ],
)
def test_what_looks_like_a_secret_is_masked_under_any_key(text: str, shown: str) -> None:
    assert masked({"x": [text]}) == {"x": [shown]}
    assert scrubbed(f"error: {text}") == f"error: {shown}"


def test_all_storage_options_are() -> None:
    assert masked({"storage_options": {"anon": False, "client": {"id": "abc"}}}) == {
        "storage_options": {"anon": False, "client": {"id": MASK}}
    }


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    )
)
def test_arguments_without_secrets_stay_as_they_are(value: Any) -> None:
    assert masked({"a": value}) == {"a": value}


def test_messages_lose_the_secrets_of_the_arguments_they_are_about() -> None:
    args = {"token": "opensesame", "name": "main"}
    assert scrubbed("main: 401 for opensesame", args) == f"main: 401 for {MASK}"


def test_a_variable_is_looked_up_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "opensesame")
    args = {"token": "env:MY_TOKEN", "headers": {"a": ["env:MY_TOKEN"]}, "n": 1}
    assert resolved(args, "data.args") == {"token": "opensesame", "headers": {"a": ["opensesame"]}, "n": 1}
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(WrongInput, match="data.args: env:MY_TOKEN names .* not set; export MY_TOKEN"):
        resolved(args, "data.args")
    with pytest.raises(WrongInput, match=r"data.args: \*\*\* is what stored configurations show .* env:NAME"):
        resolved(masked({"token": "abc"}), "data.args")
    with pytest.raises(WrongInput):
        resolved(masked({"line": f"Bearer {HF}"}), "data.args")
    assert resolved({"criteria": "*** be strict ***"}, "data.args") == {"criteria": "*** be strict ***"}


def test_neither_dump_nor_repr_of_a_reward_shows_it() -> None:
    config = RewardConfig(use="number", args={"api_key": "opensesame"})
    assert config.args["api_key"] == "opensesame"
    for shown in (repr(config), str(config), config.model_dump_json(), str(config.model_dump())):
        assert "opensesame" not in shown
