"""Memory that others may read: what they see, what becomes of it, and what a write comes to."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from cluster.errors import WrongInput
from rollout import shared_base
from rollout.shared_base import SharedFile, map_file
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
    told = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, cwd=Path(__file__).parents[2])
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
    with pytest.raises(WrongInput, match=r"the generator's base cannot be mapped \(/proc/\d+/fd/\d+: .*auto"):
        map_file(manifest)


def test_another_file_in_its_place_is_not_taken(tmp_path: Path) -> None:
    own = torch.arange(5.0)
    file = SharedFile([own])
    manifest = manifest_of(file, {"a": file.place(own)})
    with (tmp_path / "other").open("wb") as other:
        handle = manifest.pieces["a"].handle.replace(b'"fd": %d' % file._file.fileno(), b'"fd": %d' % other.fileno())
        assert handle != manifest.pieces["a"].handle
        wrong = replace(manifest, pieces={"a": replace(manifest.pieces["a"], handle=handle)})
        with pytest.raises(WrongInput, match=f"{os.getpid()}.*it is {tmp_path}/other now"):
            map_file(wrong)


# A digest of memory sees what an accident does to it, whatever the pieces in which it is read.


def test_one_bit_two_places_type_and_size_are_seen() -> None:
    piece = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = shared_base.digest_of_piece(piece)
    assert shared_base.digest_of_piece(piece.clone().view(10, 100)) == before
    flipped, swapped, sign = piece.clone(), piece.clone(), torch.zeros(4)
    flipped.view(torch.int16)[513] ^= 1
    swapped[[3, 900]] = swapped[[900, 3]]
    others = [flipped, swapped, piece[:-1], piece.view(torch.float16)]
    assert len({before, *map(shared_base.digest_of_piece, others)}) == 5
    assert shared_base.digest_of_piece(sign) != shared_base.digest_of_piece(-sign)


def test_pieces_in_which_it_is_read_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    whole = shared_base.digest_of_piece(piece)
    monkeypatch.setattr(shared_base, "CHUNK", 7)
    assert shared_base.digest_of_piece(piece) == whole


# Handles of CUDA memory, as far as a machine without a card can tell: torch's names, and where the card's index is.


def test_torch_takes_the_arguments_that_are_handed_on() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[shared_base._DEVICE] == "storage_device"
    assert len(names) == 15  # a change of them is to be read
    assert hasattr(torch.UntypedStorage, "_share_cuda_")
    assert hasattr(torch.cuda, "ipc_collect")


@pytest.mark.parametrize("setting", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(WrongInput, match=f"without expandable segments, got {setting}="):
        shared_base.handles_of({})
