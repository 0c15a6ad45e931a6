"""What gleaner plan prints: what each method needs, what is chosen, the bars, main memory, and the block to paste."""

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from cluster.memory.plan import USABLE, Misfit, Plan, Workload, gib
from cluster.memory.units import Parts, total
from learner.tools import plan_picture

GIB = 2**30


def show(needs: Mapping[str, Mapping[str, Plan]], chosen: Sequence[Plan | Misfit], on: str, work: Workload) -> None:
    """The tables of all models. `needs`: by model and method; `on`: the cards in words."""
    console = _console()
    lengths = f"G={work.generations}, prompt {work.prompt}, completion {work.completion}"
    console.print(f"GiB per card that generator and learner need at least; green fits {on}  ({lengths})")
    console.print(_needs(needs))
    console.print(f"what is chosen on {on}, GiB")
    console.print(_choices(chosen))
    console.print(plan_picture.bars(chosen, chosen[0].device_bytes))
    for found in chosen:
        if isinstance(found, Misfit):
            least, advice = gib(found.needs), "; or ".join(found.advice)
            console.print(f"{found.shape.name} needs {least} with the least of settings. Instead: {advice}")
    console.print(
        "Tensors of the learner are those of the real step within 2 % (learner.tools.meta_run); the engine's context, "
        "graphs and fragmentation were measured on one card; its workspace and the learner's context are estimates.",
        style="dim",
    )


def show_one(host: Parts, has: int, block: str) -> None:
    """For a model that was asked for: main memory, beside the `has` bytes of the machine, and the block to paste."""
    console = _console()
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in host.items() if size)
    needed = total(host)
    console.print(f"main memory, GiB: {needed / GIB:.1f}  ({parts}; docs/memory.md)")
    if needed > has:
        console.print(f"  the machine has {has / GIB:.1f}: the kernel would end a process", style="red")
    console.print("to paste into a configuration:\n")
    print(block)  # as it stands: no line of it may be broken


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 170, highlight=False)


def _needs(needs: Mapping[str, Mapping[str, Plan]]) -> Table:
    table = Table("model", *next(iter(needs.values())))
    for name, by_method in needs.items():
        table.add_row(name, *map(_cell, by_method.values()))
    return table


def _cell(needed: Plan) -> str:
    fits = needed.device_peak <= USABLE * needed.device_bytes
    return f"[{'green' if fits else 'red'}]{needed.device_peak / GIB:.1f}{'' if fits else ' no'}[/]"


def _choices(chosen: Sequence[Plan | Misfit]) -> Table:
    columns = ("model", "layout", "base", "checkpointing", "token budget", "KV cache", "sequences", "learner", "engine")
    table = Table(*columns)
    for found in chosen:
        if isinstance(found, Plan):
            policy = found.checkpointing
            twice = f"{policy} of {found.shape.layers}" if isinstance(policy, int) else policy
            table.add_row(
                found.shape.name, found.layout, found.base, twice, str(found.token_budget),
                f"{found.kv_bytes / GIB:.2f}", str(found.sequences),
                f"{found.learner_bytes / GIB:.1f}", f"{found.generator_bytes / GIB:.1f}",
            )  # fmt: skip
    return table
