"""Sizes in bytes, as a configuration writes them."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from rollout.config import parse_bytes

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kb": 10**3, "MB": 10**6, "GB": 10**9}


@given(number=st.integers(0, 10**6), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
def test_sizes(number: int, unit: str, space: str) -> None:
    assert parse_bytes(f"{number}{space}{unit}") == number * UNITS[unit]
    assert parse_bytes(f"{number}.5 GiB") == number * 2**30 + 2**29


@given(text=st.from_regex(r"[0-9.eE+ -]{1,6}[kKMGiB]{0,3}", fullmatch=True))
def test_a_size_is_a_number_of_bytes_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        size = parse_bytes(text)
        assert isinstance(size, int)
        assert size >= 0
