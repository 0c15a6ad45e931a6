"""The whole system on a CUDA card (checklist D and E), on random weights of the real shapes; needs vLLM, and says so.

    PYTHONPATH=. python -m benchmarks.gpu.system                      all rows, about 60 minutes on an H100
    PYTHONPATH=. python -m benchmarks.gpu.system --minutes 9          what fits into 9; the same command goes on
    PYTHONPATH=. python -m benchmarks.gpu.system --device cpu --tiny  the rehearsal on vLLM's CPU build

Each row is a run of learner.main in a process of its own, on a model folder that the row makes and that later rows use
again: weights by transformers' own initialisation, and the tokenizer of --tokenizer (a folder), whose ids come first
in the model's vocabulary. Such a model stops by chance only, so nearly every completion has the full length. What is
read is the run's metrics.jsonl and plan.json; the adapter proof of each push is part of the run, which ends without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, as_table
from benchmarks.gpu.rows import Found, Row, conditions_of, measured, options_of
from cluster.memory.shape import SHAPES, Shape

TINY = Shape("tiny", "llama", 128, 256, 2, 4, 4, 32, 1024, tied=True)
SLICES = ["cluster.gpus.generator=0.5", "cluster.gpus.learner=0.5", "memory.layout=slices"]
TURNS = [*SLICES[:2], "memory.layout=alternating"]
REWARD = '''
def even_share(completion_ids, **_):
    """A reward that random weights can move, so that every group trains: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
'''
PARTS_OF_PUSH = ("time/push_export", "time/push_load", "time/push_probe", "time/push_learner_probe")
MEAN = ("time/step", "time/generate", "time/train", "time/push", "time/overlap", "rollout/tokens_per_s")


def rows(options: argparse.Namespace) -> list[Row]:
    """What is missing most first: 30 steps of the 1B in two slices, the same taking turns, asynchronous, then 8B."""
    run = partial(system, options)
    if options.tiny:
        return [Row("d-tiny", partial(run, TINY, 3, ["memory.device=3GiB", "model.dtype=float32"]))]
    small, large = SHAPES["Llama-3.2-1B"], SHAPES["Llama-3.1-8B"]
    whole = ["memory.device=76GiB"]
    capped = ["memory.device=24GiB", "model.base=nf4", "rollout.kv_cache=auto"]
    return [
        Row("d-1b-slices", partial(run, small, 30, [*SLICES, *whole])),
        Row("d-1b-alternating", partial(run, small, 20, [*TURNS, "memory.device=24GiB"])),
        Row("d-1b-async", partial(run, small, 12, [*SLICES, *whole, "max_staleness=1"])),
        Row("d-1b-full", partial(run, small, 8, [*SLICES, *whole, "learner.mode=full"])),
        Row("d-1b-bare-vllm", partial(bare, options, small)),
        Row("e-8b-slices", partial(run, large, 10, [*SLICES, *whole])),
        Row("e-8b-nf4-24gib", partial(run, large, 10, [*SLICES, *capped])),
    ]


def system(options: argparse.Namespace, shape: Shape, steps: int, settings: list[str], device: str) -> Found:
    """A run of learner.main on GSM8K questions; peaks, budgets, and means of its metrics after two steps."""
    folder = Path(options.folder) / "runs" / options.row
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    lengths = (64, 24) if options.tiny else (256, 786)
    command = [
        sys.executable, "-m", "learner.main", "--config", str(ROOT / "configs" / "gsm8k_cpu.yaml"),
        f"name={options.row}", f"output_dir={folder}", f"steps={steps}", f"model.path={model(options, shape)}",
        "model.dtype=bfloat16", "data.eval.every=0", "data.overlong=drop", "data.system=null", "rollout.kv_cache=auto",
        f"rollout.max_prompt_length={lengths[0]}", f"rollout.max_completion_length={lengths[1]}",
        "learner.learning_rate=1e-6", "learner.groups_per_step=8",
        f"rewards=[{{use: '{folder}/reward.py:even_share'}}]", *settings,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    run = folder / options.row
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    later = [line for line in lines if line.get("step", 0) > 2 or (options.tiny and line.get("step", 0) > 0)]
    means = {name: float(np.mean([line[name] for line in later])) for name in (*MEAN, *PARTS_OF_PUSH)}
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return {"shape": shape.name, "steps": len(later), "settings": settings, "plan": plan, **means}


def bare(options: argparse.Namespace, shape: Shape, device: str) -> Found:
    """vllm.LLM on as many prompts at once as a step has, all tokens at once: what the engine could give."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model=str(model(options, shape)), skip_tokenizer_init=True, max_model_len=1042, seed=0)
    rng = np.random.default_rng(0)
    prompts = [TokensPrompt(prompt_token_ids=rng.integers(5, 300, 256).tolist()) for _ in range(8)]
    sampling = SamplingParams(n=8, max_tokens=786, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return {"shape": shape.name, "rollout/tokens_per_s": 8 * 8 * 786 / min(seconds)}


def model(options: argparse.Namespace, shape: Shape) -> Path:
    """A folder with random weights of the shape in bfloat16, made once."""
    folder = Path(options.models) / shape.name
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shape.json").write_text(json.dumps(shape.to_config()))
        command = [
            sys.executable, "-m", "benchmarks.gpu.model", str(folder / "shape.json"), str(folder),
            "--tokenizer", options.tokenizer, "--device", options.device,
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT)
    return folder


def report(found: dict[str, Found]) -> str:
    header = ["row", "s / step", "generate s", "train s", "push s", "overlap s", "tokens / s",
              "learner GB (plan)", "generator GB (plan)"]  # fmt: skip
    lines = []
    for name, one in found.items():
        cells = [f"{one[key]:.2f}" if key in one else "" for key in MEAN]
        if one["status"] != "ok":
            cells[0] = one["status"]
        plans = [one["plan"][role] for role in ("learner", "generator")] if "plan" in one else []
        peaks = [f"{role['measured'] / 1e9:.2f} ({role['planned'] / 1e9:.2f})" for role in plans]
        lines.append([name, *cells, *(peaks or ["", ""])])
    return f"## The whole system\n\n{as_table(header, lines)}\n\n{conditions_of(found)}"


def main() -> int:
    missing = [name for name in ("vllm", "ray") if find_spec(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)}; install them, or run benchmarks.gpu.learner", file=sys.stderr)
        return 2
    options = options_of(__doc__, 90)
    measured("benchmarks.gpu.system", options, rows(options), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
