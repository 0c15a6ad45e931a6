"""Handles of CUDA memory, as far as a machine without a card can tell: torch's names, and where the card's index is."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rollout import shared_base
from rollout.types import BaseNotShared


def test_torch_takes_the_arguments_that_are_handed_on() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[shared_base._DEVICE] == "storage_device"
    assert len(names) == 15  # a change of them is to be read
    assert hasattr(torch.UntypedStorage, "_share_cuda_")
    assert hasattr(torch.cuda, "ipc_collect")


@pytest.mark.parametrize("setting", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(BaseNotShared, match=f"without expandable segments, got {setting}="):
        shared_base.handles_of({})
