"""What a push of whole weights between two processes of one machine costs by its parts, on random weights.

    PYTHONPATH=. python -m benchmarks.gpu.push_parts                                    2.47 GB, as Llama-3.2-1B has
    PYTHONPATH=. python -m benchmarks.gpu.push_parts --device cpu --gigabytes 0.1       the rehearsal

Seconds, the fastest of three. store: as a push to another machine begins, into memory that is fresh each time. file:
as one within the machine (rollout.weights), whose digest is by itself once more. to card: from either to the card.
checksum: of the same bytes on the card, exact sums of integers (rollout.shared_base).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.rows import folder_for, told_of
from rollout.shared_base import digest_of_piece
from rollout.types import digest_of_weights
from rollout.weights import Source, WeightsFile, pack, unpack

MATRICES, REPEATS = 16, 3


def fastest(work: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(REPEATS):
        _settle(device)
        started = time.perf_counter()
        work()
        _settle(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(gigabytes: float, device: str) -> dict[str, float]:
    columns = int(1e9 * gigabytes / 2 / MATRICES / 1024)
    weights = {
        f"layers.{i}.weight": torch.randn(1024, columns, dtype=torch.bfloat16, device=device) for i in range(MATRICES)
    }
    sources = {name: Source.of(weight) for name, weight in weights.items()}
    there = {name: torch.empty_like(weight) for name, weight in weights.items()}
    file, dtype = WeightsFile(), torch.bfloat16
    found = {"store": fastest(lambda: pack(sources, dtype), device)}
    found["file"] = fastest(lambda: file.pack(1, sources, dtype), device)
    fresh, kept = pack(sources, dtype), pack(sources, dtype, file._room)

    def to_card(payload: memoryview) -> None:
        for name, weight in unpack(payload):
            there[name].copy_(weight)

    found["digest"] = fastest(lambda: digest_of_weights(kept), device)
    found["to card from fresh memory"] = fastest(lambda: to_card(fresh), device)
    found["to card from the file"] = fastest(lambda: to_card(kept), device)
    whole = torch.cat([weight.view(-1) for weight in weights.values()])
    found["checksum"] = fastest(lambda: digest_of_piece(whole), device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=2.47)
    parser.add_argument("--folder", type=Path, help="of the results")
    options = parser.parse_args()
    folder = options.folder or folder_for(options.device, options.device == "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    found = {"gigabytes": options.gigabytes, "seconds": measure(options.gigabytes, options.device)}
    text = json.dumps(found | {"conditions": told_of(options.device)}, indent=1)
    (folder / "push-parts.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
