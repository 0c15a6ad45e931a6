"""Each thing that an export is refused for, by itself."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch

from learner.driver.failure import RunEnded
from learner.tools.export.source import Proof, Said, check, compare

GOOD = Proof("bfloat16", tokens=9, recorded=True, moved=0.2, rms=0.05, worst=0.5, greedy=8, flipped=0)


def test_what_is_within_passes() -> None:
    check(GOOD)
    check(replace(GOOD, moved=None, rms=0.1, worst=1.0))
    check(replace(GOOD, dtype="float32", moved=1e-5, rms=1e-4, worst=1e-3))  # nothing was learned that could be lost


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"rms": 0.11, "moved": 9.0}, "must say what the adapter says"),
        ({"worst": 1.1}, "must say what the adapter says"),
        ({"flipped": 1}, "with 1 other greedy tokens"),
        ({"rms": nan}, "must say what the adapter says"),
        ({"worst": nan}, "must say what the adapter says"),
        ({"rms": 0.02, "dtype": "float32"}, "must say what the adapter says, within 0.0001 nats rms"),
        ({"moved": 0.09}, "rounding takes away 0.05 nats rms of the 0.09"),
    ],
)
def test_each_fault_alone_is_refused(fault: dict[str, float], told: str) -> None:
    with pytest.raises(RunEnded, match=told):
        check(replace(GOOD, **fault))  # type: ignore[arg-type]


def test_another_likeliest_token_counts_where_it_was_not_about_as_likely() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    expected = Said(logprobs, torch.tensor([4, 5, 6]), torch.tensor([0.5, 0.0005, 0.5]))
    found = Said(logprobs + torch.tensor([3e-4, 0.0, -4e-4]), torch.tensor([7, 8, 6]), torch.zeros(3))
    base = Said(logprobs - 2.0, expected.likeliest, expected.margin)
    proof = compare(expected, found, base, "float32", recorded=False)
    assert (proof.tokens, proof.greedy, proof.flipped, proof.recorded) == (3, 1, 1, False)
    assert proof.rms == pytest.approx(5e-4 / 3**0.5, rel=1e-2)
    assert proof.worst == pytest.approx(4e-4, rel=1e-2)
    assert proof.moved == pytest.approx(2.0)
