"""gleaner plan: says which model fits which GPU, with what settings. Slow modules are imported where they are used, so
that --help is fast."""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cluster.memory import plan as cards
from cluster.memory.generator import kv_token_bytes
from cluster.memory.plan import USABLE, Misfit, Plan, Wish, Workload, gib, host_bytes
from cluster.memory.search import cost, fp8_advice, least, plan
from cluster.memory.seconds import Pace, Seconds, measured_rates, step_seconds, told
from cluster.memory.shape import (
    DTYPE_BYTES,
    SHAPES,
    Base,
    LoraRank,
    Parts,
    Shape,
    UnknownModel,
    hub_name,
    shape_of,
    total,
    unshared,
)
from learner.main import Request, epilog, natural, positive
from learner.tools.plan_bars import GIB, bars, save_png
from rollout.architecture import NO_FLOAT16
from rollout.config import DEFAULT_KV

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from learner.driver.memory import CardSize


@dataclass(frozen=True, slots=True)
class PlanRequest(Request):
    """Say which models fit a card, and how.

    Generator and learner together, with the settings to paste into a configuration.
    """

    EPILOG = epilog(
        "gleaner plan --gpu rtx4090",
        "gleaner plan --gpu 24GiB --model Llama-3.1-8B --base shared",
        "gleaner plan --gpu 80 --algorithm ppo --base shared --model Qwen2.5-7B --json",
        failed="the one model that was asked for does not fit",
    )

    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="CARD", help="A card, or the memory of one: rtx4090, 24 (GB as sold), 24GiB; else the one here."
        ),
    ] = None
    cpu: Annotated[
        bool, typer.Option("--cpu", help="This machine's CPUs instead: what --model takes there, and for how long.")
    ] = False
    model: Annotated[
        str | None,
        typer.Option(help="Name in the table or on the hub, or a folder with config.json; else five usual sizes."),
    ] = None
    every: Annotated[bool, typer.Option("--all", help="Every model of the built-in table.")] = False
    cards: Annotated[Literal[1, 2], typer.Option(help="2: one for each role.")] = 1
    base: Annotated[
        Literal["auto", "own", "shared"],
        typer.Option(
            help="shared: one base for both roles (memory.layout), of LoRA; auto: in 16 bits if that fits, else in 4; "
            "shared where a base for each has no room or is slower."
        ),
    ] = "auto"
    algorithm: Annotated[
        Literal["grpo", "ppo"], typer.Option(help="ppo: a value model beside the policy, both LoRA on one base.")
    ] = "grpo"
    generations: Annotated[int, typer.Option(parser=positive, metavar="N", help="Completions per problem.")] = 8
    prompt: Annotated[int, typer.Option(parser=positive, metavar="N", help="Longest prompt, in tokens.")] = 256
    completion: Annotated[int, typer.Option(parser=positive, metavar="N", help="Longest completion, in tokens.")] = 786
    sequences: Annotated[int, typer.Option(parser=positive, metavar="N", help="Most that are decoded at once.")] = 64
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="auto: 16 bits.")] = "auto"
    staleness: Annotated[int, typer.Option(parser=natural, metavar="N", help="max_staleness.")] = 0
    rank: Annotated[LoraRank, typer.Option(help="Of the adapter.")] = 16
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Main memory of the machine, 64GiB; else of this one.")
    ] = None
    groups: Annotated[int, typer.Option(parser=positive, metavar="N", help="Problems of a step, for its seconds.")] = 8
    steps: Annotated[int, typer.Option(parser=positive, metavar="N", help="Steps of the run, for its hours.")] = 200
    longest: Annotated[
        bool, typer.Option("--longest", help="Of --model: the longest completion that fits, in place of --completion.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Every number, by role and part, in bytes.")] = False
    png: Annotated[str | None, typer.Option(metavar="FILE", help="Stacked bars; needs gleaner-rl[plan].")] = None

    def check(self) -> None:
        """Raises ValueError for options that do not go together."""
        if self.model is not None and self.every:
            raise ValueError("--all: does not go with --model, which names one; leave one of them out")
        if self.cpu:
            self._check_cpu()
        if self.longest and self.model is None:
            raise ValueError("--longest: is asked of one model; name it with --model")
        if self.algorithm == "grpo" and self.generations < 2:
            raise ValueError(
                f"--generations: GRPO compares the completions of a group, so at least 2, got {self.generations}; "
                "raise it, or take --algorithm ppo"
            )
        if self.base == "shared" and self.cards == 2:
            raise ValueError(
                "--base shared: one base for both roles needs both on one card, got --cards 2; leave that out"
            )

    def _check_cpu(self) -> None:
        if self.model is None:
            raise ValueError("--cpu: is asked of one model; name it with --model")
        others = {
            "--gpu": self.gpu is not None, "--longest": self.longest, "--png": self.png is not None,
            "--cards": self.cards != 1, "--base": self.base != "auto", "--algorithm": self.algorithm != "grpo",
            "--kv-cache-dtype": self.kv_cache_dtype != "auto", "--ram": self.ram is not None, "--all": self.every,
        }  # fmt: skip
        if wrong := [name for name, given in others.items() if given]:
            raise ValueError(f"--cpu: goes without {', '.join(wrong)}; leave out what is of cards")

    def check_base(self, shapes: Sequence[Shape]) -> None:
        """Raises ValueError if one base for both roles is asked for a model whose weights vLLM lays out anew."""
        for shape in shapes:
            if self.base == "shared" and (why := unshared(shape)):
                raise ValueError(f"--base shared: needs weights that both roles can read, and {why}; leave that out")


# The settings of a plan as a block of a configuration file.

BLOCK = """\
max_staleness: {staleness}
model: {{path: {model}, dtype: {dtype}, base: {base}}}
rollout:
  num_generations: {generations}
  max_prompt_length: {prompt}
  max_completion_length: {completion}
  kv_cache: {kv_bytes}  # bytes, {kv_size}: {sequences} sequences of full length
  kv_cache_dtype: {kv_dtype}
  max_num_seqs: {sequences}
learner:
  algorithm: {algorithm}
  lora: {{rank: {rank}}}
  checkpointing: {checkpointing}
  token_budget: {token_budget}
memory:
  device: {device}  # bytes of one card, {device_size}
  layout: {layout}
cluster:
  gpus: {{generator: {share}, learner: {share}}}
"""


def block(found: Plan, work: Workload, wish: Wish, *, model: str, staleness: int) -> str:
    """Returns the plan as YAML; other settings (name, data, rewards, steps) are left to the user."""
    return BLOCK.format(
        staleness=staleness, model=model, dtype=wish.dtype, base=found.base,
        generations=work.generations, prompt=work.prompt, completion=work.completion,
        kv_bytes=found.kv_bytes, kv_size=gib(found.kv_bytes), sequences=found.sequences,
        kv_dtype="fp8" if wish.kv_dtype == "fp8" else "auto", rank=wish.rank,
        checkpointing=found.checkpointing, token_budget=found.token_budget,
        device=found.device_bytes, device_size=gib(found.device_bytes),
        layout="shared" if wish.shared else found.layout,
        algorithm="ppo" if wish.value_rank else "grpo",
        share="1" if found.layout == "separate" else "0.5",
    )  # fmt: skip


# Output: what each method needs, what is chosen, the bars, main memory, and the block to paste.


def show_tables(
    needs: Mapping[str, Mapping[str, Plan]], chosen: Sequence[Plan | Misfit], on: str, work: Workload
) -> None:
    """Prints the tables of all models. needs: model -> method -> plan that needs least. on: the GPUs in words."""
    console = _console()
    lengths = f"G={work.generations}, prompt {work.prompt}, completion {work.completion}"
    console.print(f"GiB per card that generator and learner need at least; green fits {on}  ({lengths})")
    console.print(_needs(needs))
    console.print(f"what is chosen on {on}, GiB")
    console.print(_choices(chosen))
    console.print(bars(chosen, chosen[0].device_bytes))
    for found in chosen:
        if isinstance(found, Misfit):
            least, advice = gib(found.needs), "; or ".join(found.advice)
            console.print(f"{found.shape.name} needs {least} with the least of settings. Instead: {advice}")
    console.print(
        "FP8, W4A16: from a checkpoint of the model in that format, if there is one and docs/models.md has the format. "
        "Tensors of the learner are those of the real step within 3 % (learner.tools.meta_run); the engine's context, "
        "graphs and fragmentation were measured on one card; its workspace and the learner's context are estimates.",
        style="dim",
    )


def show_one(shape: Shape, host: Parts, has: int, time: str, block: str) -> None:
    """Prints, for a model that was named, the main memory that it needs, the time, and the block to paste. has: the
    machine's bytes of main memory."""
    console = _console()
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in host.items() if size)
    needed = total(host)
    if shape.has_experts or shape.stored is not None:
        stored = "16 bits" if shape.stored is None else shape.stored.name
        every, active = shape.params / 1e9, shape.active_params / 1e9
        console.print(f"weights: {every:.1f} billion in {stored}, {active:.1f} of them at work for a token")
    console.print(f"main memory, GiB: {needed / GIB:.1f}  ({parts}; docs/memory.md)")
    if needed > has:
        console.print(f"  the machine has {has / GIB:.1f}: the kernel would end a process", style="red")
    console.print(time)
    console.print("to paste into a configuration:\n")
    print(block)  # not by the console, which would break long lines


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 170, highlight=False)


def _needs(needs: Mapping[str, Mapping[str, Plan]]) -> "Table":
    from rich.table import Table

    table = Table("model", *next(iter(needs.values())))
    for name, by_method in needs.items():
        table.add_row(name, *map(_cell, by_method.values()))
    return table


def _cell(needed: Plan) -> str:
    fits = needed.device_peak <= USABLE * needed.device_bytes
    return f"[{'green' if fits else 'red'}]{needed.device_peak / GIB:.1f}{'' if fits else ' no'}[/]"


def _base(found: Plan) -> str:
    return found.base if found.learner["weights"] else f"{found.base}, shared"  # then they are counted in the generator


def _choices(chosen: Sequence[Plan | Misfit]) -> "Table":
    from rich.table import Table

    columns = ("model", "layout", "base", "checkpointing", "token budget", "KV cache", "sequences", "learner", "engine")
    table = Table(*columns)
    for found in chosen:
        if isinstance(found, Plan):
            policy = found.checkpointing
            twice = f"{policy} of {found.shape.layers}" if isinstance(policy, int) else policy
            table.add_row(
                found.shape.name, found.layout, _base(found), twice, str(found.token_budget),
                f"{found.kv_bytes / GIB:.2f}", str(found.sequences),
                f"{found.learner_bytes / GIB:.1f}", f"{found.generator_bytes / GIB:.1f}",
            )  # fmt: skip
    return table


MOST_TOKENS = 2**20  # that --longest looks at
FIVE = ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-14B")
METHODS = {
    "full": Wish(mode="full", base="none", checkpointing="none"),
    "full, rounded": Wish(mode="full", base="none", checkpointing="none", optimizer="adamw_rounded"),
    "full, 8-bit Adam": Wish(mode="full", base="none", checkpointing="none", optimizer="adamw_8bit"),
    "+ checkpointing": Wish(mode="full", base="none", checkpointing="full", optimizer="adamw_8bit"),
    "LoRA": Wish(base="none", checkpointing="none"),
    "LoRA + ckpt": Wish(base="none", checkpointing="full"),
    "QLoRA": Wish(base="nf4", checkpointing="full"),
    # A checkpoint of the same model in that format, where there is one; each role holds it as it is stored.
    "LoRA, FP8": Wish(base="fp8", checkpointing="full"),
    "LoRA, W4A16": Wish(base="w4a16", checkpointing="full"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """The result for a model."""

    shape: Shape
    wish: Wish  # the request, with LoRA
    needs: dict[str, Plan]  # method -> the plan that needs least
    chosen: Plan | Misfit

    @property
    def host(self) -> Parts:
        """Main memory that the chosen plan needs, or if none fits the plan that needs least, by part."""
        from cluster.ray_cluster import store_bytes  # imported here, and others below, so that --help is fast

        small = self.chosen.least if isinstance(self.chosen, Misfit) else self.chosen
        policy = DTYPE_BYTES[self.wish.dtype] * self.shape.lora_params(self.wish.rank)
        return host_bytes(small, self.wish, object_store=store_bytes(policy, sys.maxsize))


def run(asked: PlanRequest) -> int:
    """Carries out the command. Returns the exit code: 0; 1 if the named model does not fit; 2 for wrong arguments."""
    from cluster.machine import main_memory
    from rollout.config import parse_size

    try:
        asked.check()
        if asked.cpu:
            return _on_cpu(asked)
        size, has = _card(asked), parse_size(asked.ram) if asked.ram else main_memory()
        shapes = able([shape_at(asked.model)] if asked.model else _shapes(all_of_them=asked.every), size)
        asked.check_base(shapes)
    except (ValueError, OSError) as error:
        print(f"error: {str(error).replace('model.path: ', '--model: ', 1)}", file=sys.stderr)
        return 2
    work = Workload(
        asked.generations, asked.prompt, asked.completion, asked.sequences, asked.staleness + 2, groups=asked.groups
    )
    if asked.longest:
        work = replace(work, completion=longest(shapes[0], size.bytes, work, _ways(shapes[0], size, asked)))
        if not asked.as_json:
            print(_beyond(shapes[0], size, work, asked))
    found = [_plans(shape, size, work, asked) for shape in shapes]
    if asked.as_json:
        print(json.dumps([_as_json(one) for one in found], indent=2))
    else:
        if size.note:
            print(size.note)
        if not asked.model and no_bfloat16(size):
            print(f"not in the table: models that are not computed in float16 ({', '.join(NO_FLOAT16)})")
        on = f"{asked.cards} card{'s' if asked.cards > 1 else ''} of {gib(size.bytes)}"
        if asked.base == "shared":
            on += ", LoRA with one base for both roles, which is the generator's"
        show_tables({one.shape.name: one.needs for one in found}, [one.chosen for one in found], on, work)
        one = found[0]
        if asked.model and isinstance(one.chosen, Plan):
            text = block(one.chosen, work, one.wish, model=hub_name(asked.model, one.shape), staleness=asked.staleness)
            show_one(one.shape, one.host, has, _time(one.chosen, one.wish, work, size, asked), text)
    if asked.png:
        try:
            save_png([one.chosen for one in found], size.bytes, Path(asked.png))
        except ImportError:
            print("error: --png needs matplotlib: pip install 'gleaner-rl[plan]'", file=sys.stderr)
            return 2
        except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the file's ending
            print(f"error: --png: {asked.png} cannot be written: {error}; give another file", file=sys.stderr)
            return 2
    return int(asked.model is not None and isinstance(found[0].chosen, Misfit))


def shape_at(model: str) -> Shape:
    """The shape of a model: of a folder, of the built-in table, or of the hub, which is asked for the config.json of
    `owner/name` alone.

    Raises:
        ValueError: there is no such model, the hub cannot be reached, or the architecture is not known.
    """
    from rollout.data.model_files import CONFIG, read_json  # imported here, so that --help is fast

    try:
        return shape_of(model)
    except UnknownModel:
        if model.count("/") != 1 or model.startswith((".", "~", "/")):
            raise
    with _quiet("huggingface_hub"):
        config = read_json(model, CONFIG)
    return Shape.from_config(config, model)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Inside this block a library does not tell of each attempt that failed; the last one raises."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _card(asked: PlanRequest) -> "CardSize":
    from learner.driver import memory

    try:
        size = memory.card_here() if asked.gpu is None else memory.card_size(asked.gpu)
    except ValueError as error:
        raise ValueError(f"--gpu: {error}") from None
    if asked.kv_cache_dtype == "fp8" and size.card is not None and size.card.capability < cards.FP8_KV:
        raise ValueError(
            f"--kv-cache-dtype: fp8 needs a card of compute capability 8.9, {size.card.name} has "
            f"{'.'.join(map(str, size.card.capability))}; set auto"
        )
    return size


def _shapes(*, all_of_them: bool) -> Sequence[Shape]:
    return list(SHAPES.values()) if all_of_them else [SHAPES[name] for name in FIVE]


def able(shapes: Sequence[Shape], size: "CardSize") -> list[Shape]:
    """Returns the models that the GPU can compute in 16 bits. Raises ValueError if there are none."""
    if not no_bfloat16(size):
        return list(shapes)
    able = [shape for shape in shapes if shape.kind not in NO_FLOAT16]
    if not able:
        raise ValueError(
            f"--model: {shapes[0].name} is not computed in float16 (vLLM), and the card has no bfloat16; name a newer "
            "card, or another model"
        )
    return able


def no_bfloat16(size: "CardSize") -> bool:
    """Whether the GPU has no bfloat16."""
    return size.card is not None and size.card.capability < cards.BF16


def methods(shape: Shape, *, ppo: bool, old: bool) -> dict[str, Wish]:
    """Returns the possible methods of training a model. PPO trains adapters only, and so does a model with experts or a
    quantised checkpoint, which stays as it is stored. An old GPU has no bfloat16 to round to."""
    adapters = ppo or shape.has_experts or shape.stored is not None
    return {
        name: wish
        for name, wish in METHODS.items()
        if not (adapters and wish.mode == "full")
        and not (old and wish.optimizer == "adamw_rounded")
        and not (shape.stored is not None and wish.base != "none")
    }


def dtype_of(method: Wish, dtype: str, *, old: bool) -> str:
    """Returns the dtype of a method where LoRA has `dtype`: a whole model is not trained in float16."""
    return "float32" if old and method.mode == "full" else dtype


def asked_for(wish: Wish, method: Wish, dtype: str) -> Wish:
    """Returns the wish for a method of training, with the other settings of `wish`."""
    return replace(
        wish, mode=method.mode, base=method.base, checkpointing=method.checkpointing, optimizer=method.optimizer,
        dtype=dtype, kv_dtype=wish.kv_dtype if wish.kv_dtype == "fp8" else dtype,
        shared=wish.shared and method.mode == "lora",
    )  # fmt: skip


def _plans(shape: Shape, size: "CardSize", work: Workload, asked: PlanRequest) -> Found:
    """Returns what each method needs at least, and what the planner chooses for LoRA."""
    ways = methods(shape, ppo=asked.algorithm == "ppo", old=no_bfloat16(size))
    needs = {name: least(shape, size.bytes, work, _wanted(wish, size, asked)) for name, wish in ways.items()}
    chosen, wish = _chosen(shape, size, work, asked)
    return Found(shape, wish, needs, chosen)


def _chosen(shape: Shape, size: "CardSize", work: Workload, asked: PlanRequest) -> tuple[Plan | Misfit, Wish]:
    """The plan that `--base` allows with the least cost, in 16 bits if one fits, else the last one's misfit; and its
    wish."""
    wish = _wanted(Wish(), size, asked)
    pace = _pace(work, wish, asked)
    ways: list[tuple[Base | None, tuple[bool, ...]]] = [(None, (wish.shared,))]
    if _may_share(shape, asked):
        ways = [("none", (False, True)), ("nf4", (False, True))]
    for base, sharings in ways:
        wishes = [replace(wish, base=base, shared=shared) for shared in sharings]
        found = [(plan(shape, size.bytes, work, one, pace, size.card), one) for one in wishes]
        fitting = [(one, its) for one, its in found if isinstance(one, Plan)]
        if fitting:
            return min(fitting, key=lambda way: cost(way[0], work, way[1], pace, size.card))
    return found[-1]


def _wanted(wish: Wish, size: "CardSize", asked: PlanRequest) -> Wish:
    """The wish with what the user asks for."""
    old = no_bfloat16(size)
    layouts = ("slices",) if asked.staleness > 0 else wish.layouts  # a generator that sleeps cannot run ahead
    layouts = ("separate",) if asked.cards == 2 else layouts
    dtype = dtype_of(wish, "float16" if old else wish.dtype, old=old)
    kv_dtype = dtype if asked.kv_cache_dtype == "auto" else asked.kv_cache_dtype
    shared = asked.base == "shared" and wish.mode == "lora"
    value = asked.rank if asked.algorithm == "ppo" else 0
    return replace(
        wish, rank=asked.rank, value_rank=value, layouts=layouts, dtype=dtype, kv_dtype=kv_dtype, shared=shared
    )


def _on_cpu(asked: PlanRequest) -> int:
    """Carries out `--cpu`: one core for each role, as is the default. Returns the exit code. Raises ValueError."""
    from cluster.machine import cpu_dtype, main_memory
    from learner.config.settings import AUTO_TOKEN_BUDGET
    from learner.driver.memory import NO_LIMIT

    shape, has, dtype = shape_at(str(asked.model)), main_memory(), cpu_dtype()
    work = Workload(
        asked.generations, asked.prompt, asked.completion, asked.sequences, asked.staleness + 2, groups=asked.groups
    )
    cache = max(DEFAULT_KV, work.generations * work.whole * kv_token_bytes(shape, dtype))
    wish = Wish(
        rank=asked.rank, dtype=dtype, kv_dtype=dtype, base="none", checkpointing="none", layouts=("slices",),
        token_budget=AUTO_TOKEN_BUDGET, kv_bytes=cache, cuda=False,
    )  # fmt: skip
    found = plan(shape, NO_LIMIT, work, wish)
    if isinstance(found, Misfit):
        raise ValueError(f"--model: {found}")
    each = seconds_on_cpu(found, wish, work, _pace(work, wish, asked))
    fits = found.learner_bytes + found.generator_bytes <= has
    if asked.as_json:
        seconds = {"step": each.step, "generate": each.generate, "train": each.train, "push": each.push}
        row = {"model": shape.name, "dtype": dtype, "fits": fits, "main_memory": has, "seconds": seconds}
        print(json.dumps([row | {"learner": found.learner, "generator": found.generator}], indent=2))
        return int(not fits)
    print(
        f"{shape.name} in {dtype} on CPUs, LoRA: learner {gib(found.learner_bytes)}, generator "
        f"{gib(found.generator_bytes)}; the machine has {gib(has)} and {os.cpu_count()} cores\n"
        f"one core and thread for each role (cluster.cpus), {gib(cache)} of KV cache (rollout.kv_cache)\n"
        f"time: about {each.words(asked.steps)}; {asked.groups} groups of {work.generations}, all completions of "
        f"{work.completion} tokens"
    )
    return int(not fits)


def seconds_on_cpu(found: Plan, wish: Wish, work: Workload, pace: Pace) -> Seconds:
    """Seconds of a step on this machine's CPU, one core for each role, by what a core does in a second, as measured; in
    float32 with the library that the learner would choose, of the two that the engine has, too."""
    from learner.trainer.float32_products import choose_library, use_library

    chosen = wish.dtype == "float32" and choose_library()
    try:
        return step_seconds(found, wish, work, pace, measured_rates(wish.dtype, 1))
    finally:
        if chosen:
            use_library("default")


def longest(shape: Shape, size: int, work: Workload, ways: Sequence[Wish]) -> int:
    """The longest completion, in tokens, for which one of these has a plan within the model's context; at least 1."""
    fits, beyond = 1, (shape.positions or MOST_TOKENS) - work.prompt + 1
    while beyond - fits > 1:
        tried = (fits + beyond) // 2
        needs = (least(shape, size, replace(work, completion=tried), wish) for wish in ways)
        found = any(one.device_peak <= USABLE * size for one in needs)
        fits, beyond = (tried, beyond) if found else (fits, tried)
    return fits


def _ways(shape: Shape, size: "CardSize", asked: PlanRequest) -> list[Wish]:
    """What is asked for; where `--base auto` may choose, what needs least."""
    wish = _wanted(Wish(), size, asked)
    smallest = [replace(wish, base="nf4", shared=shared) for shared in (True, False)]
    return smallest if _may_share(shape, asked) else [wish]


def _beyond(shape: Shape, size: "CardSize", work: Workload, asked: PlanRequest) -> str:
    """What --longest says beside the plan."""
    if work.whole == shape.positions:
        return f"longest: the model's own context, {work.whole} tokens with the prompt"
    ways = [replace(way, checkpointing="full", offload=True) for way in _ways(shape, size, asked)]
    further = longest(shape, size.bytes, work, ways)
    tokens = work.prompt + further
    host = gib(DTYPE_BYTES[ways[0].dtype] * shape.layers * shape.hidden * tokens)
    offloaded = f"{tokens} with learner.checkpointing=offloaded, whose micro-batches keep up to {host} in main memory"
    return f"longest: {work.whole} tokens with the prompt; {offloaded}"


def _may_share(shape: Shape, asked: PlanRequest) -> bool:
    """Whether `--base auto` has other ways than a base for each role."""
    return asked.base == "auto" and asked.cards == 1 and shape.stored is None and unshared(shape) is None


def _time(found: Plan, wish: Wish, work: Workload, size: "CardSize", asked: PlanRequest) -> str:
    """The line about the seconds of a step and the hours of a run."""
    line = told(size.card, size.bytes, partial(step_seconds, found, wish, work, _pace(work, wish, asked)), asked.steps)
    if line is None:
        return "time: not known, as the card is not (--gpu rtx4090)"
    each = f"{asked.groups} groups of {work.generations}, all completions of {work.completion} tokens"
    advice = fp8_advice(found, work, wish, _pace(work, wish, asked), size.card)
    return f"{line}; {each} (docs/benchmarks.md)" + (f"\n{advice}" if advice else "")


def _pace(work: Workload, wish: Wish, asked: PlanRequest) -> Pace:
    further = 2.0 * (wish.value_rank > 0)
    return Pace(asked.groups, work.completion, together=asked.staleness > 0, further=further)


def _as_json(one: Found) -> dict[str, Any]:
    needs = {name: to_dict(needed) for name, needed in one.needs.items()}
    return {
        "model": one.shape.name,
        "params": one.shape.params,
        "active_params": one.shape.active_params,
        "chosen": to_dict(one.chosen) | {"shared": one.wish.shared},
        "least": needs,
        "main_memory": one.host,
    }


def to_dict(found: Plan | Misfit) -> dict[str, Any]:
    """Returns every number of a plan for JSON, in bytes."""
    if isinstance(found, Misfit):
        return {"fits": False, "needs": found.needs, "advice": list(found.advice)}
    numbers = {key: value for key, value in asdict(found).items() if key != "shape"}
    sums = {key: getattr(found, key) for key in ("learner_bytes", "generator_bytes", "device_peak")}
    return {"fits": found.device_peak <= USABLE * found.device_bytes, **numbers, **sums}
