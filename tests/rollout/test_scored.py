"""What a reward model says, beside what a worker's functions said."""

from __future__ import annotations

import math

import pytest

from rollout.fakes import make_group
from rollout.schema import check, parts_of, with_part


def test_a_score_counts_as_a_function_s_would() -> None:
    status = ["ok", "none", "error", "ok", "ok"]
    late = "reward 'vowels': 0: stopped after 4 s"
    group = make_group(
        rewards=[1.0, None, None, 0.5, 0.5], reward_status=status, reward_error=[late, None, None, None, None]
    )
    scored = check(with_part(group, "helpful", 2.0, [0.25, -1.5, 3.0, math.inf, 1e31]))
    assert scored.column("reward").to_pylist() == [1.5, -3.0, None, None, None]
    assert scored.column("reward_status").to_pylist() == ["ok", "ok", "error", "nan", "nan"]
    errors = scored.column("reward_error").to_pylist()
    assert errors[:3] == [late, None, None]
    assert errors[3] == "reward 'helpful': nan: the reward model gave inf, which is no finite number."
    with pytest.raises(ValueError, match="the environment gives helpful as well; set rewards.<i>.name"):
        with_part(scored, "helpful", 1.0, [0.0] * 5)
    said = [parts["helpful"] for parts in parts_of(scored)]
    assert said == pytest.approx([0.25, -1.5, 3.0, math.nan, math.nan], nan_ok=True)
    assert [parts["vowels"] for parts in parts_of(scored)] == [1.0, None, None, 0.5, 0.5]
    kept = [name for name in group.column_names if not name.startswith("reward")]
    assert scored.select(kept).equals(group.select(kept))
