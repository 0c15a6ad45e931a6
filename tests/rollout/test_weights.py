"""Our safetensors writer and reader against the library's."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save

from cluster.actor import ValueLost
from rollout.types import AdapterCorrupt, EngineError, Weights, WeightsInFile, digest_of_weights
from rollout.weights import (
    Source,
    WeightsFile,
    WeightsReader,
    as_bytes,
    in_halves,
    in_pairs,
    pack,
    turned_heads,
    unpack,
    write,
)

names = st.text(min_size=1).filter(lambda name: name != "__metadata__")  # which is the format's own
shapes = st.dictionaries(names, st.lists(st.integers(1, 5), max_size=3), max_size=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(shapes=shapes)
def test_it_is_the_format_in_both_directions(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shapes: dict[str, list[int]]
) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    wanted = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    sources = {name: Source.of(tensor) for name, tensor in tensors.items()}
    payload, file = pack(sources, dtype), tmp_path_factory.getbasetemp() / "written.safetensors"
    write(file, sources, dtype)
    for found in (
        load(bytes(payload)), dict(unpack(payload)), dict(unpack(save(wanted, metadata={"format": "pt"}))),
        load_file(file), dict(unpack(file.read_bytes())),
    ):  # fmt: skip
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert all(tensor.dtype == dtype for tensor in found.values())


# Whole weights that stay in the learner's memory, and who reads them while they may be overwritten.


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


def mapped() -> bool:
    return "gleaner-weights" in Path("/proc/self/maps").read_text()


def test_what_is_read_is_what_was_written_and_nothing_stays_mapped_on_a_cpu(file: WeightsFile) -> None:
    reader, places = WeightsReader(), list[WeightsInFile]()
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
        assert not mapped()
        places.append(place)
    assert len({place.inode for place in places}) == 1
    assert [place.offset == places[0].offset for place in places] == [True, False, True]


def test_a_policy_stays_until_the_one_after_the_next_is_written(file: WeightsFile) -> None:
    reader, first, second = WeightsReader(), packed(file, 1), packed(file, 2)
    assert (run(reader, first), run(reader, second)) == (first.digest, second.digest)
    third = packed(file, 3)
    assert (run(reader, first), run(reader, second), run(reader, third)) == (None, second.digest, third.digest)


def test_a_policy_that_is_overwritten_while_it_is_loaded_was_not_loaded(file: WeightsFile) -> None:
    async def too_slow(weights: Weights) -> str:
        packed(file, 11)
        packed(file, 12)
        return weights.digest

    async def torn(weights: Weights) -> str:
        await too_slow(weights)
        weights.verify()
        return weights.digest

    async def half_written(weights: Weights) -> str:
        packed(file, 11)
        file._room(len(weights.payload))  # and no further
        return weights.digest

    for version, loading in enumerate((too_slow, torn, half_written)):
        assert run(WeightsReader(), packed(file, version), loading) is None


def test_weights_that_came_another_way_are_found_by_other_processes_in_one_place() -> None:
    file, reader, places = WeightsFile(places=1), WeightsReader(), set[tuple[int, int]]()
    for version in (1, 2, 3):
        weights = Weights.build(version, pack(sources(version), torch.bfloat16))
        place = file.copy(weights)
        with reader.payload(place) as payload:
            assert payload == weights.payload
        del payload
        assert run(reader, place) == weights.digest
        assert not mapped()
        places.add((place.inode, place.offset))
    assert len(places) == 1
    file.close()
    with pytest.raises(ValueLost), reader.payload(place):
        pass


def test_processes_of_a_generator_find_them_though_the_learner_has_ended(file: WeightsFile) -> None:
    place, own = packed(file, 1), list[WeightsInFile]()

    async def load(weights: Weights) -> str:
        file.close()
        assert weights.place is not None
        with WeightsReader().payload(weights.place) as payload:
            assert payload == weights.payload
        own.append(weights.place)
        return weights.digest

    assert run(WeightsReader(), place, load) == place.digest
    with pytest.raises(ValueLost), WeightsReader().payload(own[0]):  # nor is it kept open for longer
        pass


def test_bytes_that_changed_on_their_way_are_an_error(file: WeightsFile) -> None:
    place = packed(file, 1)
    with pytest.raises(AdapterCorrupt, match="weights v1: the digest of its"):
        run(WeightsReader(), place._replace(digest="0" * 64))


def test_closing_twice_closes_nothing_else(file: WeightsFile) -> None:
    packed(file, 1)
    file.close()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    before = [os.fstat(number).st_ino for number in (1, *opened)]
    file.close()
    assert [os.fstat(number).st_ino for number in (1, *opened)] == before  # OSError for one that is closed
    for number in opened:
        os.close(number)


def test_more_weights_than_before_lie_in_another_file(file: WeightsFile) -> None:
    reader, small, large = WeightsReader(), packed(file, 1), packed(file, 2, size=300)
    assert small.path == large.path  # the number of the old one is free again
    assert run(reader, large) == large.digest
    with pytest.raises(ValueLost):
        run(reader, small)


def test_weights_that_are_gone_and_weights_that_cannot_be_reached(
    file: WeightsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = packed(file, 1)
    with pytest.raises(ValueLost, match="weights v1: they are gone with the learner's process"):
        run(WeightsReader(), place._replace(path="/proc/1000000000/fd/3"))
    with pytest.raises(EngineError, match=r"weights v1: .* must run in one container"):
        run(WeightsReader(), place._replace(machine="another"))

    def forbidden(*path: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(EngineError, match=r"weights v1: the learner's memory cannot be mapped .*must run as one user"):
        run(WeightsReader(), place)


class Card:
    """CUDA's runtime, which refuses or takes what it is asked to register. given: addresses that it has."""

    def __init__(self, error: int) -> None:
        self.error, self.asked, self.given = error, 0, set[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked += 1
        self.given |= set() if self.error else {address}
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.given.remove(address)
        return 0


@pytest.mark.parametrize("error", [0, 2])
def test_on_a_card_memory_is_registered_once_or_refused_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    card, file, reader = Card(error), WeightsFile(), WeightsReader()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: card)
    for version in (1, 2, 3):
        place = packed(file, version)
        assert run(reader, place) == place.digest
    assert (card.asked, len(card.given)) == (2, 0 if error else 2)  # of both ends
    assert ["did not register" in record.getMessage() for record in caplog.records] == [True] * (2 if error else 0)
    file.close()
    reader._let_go()
    assert card.given == set()


# The digest of whole weights, against the published vectors of its hash.

# From the test vectors of BLAKE3 (github.com/BLAKE3-team/BLAKE3), whose input is the bytes 0, 1, ..., 250, 0, 1, ...
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


def test_it_is_blake3() -> None:
    for length, digest in VECTORS.items():
        payload = bytes(i % 251 for i in range(length))
        assert digest_of_weights(payload) == digest_of_weights(memoryview(payload)) == digest


def test_memory_that_is_read_only_is_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_bytes(bytes([3, 1])).tolist() == as_bytes(memoryview(b"\x03\x01")).tolist() == [3, 1]


# The order of rows in Llama 4's queries and keys.


def test_the_even_rows_of_each_head_come_before_its_odd_ones() -> None:
    pairs = torch.tensor([[i, 10 * i, -i] for i in range(12)])
    halves = in_halves(pairs, 2)
    assert halves[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(halves, pairs[halves[:, 0]])
    assert torch.equal(in_pairs(halves, 2), pairs)
    assert in_halves(pairs, 3)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]


def test_only_queries_and_keys_of_llama_4_are_held_so() -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    llama4, llama = (SimpleNamespace(model_type=kind, **heads) for kind in ("llama4_text", "llama"))
    layers = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert [turned_heads(llama4, layer) for layer in layers] == [8, 2, 0, 0]
    assert [turned_heads(llama, layer) for layer in layers] == [0, 0, 0, 0]
