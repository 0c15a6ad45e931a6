"""Whole weights that stay in the learner's memory, and who reads them while they may be overwritten."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollout.safetensors_stream import Source, pack, unpack
from rollout.types import AdapterCorrupt, EngineError, Weights, WeightsInFile
from rollout.weights_file import WeightsFile, WeightsReader


def sources(value: float, size: int = 3) -> dict[str, Source]:
    return {"a.weight": Source.of(torch.full((size, 2), value)), "b.weight": Source.of(torch.arange(5.0) + value)}


@pytest.fixture
def file() -> Iterator[WeightsFile]:
    one = WeightsFile()
    yield one
    one.close()


async def take(weights: Weights) -> str:
    weights.verify()
    return weights.digest


def packed(file: WeightsFile, version: int, size: int = 3) -> WeightsInFile:
    return file.pack(version, sources(float(version), size), torch.bfloat16)


def run(reader: WeightsReader, place: WeightsInFile, load: Callable[[Weights], Awaitable[str]] = take) -> str | None:
    return asyncio.run(reader.load(place, load))


def test_what_is_read_is_what_was_written_and_costs_nothing_between_two_policies(file: WeightsFile) -> None:
    reader = WeightsReader()
    for version in (1, 2, 3):
        place, found = packed(file, version), dict[str, torch.Tensor]()
        assert place.policy_id == Weights.build(version, pack(sources(version), torch.bfloat16)).policy_id

        async def load(weights: Weights, found: dict[str, torch.Tensor] = found) -> str:
            found.update((name, tensor.clone()) for name, tensor in unpack(weights.payload))
            return await take(weights)

        assert run(reader, place, load) == place.digest
        assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
            "a.weight": (torch.bfloat16, [[version] * 2] * 3),
            "b.weight": (torch.bfloat16, [version + i for i in range(5)]),
        }
        assert place.path == packed(file, version).path  # in the place of the one before
        assert "gleaner-weights" not in Path("/proc/self/maps").read_text()  # neither side has it mapped


def test_a_policy_that_is_overwritten_is_no_policy_before_while_and_after_it_is_loaded(file: WeightsFile) -> None:
    reader, old = WeightsReader(), packed(file, 1)
    new = packed(file, 2)
    assert run(reader, old) is None
    assert run(reader, new) == new.digest

    async def too_slow(weights: Weights) -> str:
        packed(file, 3)
        return weights.digest

    async def torn(weights: Weights) -> str:
        packed(file, 3)
        weights.verify()
        return weights.digest

    for load in (too_slow, torn):
        assert run(reader, packed(file, 2), load) is None

    async def half_written(weights: Weights) -> str:
        file._room(len(weights.payload))  # and no further
        return weights.digest

    assert run(reader, packed(file, 4), half_written) is None


def test_bytes_that_changed_on_their_way_are_an_error(file: WeightsFile) -> None:
    place = packed(file, 1)
    with pytest.raises(AdapterCorrupt, match="weights v1: the digest of its"):
        run(WeightsReader(), place._replace(digest="0" * 64))


def test_more_weights_than_before_lie_in_another_file(file: WeightsFile) -> None:
    reader, small, large = WeightsReader(), packed(file, 1), packed(file, 2, size=300)
    assert (run(reader, small), run(reader, large)) == (None, large.digest)


def test_a_learner_that_has_ended_is_no_error_of_the_reader_and_memory_of_another_user_is(
    file: WeightsFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = packed(file, 1)
    assert run(WeightsReader(), place._replace(path="/proc/1000000000/fd/3")) is None
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)  # the number is another file's by now
    assert run(WeightsReader(), place._replace(path=f"/proc/self/fd/{other}")) is None
    os.close(other)

    def forbidden(path: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "readlink", forbidden)
    with pytest.raises(EngineError, match=r"weights v1: the learner's memory cannot be mapped .*must run as one user"):
        run(WeightsReader(), place)
