"""Runs of whole systems as a user starts them, in processes of their own: what they run on, and what they told.

    ragged   random weights, prompts of 200 to 400 tokens, completions that end by chance
    demo     the README's demo: examples/tiny-arithmetic learns sums, as in configs/local_cpu.yaml

Seconds are wall time, since a system is all its processes and their waits; the load average is kept beside them. The
time of held-out evaluations is not in a step's seconds. gleaner's generators work ahead during one, so the steps that
may have gained from it are charged at least the median of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from benchmarks.common import ENGINE_PACKAGES, LEARNER_PACKAGES, ROOT, as_table, spread, under
from rollout import ledger

PUSH = ("push_export", "push", "push_load", "push_probe", "push_learner_probe")
TIMES = ("generate", "train", "overlap", "generator_idle", "learner_idle", *PUSH)
BOTH = tuple(dict.fromkeys([*LEARNER_PACKAGES, *ENGINE_PACKAGES]))  # packages that a whole system is made of
RIVALS = {"generate": "TRL", "vllm": "TRL with vLLM"}  # engine of TRL -> the system's name
FOREIGN = ("RAY_", "VLLM_", "TORCH_COMPILE")  # settings of a shell that a system should not inherit
PROMPT_WORDS = (200, 400)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
PAD, END, WORDS = 0, 1, 8000
TEMPLATE = (
    "{% for message in messages %}{{ '<|user|> ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATE_TOKENS = 2  # of it, around the words of a prompt
REWARD = '''
def even_words(completions, **columns):
    """A reward that random weights can move: the share of words w<even number>; 0.0 for an empty completion."""
    texts = [completion[0]["content"].split() for completion in completions]
    return [sum(word.endswith(("0", "2", "4", "6", "8")) for word in words) / max(len(words), 1) for words in texts]
'''

Tree = dict[str, Any]


class RunFailed(RuntimeError):
    """A system did not come to its end; the text is the last that it said."""


@dataclass
class Record:
    """What a run was. `steps`: seconds, samples, tokens and, where the system tells, TIMES of each step from the first.
    `lengths`: tokens of every completion. `ended`: share of them that sampled the end. `accuracy`: (step, score).
    `start_s`: from the command to the first step; `wall_s`: to the end of the process; `load`: average before."""

    system: str
    seed: int
    dtype: str
    start_s: float
    wall_s: float
    load: float
    steps: list[dict[str, float]]
    lengths: list[int]
    ended: float
    accuracy: list[tuple[int, float]] = field(default_factory=list)

    def steady(self, skip: int) -> list[dict[str, float]]:
        """Steps after the first `skip`, less those that an evaluation disturbed, where others are left."""
        later = self.steps[skip:]
        return [step for step in later if not step.get("evaluated")] or later

    def rate(self, skip: int, what: str = "samples") -> float:
        """`what` per second over the steady steps."""
        steps = self.steady(skip)
        return sum(step[what] for step in steps) / sum(step["seconds"] for step in steps)

    def mean(self, skip: int, what: str) -> float:
        steps = self.steady(skip)
        return sum(step[what] for step in steps) / len(steps)

    def other(self, skip: int) -> float:
        """Seconds of a step in which neither generation nor training went on."""
        parts = {what: self.mean(skip, what) for what in ("seconds", "generate", "train", "overlap")}
        return parts["seconds"] - (parts["generate"] + parts["train"] - parts["overlap"])

    def curve(self) -> list[tuple[float, float]]:
        """(seconds of training, held-out accuracy)."""
        return [(sum(step["seconds"] for step in self.steps[:count]), score) for count, score in self.accuracy]

    def seconds_to(self, accuracy: float) -> float | None:
        """Of training, to the first evaluation at or above `accuracy`; None if there was none."""
        return next((seconds for seconds, score in self.curve() if score >= accuracy), None)


@dataclass(frozen=True)
class Mode:
    """How gleaner runs: policy versions that generation may run ahead, cores of each role, what completions under way
    do when a newer policy comes (rollout.in_flight), and the ranks of the learner, each with that many cores."""

    staleness: int
    generator: int
    learner: int
    in_flight: str = "finish"
    ranks: int = 1

    @classmethod
    def parse(cls, text: str) -> Mode:
        """`STALENESS:GENERATOR/LEARNER[xRANKS][:IN_FLIGHT]`, for example 1:1/1x2:continue. Raises
        ArgumentTypeError."""
        if (found := re.fullmatch(r"(\d+):(\d+)/(\d+)(?:x(\d+))?(?::(finish|continue))?", text)) is None:
            raise argparse.ArgumentTypeError(
                f"must be STALENESS:CORES/CORES[xRANKS][:finish|:continue], for example 1:1/1x2, got {text}"
            )
        staleness, generator, learner, ranks, in_flight = found.groups()
        return cls(int(staleness), int(generator), int(learner), in_flight or "finish", int(ranks or 1))

    @property
    def name(self) -> str:
        way = f"async, {self.staleness} ahead" if self.staleness else "sync"
        way += f", in flight {self.in_flight}" * (self.in_flight != "finish")
        ranks = f" x {self.ranks} ranks" * (self.ranks > 1)
        return f"gleaner {way}, {self.generator}/{self.learner} cores{ranks}"


def command(tree: Tree, before: Sequence[str], after: Sequence[str], limit_s: float) -> None:
    """python BEFORE config.yaml AFTER, in a session of its own that ends with it. Raises RunFailed."""
    with tempfile.TemporaryDirectory() as folder:
        config, said = Path(folder) / "config.yaml", Path(folder) / "said.txt"
        config.write_text(yaml.safe_dump(tree))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}"
        with said.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *before, str(config), *after],
                stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=limit_s)
            except BaseException as error:  # Ctrl-C is not seen by a session of its own
                _end(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise RunFailed(f"{before[1]}: not done after {limit_s:g} s; raise --limit\n{_tail(said)}") from None
        if code != 0:
            raise RunFailed(f"{before[1]}: exit status {code}\n{_tail(said)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, by which gleaner takes its processes down, then SIGKILL to what is left of the session."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(said: Path) -> str:
    return said.read_text(errors="replace")[-4000:]


@contextmanager
def finished(tree: Tree, limit_s: float) -> Iterator[Path]:
    """The folder of a run of `python -m learner.main` on the configuration. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="gleaner-bench-") as folder:
        command(tree | {"name": "run", "output_dir": folder}, ["-m", "learner.main", "--config"], [], limit_s)
        yield Path(folder) / "run"


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl so far, without a line that is still being written."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def accuracies(lines: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Step and held-out accuracy of each evaluation."""
    return [(int(line["step"]), float(line["eval/accuracy"])) for line in lines if "eval/accuracy" in line]


def trained(run_dir: Path) -> list[tuple[int, int, int, int]]:
    """Groups of the ledger: step, position in the stream, attempt, generator."""
    found = set()
    for file in sorted((run_dir / "rollouts").glob("step-*.parquet")):
        table = pq.read_table(file, columns=["group_id", "position", "worker"])
        for name, position, worker in zip(*(table.column(c).to_pylist() for c in table.column_names), strict=True):
            found.add((int(file.stem[5:]), position, int(name.rpartition("-")[2]), worker))
    return sorted(found)


def counted(run_dir: Path) -> dict[str, int]:
    """Lost: positions before the last one trained that are in no batch. Doubled: those that are in two."""
    steps, groups = rows(run_dir), trained(run_dir)
    times = Counter(position for _, position, _, _ in groups)
    return {
        "steps": steps[-1]["step"],
        "trained": len(groups),
        "reissued": sum(attempt > 0 for _, _, attempt, _ in groups),
        "dropped": round(sum(row.get("buffer/dropped_stale", 0.0) for row in steps)),
        "lost": len(set(range(max(times) + 1)) - set(times)),
        "doubled": sum(count > 1 for count in times.values()),
    }


ON_CPUS: Tree = {"cluster": {"gpus": {"generator": 0, "learner": 0}}}  # also where there is a card


def run_gleaner(tree: Tree, mode: Mode, limit_s: float) -> Record:
    """A run in this mode. Raises RunFailed."""
    more: Tree = {"max_staleness": mode.staleness, "rollout": tree["rollout"] | {"in_flight": mode.in_flight}}
    cpus = {"generator": mode.generator, "learner": mode.learner}
    more["cluster"] = ON_CPUS["cluster"] | {"cpus": cpus, "learners": mode.ranks}
    load, started = os.getloadavg()[0], time.time()
    with finished(tree | more, limit_s) as run:
        wall, lines = time.time() - started, rows(run)
        batches = [ledger.read(path) for path in ledger.steps(run / "rollouts")]
    lengths = [n for table in batches for n in pc.list_value_length(table.column("completion_ids")).to_pylist()]
    ended = [reason == "stop" for table in batches for reason in table.column("finish_reason").to_pylist()]
    told = [line for line in lines if line["step"] > 0]
    return Record(
        system=mode.name, seed=tree["seed"], dtype=tree["model"]["dtype"],
        start_s=told[0]["at"] - told[0]["time/step"] - started, wall_s=wall, load=load,
        steps=_steps(told, [table.num_rows for table in batches], mode.staleness),
        lengths=lengths, ended=sum(ended) / len(ended),
        accuracy=accuracies(lines),
    )  # fmt: skip


def _steps(lines: Sequence[dict[str, float]], samples: Sequence[int], staleness: int) -> list[dict[str, float]]:
    """Of lines of metrics.jsonl, those of steps. `evaluated`: the step holds an evaluation, or gained from one."""
    steps = [_step(line, count) for line, count in zip(lines, samples, strict=True)]
    for index, step in enumerate(steps):
        step["evaluated"] = float(
            any(line["time/evaluate"] > 0 for line in lines[max(0, index - staleness) : index + 1])
        )
    quiet = [step["seconds"] for step in steps if not step["evaluated"]]
    if not quiet:
        raise RunFailed("every step holds an evaluation or gained from one: evaluate less often, or take more steps")
    for step in steps:
        if step["evaluated"]:
            step["seconds"] = max(step["seconds"], median(quiet))
    return steps


def _step(line: dict[str, float], samples: int) -> dict[str, float]:
    told = {what: line[f"time/{what}"] for what in TIMES if f"time/{what}" in line}
    # Where a run does not tell how long a role idled, it is what it was not busy for.
    derived = {
        "generator_idle": line["time/step"] - line["time/generate"],
        "learner_idle": line["time/step"] - line["time/train"],
    }
    counts = {"samples": samples, "tokens": line["rollout/tokens"]}
    return derived | told | counts | {"seconds": line["time/step"] - line["time/evaluate"] - line["time/checkpoint"]}


def parts_of(records: Sequence[Record], skip: int, names: Sequence[str], form: str = ".2f") -> list[str]:
    """Of each named part of a step, the spread over the runs."""
    return [spread([record.mean(skip, name) for record in records], form) for name in names]


def lengths_table(records: Sequence[Record]) -> str:
    """What was sampled, by system: they sample from one model, so these must agree within noise."""
    shares = (0.1, 0.25, 0.5, 0.75, 0.9)
    lines = []
    for system, dtype in dict.fromkeys((record.system, record.dtype) for record in records):
        own = [record for record in records if (record.system, record.dtype) == (system, dtype)]
        lengths = sorted(n for record in own for n in record.lengths)
        cells = [str(lengths[int(share * (len(lengths) - 1))]) for share in shares]
        ended = sum(record.ended * len(record.lengths) for record in own) / len(lengths)
        lines.append([system, dtype, str(len(lengths)), f"{sum(lengths) / len(lengths):.1f}", *cells, f"{ended:.3f}"])
    quantiles = [f"{share:.0%} below" for share in shares]
    return as_table(["system", "type", "completions", "mean tokens", *quantiles, "share that ended itself"], lines)


def wall_text(told: dict[str, Any], records: Sequence[Record]) -> str:
    """The conditions of runs that are timed by the clock on the wall."""
    loads = [record.load for record in records]
    between = f"load average before the runs {min(loads):.1f} to {max(loads):.1f} (a run leaves its own behind)"
    return under(told, f"Wall time, {between}")


def add_ragged_options(parser: argparse.ArgumentParser) -> None:
    """The shape of the ragged workload."""
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--steps", type=int, default=8, help="ragged: optimizer steps that count")
    parser.add_argument("--skip", type=int, default=2, help="ragged: steps before those")
    parser.add_argument("--groups", type=int, default=8, help="ragged: groups per step")
    parser.add_argument("--generations", type=int, default=8, help="ragged: completions per group")
    parser.add_argument("--completion", type=int, default=256, help="ragged: most tokens of a completion")
    parser.add_argument("--end-rate", type=float, default=0.01, help="ragged: probability of the end, per token")
    parser.add_argument("--kv-cache", default="1GiB", help="ragged: of gleaner's generator")


def about_ragged(options: argparse.Namespace) -> str:
    return (
        f"A Llama of 25M random weights (H = 384, 12 layers, V = {WORDS + len(SPECIAL)}, 6 query and 2 KV heads, "
        f"untied head), prompts of 200 to 400 tokens, {options.groups} groups of {options.generations} completions a "
        f"step, each token the last with probability {options.end_rate:g}, at most {options.completion} tokens."
    )


def ragged(folder: Path, options: argparse.Namespace) -> Tree:
    """Writes model, problems and reward under `folder` and returns the configuration that uses them."""
    longest = PROMPT_WORDS[1] + TEMPLATE_TOKENS
    make_model(folder / "model", end_rate=options.end_rate, context=longest + options.completion)
    rng, steps = random.Random(0), options.steps + options.skip
    problems = [
        {"question": " ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randint(*PROMPT_WORDS)))}
        for _ in range(steps * options.groups)
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    (folder / "reward.py").write_text(REWARD)
    return {
        "steps": steps,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "problems.jsonl"), "eval": {"every": 0}},
        "rewards": [{"use": f"{folder.absolute()}/reward.py:even_words"}],
        "rollout": {
            "num_generations": options.generations,
            "max_prompt_length": longest,
            "max_completion_length": options.completion,
            "kv_cache": options.kv_cache,
        },
        "learner": {"groups_per_step": options.groups, "learning_rate": 1e-5},
        "checkpoint": {"every": steps},
        "trackers": [],
    }


ABOUT_REAL = (
    "SmolLM2-135M-Instruct (`make smollm2`) on `configs/real_cpu.yaml`: 4 groups of 8 completions of at most 80 tokens "
    "a step, constraints that a program checks, without evaluations."
)


def real(steps: int, dtype: str) -> Tree:
    """configs/real_cpu.yaml without evaluations, on SmolLM2 in a type; saved at the end only."""
    from cluster.reading import read_yaml

    tree = read_yaml(ROOT / "configs" / "real_cpu.yaml")
    tree["model"] = {"path": str(ROOT / "build" / "smollm2" / dtype), "dtype": dtype}
    tree["data"] |= {"path": str(ROOT / tree["data"]["path"]), "eval": {"every": 0}}
    tree["rewards"][0]["use"] = f"{ROOT}/{tree['rewards'][0]['use']}"
    return tree | {"steps": steps, "checkpoint": {"every": steps}, "trackers": []}


def demo(steps: int, every: int) -> Tree:
    """configs/local_cpu.yaml, evaluated every `every` steps and saved at the end only."""
    from cluster.reading import read_yaml

    tree = read_yaml(ROOT / "configs" / "local_cpu.yaml")
    tree["model"]["path"] = str(ROOT / tree["model"]["path"])
    tree["data"]["eval"]["every"] = every
    return tree | {"steps": steps, "checkpoint": {"every": steps}, "trackers": []}


def demo_of_one(steps: int, every: int) -> Tree:
    """`demo` with one generator, which gets adapters: for what compares pushes, looks at one generator, or trains all
    weights."""
    tree = demo(steps, every)
    tree["rollout"]["workers"], tree["learner"]["push"] = 1, "adapter"
    return tree


def make_tokenizer() -> Any:
    """One token per word w0, w1, ..., after the special ones."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    hf: Any = transformers  # its constructors carry no annotations
    names = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=SPECIAL[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[PAD], eos_token=SPECIAL[END], chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(folder: Path, *, end_rate: float, context: int) -> None:
    """Writes to folder a Llama of 25 million random weights in float32 whose completions end by chance, so that their
    lengths are ragged, and its tokenizer.

    Random weights never sample the end token. Here residual channel 0 holds the same constant at every position: the
    embeddings write it, and no layer writes to it. The end token's row of the head reads that channel alone, with a
    gain found by bisection so that its probability is `end_rate` per token on average. Lengths are then geometric, cut
    at the limit, for whichever system samples from the folder.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + WORDS,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=6,  # of 64: a width that vLLM's attention has on CPU and GPU
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=0.05,  # with it the next token's entropy is near that of a uniform choice, not equal to it
        **ends,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    with torch.no_grad():
        _set_end_rate(model, end_rate)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def _set_end_rate(model: Any, end_rate: float) -> None:
    import torch

    model.model.embed_tokens.weight[:, 0] = 10 * float(model.model.embed_tokens.weight.std())
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    head = model.lm_head.weight
    head[:, 0] = 0
    head[: len(SPECIAL)] = 0
    ids = torch.randint(len(SPECIAL), len(head), (8, 512))  # random words are what such a model samples
    hidden = model.model(ids).last_hidden_state[:, 200:].flatten(0, 1)  # [N, H], where completions are: after a prompt
    others = (hidden @ head[len(SPECIAL) :].T).logsumexp(-1)
    low, high = 0.0, 1e4
    for _ in range(60):
        gain = (low + high) / 2
        rate = float((gain * hidden[:, 0] - others).sigmoid().mean())
        low, high = (gain, high) if rate < end_rate else (low, gain)
    head[END, 0] = gain
    head[[i for i in range(len(SPECIAL)) if i != END], 0] = -gain  # never sampled


def run_trl(tree: Tree, micro_batch: int, engine: str, limit_s: float) -> Record:
    """benchmarks.system.trl_system on the configuration; engine: a key of RIVALS. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="trl-bench-") as folder:
        out = Path(folder) / "out.json"
        after = [str(out), "--micro-batch", str(micro_batch), "--engine", engine]
        load, started = os.getloadavg()[0], time.time()
        command(tree, ["-m", "benchmarks.system.trl_system"], after, limit_s)
        wall, told = time.time() - started, json.loads(out.read_text())
    return Record(
        system=RIVALS[engine], seed=tree["seed"], dtype=tree["model"]["dtype"], start_s=told["began_at"] - started,
        wall_s=wall, load=load, steps=told["steps"], lengths=told["lengths"], ended=told["ended"],
        accuracy=[(step, score) for step, score in told["accuracy"]],
    )  # fmt: skip
