"""gleaner plan --gpu rtx4090 [--model NAME_OR_DIR | --all]: which model fits which card, with what settings."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.machine import main_memory
from cluster.memory import cards
from cluster.memory.host import host_bytes
from cluster.memory.plan import USABLE, Misfit, Plan, Wish, Workload, gib
from cluster.memory.search import least, plan
from cluster.memory.shape import SHAPES, Shape, hub_name, shape_of
from cluster.memory.units import DTYPE_BYTES, Parts
from cluster.ray_cluster import store_bytes
from learner.driver import memory
from learner.driver.memory import CardSize
from learner.tools import plan_picture, plan_tables
from learner.tools.plan_config import block
from rollout.architecture import NO_FLOAT16
from rollout.config import parse_size

FIVE = ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-14B")
METHODS = {
    "full": Wish(mode="full", base="none", checkpointing="none"),
    "full, rounded": Wish(mode="full", base="none", checkpointing="none", optimizer="adamw_rounded"),
    "full, 8-bit Adam": Wish(mode="full", base="none", checkpointing="none", optimizer="adamw_8bit"),
    "+ checkpointing": Wish(mode="full", base="none", checkpointing="full", optimizer="adamw_8bit"),
    "LoRA": Wish(base="none", checkpointing="none"),
    "LoRA + ckpt": Wish(base="none", checkpointing="full"),
    "QLoRA": Wish(base="nf4", checkpointing="full"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """All that is said of one model."""

    shape: Shape
    wish: Wish  # what was asked for, LoRA
    needs: dict[str, Plan]  # by method, the settings that need least
    chosen: Plan | Misfit

    @property
    def host(self) -> Parts:
        """Main memory that what is chosen, or else needs least, takes."""
        small = self.chosen.least if isinstance(self.chosen, Misfit) else self.chosen
        policy = DTYPE_BYTES[self.wish.dtype] * self.shape.lora_params(self.wish.rank)
        return host_bytes(small, self.wish, object_store=store_bytes(policy, sys.maxsize))


@dataclass(frozen=True, slots=True)
class Asked:
    """What learner.tools.commands.plan takes, under its names."""

    gpu: str
    model: str | None
    every: bool
    cards: int
    base: str
    algorithm: str
    generations: int
    prompt: int
    completion: int
    sequences: int
    kv_cache_dtype: str
    staleness: int
    rank: int
    ram: str | None
    as_json: bool
    png: str | None

    def check(self) -> None:
        """Raises ValueError for what does not go together."""
        if self.model is not None and self.every:
            raise ValueError("--all: does not go with --model, which names one; leave one of them out")
        if self.algorithm == "grpo" and self.generations < 2:
            raise ValueError(
                f"--generations: GRPO compares the completions of a group, so at least 2, got {self.generations}; "
                "raise it, or take --algorithm ppo"
            )
        if self.base == "shared" and self.cards == 2:
            raise ValueError(
                "--base shared: one base for both roles needs both on one card, got --cards 2; leave that out"
            )


def run(asked: Asked) -> int:
    """Exit code: 0; 1 if the one model that was asked for does not fit; 2 for wrong arguments."""
    try:
        asked.check()
        size, has = _card(asked), parse_size(asked.ram) if asked.ram else main_memory()
        shapes = able([shape_of(asked.model)] if asked.model else _shapes(all_of_them=asked.every), size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    work = Workload(asked.generations, asked.prompt, asked.completion, asked.sequences, asked.staleness + 2)
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
        plan_tables.show({one.shape.name: one.needs for one in found}, [one.chosen for one in found], on, work)
        one = found[0]
        if asked.model and isinstance(one.chosen, Plan):
            text = block(one.chosen, work, one.wish, model=hub_name(asked.model, one.shape), staleness=asked.staleness)
            plan_tables.show_one(one.host, has, text)
    if asked.png:
        try:
            plan_picture.save_png([one.chosen for one in found], size.bytes, Path(asked.png))
        except ImportError:
            print("error: --png needs matplotlib: pip install 'gleaner-rl[plan]'", file=sys.stderr)
            return 2
        except (OSError, ValueError) as error:  # of another ending than matplotlib knows
            print(f"error: --png: {asked.png} cannot be written: {error}; give another file", file=sys.stderr)
            return 2
    return int(asked.model is not None and isinstance(found[0].chosen, Misfit))


def _card(asked: Asked) -> CardSize:
    try:
        size = memory.card_size(asked.gpu)
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


def able(shapes: Sequence[Shape], size: CardSize) -> list[Shape]:
    """Those that the card computes in 16 bits. Raises ValueError if there is none."""
    if not no_bfloat16(size):
        return list(shapes)
    able = [shape for shape in shapes if shape.kind not in NO_FLOAT16]
    if not able:
        raise ValueError(
            f"--model: {shapes[0].name} is not computed in float16 (vLLM), and the card has no bfloat16; name a newer "
            "card, or another model"
        )
    return able


def no_bfloat16(size: CardSize) -> bool:
    """Whether the card has no bfloat16."""
    return size.card is not None and size.card.capability < cards.BF16


def methods(*, ppo: bool, old: bool) -> dict[str, Wish]:
    """The ways of training that there are: PPO trains adapters, and a card without bfloat16 has none to round."""
    return {
        name: wish
        for name, wish in METHODS.items()
        if not (ppo and wish.mode == "full") and not (old and wish.optimizer == "adamw_rounded")
    }


def dtype_of(method: Wish, dtype: str, *, old: bool) -> str:
    """Of a way of training, where LoRA has `dtype`: float16 trains no whole model."""
    return "float32" if old and method.mode == "full" else dtype


def asked_for(wish: Wish, method: Wish, dtype: str) -> Wish:
    """A way of training with what else is wished for."""
    return replace(
        wish, mode=method.mode, base=method.base, checkpointing=method.checkpointing, optimizer=method.optimizer,
        dtype=dtype, kv_dtype=wish.kv_dtype if wish.kv_dtype == "fp8" else dtype,
        shared=wish.shared and method.mode == "lora",
    )  # fmt: skip


def _plans(shape: Shape, size: CardSize, work: Workload, asked: Asked) -> Found:
    """What each method needs at least, and what the planner chooses for LoRA."""
    old = no_bfloat16(size)

    def wanted(wish: Wish) -> Wish:
        layouts = ("slices",) if asked.staleness > 0 else wish.layouts  # a generator that sleeps cannot run ahead
        layouts = ("separate",) if asked.cards == 2 else layouts
        dtype = dtype_of(wish, "float16" if old else wish.dtype, old=old)
        kv_dtype = dtype if asked.kv_cache_dtype == "auto" else asked.kv_cache_dtype
        shared = asked.base == "shared" and wish.mode == "lora"
        value = asked.rank if asked.algorithm == "ppo" else 0
        return replace(
            wish, rank=asked.rank, value_rank=value, layouts=layouts, dtype=dtype, kv_dtype=kv_dtype, shared=shared
        )

    ways = methods(ppo=asked.algorithm == "ppo", old=old)
    needs = {name: least(shape, size.bytes, work, wanted(wish)) for name, wish in ways.items()}
    return Found(shape, wanted(Wish()), needs, plan(shape, size.bytes, work, wanted(Wish())))


def _as_json(one: Found) -> dict[str, Any]:
    needs = {name: to_dict(needed) for name, needed in one.needs.items()}
    return {
        "model": one.shape.name,
        "params": one.shape.params,
        "chosen": to_dict(one.chosen),
        "least": needs,
        "main_memory": one.host,
    }


def to_dict(found: Plan | Misfit) -> dict[str, Any]:
    """Every number of a plan, JSON-able, in bytes."""
    if isinstance(found, Misfit):
        return {"fits": False, "needs": found.needs, "advice": list(found.advice)}
    numbers = {key: value for key, value in asdict(found).items() if key != "shape"}
    sums = {key: getattr(found, key) for key in ("learner_bytes", "generator_bytes", "device_peak")}
    return {"fits": found.device_peak <= USABLE * found.device_bytes, **numbers, **sums}
