"""The memory of a teacher (model.teacher): an engine that computes prompts alone and gives the logprobs of their tokens
(EngineSettings.prompt_logprobs of rollout.engine)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from cluster.errors import WrongInput
from cluster.memory.generator import (
    ENGINE_PROCESS,
    PREFILL_TOKENS,
    Serving,
    cache_bytes,
    engine_processes,
    generator_bytes,
)
from cluster.memory.plan import CUDA_LIBRARIES, USABLE, gib
from cluster.memory.shape import Parts, Shape, total

AT_ONCE = 32  # completions that are computed at once: a step has room for so many of usual lengths
LOGITS_BYTES = 2**30  # most bytes of a step's logits in float32
LEAST_TOKENS = 256  # of a step
MORE_ROWS = 8  # tokens that the policy may lack among a teacher's likeliest


def step_tokens(vocab: int) -> int:
    """Most tokens of an engine step. vLLM holds the logits of all of them (v1/worker/gpu_model_runner.py,
    _get_prompt_logprobs_dict): of 4096 tokens and 150,000 entries 2.5 GB in float32, and as much for their logarithms.
    """
    return min(PREFILL_TOKENS, max(LEAST_TOKENS, LOGITS_BYTES // (4 * max(vocab, 1))))


def kv_bytes(shape: Shape, dtype: str, longest: int, *, cuda: bool) -> int:
    """Bytes of the KV cache: for the completions of a step, of `longest` tokens with their prompt, and one more, of
    which a part is computed."""
    count = min(AT_ONCE, ceil(step_tokens(shape.vocab) / longest) + 1)
    return cache_bytes(shape, dtype, longest, count, cuda=cuda)


def teacher_bytes(shape: Shape, dtype: str, longest: int, *, cuda: bool, shards: int = 1) -> Parts:
    """The bytes that a teacher holds, by part, as generator_bytes counts them: on each of its GPUs, or on a CPU.

    logits: 12 V per token of a step, for those of the model, their logarithms and the likeliest of them (estimate). No
    graphs: it decodes nothing.
    """
    kv = kv_bytes(shape, dtype, longest, cuda=cuda)
    found = generator_bytes(shape, Serving(dtype, adapters=0, sequences=AT_ONCE, kv_bytes=kv, cuda=cuda, shards=shards))
    logits = 12 * shape.vocab * step_tokens(shape.vocab)
    left_out = ("graphs", "lora_slots", "push")
    return {name: size for name, size in found.items() if name not in left_out} | {"logits": logits}


@dataclass(frozen=True, slots=True)
class TeacherBudget:
    """What the process of a teacher gets, and what it takes.

    longest: tokens of the longest prompt with its completion, and the one that vLLM samples behind them. step: most
    tokens of an engine step. kv_bytes: of the KV cache, of each of its shards. vocabulary, others: rows of the policy's
    head, and how many tokens more it is asked for since its own head has more. parts: planned bytes by part; None for
    an architecture that the memory model does not know. cuda: whether it is on a card.
    """

    longest: int
    step: int
    kv_bytes: int
    vocabulary: int
    others: int
    parts: Parts | None
    cuda: bool

    @property
    def takes(self) -> int:
        """Planned bytes, 0 where they are not known."""
        return total(self.parts or {})

    @property
    def room(self) -> int:
        """Free bytes of a card that its engine waits for before it loads the model."""
        return 0 if self.parts is None or not self.cuda else self.parts["weights"] + self.parts["kv_cache"]

    def host(self, shards: int) -> int:
        """Bytes of main memory that its processes take."""
        return engine_processes(shards) * (ENGINE_PROCESS + CUDA_LIBRARIES) if self.cuda else self.takes

    @property
    def note(self) -> str:
        """A clause for the user."""
        if self.parts is None:
            return f"model.teacher: no plan for its architecture, its KV cache has {gib(self.kv_bytes)}"
        return (
            f"model.teacher: {gib(self.takes)} planned on {'a card' if self.cuda else 'the CPU'} (weights "
            f"{gib(self.parts['weights'])}, KV cache {gib(self.parts['kv_cache'])}, logits "
            f"{gib(self.parts['logits'])}: {self.step} tokens a step)"
        )

    def beside(self, device: int, name: str, *, shares: bool) -> int:
        """What is left of a device of so many bytes for the other roles. shares: whether they are on it, too.

        Raises WrongInput if the teacher does not fit. name: of its model.
        """
        if self.takes > USABLE * device:
            assert self.parts is not None
            raise WrongInput(
                f"model.teacher: {name} needs {gib(self.takes)} (weights {gib(self.parts['weights'])}), and "
                f"{gib(device)} are there; give a smaller or a quantised one, or "
                f"{'more cards (cluster.gpus.teacher=2)' if self.cuda else 'raise memory.device'}"
            )
        return device - self.takes if shares else device


def teacher_budget(
    config: Mapping[str, Any], dtype: str, longest: int, rows: Sequence[int], *, cuda: bool, shards: int, default: int
) -> TeacherBudget:
    """The budget of the teacher with this config.json.

    longest: as TeacherBudget has it. rows: of the heads of the policy and of the teacher. default: bytes of the KV
    cache of an architecture that the memory model does not know.
    """
    own, theirs = rows
    others = min(max(theirs - own, 0), MORE_ROWS)
    try:
        shape = Shape.from_config(config)
    except (ValueError, TypeError):
        return TeacherBudget(longest, step_tokens(theirs), default, own, others, None, cuda)
    parts = teacher_bytes(shape, dtype, longest, cuda=cuda, shards=shards)
    kv = kv_bytes(shape, dtype, longest, cuda=cuda) // shards
    return TeacherBudget(longest, step_tokens(shape.vocab), kv, own, others, parts, cuda)
