"""A role of benchmarks.engine.shared_base in a process of its own: generator or learner, on one base or two.

    generator FOLDER WAY    starts vLLM, tells how its base is mapped, takes the learner's adapter, generates
    learner FOLDER WAY      a trainer on the generator's base or its own; a forward and backward pass
    equal FOLDER DTYPE      both in one process, for each small model in the folder: whether logprobs and gradients are
                            those of an own copy, bit for bit

Each says on a line what it found and waits for an empty line before it goes on.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.errors import WrongInput
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig, LoraConfig
from learner.model.logprob import policy_logprobs
from learner.model.policy import Policy
from learner.model.shared_base import MappedBase
from learner.trainer.trainer import Trainer
from rollout.engine import EngineSettings
from rollout.types import Manifest, Sampling

PROMPT, COMPLETION, GROUP = 64, 64, 8
KV_CACHE = 64 * 2**20
PROBE = list(range(40, 72))
LORA = LoraConfig(rank=16)
SHARED, OWN, REPACKED = "shared", "own", "own, repacked"  # the last: as vLLM comes


def say(found: dict[str, Any]) -> None:
    """The answer on one line, then a wait for the next word; what is freed goes back to the system before it is
    measured."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


def engine_of(folder: Path, dtype: str, *, shares: bool) -> Any:
    from rollout.vllm.engine import VllmEngine

    return VllmEngine(
        EngineSettings(
            model=str(folder), dtype=dtype, max_model_len=PROMPT + COMPLETION, kv_cache_bytes=KV_CACHE,
            max_num_seqs=GROUP, max_lora_rank=LORA.rank, adapter_window=2, seed=0, shares_base=shares,
        )
    )  # fmt: skip


def generator(folder: Path, way: str) -> None:
    engine = engine_of(folder, "bfloat16", shares=way != REPACKED)
    if way == SHARED:
        (folder / "manifest").write_bytes(pickle.dumps(asyncio.run(engine.share_base())))
    say({})
    asyncio.run(engine.load_adapter(pickle.loads((folder / "adapter").read_bytes())))
    group = asyncio.run(engine.generate(PROBE, Sampling(n=GROUP, max_tokens=COMPLETION, seed=0)))
    say({"tokens": sum(len(completion.token_ids) for completion in group)})
    asyncio.run(engine.close())


def learner(folder: Path, way: str) -> None:
    base: Manifest | None = pickle.loads((folder / "manifest").read_bytes()) if way == SHARED else None
    trainer = Trainer(
        ModelConfig(path=str(folder), dtype="bfloat16"),
        LearnerConfig(lora=LORA, token_budget=PROMPT + COMPLETION, checkpointing="full"),
        temperature=1.0,
        max_completion_length=COMPLETION,
        total_steps=1,
        seed=0,
        device="cpu",
        base=base,
    )
    asyncio.run(_learn(trainer, folder))


async def _learn(trainer: Trainer, folder: Path) -> None:
    await trainer.rehearse(PROMPT)
    adapter, _ = await trainer.outgoing()
    (folder / "adapter").write_bytes(pickle.dumps(adapter.value, pickle.HIGHEST_PROTOCOL))
    answer = await trainer.probe(PROBE)
    say({"logprobs": hashlib.sha256(answer.logprobs.tobytes()).hexdigest()})


def equal(folder: Path, dtype: Any) -> None:
    say({path.name: _equal(path, dtype) for path in sorted(folder.iterdir())})


def _equal(folder: Path, dtype: Any) -> dict[str, Any]:
    """Tensors of the checkpoint, those that are views, and whether both policies are the same; or why the base cannot
    be shared."""
    engine = engine_of(folder, dtype, shares=True)
    manifest: Manifest = asyncio.run(engine.share_base())
    found: dict[str, Any] = {"views": len(manifest.views), "tensors": len(manifest.views) + len(manifest.refused)}
    cpu = torch.device("cpu")
    try:
        mapped = MappedBase(manifest, cpu)
        ours, own = (
            _learned(Policy(ModelConfig(path=str(folder), dtype=dtype), LORA, checkpointing="full", seed=0, device=cpu,
                            mapped=base))
            for base in (mapped, None)
        )  # fmt: skip
        mapped.check()
        found |= {"logprobs": torch.equal(ours[0], own[0]), "gradients": all(map(torch.equal, ours[1:], own[1:]))}
        found["compared"] = len(own) - 1
    except WrongInput as error:
        found["refused"] = str(error)
    asyncio.run(engine.close())
    print(folder.name, found, file=sys.stderr, flush=True)
    return found


def _learned(policy: Policy) -> list[Tensor]:
    """Logprobs of a row under a random adapter, and the gradients of their sum."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.masters.values():
            master.copy_(0.2 * torch.randn(master.shape, generator=random))
    policy.sync()
    ids = torch.tensor([PROBE])
    logprobs, _ = policy_logprobs(policy.hidden(ids[:, :-1]), policy.head, ids[0, 1:], 1.0, logits=policy.logits)
    logprobs.sum().backward()
    policy.collect_gradients()
    gradients = [master.grad for master in policy.masters.values() if master.grad is not None]
    assert len(gradients) == len(policy.masters), "every part of the adapter has a gradient"
    return [logprobs.detach(), *gradients]


if __name__ == "__main__":
    {"generator": generator, "learner": learner, "equal": equal}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
