"""Whole sequences in micro-batches: every completion once, read up to its last token that is not padding."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch.micro_batch import read, whole_batches
from tests.learner.batch.test_micro_batch import sequence
from tests.learner.rollouts import make_group, uniform

TOKEN = st.integers(0, 3)  # 0 is the padding
GROUP = st.tuples(
    st.lists(TOKEN, min_size=1, max_size=4), st.lists(st.lists(TOKEN, max_size=5), min_size=1, max_size=4)
)


@settings(max_examples=80)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=3),
    budget=st.integers(1, 40),
    packed=st.booleans(),
    pad=st.sampled_from([0, None]),
)
def test_every_sequence_once_and_up_to_its_last_real_token(
    groups: list[tuple[list[int], list[list[int]]]], budget: int, packed: bool, pad: int | None
) -> None:
    tables = [make_group(prompt, own, [0.0] * len(own), uniform, position=i) for i, (prompt, own) in enumerate(groups)]
    wanted = []
    for whole in (prompt + completion for prompt, own in groups for completion in own):
        real = [i for i, token in enumerate(whole) if token != pad]
        wanted.append(whole[: real[-1] + 1 if real else 1])
    batches = whole_batches(read(tables), budget, packed=packed, pad=pad)
    found = {
        row: sequence(each.batch, end)
        for each in batches
        for row, end in zip(each.rows.tolist(), each.ends.tolist(), strict=True)
    }
    assert [found[row] for row in range(len(wanted))] == wanted
    assert sum(len(each.rows) for each in batches) == len(wanted)
    assert all(each.ids.numel() <= budget or len(each.rows) == 1 for each in batches)
    assert np.all(np.concatenate([each.batch.lengths for each in batches]) > 0)
