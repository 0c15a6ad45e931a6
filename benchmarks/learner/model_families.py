"""Each model family, by tiny random models: sampler and learner compute the same.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.model_families [--families NAME ...] [--steps 3]
    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.model_families --shared-base
    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.model_families --experts
    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.model_families --routing

Three steps of the whole system (Ray, vLLM, learner) in float32. What is shown: with its cap, scale, experts or fused
layers each family is sampled and scored alike. Sampler and learner are other programs with the same weights, so the
largest difference of their logprobs of one token is rounding, or else one of them leaves something out. Synchronous, so
that the policy's own change is in no difference. A family that is not asked for keeps what an earlier call found.

--shared-base: the learner on the generator's base (memory.layout: shared) against the learner on its own, on a CPU:
logprobs, and the gradient of every part of the adapter, bit for bit; or why the base cannot be shared.

--experts: adapters on attention and routed experts, twenty steps, three seeds: what the reward gains (mean of the last
five steps less that of the first five), beside the spread of the seeds.

--routing: the mismatch in bfloat16 where the learner's routers choose by themselves, and with rollout.routing_replay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import RESULTS, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import BOTH, Tree, finished, rows
from examples.random_families import FAMILIES, make_family
from examples.random_model import make_tiny_model
from examples.random_towers import CHECKPOINTS, make_checkpoint
from rollout.vllm.environment import required_env

LIMIT = 1e-4  # nats
REWARD = """
def score(prompts, completions, **columns):  # differs in nearly every group, so that every step trains
    return [len(set(completion[0]["content"])) for completion in completions]
"""
LEARNED = """
def score(prompts, completions, **columns):  # the share of letters of the first half of the alphabet
    texts = [completion[0]["content"] for completion in completions]
    return [sum("a" <= letter <= "m" for letter in text) / max(len(text), 1) for text in texts]
"""
WITH_EXPERTS = {"Qwen3-MoE": "qwen3_moe", "gpt-oss": "gpt_oss"}  # as named in reports -> in FAMILIES
STEPS, END, SEEDS = 20, 5, 3  # END: so many steps at the start, and at the end, give a mean reward
COLUMNS = ("policy/mismatch_max", "policy/mismatch_k3", "policy/entropy", "loss/grad_norm")
PLAIN = ("Llama", "Qwen2")
TOWERS = {f"{name}+towers": name for name in CHECKPOINTS}  # their text parts are trained
PROBE = list(range(40, 72))


def made(name: str, path: Path) -> Path:
    """Writes a tiny random model of the family, of PLAIN, FAMILIES or TOWERS."""
    if name in TOWERS:
        return make_checkpoint(path, TOWERS[name])
    return make_tiny_model(path, family=name) if name in PLAIN else make_family(path, name)


def run(
    name: str,
    folder: Path,
    steps: int,
    learner: Tree | None = None,
    *,
    reward: str = REWARD,
    seed: int = 0,
    rollout: Tree | None = None,
    dtype: str = "float32",
) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of a whole run, its policy moved by each step. learner, rollout: more settings of
    these. reward: the source of its reward function."""
    file, data = folder / "reward.py", folder / "data.jsonl"
    file.write_text(reward)
    problems = [{"question": f"Say something about {word}", "answer": word} for word in "abcdefghijklmnopqrst"]
    data.write_text("".join(json.dumps(row) + "\n" for row in problems))
    tree: Tree = {
        "steps": steps,
        "model": {"path": str(made(name, folder / "model")), "dtype": dtype},
        "data": {"path": str(data), "eval": {"every": 0}},
        "rewards": [{"use": f"{file}:score"}],
        "seed": seed,
        "rollout": {
            "num_generations": 4, "max_prompt_length": 96, "max_completion_length": 24, "kv_cache": "32MiB",
            **(rollout or {}),
        },
        "learner": {"groups_per_step": 3, "learning_rate": 1e-3, **(learner or {})},
        "trackers": [],
    }  # fmt: skip
    with finished(tree, limit_s=600) as run_dir:
        return [line for line in rows(run_dir) if "policy/mismatch_max" in line]


def report(found: dict[str, Any]) -> tuple[str, bool]:
    """(Markdown, whether every family is below LIMIT in each of its steps)."""
    lines, bad = [], []
    for name, one in found.items():
        greatest = [max(step[column] for step in one["steps"]) for column in COLUMNS]
        lines.append([name, str(len(one["steps"])), *(f"{value:.1e}" for value in greatest)])
        if len(one["steps"]) != one["asked"] or greatest[0] >= LIMIT:
            bad.append(name)
    verdict = f"not below {LIMIT:.0e} in every step: {', '.join(bad)}" if bad else f"all below {LIMIT:.0e} nats"
    newest = list(found.values())[-1]["conditions"]
    text = (
        f"# Families in the whole system\n\nGreatest value over the steps, nats; {verdict}.\n\n"
        f"{as_table(['family', 'steps', *COLUMNS], lines)}\n\n"
        f"{under(newest, 'Tiny random models, float32, LoRA on all-linear')} Those of each family are in the JSON.\n"
    )
    return text, not bad


def whole_system(options: argparse.Namespace) -> bool:
    earlier = RESULTS / "model_families.json"
    found: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {}
    good = False
    for name in options.families:
        told = conditions(BOTH)
        with tempfile.TemporaryDirectory() as folder:
            lines = run(name, Path(folder), options.steps)
        steps = [{column: line[column] for column in COLUMNS} for line in lines]
        found[name] = {"asked": options.steps, "steps": steps, "conditions": told}
        found = {family: found[family] for family in [*FAMILIES, *TOWERS] if family in found}
        print(name, [step["policy/mismatch_max"] for step in steps], flush=True)
        text, good = report(found)
        save("model_families", found, text)
    return good


def equal(folder: str, dtype: Any) -> dict[str, Any]:
    """Tensors of the checkpoint, those that are views, and whether both policies are the same; or why the base cannot
    be shared. In a process of its own."""
    import torch

    from cluster.errors import WrongInput
    from learner.config import ModelConfig
    from learner.config.settings import LoraConfig
    from learner.model.bases.shared import MappedBase
    from learner.model.policy import Policy
    from rollout.engine import EngineSettings
    from rollout.types import Manifest
    from rollout.vllm.engine import VllmEngine

    settings = EngineSettings(
        model=folder, dtype=dtype, max_model_len=128, kv_cache_bytes=64 << 20, max_num_seqs=8, max_lora_rank=16,
        adapter_window=2, seed=0, shares_base=True,
    )  # fmt: skip
    engine, cpu = VllmEngine(settings), torch.device("cpu")
    manifest: Manifest = asyncio.run(engine.share_base())
    found: dict[str, Any] = {"views": len(manifest.views), "tensors": len(manifest.views) + len(manifest.refused)}
    try:
        mapped = MappedBase(manifest, cpu)
        model, lora = ModelConfig(path=folder, dtype=dtype), LoraConfig(rank=16)
        ours, own = (
            _learned(Policy(model, lora, checkpointing="full", seed=0, device=cpu, mapped=base))
            for base in (mapped, None)
        )
        mapped.check()
        found["same"] = all(map(torch.equal, ours, own))
    except WrongInput as error:
        found["refused"] = str(error)
    asyncio.run(engine.close())
    return found


def _learned(policy: Any) -> list[Any]:
    """Logprobs of a row under a random adapter, and the gradients of their sum."""
    import torch

    from learner.model.logprob import policy_logprobs

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


def shared_base(options: argparse.Namespace) -> bool:
    told = conditions()
    os.environ.update(required_env(cuda=False) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    found = []
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, spawn.Pool(1, maxtasksperchild=1) as pool:
        for name in (*PLAIN, *options.families):
            model = made(name, Path(folder) / name)
            for dtype in ("float32", "bfloat16"):
                found.append({"family": name, "dtype": dtype} | pool.apply(equal, (str(model), dtype)))
                print(found[-1], flush=True)
    cells = [
        [
            one["family"], one["dtype"], f"{one['views']} of {one['tensors']}",
            "refused" if "refused" in one else "same bits" if one["same"] else "differ", one.get("refused", ""),
        ]
        for one in found
    ]  # fmt: skip
    header = ["family", "type", "tensors that are views", "logprobs and gradients", "refused"]
    text = f"# One base for generator and learner, by family\n\n{as_table(header, cells)}\n\n{under(told, 'On a CPU')}"
    save("shared_base_families", {"conditions": told, "families": found}, text)
    return all(one.get("same", True) for one in found)


def experts(options: argparse.Namespace) -> bool:
    """Whether the mean gain of the seeds is more than their spread, in every family of WITH_EXPERTS."""
    told, cells = conditions(BOTH), []
    found: dict[str, Any] = {}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
    settings: Tree = {"push": "merged", "learning_rate": 1e-2, "groups_per_step": 6, "lora": {"targets": targets}}
    for shown, name in WITH_EXPERTS.items():
        gains, worst = [], 0.0
        for seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                lines = run(name, Path(folder), STEPS, settings, reward=LEARNED, seed=seed)
            rewards = [line["reward/mean"] for line in lines]
            gains.append(mean(rewards[-END:]) - mean(rewards[:END]))
            worst = max(worst, *(line["policy/mismatch_max"] for line in lines))
            print(shown, seed, [f"{reward:.3f}" for reward in rewards], flush=True)
        found[shown] = {"gains": gains, "mismatch_max": worst}
        apart = max(gains) - min(gains)
        told_gains = [f"{gain:+.3f}" for gain in (*gains, mean(gains))]
        cells.append([shown, *told_gains, f"{apart:.3f}", f"{worst:.1e}"])
    header = ["family", *(f"seed {seed}" for seed in range(SEEDS)), "mean", "spread of the seeds", "mismatch_max, nats"]
    text = (
        f"# Experts and attention adapted: what {STEPS} steps gain\n\n{as_table(header, cells)}\n\n"
        f"The reward is the share of letters from a to m in a completion of 24 tokens; its mean of the last {END} "
        f"steps less that of the first {END}. {under(told, 'Tiny random models, float32, merged pushes')}\n"
    )
    save("expert_adapters", {"conditions": told, "families": found}, text)
    return all(mean(one["gains"]) > max(one["gains"]) - min(one["gains"]) for one in found.values())


def routing(options: argparse.Namespace) -> bool:
    """Whether routing replay brings the mismatch down, in every family of WITH_EXPERTS."""
    told, cells, better = conditions(BOTH), [], True
    found: dict[str, Any] = {}
    for shown, name in WITH_EXPERTS.items():
        for replay in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                more: Tree = {"routing_replay": replay}
                lines = run(name, Path(folder), options.steps, rollout=more, dtype="bfloat16")
            worst, k3 = (
                max(line[column] for line in lines) for column in ("policy/mismatch_max", "policy/mismatch_k3")
            )
            found.setdefault(shown, []).append({"mismatch_max": worst, "mismatch_k3": k3})
            cells.append([shown, "the sampler's" if replay else "its own", f"{worst:.1e}", f"{k3:.1e}"])
            print(*cells[-1], flush=True)
        before, after = found[shown]
        better &= after["mismatch_k3"] < before["mismatch_k3"]
    text = (
        "# Routing replay: how far sampler and learner are apart\n\n"
        f"{as_table(['family', 'experts of the learner', 'mismatch_max, nats', 'mismatch_k3, nats'], cells)}\n\n"
        f"Greatest value over {options.steps} steps. {under(told, 'Tiny random models, bfloat16')}\n"
    )
    save("routing_replay", {"conditions": told, "families": found}, text)
    return better


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES, *TOWERS], default=[*FAMILIES, *TOWERS])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--shared-base", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--routing", action="store_true")
    options = parser.parse_args()
    others = {shared_base: options.shared_base, experts: options.experts, routing: options.routing}
    measure = next((one for one, asked in others.items() if asked), whole_system)
    sys.exit(not measure(options))


if __name__ == "__main__":
    main()
