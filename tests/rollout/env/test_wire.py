"""What an environment may answer, before it leaves its process."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.env.host import (
    BadAnswer,
    encoded,
    parts,
    start_to_json,
    step_to_json,
)
from rollout.env.protocol import Start, Step


def user(**message: Any) -> Step:
    return Step(({"role": "user", "content": "a"} | message,))


NESTED: Any = []
for _ in range(500):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("check", "answer", "sentence"),
    [
        (step_to_json, user(content="a\ud83d"), "step: a message's content must be text that UTF-8 can hold"),
        (step_to_json, user(name=["b"]), "step: a message's name must be text that UTF-8 can hold, got .'b'"),
        (step_to_json, user(tool_call_id=3), "step: a message's tool_call_id must be text"),
        (step_to_json, Step(done=True, metrics={"\ud83d": 1.0}), "step: numbers must come as a mapping from names"),
        (step_to_json, Step(done=True, warnings={"tool": None}), "step: warnings must come as a mapping"),  # type: ignore[dict-item]
        (step_to_json, Step(done=True, reward=1e39), "step: reward must be a finite number of at most 1e30, got 1e"),
        (parts, {"env": 5.0}, "score: a reward is named env already"),
        (start_to_json, Start((), ({"name": "search"},)), 'reset: tools must be a sequence of {"type": "function"'),
        (lambda answer: encoded("step", step_to_json(answer)), user(seen=NESTED), "step: .* nested at most 100 deep"),
    ],
)
def test_what_no_tokenizer_template_or_ledger_takes_is_said(check: Any, answer: Any, sentence: str) -> None:
    with pytest.raises(BadAnswer, match=sentence):
        check(answer)
