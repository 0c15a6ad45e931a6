"""Cards by name: the memory that each has, and what its generation can compute.

MiB as nvidia-smi (NVML) shows them with a driver of 2024 or later; they are less than what is sold as so many GB where
a part is reserved, as on cards whose memory corrects errors. Compute capability: developer.nvidia.com/cuda-gpus.
"""

import difflib
import re
from dataclasses import dataclass

BF16, FP8_KV, OLDEST = (8, 0), (8, 9), (7, 5)  # compute capability


@dataclass(frozen=True, slots=True)
class CardKind:
    """A kind of card: its short name, the GB it is sold as, bytes, compute capability."""

    name: str
    sold: int
    bytes: int
    capability: tuple[int, int]

    @property
    def free(self) -> int:
        """Bytes that a run can have of an idle one. The driver keeps a part for itself: 454 MiB of an H100's 81559
        (nvidia-smi -q); of others it is assumed to be at most 3 %, or 640 MiB."""
        return self.bytes - min(3 * self.bytes // 100, 640 * 2**20)


def lacks(capability: tuple[int, int], *, dtype: str, kv_dtype: str) -> str | None:
    """Why a card of this compute capability cannot run the types, with the setting to change; None: it can.

    bfloat16 and FlashAttention begin with 8.0; vLLM's fp8 KV cache with 8.9; torch's and vLLM's wheels, made with CUDA
    13, hold no code for cards before 7.5.
    """
    own = ".".join(map(str, capability))
    if capability < OLDEST:
        return f"a card of compute capability {own} is older than CUDA 13 supports, 7.5; take a newer one"
    if dtype == "bfloat16" and capability < BF16:
        return f"model.dtype: bfloat16 needs compute capability 8.0, this card has {own}; set model.dtype=float16"
    if kv_dtype == "fp8" and capability < FP8_KV:
        return f"rollout.kv_cache_dtype: fp8 needs compute capability 8.9, this card has {own}; set it to auto"
    return None


def named(text: str) -> tuple[CardKind, ...]:
    """The cards that a name means, as one writes it (`rtx4090`, `NVIDIA GeForce RTX 4090`, `4090`); several where it
    leaves the size open (`a100`); none for an unknown one."""
    wanted = _plain(text)
    exact = tuple(card for card in CARDS if _plain(card.name) == wanted)
    return exact or tuple(card for card in CARDS if _plain(card.name.partition("-")[0]) == wanted)


def sold_as(size: int) -> tuple[CardKind, ...]:
    """The cards that are sold as so many GB."""
    return tuple(card for card in CARDS if card.sold == size)


def like(text: str) -> list[str]:
    """Up to three names that may have been meant."""
    names = {_plain(card.name): card.name for card in CARDS}
    return [names[near] for near in difflib.get_close_matches(_plain(text), names, n=3, cutoff=0.6)]


def _plain(text: str) -> str:
    return re.sub("^(nvidia|geforce|tesla|rtx)+", "", re.sub("[^a-z0-9]", "", text.lower()))


def _table(rows: str) -> tuple[CardKind, ...]:
    cards = []
    for row in rows.strip().splitlines():
        name, sold, mib, capability = row.split()
        major, minor = capability.split(".")
        cards.append(CardKind(name, int(sold), int(mib) * 2**20, (int(major), int(minor))))
    return tuple(cards)


CARDS = _table("""
rtx2080ti       11  11264  7.5
t4              16  15360  7.5
rtx3060         12  12288  8.6
rtx3070          8   8192  8.6
rtx3080         10  10240  8.6
rtx3090         24  24576  8.6
rtx4060          8   8188  8.9
rtx4060ti       16  16380  8.9
rtx4070         12  12282  8.9
rtx4080         16  16376  8.9
rtx4090         24  24564  8.9
rtx5070         12  12227 12.0
rtx5070ti       16  16303 12.0
rtx5080         16  16303 12.0
rtx5090         32  32607 12.0
rtxa4000        16  16376  8.6
rtxa5000        24  24564  8.6
rtxa6000        48  49140  8.6
rtx6000ada      48  49140  8.9
rtxpro6000      96  97887 12.0
a10             24  23028  8.6
a10g            24  23028  8.6
a40             48  46068  8.6
a100-40gb       40  40960  8.0
a100-80gb       80  81920  8.0
l4              24  23034  8.9
l40s            48  46068  8.9
h100            80  81559  9.0
h100-nvl        94  95830  9.0
gh200           96  97871  9.0
h200           141 143771  9.0
b200           192 183359 10.0
""")
