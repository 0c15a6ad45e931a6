"""Reward functions are tried before a run: a broken one is one line."""

from pathlib import Path

import pytest

from cluster.errors import WrongInput
from rewards.call import Group
from rewards.check import try_rewards
from rewards.config import RewardConfig
from tests.rewards.pool_case import OneOf


def test_the_trial_tells_a_broken_reward_in_one_line(rewards_file: OneOf, tmp_path: Path) -> None:
    group = Group(["p", "p"], ["c", "d"], [[1], [2]], {"answer": ["1", "2"]})
    (tmp_path / "bad.py").write_text("import nothing_of_this_name")
    assert try_rewards([rewards_file("good"), RewardConfig(use="number")], group).scores.reward == [1.0, 1.0]
    for reward, sentence in [
        (rewards_file("boom"), "ValueError: boom"),
        (RewardConfig(use=f"{tmp_path}/bad.py:f"), "bad.py does not import: ModuleNotFoundError"),
        (
            RewardConfig(use="format", args={"tag": "a"}),
            "reward 'format': error: args: unknown tag; this reward takes tags",
        ),
        (rewards_file("words"), "error: returned str for sample 0, must return numbers or None: 'good'"),
    ]:
        with pytest.raises(WrongInput) as caught:
            try_rewards([rewards_file("good"), reward], group)
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", ["float(len(completion))", "float(completion.count('b') > 1)", "len(set(completion))"])
def test_a_function_of_texts_that_is_given_messages_is_told(tmp_path: Path, body: str) -> None:
    (tmp_path / "of.py").write_text(
        f"def texts(completions, **_):\n    return [{body} for completion in completions]\n"
        "def messages(completions, **_):\n    return [float(len(one[0]['content']) > 9) for one in completions]\n"
        "def both(completions, **_):\n"
        "    return [float('b' in (one if isinstance(one, str) else one[0]['content'])) for one in completions]\n"
    )
    texts, messages, both = (RewardConfig(use=f"{tmp_path}/of.py:{name}") for name in ("texts", "messages", "both"))
    group = Group.of([{"role": "user", "content": "?"}], ["ab", "abb"], [[1], [2]], {})
    if "set" in body:
        with pytest.raises(
            WrongInput, match=r"unhashable type: 'dict'.* It treats completions as texts, and is given "
        ):
            try_rewards([texts], group)
    else:
        (note,) = try_rewards([messages, texts, both], group).notes
        assert note.startswith("reward 'texts': gives ")
        assert "set data.chat_template: none" in note
    plain = Group.of("?", ["ab", "abb"], [[1], [2]], {})
    assert try_rewards([texts], plain).notes == ()
    assert try_rewards([RewardConfig(use="number")], Group.of([], ["a", "b"], [[1], [2]], {"answer": 1})).notes == ()


def test_a_function_that_never_answers_is_waited_for_twice_at_most(
    rewards_file: OneOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time tells whether only its first call is late."""
    monkeypatch.setattr("rewards.check.PATIENCE_S", 0.4)
    endless = rewards_file("endless", timeout_s=0.2, args={"where": str(tmp_path / "calls")})
    with pytest.raises(WrongInput, match="timeout: no answer within 0.2 s, so its process was killed"):
        try_rewards([endless], Group(["p"], ["c"], [[1]], {}))
    assert (tmp_path / "calls").read_text() == "called called "
