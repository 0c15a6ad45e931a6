"""Takes out of a shared library what one kind of card never reads, in place: file sizes and offsets stay, and zeros
compress to nothing.

CUDA keeps the machine code of a library's kernels in fat binaries, one container after another: in the sections
.nv_fatbin and __nv_relfatbin, and in cuBLAS, cuFFT and cuDNN in others, too, so they are looked for in the whole file.
All numbers are little-endian.

    container   u32 0xBA55ED50, u16 version 1, u16 bytes of this header (16), u64 bytes of the entries after it
    entry       u16 kind (1 PTX, 2 machine code), u16 version, u32 bytes of this header, u64 bytes of the payload after
                it, u32 and u32 left aside, u16 and u16 version of the tools, u32 architecture (90 for sm_90 and sm_90a)

What a container begins must add up, entry by entry, to its length; what does not is no container, stays as it is and is
counted. So do entries of another kind stay. The driver takes by its header the entry that suits the card, and reads no
payload but that one's.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHI")
PTX, CODE = 1, 2
LONGEST_HEADER = 4096  # of an entry; those of CUDA 11 to 13 have 64 to 144 bytes
ELF64 = b"\x7fELF\x02\x01"  # 64 bits, little-endian
DEBUG = b".debug_"
ALLOCATED, NOBITS = 0x2, 8  # flag of a section that is loaded; type of one without bytes in the file
Bytes = bytearray | memoryview


class Entry(NamedTuple):
    """start, size: of the payload, in the file."""

    kind: int
    architecture: int
    start: int
    size: int


class Stripped(NamedTuple):
    """zeroed: bytes. skipped: what was left as it is, since it was not understood, and how often."""

    containers: int
    zeroed: int
    skipped: dict[str, int]


def entries_at(data: Bytes, at: int) -> tuple[list[Entry], int] | None:
    """Those of the container that begins here, and where it ends; None if this is none."""
    if at + CONTAINER.size > len(data):
        return None
    magic, version, header, size = CONTAINER.unpack_from(data, at)
    place, end = at + header, at + header + size
    if (magic, version, header) != (MAGIC, 1, CONTAINER.size) or size == 0 or end > len(data):
        return None
    found = []
    while place < end:
        if place + ENTRY.size > end:
            return None
        kind, _, length, payload, *_, architecture = ENTRY.unpack_from(data, place)
        start = place + length
        if not ENTRY.size <= length <= LONGEST_HEADER or start + payload > end:
            return None
        found.append(Entry(kind, architecture, start, payload))
        place = start + payload
    return found, end


def superfluous(entries: list[Entry], architecture: int) -> list[Entry]:
    """Machine code but the newest that runs there, which is of the same generation (80 runs on 89) and no newer; and
    PTX where there is such code, else all PTX but the newest that can be compiled there."""
    older = [one for one in entries if one.architecture <= architecture]
    runs = [one.architecture for one in older if one.kind == CODE and one.architecture // 10 == architecture // 10]
    compiles = [one.architecture for one in older if one.kind == PTX]
    kept = (CODE, max(runs)) if runs else (PTX, max(compiles, default=0))
    return [one for one in entries if one.kind in (CODE, PTX) and (one.kind, one.architecture) != kept]


def strip(data: bytearray, architecture: int) -> Stripped:
    """Zeros the payloads that this architecture (90) does not need, and debug information, in place."""
    containers, zeroed, skipped = 0, 0, Counter[str]()
    mark, at = MAGIC.to_bytes(4, "little"), 0
    while (at := data.find(mark, at)) >= 0:
        if (found := entries_at(data, at)) is None:
            skipped["bytes that look like a container and do not add up"] += 1
            at += len(mark)
            continue
        entries, at = found
        containers += 1
        skipped.update(f"entry of kind {one.kind}" for one in entries if one.kind not in (PTX, CODE))
        for one in superfluous(entries, architecture):
            zero(data, one.start, one.size)
            zeroed += one.size
    for start, size in debug_sections(data):
        zero(data, start, size)
        zeroed += size
    return Stripped(containers, zeroed, dict(skipped))


def zero(data: bytearray, start: int, size: int) -> None:
    data[start : start + size] = bytes(size)


def debug_sections(data: Bytes) -> Iterator[tuple[int, int]]:
    """Place and bytes of the sections .debug_* that are not loaded; none if this is no ELF file of this kind."""
    if bytes(data[: len(ELF64)]) != ELF64 or len(data) < 64:
        return
    table = struct.unpack_from("<Q", data, 40)[0]
    step, count, of_names = struct.unpack_from("<HHH", data, 58)
    if step < 40 or of_names >= count or table + step * count > len(data):
        return
    sections = [struct.unpack_from("<IIQQQQ", data, table + step * one) for one in range(count)]
    names = sections[of_names][4]
    for name, kind, flags, _, start, size in sections:
        named = bytes(data[names + name : names + name + len(DEBUG)]) == DEBUG
        if named and kind != NOBITS and not flags & ALLOCATED and start + size <= len(data):
            yield start, size
