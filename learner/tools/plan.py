"""gleaner plan --gpu rtx4090 [--model NAME_OR_DIR | --all]: which model fits which card, with what settings."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from cluster.machine import main_memory
from cluster.memory import cards
from cluster.memory.host import host_bytes
from cluster.memory.plan import USABLE, Misfit, Plan, Wish, Workload, gib
from cluster.memory.search import least, plan
from cluster.memory.shape import SHAPES, Shape, shape_of
from cluster.memory.units import DTYPE_BYTES, Parts
from cluster.ray_cluster import store_bytes
from learner.config.learner import LoraConfig
from learner.driver import card_size
from learner.driver.card_size import CardSize
from learner.tools import plan_picture, plan_tables
from learner.tools.arguments import natural, positive
from learner.tools.plan_config import block
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


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 1 if the one model that was asked for does not fit; 2 for wrong arguments."""
    args = _parse(argv)
    try:
        size, has = _card(args), parse_size(args.ram) if args.ram else main_memory()
        shapes = [shape_of(args.model)] if args.model else list(_shapes(all_of_them=args.all))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    work = Workload(args.generations, args.prompt, args.completion, args.sequences, args.staleness + 2)
    found = [_plans(shape, size, work, args) for shape in shapes]
    if args.json:
        print(json.dumps([_as_json(one) for one in found], indent=2))
    else:
        if size.note:
            print(size.note)
        on = f"{args.cards} card{'s' if args.cards > 1 else ''} of {gib(size.bytes)}"
        if args.base == "shared":
            on += ", LoRA with one base for both roles, which is the generator's"
        plan_tables.show({one.shape.name: one.needs for one in found}, [one.chosen for one in found], on, work)
        one = found[0]
        if args.model and isinstance(one.chosen, Plan):
            text = block(one.chosen, work, one.wish, model=args.model, staleness=args.staleness)
            plan_tables.show_one(one.host, has, text)
    if args.png:
        try:
            plan_picture.save_png([one.chosen for one in found], size.bytes, Path(args.png))
        except ImportError:
            print("error: --png needs matplotlib: pip install 'gleaner[plan]'", file=sys.stderr)
            return 2
    return int(args.model is not None and isinstance(found[0].chosen, Misfit))


def _card(args: argparse.Namespace) -> CardSize:
    try:
        size = card_size.parse(args.gpu)
    except ValueError as error:
        raise ValueError(f"--gpu: {error}") from None
    if args.kv_cache_dtype == "fp8" and size.card is not None and size.card.capability < cards.FP8_KV:
        raise ValueError(
            f"--kv-cache-dtype: fp8 needs a card of compute capability 8.9, {size.card.name} has "
            f"{'.'.join(map(str, size.card.capability))}; set auto"
        )
    return size


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gleaner plan", description="Which models fit a card, generator and learner together, and how."
    )
    parser.add_argument(
        "--gpu", required=True, metavar="CARD", help="a card, or the memory of one: rtx4090, 24 (GB as sold), 24GiB"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="name in the table or folder with a config.json; default: five usual sizes")
    which.add_argument("--all", action="store_true", help="every model of the built-in table")
    parser.add_argument("--cards", type=int, choices=(1, 2), default=1, help="2: one for each role (default 1)")
    parser.add_argument("--base", choices=("own", "shared"), default="own", help="memory.base, of LoRA (default own)")
    parser.add_argument(
        "--algorithm", choices=("grpo", "ppo"), default="grpo",
        help="ppo: a value model beside the policy, both LoRA on one base (default grpo)",
    )  # fmt: skip
    parser.add_argument("--generations", type=positive, default=8, help="completions per problem (default 8)")
    parser.add_argument("--prompt", type=positive, default=256, help="tokens (default 256)")
    parser.add_argument("--completion", type=positive, default=786, help="tokens (default 786)")
    parser.add_argument("--sequences", type=positive, default=64, help="most that are decoded at once (default 64)")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="default auto: 16 bits")
    parser.add_argument("--staleness", type=natural, default=0, help="max_staleness (default 0)")
    parser.add_argument(
        "--rank", type=int, choices=get_args(LoraConfig.model_fields["rank"].annotation), default=16,
        help="of the adapter (default 16)",
    )  # fmt: skip
    parser.add_argument("--ram", metavar="SIZE", help="main memory of the machine, 64GiB (default: of this one)")
    parser.add_argument("--json", action="store_true", help="every number, by role and part, in bytes")
    parser.add_argument("--png", metavar="FILE", help="stacked bars")
    args = parser.parse_args(argv)
    if args.base == "shared" and args.cards == 2:
        parser.error("--base shared: one base for both roles needs both on one card; leave out --cards 2")
    return args


def _shapes(*, all_of_them: bool) -> Sequence[Shape]:
    return list(SHAPES.values()) if all_of_them else [SHAPES[name] for name in FIVE]


def _plans(shape: Shape, size: CardSize, work: Workload, args: argparse.Namespace) -> Found:
    """What each method needs at least, and what the planner chooses for LoRA."""
    old = size.card is not None and size.card.capability < cards.BF16  # float16 trains no whole model

    def asked(wish: Wish) -> Wish:
        layouts = ("slices",) if args.staleness > 0 else wish.layouts  # a generator that sleeps cannot run ahead
        layouts = ("separate",) if args.cards == 2 else layouts
        dtype = wish.dtype if not old else "float32" if wish.mode == "full" else "float16"
        kv_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
        shared = args.base == "shared" and wish.mode == "lora"
        value = args.rank if args.algorithm == "ppo" else 0
        return replace(
            wish, rank=args.rank, value_rank=value, layouts=layouts, dtype=dtype, kv_dtype=kv_dtype, shared=shared
        )

    methods = {name: wish for name, wish in METHODS.items() if wish.mode == "lora" or args.algorithm == "grpo"}
    needs = {name: least(shape, size.bytes, work, asked(wish)) for name, wish in methods.items()}
    return Found(shape, asked(Wish()), needs, plan(shape, size.bytes, work, asked(Wish())))


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
