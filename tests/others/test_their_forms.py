"""Functions in the forms of OpenRLHF and open-r1, and reasoning-gym's scorer, say what they say when called."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.others import in_their_form as theirs
from tests.others.asked import asked, each, group_of, same

pytest.importorskip("reasoning_gym")
FILE = Path(__file__).with_name("in_their_form.py")
TEXTS = ["12", "<think>\n9 + 3\n</think>\n<answer>\n12\n</answer>", "13", "", "  12 \ud7ff", "<answer>12"]
NAMES = ("openrlhf", "openrlhf_tensor", "open_r1_tags", "open_r1_lengths", "gym")


async def test_values_are_those_of_direct_calls() -> None:
    metadata = {"source_dataset": "chain_sum"}
    group = group_of(TEXTS, answer="12", solution="12", metadata=metadata)
    found = await asked({f"{FILE}:{name}": {} for name in NAMES}, [group])
    prompts = ["How much is it?"] * len(TEXTS)
    queries, labels = [f"{prompt}{text}" for prompt, text in zip(prompts, TEXTS, strict=True)], ["12"] * len(TEXTS)
    wanted = {
        "openrlhf": theirs.openrlhf(queries, prompts, labels)["rewards"].tolist(),
        "openrlhf_tensor": theirs.openrlhf_tensor(queries, prompts, labels).tolist(),
        "open_r1_tags": theirs.open_r1_tags(group.completions),
        "open_r1_lengths": await asyncio.create_task(theirs.open_r1_lengths(group.completions, labels)),
        "gym": each(theirs.gym, TEXTS, answer="12", metadata=metadata),
    }
    for name in NAMES:
        assert same(found[f"{FILE}:{name}"], [wanted[name]]), name
        assert len(set(wanted[name])) > 1, name
