"""The source of an export: finding a whole checkpoint of a run, which may still be going on, the tokens and limits by
which written weights are compared with it, and the disk and memory that an export needs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from cluster.errors import WrongInput
from cluster.machine import available_memory
from cluster.memory.plan import gib
from cluster.memory.shape import DTYPE_BYTES
from cluster.reading import read_json
from learner.config import RunConfig, load
from learner.driver import checkpoint
from learner.driver.checkpoint import TRAINER
from learner.driver.evaluate import Evaluation
from learner.driver.failure import RunEnded
from learner.driver.identity import (
    FILE,
    REVISION,
    Fingerprints,
    content_of,
    differing,
)
from learner.model.adapter_config import CONFIG_FILE, MODEL
from rollout import ledger
from rollout.data import model_files
from rollout.data.model_files import WEIGHTS_FILE, adapter_weights, model_weights
from rollout.data.weight_names import in_16_bits
from rollout.schema import masks_of, ragged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A verified checkpoint of a run, and what the run was made with.

    Attributes:
        run: the run's folder.
        evaluations: the run's evaluations up to the checkpoint, oldest first.
        inputs: digests of data, reward functions and base.
    """

    run: Path
    config: RunConfig
    checkpoint: Path
    step: int
    evaluations: list[Evaluation]
    inputs: Fingerprints

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.run.name

    @property
    def whole_model(self) -> bool:
        """Whether all weights were trained, instead of a LoRA adapter."""
        return self.config.learner.mode == "full"

    @property
    def learned(self) -> Path:
        """The folder in the checkpoint with the adapter or the whole model."""
        return self.checkpoint / TRAINER / MODEL if self.whole_model else self.checkpoint / TRAINER


def find(run: Path, step: int | None, model: str | None = None) -> Source:
    """Returns the newest whole checkpoint of a run, or that of a step. Raises WrongInput if there is none.

    model: hub name or folder of the base, if it is no longer at model.path.
    """
    run = run.resolve()
    if not (run / "config.yaml").is_file():
        raise WrongInput(f"RUN: must be a run folder such as runs/demo-seed0, got {run}; check the path")
    folder = _checkpoint(run / "checkpoints", step)
    try:
        config = load.recorded(read_json(folder / "config.json"))
        inputs = Fingerprints.read(folder / FILE)
        evaluations = [Evaluation(**dict(one)) for one in checkpoint.read_state(folder).evaluations]
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise WrongInput(
            f"RUN: {folder} was made by another version of gleaner, of which this one cannot read all ({first}); "
            "export it with that version, or go on with the run for a step"
        ) from None
    if model is not None:
        config = _with_base(config, model)
    source = Source(run, config, folder, checkpoint.step_of(folder), evaluations, inputs)
    wanted = "config.json" if source.whole_model else CONFIG_FILE
    if not (source.learned / wanted).is_file() or not (source.whole_model or (source.learned / WEIGHTS_FILE).is_file()):
        raise WrongInput(
            f"RUN: {folder} holds no {wanted}, as those of an older version of gleaner; go on with the run for a step"
        )
    return source


def _with_base(config: RunConfig, model: str) -> RunConfig:
    if config.learner.mode == "full":
        raise WrongInput("--model: is the base of an adapter, and this run trained all weights; leave it out")
    path = str(Path(model).absolute()) if Path(model).is_dir() else model
    revision = config.model.revision if path == config.model.path else None
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path, "revision": revision})})


def _checkpoint(root: Path, step: int | None) -> Path:
    kept = checkpoint.listing(root)
    if not kept:
        raise WrongInput(f"RUN: {root.parent} has no checkpoint yet; wait for its first (checkpoint.every)")
    if step is None:
        found, skipped = checkpoint.newest(root)
        if found is None:
            raise WrongInput(f"RUN: no checkpoint in {root} is whole ({'; '.join(skipped)}); copy the run again")
        return found
    folder = root / checkpoint.name_of(step)
    if folder not in kept:
        steps = ", ".join(str(checkpoint.step_of(one)) for one in kept)
        raise WrongInput(
            f"--step: must be one whose checkpoint is kept ({steps}), got {step}; raise checkpoint.keep to keep more"
        )
    if reason := checkpoint.verify(folder):
        raise WrongInput(f"--step: {folder} is not whole ({reason}); give another step")
    return folder


def check_base(source: Source) -> bool:
    """Whether the base is known to be the one that the adapter was trained on. It is not known if one of the two is a
    hub's revision and the other a folder. Raises WrongInput if it is known to be another."""
    path, recorded = source.config.model.source, source.inputs.base
    now = content_of(path)
    own = {name: digest for name, digest in recorded.items() if not name.startswith(("reference ", "value "))}
    if {REVISION} in (now.keys(), own.keys()) and not now.keys() & own.keys():
        return False  # one is identified by its commit, the other by its files
    differ = [name for name in differing(now, own) if name.endswith(".safetensors") or name == REVISION]
    if differ:
        raise WrongInput(
            f"model.path: {path} must be the base that the run was trained on, and has another {', '.join(differ)}; "
            "put the same model there, or say with --model where it is"
        )
    return True


# The recorded tokens on which merged weights are compared with the adapter.

ROWS, LENGTH, TOTAL = 16, 512, 4096  # number of completions; most ids of each; most ids of all together
CONTEXT = LENGTH // 2  # most ids of a prompt, from its end


class Window(NamedTuple):
    """A part of a recorded sequence."""

    ids: list[int]  # [L] the end of a prompt and the beginning of the completion
    places: list[int]  # indices in `ids` of sampled tokens


def recorded(rollouts: Path, step: int) -> list[Window]:
    """Returns windows of the newest step up to `step` whose file can be read, spread over the file; none if there is no
    such file."""
    for file in reversed(ledger.steps(rollouts)):
        if int(file.stem.removeprefix("step-")) > step:
            continue
        try:
            rows = ledger.read(file)
        except (OSError, ValueError):  # the file is cut short, or of a schema that is no longer read
            continue
        if found := list(_within(_windows(rows))):
            return found
    return []


def made_up(vocabulary: int) -> list[Window]:
    """Returns windows of random ids, always the same, for a run whose rollouts are gone."""
    rng = np.random.default_rng(0)
    return [Window(rng.integers(0, vocabulary, 64).tolist(), list(range(1, 64))) for _ in range(ROWS)]


def _windows(rows: pa.Table) -> Iterator[Window]:
    prompts, completions, masks = ragged(rows, "prompt_ids"), ragged(rows, "completion_ids"), masks_of(rows)
    for row in np.unique(np.linspace(0, rows.num_rows - 1, ROWS).astype(int)):
        prompt = prompts[row][-CONTEXT:].tolist()
        ids = [*prompt, *completions[row].tolist()][:LENGTH]
        places = [len(prompt) + at for at in np.flatnonzero(masks[row]).tolist() if len(prompt) + at < len(ids)]
        if places:
            yield Window(ids, places)


def _within(windows: Iterator[Window]) -> Iterator[Window]:
    left = TOTAL
    for window in windows:
        left -= len(window.ids)
        if left < 0:
            return
        yield window


# Comparison of the written weights with base and adapter.
#
# Both compute in float32, whatever the dtype of the written weights, so that only the rounding of the written weights
# and faults of the merge remain as differences.

# Largest allowed difference of logprobs in nats, by the dtype of the written weights: rms, and at one token. They are
# measured in docs/export.md.
TOLERANCE = {"float32": (1e-4, 1e-3), "float16": (0.02, 0.2), "bfloat16": (0.1, 1.0)}
SHARE = 0.5  # largest share of the adapter's effect on logprobs that rounding may take away


class Said(NamedTuple):
    """What a model computes for N tokens, on the CPU."""

    logprobs: Tensor  # [N] float32, nats
    likeliest: Tensor  # [N] the token that greedy decoding takes
    margin: Tensor  # [N] float32, nats by which that token is likelier than the next


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a comparison of written weights with what was learned.

    Attributes:
        dtype: dtype of the written weights.
        tokens: number of compared tokens.
        recorded: whether the tokens are the run's; false: they are random.
        moved: rms difference between logprobs with the adapter and without it, nats; None if there is no adapter.
        rms, worst: rms and largest difference between logprobs of the written and the learned weights, nats.
        greedy: number of tokens with the same likeliest token.
        flipped: number of tokens with another likeliest token although the margin was above the tolerance of a token.
    """

    dtype: str
    tokens: int
    recorded: bool
    moved: float | None
    rms: float
    worst: float
    greedy: int
    flipped: int


def ask(lm: Any, windows: Sequence[Window]) -> Said:
    """Computes the sampled tokens of the windows with a causal language model of transformers, window after window."""
    import torch

    device, parts = lm.get_input_embeddings().weight.device, []
    with torch.no_grad():
        for ids, places in windows:
            at = torch.tensor(places, device=device)
            row = torch.tensor([ids], device=device)
            logs = lm(input_ids=row, use_cache=False).logits[0, at - 1].float().log_softmax(-1)
            best = logs.topk(2)
            own = logs.gather(1, row[0, at, None])[:, 0]
            parts.append(Said(own.cpu(), best.indices[:, 0].cpu(), (best.values[:, 0] - best.values[:, 1]).cpu()))
    return Said(*(torch.cat(part) for part in zip(*parts, strict=True)))


def compare(expected: Said, found: Said, base: Said | None, dtype: str, *, recorded: bool) -> Proof:
    """Compares `found`, by the written weights, with `expected`, by the learned ones. base: without the adapter; None:
    there is no adapter."""
    apart = found.logprobs - expected.logprobs
    same = found.likeliest == expected.likeliest
    return Proof(
        dtype=dtype, tokens=len(apart), recorded=recorded,
        moved=None if base is None else _rms(expected.logprobs - base.logprobs),
        rms=_rms(apart), worst=float(apart.abs().max()), greedy=int(same.sum()),
        flipped=int((~same & (expected.margin > TOLERANCE[dtype][1])).sum()),
    )  # fmt: skip


def check(proof: Proof) -> None:
    """Raises RunEnded if the differences are larger than allowed."""
    rms, worst = TOLERANCE[proof.dtype]
    # The comparison is negated so that nan fails.
    if not (proof.rms <= rms and proof.worst <= worst) or proof.flipped:
        raise RunEnded(
            f"OUT: the merged weights must say what the adapter says, within {rms:g} nats rms and {worst:g} at a token "
            f"({proof.dtype}), and differ by {proof.rms:.2g} rms and {proof.worst:.2g} at a token, of {proof.tokens} "
            f"tokens, with {proof.flipped} other greedy tokens; nothing was written: please report this with the model"
        )
    least = TOLERANCE["float32"][0]
    if proof.moved is not None and proof.rms > max(SHARE * proof.moved, least):
        raise RunEnded(
            f"--dtype: {proof.dtype} weights must hold what was learned, and rounding takes away {proof.rms:.2g} nats "
            f"rms of the {proof.moved:.2g} by which the adapter moves logprobs; give --dtype float32, or --adapter-only"
        )


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.double().square().mean()))


# Disk and memory that an export needs.

OTHERS = 50 * 10**6  # bytes of tokenizer, configuration and card
PROCESS = 2 * 10**9  # bytes of memory for torch, and for the logits of one completion
GGUF_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "auto": 2.0, "q8_0": 34 / 32}  # bytes per weight of a GGUF file


@dataclass(frozen=True, slots=True)
class Needed:
    """What an export needs."""

    disk: int  # bytes
    memory: int  # bytes, of a GPU or of the machine
    weights: int  # number of the model's weights; 0 if it is not known


def needed(source: Source, dtype: str | None, outtype: str | None) -> Needed:
    """Returns what an export needs with merged weights of `dtype` (None: the adapter alone) and a GGUF file of
    `outtype` (None: without)."""
    if dtype is None:
        stored = adapter_weights(str(source.learned), "RUN").values()
        # The adapter may be written twice, the second time under vLLM's names.
        return Needed(2 * sum(one.nbytes for one in stored) + OTHERS, 0, 0)
    path = str(source.learned) if source.whole_model else source.config.model.source
    found = in_16_bits(model_weights(path) or {}, model_files.read_json(path, model_files.CONFIG), path, "model.path")
    weights = sum(math.prod(one.shape) for one in found.values())
    each = DTYPE_BYTES[dtype] + (GGUF_BYTES[outtype] if outtype else 0)
    return Needed(int(weights * each) + OTHERS, 4 * weights + PROCESS, weights)


def check_disk(wanted: Needed, out: Path) -> None:
    """Raises WrongInput if the disk has too little room."""
    there = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if wanted.disk > free:
        raise WrongInput(
            f"OUT: needs {gib(wanted.disk)} on the disk of {there}, which has {gib(free)} left; give another folder"
        )


def check_memory(wanted: Needed) -> None:
    """Raises WrongInput if the machine has too little memory for a merge on the CPU."""
    free = available_memory()
    if wanted.memory > free:
        raise WrongInput(
            f"RUN: merging in float32 needs {gib(wanted.memory)} of memory, {gib(free)} are free; give "
            "--adapter-only, which needs none, or merge on a larger machine"
        )
