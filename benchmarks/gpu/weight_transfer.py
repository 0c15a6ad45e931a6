"""Whole weights to vLLM on the learner's card: by vLLM's own weight transfer (CUDA IPC), and through a file in the
learner's memory, as runs send them.

    PYTHONPATH=. python -m benchmarks.gpu.weight_transfer --model FOLDER                      a card with vLLM
    PYTHONPATH=. python -m benchmarks.gpu.weight_transfer --model FOLDER --device cpu         the file alone

A process holds the model's weights as a learner does; another runs vLLM in itself, as a generator does. Ways take
turns, and each push carries other weights. sent: the learner's part. load: the generator's. ipc: handles to the
learner's own tensors, which vLLM copies into its model layer by layer, unproved. ipc, proved: with digests of the
weights at both ends (rollout.shared_base), as a push that is proved would need them. file: with its digest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import as_table
from benchmarks.gpu.rows import folder_for, told_of
from rollout.shared_base import digests_of_pieces
from rollout.types import WeightsInFile, digest_of_weights
from rollout.vllm.policies import _replace
from rollout.weights import Source, WeightsFile, WeightsReader

IPC, PROVED, FILE = "ipc", "ipc, proved", "file"
EMBEDDING = "model.embed_tokens.weight"


def learner(model: str, device: str, connection: Connection) -> None:
    """Answers each way asked for with seconds and what the generator needs, until it is asked for none."""
    from transformers import AutoModelForCausalLM

    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    weights = {name: weight.detach() for name, weight in lm.to(device).named_parameters()}
    sources = {name: Source.of(weight) for name, weight in weights.items()}
    file, version = WeightsFile(), 0
    connection.send(None)
    while way := connection.recv():
        version += 1
        for weight in weights.values():
            weight.mul_(1.01)
        _settle(device)
        began = time.perf_counter()
        if way == FILE:
            told: Any = file.pack(version, sources, torch.bfloat16)
        else:
            told = handles(weights), digests_of_pieces(weights) if way == PROVED else {}
        seconds = time.perf_counter() - began
        connection.send((seconds, told, float(weights[EMBEDDING].double().sum())))


def handles(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What vLLM's IPCWeightTransferUpdateInfo asks for."""
    from torch.multiprocessing.reductions import reduce_tensor

    card = str(torch.cuda.get_device_properties(0).uuid)
    return {
        "names": list(weights),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
        "ipc_handles": [{card: reduce_tensor(weight)[1]} for weight in weights.values()],
    }


class Generator:
    """vLLM in this process."""

    def __init__(self, model: str, device: str) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        extra: dict[str, Any] = {}
        if device == "cuda":
            extra = {"weight_transfer_config": WeightTransferConfig(backend="ipc")}
        self._llm = LLM(
            model=model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8,
            enforce_eager=True, gpu_memory_utilization=0.3, **extra,
        )  # fmt: skip
        if extra:
            self._llm.init_weight_transfer_engine({"init_info": {"packed": False}})
        self._reader = WeightsReader()

    def take_file(self, place: WeightsInFile) -> None:
        with self._reader.payload(place) as payload:
            assert digest_of_weights(payload) == place.digest
            self._llm.collective_rpc(_replace, args=(payload, frozenset([EMBEDDING])))

    def take_handles(self, told: dict[str, Any], digests: Mapping[str, str]) -> None:
        if digests:
            assert digests_of_pieces(opened(told)) == digests
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": told})
        self._llm.finish_weight_update()

    def embedding(self) -> float:
        """The sum of vLLM's own input embedding, whose padded rows are 0."""
        return float(self._llm.collective_rpc(_sum_of_embedding)[0])


def opened(told: dict[str, Any]) -> dict[str, Tensor]:
    """The learner's tensors, as vLLM's engine opens them."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    pairs = zip(told["names"], told["ipc_handles"], strict=True)
    return {name: rebuild_cuda_tensor(*next(iter(handle.values()))) for name, handle in pairs}


def _sum_of_embedding(worker: Any) -> float:
    return float(worker.model_runner.get_model().model.embed_tokens.weight.double().sum())


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(model: str, device: str, repeats: int) -> list[dict[str, Any]]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=learner, args=(model, device, there), daemon=True)
    process.start()
    generator = Generator(model, device)
    here.recv()
    ways = (IPC, PROVED, FILE) if device == "cuda" else (FILE,)
    rows: list[dict[str, Any]] = []
    for turn in range(repeats + 1):
        for way in ways:
            here.send(way)
            sent, told, expected = here.recv()
            _settle(device)
            began = time.perf_counter()
            if way == FILE:
                generator.take_file(told)
            else:
                generator.take_handles(*told)
            _settle(device)
            load = time.perf_counter() - began
            assert abs(generator.embedding() - expected) <= 1e-6 * abs(expected), (way, expected)
            rows.append({"way": way, "first": turn == 0, "sent s": sent, "load s": load, "all s": sent + load})
            print(rows[-1], flush=True)
    here.send("")
    process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model's folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="of the results")
    options = parser.parse_args()
    folder = options.folder or folder_for(options.device, options.device == "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    rows = measure(options.model, options.device, options.repeats)
    text = json.dumps({"rows": rows, "conditions": told_of(options.device)}, indent=1)
    (folder / "weight-transfer.json").write_text(text + "\n")
    print(report(rows))


def report(rows: list[dict[str, Any]]) -> str:
    """Medians without the first push of each way."""
    warm = [row for row in rows if not row["first"]]
    header = ["sent s", "load s", "all s"]
    lines = [
        [way, *(f"{median(row[name] for row in warm if row['way'] == way):.3f}" for name in header)]
        for way in dict.fromkeys(row["way"] for row in rows)
    ]
    return as_table(["way", *header], lines)


if __name__ == "__main__":
    main()
