"""The weights of a checkpoint that are kept in several types."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.model.export import save_masters
from rollout.data.model_files import WEIGHTS_FILE

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("kinds", "written"),
    [((FLOAT32, FLOAT32), FLOAT32), ((BFLOAT16, BFLOAT16), BFLOAT16), ((BFLOAT16, FLOAT32), FLOAT32)],
)
def test_no_bit_is_lost_where_transformers_keeps_some_weights_in_float32(
    tmp_path: Path, kinds: tuple[torch.dtype, torch.dtype], written: torch.dtype
) -> None:
    torch.manual_seed(0)
    masters = {name: torch.randn(5, 3).to(kind) for name, kind in zip("ab", kinds, strict=True)}
    policy: Any = SimpleNamespace(masters=masters)
    save_masters(policy, tmp_path / "new")
    found = load_file(tmp_path / "new" / WEIGHTS_FILE)
    assert found.keys() == masters.keys()
    for name, master in masters.items():
        assert found[name].dtype == written
        assert torch.equal(found[name].to(FLOAT32), master.to(FLOAT32))
