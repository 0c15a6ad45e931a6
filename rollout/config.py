"""What is generated: data, sampling, and the generator's own memory."""

import json
import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.config import Frozen
from rewards.config import Arguments
from rewards.limits import DEFAULT_MEMORY as DEFAULT_REWARD_MEMORY

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


DEFAULT_ENVIRONMENT_MEMORY = 2**30  # bytes that the process of an environment may hold
DEFAULT_KV = 256 * 2**20  # bytes of a generator's KV cache without a plan
DEFAULT_SEQUENCES = 128  # that a generator decodes at once, likewise

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


def _choices(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) < 2 or not all(isinstance(one, str) and one for one in value):
        raise ValueError(
            "must be a list of at least two texts, in quotes where YAML takes them for something else, for example "
            f"['yes', 'no'], got {value!r}"
        )
    return tuple(value)


class EvalConfig(Frozen):
    """Held-out evaluation. Without `path` and `split` problems are held out of the training data; `every: 0` switches
    it off."""

    path: str | None = None
    """Held-out problems of their own, named as in `data.path`; null: `data.path`."""
    split: str | None = None
    """Their split; null: `test`, and of a file all of it. With `path` null as well, a tenth of the distinct training
    prompts is held out."""
    size: Annotated[int, Field(ge=1)] = 200
    """Held-out problems, at most. More: a finer score, and a longer evaluation."""
    every: Annotated[int, Field(ge=0)] = 20
    """Steps between evaluations; 0: none. Raise it where an evaluation takes long beside the steps."""
    reward: str | None = None
    """The reward function that counts as accuracy, by its name in the metrics; null: the one called `accuracy`, else
    the one with the largest weight. Reward models are not asked."""


OWN = "env:own"  # data.path: the environment has the problems
EPISODE = "episode"  # the column that its problems have, a number
# Settings of `data` that say how its path is read: of another path they say nothing.
OF_ITS_PATH = ("split", "args")
# Settings of `data.eval` that say which problems are held out.
OF_HELD_OUT = ("path", "split")


OWN_ROLLOUTS = "own"  # data.curriculum: by the rollouts of this run


class TeacherConfig(Frozen):
    """A privileged prompt: what a teacher on the policy's base (`learner.algorithm: distill`, or `learner.loss.beta`
    beside rewards) is given in place of the prompt, such as the answer, an example or a hint, which the policy never
    sees. With neither prompt nor system it is given the policy's prompt."""

    prompt: str | None = None
    """As `data.prompt`, such as `"{question} (The answer: {answer})"`; null: `data.prompt`."""
    system: str | None = None
    """A system message before it; null: `data.system`."""
    max_prompt_length: Annotated[int, Field(ge=1)] = 512
    """Longest of these prompts in tokens; of longer ones `data.overlong` decides. The learner's memory is planned for
    it."""

    @property
    def privileged(self) -> bool:
        """Whether the teacher is given another prompt than the policy."""
        return self.prompt is not None or self.system is not None

    @property
    def longest(self) -> int:
        """The most tokens of its prompts; 0 where it is given the policy's."""
        return self.max_prompt_length if self.privileged else 0


class DataConfig(Frozen):
    """Problems: a hub dataset name, a JSON lines, JSON, CSV or Parquet file (also packed: .gz), a folder of
    save_to_disk, a reasoning_gym task `rg:<task>`, or `env:own`."""

    path: str
    """The training problems: a hub name, a file, a pattern of files (`data/*.jsonl`), a folder, or a reasoning_gym
    task, `rg:<task>`. `env:own`: those of the environment, which begins each trajectory by its seed."""
    split: str = "train"
    """Which split, or a part of it: `train[:100]`. Take a part to try things out."""
    prompt: str | None = "question"
    """What the model is asked: a column (text, or a list of chat messages), a part of a nested one (`problem.text`), or
    a template over columns (`"Solve: {question}"`). null: an environment says it all."""
    system: str | None = None
    """A system message before every prompt. Set it to ask for a format; leave it null where the data has one."""
    chat_template: Literal["auto", "none"] = "auto"
    """`auto`: a prompt is messages, rendered by the model's chat template where it has one; a text is a user's message.
    `none`: a prompt is a text that the model continues as it stands, and reward functions get texts. Set it for prompts
    that are rendered already, as those that open a `<think>`."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `{enable_thinking: false}` for Qwen3; one that it does not read
    is refused."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Use the first n problems; of a reasoning_gym task: how many to make (null: 1000). Set it for a short trial."""
    args: Arguments = Field(default_factory=dict)
    """Settings of a reasoning_gym task; of a CSV file arguments of `pandas.read_csv` (`{sep: ";"}`); else of
    `datasets.load_dataset` (`{name: main}`). Give a secret as `env:NAME`, the name of an environment variable."""
    overlong: Literal["fail", "drop"] = "fail"
    """Prompts above `rollout.max_prompt_length`: refuse the run, or leave them out; they are never cut."""
    shuffle: bool = True
    """Each epoch in another order, by `seed`. `false`: in the order of the source, for a curriculum of your own."""
    curriculum: Annotated[str, Field(min_length=1)] | None = None
    """Draw problems more often whose completions differ in score, and those seldom that are never or always solved:
    `own`, by this run's rollouts so far, anew at each epoch's start; or another run's folder, to begin with its
    rollouts. Set it where `reward/zero_variance_groups` is most of a batch. null: each problem once an epoch."""
    eval: EvalConfig = EvalConfig()
    teacher: TeacherConfig = TeacherConfig()

    @property
    def of_teacher(self) -> "DataConfig":
        """These settings with the teacher's prompt in place of the policy's."""
        given = {name: value for name in ("prompt", "system") if (value := getattr(self.teacher, name)) is not None}
        return self.model_copy(update=given)

    @property
    def by_environment(self) -> bool:
        """Whether an environment says what the model is asked: a prompt is an empty message of the user's."""
        return self.prompt is None or self.path == OWN


class StructuredOutputs(Frozen):
    """A form that every completion has: what does not fit it is never sampled. One of the four; the learner scores the
    whole distribution all the same, as with top_p. Needs temperature 1, and no environment."""

    regex: Annotated[str, Field(min_length=1)] | None = None
    """A regular expression that the whole completion matches, such as `[0-9]+`."""
    json_schema: dict[str, Any] | None = None
    """A JSON object of this JSON schema."""
    choice: Annotated[tuple[str, ...] | None, BeforeValidator(_choices)] = None
    """Texts, of which each completion is one."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """A context-free grammar in EBNF (GBNF), whose rule `root` is the completion."""

    @property
    def form(self) -> str:
        """JSON of the one that is given; "" where none is."""
        given = {name: value for name, value in self if value is not None}
        return json.dumps(given) if given else ""

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        given = [name for name, value in self if value is not None]
        if len(given) > 1:
            raise ValueError(f"one form at a time, got {' and '.join(given)}; leave out the others")
        return self


class RolloutConfig(Frozen):
    """Generation, and the processes that score it. Lengths are in tokens."""

    workers: Annotated[int, Field(ge=1)] = 1
    """Generators. Raise it where a run says that generation is the longer side, and there is hardware for another."""
    num_generations: Annotated[int, Field(ge=1)] = 8
    """Completions per problem (G): the group that GRPO's advantages are computed in. More: a better estimate, for more
    generation."""
    max_prompt_length: Annotated[int, Field(ge=1)] = 256
    """Longest prompt in tokens; see `data.overlong` for longer ones."""
    max_completion_length: Annotated[int, Field(ge=1)] = 512
    """Longest completion in tokens. Raise it while `rollout/truncated` is far from 0; memory and time grow with it."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    """Strings that end a completion, beside the end tokens of the tokenizer, generation_config.json and the chat
    template. Its tokens stay as sampled, up to and including the one that completes the string. A special token ends it
    by its id."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Of sampling; the learner scores the same distribution. Raise it where the completions of a group are too alike to
    learn from."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability. The learner scores the whole distribution,
    so that tokens keep their exact ratio; needs temperature 1. 1: from all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from so many of the likeliest tokens, likewise. 0: from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens that have at least this share of the likeliest one's probability, likewise. 0: from all."""
    structured_outputs: StructuredOutputs = StructuredOutputs()
    kv_cache: BytesOrAuto = "auto"
    """Bytes of each generator's KV cache; `auto`: by the memory plan, 256MiB without one. More: more sequences at
    once."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """`auto`: the model's type. `fp8`: twice the tokens of bfloat16 in the same bytes, sampled a little further from
    what the learner scores, which the ratio corrects (the demo learns the same; its `policy/mismatch_k3` is 0.001)."""
    max_num_seqs: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Sequences that a generator decodes at once, at most; `auto`: 128, and on a card as many of a step's completions
    as the memory plan has room for, up to 256. Lower it where memory is short."""
    in_flight: Literal["finish", "continue"] = "finish"
    """What completions under way do when a newer policy arrives: `finish` under theirs, or `continue` under the new one
    from the next token on, with a version per token. `continue` needs `max_staleness` of at least 1; it keeps long
    completions from getting old."""
    routing_replay: bool = False
    """For models with experts: the generator records to which experts it sent each token, and the learner sends it to
    the same. Set it where `policy/mismatch_k3` is large since a token that two experts suit alike goes to one here and
    to the other there. It takes 2 bytes for each token, layer and expert of a token."""
    reward_workers: Annotated[int, Field(ge=1)] = 1
    """Reward processes beside each generator, or below each of `cluster.rewards.processes`. Each makes one call at a
    time, or those of an `async def` for several groups at once. Raise it where `reward/ms` is a large part of a group's
    time."""
    process_memory: BytesOrAuto = "auto"
    """The most main memory that each of them may hold, and what it starts, and likewise each process of an environment;
    `auto`: 4GiB, and of an environment 1GiB. Raise it for reward models, and for environments that load much."""
    dynamic_sampling: bool = False
    """DAPO: groups whose rewards are all equal are replaced by others before the update. Set it where
    `reward/zero_variance_groups` is most of a batch."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens may not be sampled."""
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0) or bool(self.structured_outputs.form)

    @property
    def reward_memory(self) -> int:
        """The most bytes that a reward process may hold."""
        return DEFAULT_REWARD_MEMORY if self.process_memory == "auto" else self.process_memory

    @property
    def environment_memory(self) -> int:
        """The most bytes that an environment's process may hold."""
        return DEFAULT_ENVIRONMENT_MEMORY if self.process_memory == "auto" else self.process_memory

    @property
    def sequences(self) -> int:
        """max_num_seqs; of auto, before a plan has put a number there, what is taken without one."""
        return DEFAULT_SEQUENCES if self.max_num_seqs == "auto" else self.max_num_seqs
