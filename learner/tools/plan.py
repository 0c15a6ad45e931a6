"""gleaner plan --gpu 16GiB [--model NAME_OR_DIR | --all]: which model fits which card, with what settings."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.memory.plan import USABLE, Misfit, Plan, Wish, Workload, gib
from cluster.memory.search import least, plan
from cluster.memory.shape import SHAPES, Shape, shape_of
from learner.tools import plan_picture
from learner.tools.arguments import natural, positive
from rollout.config import parse_size

FIVE = ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-14B")
METHODS = {
    "full": Wish(mode="full", base="none", checkpointing="none"),
    "full, 8-bit Adam": Wish(mode="full", base="none", checkpointing="none", optimizer="adamw_8bit"),
    "+ checkpointing": Wish(mode="full", base="none", checkpointing="full", optimizer="adamw_8bit"),
    "LoRA": Wish(base="none", checkpointing="none"),
    "LoRA + ckpt": Wish(base="none", checkpointing="full"),
    "QLoRA": Wish(base="nf4", checkpointing="full"),
}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Found:
    """All that is said of one model."""

    shape: Shape
    needs: dict[str, Plan]  # by method, the settings that need least
    chosen: Plan | Misfit


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 1 if the one model that was asked for does not fit; 2 for wrong arguments."""
    args = _parse(argv)
    try:
        device = _device(args.gpu)
        shapes = [shape_of(args.model)] if args.model else list(_shapes(all_of_them=args.all))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    work = Workload(args.generations, args.prompt, args.completion, args.sequences, args.staleness + 2)
    found = [_plans(shape, device, work, args) for shape in shapes]
    if args.json:
        print(json.dumps([_as_json(one) for one in found], indent=2))
    else:
        _print(found, device, work, args)
    if args.png:
        try:
            plan_picture.save_png([one.chosen for one in found], device, Path(args.png))
        except ImportError:
            print("error: --png needs matplotlib: pip install 'gleaner[plan]'", file=sys.stderr)
            return 2
    return int(args.model is not None and isinstance(found[0].chosen, Misfit))


def _device(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"--gpu: {error}") from None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gleaner plan", description="Which models fit a card, generator and learner together, and how."
    )
    parser.add_argument("--gpu", required=True, metavar="SIZE", help="memory of one card, for example 16GiB")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="name in the table or folder with a config.json; default: five usual sizes")
    which.add_argument("--all", action="store_true", help="every model of the built-in table")
    parser.add_argument("--cards", type=int, choices=(1, 2), default=1, help="2: one for each role (default 1)")
    parser.add_argument("--base", choices=("own", "shared"), default="own", help="memory.base, of LoRA (default own)")
    parser.add_argument("--generations", type=positive, default=8, help="completions per problem (default 8)")
    parser.add_argument("--prompt", type=positive, default=256, help="tokens (default 256)")
    parser.add_argument("--completion", type=positive, default=786, help="tokens (default 786)")
    parser.add_argument("--sequences", type=positive, default=64, help="most that are decoded at once (default 64)")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="default auto: 16 bits")
    parser.add_argument("--staleness", type=natural, default=0, help="max_staleness (default 0)")
    parser.add_argument("--rank", type=positive, default=16, help="of the adapter (default 16)")
    parser.add_argument("--json", action="store_true", help="every number, by role and part, in bytes")
    parser.add_argument("--png", metavar="FILE", help="stacked bars")
    args = parser.parse_args(argv)
    if args.base == "shared" and args.cards == 2:
        parser.error("--base shared: one base for both roles needs both on one card; leave out --cards 2")
    return args


def _shapes(*, all_of_them: bool) -> Sequence[Shape]:
    return list(SHAPES.values()) if all_of_them else [SHAPES[name] for name in FIVE]


def _plans(shape: Shape, device: int, work: Workload, args: argparse.Namespace) -> Found:
    """What each method needs at least, and what the planner chooses for LoRA."""

    def asked(wish: Wish) -> Wish:
        layouts = ("slices",) if args.staleness > 0 else wish.layouts  # a generator that sleeps cannot run ahead
        layouts = ("separate",) if args.cards == 2 else layouts
        kv_dtype = wish.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
        shared = args.base == "shared" and wish.mode == "lora" and wish.base != "nf4"
        return replace(wish, rank=args.rank, layouts=layouts, kv_dtype=kv_dtype, shared=shared)

    needs = {name: least(shape, device, work, asked(wish)) for name, wish in METHODS.items()}
    return Found(shape, needs, plan(shape, device, work, asked(Wish())))


def _print(found: Sequence[Found], device: int, work: Workload, args: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    on = f"{args.cards} card{'s' if args.cards > 1 else ''} of {gib(device)}"
    if args.base == "shared":
        on += ", LoRA with one base for both roles, which is the generator's"
    lengths = f"G={work.generations}, prompt {work.prompt}, completion {work.completion}"
    console.print(f"GiB per card that generator and learner need at least; green fits {on}  ({lengths})")
    console.print(_needs(found))
    console.print(f"what is chosen on {on}, GiB")
    console.print(_choices(found))
    console.print(plan_picture.bars([one.chosen for one in found], device))
    for one in found:
        if isinstance(one.chosen, Misfit):
            needs, advice = gib(one.chosen.needs), "; or ".join(one.chosen.advice)
            console.print(f"{one.shape.name} needs {needs} with the least of settings. Instead: {advice}")
    console.print(
        "Tensors of the learner are those of the real step within 2 % (learner.tools.meta_run); the engine's workspace "
        "and graphs, contexts and fragmentation are estimates.",
        style="dim",
    )


def _needs(found: Sequence[Found]) -> Table:
    table = Table("model", *METHODS)
    for one in found:
        cells = [_cell(plan) for plan in one.needs.values()]
        table.add_row(one.shape.name, *cells)
    return table


def _cell(needed: Plan) -> str:
    fits = needed.device_peak <= USABLE * needed.device_bytes
    return f"[{'green' if fits else 'red'}]{needed.device_peak / GIB:.1f}{'' if fits else ' no'}[/]"


def _choices(found: Sequence[Found]) -> Table:
    columns = ("model", "layout", "base", "checkpointing", "token budget", "KV cache", "sequences", "learner", "engine")
    table = Table(*columns)
    for one in found:
        chosen = one.chosen
        if isinstance(chosen, Plan):
            policy = chosen.checkpointing
            twice = f"{policy} of {one.shape.layers}" if isinstance(policy, int) else policy
            table.add_row(
                one.shape.name, chosen.layout, chosen.base, twice, str(chosen.token_budget),
                f"{chosen.kv_bytes / GIB:.2f}", str(chosen.sequences),
                f"{chosen.learner_bytes / GIB:.1f}", f"{chosen.generator_bytes / GIB:.1f}",
            )  # fmt: skip
    return table


def _as_json(one: Found) -> dict[str, Any]:
    needs = {name: to_dict(needed) for name, needed in one.needs.items()}
    return {
        "model": one.shape.name,
        "params": one.shape.params,
        "chosen": to_dict(one.chosen),
        "least": needs,
    }


def to_dict(found: Plan | Misfit) -> dict[str, Any]:
    """Every number of a plan, JSON-able, in bytes."""
    if isinstance(found, Misfit):
        return {"fits": False, "needs": found.needs, "advice": list(found.advice)}
    numbers = {key: value for key, value in asdict(found).items() if key != "shape"}
    sums = {key: getattr(found, key) for key in ("learner_bytes", "generator_bytes", "device_peak")}
    return {"fits": found.device_peak <= USABLE * found.device_bytes, **numbers, **sums}
