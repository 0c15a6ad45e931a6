"""Memory that others may read: what they see, what becomes of it, and what a write comes to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout.shared_base import SharedFile, map_file
from rollout.types import BaseNotShared
from tests.shared_bases import manifest_of, mappings

WRITE = """
import torch
from rollout.shared_base import SharedFile, map_file
from tests.shared_bases import manifest_of
own = torch.arange(5.0)
file = SharedFile([own])
tensors = {"a": file.place(own).copy_(own)}
mapped = map_file(manifest_of(file, tensors))["a"]
tensors["a"][0] = 7  # the owner may write
print(mapped.tolist(), flush=True)
mapped.add_(1)
print("written", flush=True)
"""


def test_a_write_ends_the_process_that_maps() -> None:
    told = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (told.returncode, told.stdout) == (-signal.SIGSEGV, "[7.0, 1.0, 2.0, 3.0, 4.0]\n"), told.stderr


def test_what_is_mapped_outlives_its_owner_and_is_gone_with_the_last_tensor() -> None:
    others = mappings()
    own = {"a": torch.randn(3, 5).bfloat16(), "b": torch.arange(7.0)}
    file = SharedFile(own.values())
    tensors = {name: file.place(tensor).copy_(tensor) for name, tensor in own.items()}
    manifest = manifest_of(file, tensors)
    mapped = map_file(manifest)
    assert mappings() == others + 2
    del file, tensors
    assert mappings() == others + 1
    assert all(torch.equal(mapped[name], tensor.flatten()) for name, tensor in own.items())
    del mapped
    assert mappings() == others
    with pytest.raises(BaseNotShared, match=r"the generator's base cannot be mapped \(/proc/\d+/fd/\d+: .*own"):
        map_file(manifest)


def test_another_file_in_its_place_is_not_taken(tmp_path: Path) -> None:
    own = torch.arange(5.0)
    file = SharedFile([own])
    manifest = manifest_of(file, {"a": file.place(own)})
    with (tmp_path / "other").open("wb") as other:
        handle = manifest.pieces["a"].handle.replace(b'"fd": %d' % file._file.fileno(), b'"fd": %d' % other.fileno())
        assert handle != manifest.pieces["a"].handle
        wrong = replace(manifest, pieces={"a": replace(manifest.pieces["a"], handle=handle)})
        with pytest.raises(BaseNotShared, match=f"{os.getpid()}.*it is {tmp_path}/other now"):
            map_file(wrong)
