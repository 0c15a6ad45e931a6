"""What is generated: data, sampling, and the generator's own memory."""

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from cluster.config import Frozen
from rewards.memory import DEFAULT as DEFAULT_REWARD_MEMORY
from rewards.secret_values import Arguments

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


SMALLEST = 2**20  # bytes of anything that this project is asked to fill


def parse_bytes(value: object) -> object:
    """`256MiB`, `1.5GB` or a plain number of bytes -> int; what is no text is given back as it is."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(f"not a size: {value[:40]!r}; write for example 256MiB, 1.5GB or a number of bytes")
    return int(Fraction(match[1]) * UNITS[match[2].upper()])


def parse_size(value: object) -> int:
    """A size of at least 1 MiB; a number without a unit is bytes, so `24` is refused with what was probably meant."""
    size = parse_bytes(value)
    if isinstance(size, bool) or not isinstance(size, int):
        raise ValueError(f"not a size: {str(value)[:40]!r}; write for example 256MiB, 1.5GB or a number of bytes")
    if size < SMALLEST:
        raise ValueError(f"must be a size of at least 1MiB, got {size} bytes; write the unit, for example 24GiB")
    return size


DEFAULT_KV = 256 * 2**20  # bytes of a generator's KV cache without a plan

Bytes = Annotated[int, BeforeValidator(parse_size)]


def _bytes_or_auto(value: object) -> object:
    # Checked here whole: of a union pydantic would tell one error per member.
    return value if value == "auto" else parse_size(value)


BytesOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_bytes_or_auto)]


def _texts(value: object) -> object:
    # Checked here whole: a text would be taken for the list of its letters, or refused without a next step.
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"must be a list of texts that are not empty, for example ['</answer>'], got {value!r}")
    return tuple(value)


class EvalConfig(Frozen):
    """Held-out evaluation. Without `path` and `split` problems are held out of the training data; `every: 0` switches
    it off."""

    path: str | None = None  # null: data.path
    split: str | None = None  # null: test; of a file, all of it
    size: Annotated[int, Field(ge=1)] = 200
    every: Annotated[int, Field(ge=0)] = 20
    reward: str | None = None  # the reward that counts as accuracy; null = the one with the largest weight


class DataConfig(Frozen):
    """Problems: a hub dataset name, a JSON lines, JSON, CSV or Parquet file (also packed: .gz), a folder of
    save_to_disk, or a reasoning_gym task `rg:<task>`."""

    path: str
    split: str = "train"  # or a part: train[:100]
    prompt: str = (
        "question"  # a column (text or chat messages), a part of one (problem.text), or a template: "Solve: {q}"
    )
    system: str | None = None
    # Variables of the model's chat template, e.g. {enable_thinking: false}; one that it does not read is refused.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    size: Annotated[int, Field(ge=1)] | None = None  # use the first n problems; for rg: how many to generate
    # rg: the task's settings; else arguments of load_dataset. A secret is best given as env:NAME, a variable's name.
    args: Arguments = Field(default_factory=dict)
    overlong: Literal["fail", "drop"] = "fail"  # prompts above rollout.max_prompt_length; they are never cut
    eval: EvalConfig = EvalConfig()


class RolloutConfig(Frozen):
    """Generation. Token counts are per completion or prompt; `kv_cache` is bytes per generator, auto: by the memory
    plan, 256MiB without one. `kv_cache_dtype`: auto is the model's type; fp8 holds twice the tokens of 16 bits, and
    samples a little further from what the learner scores. `in_flight`: completions that run when a newer adapter
    arrives finish on the one they began with, or continue under the newer one from the next token on."""

    workers: Annotated[int, Field(ge=1)] = 1
    num_generations: Annotated[int, Field(ge=2)] = 8
    max_prompt_length: Annotated[int, Field(ge=1)] = 256
    max_completion_length: Annotated[int, Field(ge=1)] = 256
    # A completion also ends with the token that completes one of these in its text; its tokens stay as sampled, that
    # one included. Text is without special tokens; a string that is one ends completions by its id.
    stop: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    top_p: float = 1.0
    kv_cache: BytesOrAuto = DEFAULT_KV
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    max_num_seqs: Annotated[int, Field(ge=1)] = 128
    in_flight: Literal["finish", "continue"] = "finish"
    reward_workers: Annotated[int, Field(ge=1)] = 1  # reward processes beside each generator
    reward_memory: Bytes = DEFAULT_REWARD_MEMORY  # the most that each of them, and what it starts, may hold; not GPU
    dynamic_sampling: bool = False  # replace groups whose rewards are all equal (DAPO)
    # Groups begun beyond a batch's; the last to finish are stopped and go on later. Tokens may then be older than
    # max_staleness (see cluster.oversampling), and are trained on with the ratio to their own policy.
    oversample: Annotated[int, Field(ge=0)] = 0

    @field_validator("top_p")
    @classmethod
    def _full_distribution(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                f"must be 1.0 (got {value}): the learner scores the full distribution, and a truncated sampler would "
                "make every importance ratio wrong; lower rollout.temperature instead"
            )
        return value
