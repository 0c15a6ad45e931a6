"""The picture of `gleaner plan`: bars with the bytes of each role's parts on a GPU, in the terminal and as PNG. Slow
modules are imported where they are used."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.memory.plan import Misfit, Plan
from cluster.memory.quantised import FORMATS

if TYPE_CHECKING:
    from rich.console import Group

GIB = 2**30
WIDTH = 72  # characters of a bar
END = 1.35  # share of the GPU's memory at which the picture cuts the bars of a model that does not fit
# The sections of a bar: label, role, parts, colour (of rich and of matplotlib).
BANDS = (
    ("learner: weights", "learner", ("weights", "gathered", "reference"), "blue"),
    ("adapter, gradient, optimizer", "learner", ("adapters", "gradients", "optimizer"), "cyan"),
    ("activations", "learner", ("checkpoints", "activations", "live", "update", "fragmentation"), "magenta"),
    ("generator: weights", "generator", ("weights",), "green"),
    ("KV cache", "generator", ("kv_cache",), "yellow"),
    ("adapters, workspace, graphs", "generator", ("lora_slots", "workspace", "graphs", "fragmentation"), "red"),
    ("contexts", "both", ("context",), "grey"),
)


def bands(plan: Plan) -> list[tuple[str, str, int]]:
    """Returns (label, colour, bytes) of the sections of both roles; alternating roles are not on the GPU at once."""
    roles = {"learner": [plan.learner], "generator": [plan.generator], "both": [plan.learner, plan.generator]}
    return [
        (label, colour, sum(parts.get(name, 0) for parts in roles[role] for name in names))
        for label, role, names, colour in BANDS
    ]


def bars(plans: Sequence[Plan | Misfit], device: int) -> "Group":
    """Returns a bar for each model, whose width is the GPU's memory; the hatched end is free."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text()]
    for found in plans:
        line = Text(f"{found.shape.name:>16} ")
        if isinstance(found, Misfit):
            line.append(f"does not fit: needs {found.needs / GIB:.1f} GiB", "red")
            lines.append(line)
            continue
        scale = WIDTH / (device * (1 if found.layout == "slices" else 2))
        used, drawn = 0, 0
        for _, colour, size in bands(found):
            used += size
            cells = round(used * scale) - drawn
            drawn += cells
            line.append("█" * cells, _rich(colour))
        line.append("░" * max(WIDTH - drawn, 0), "dim")
        note = "" if found.layout == "slices" else f" {found.layout}, bar of two cards"
        lines.append(line.append(f" {found.device_peak / GIB:.1f} GiB{note}"))
    legend = Text(" " * 17)
    for label, _, _, colour in BANDS:
        legend.append("█ ", _rich(colour)).append(f"{label}  ")
    return Group(*lines, legend)


def save_png(plans: Sequence[Plan | Misfit], device: int, file: Path) -> None:
    """Writes horizontal stacked bars with the GPU's size as a line. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # imported here: it is an extra of the package

    figure = Figure(figsize=(11, 1.8 + 0.34 * len(plans)), layout="constrained")
    axes = figure.subplots()
    for row, found in enumerate(plans):
        left = 0.0
        chosen = found.least if isinstance(found, Misfit) else found
        for label, colour, whole in bands(chosen):
            size = min(whole, max(0, END * device - left * GIB))  # bars are cut at the end of the picture
            faint = 0.25 if isinstance(found, Misfit) else 0.85
            axes.barh(row, size / GIB, left=left, color=_plain(colour), alpha=faint, label=label if row == 0 else None)
            left += size / GIB
        axes.text(min(max(left, device / GIB), END * device / GIB), row, f"  {_words(found)}", va="center", fontsize=8)
    axes.axvline(device / GIB, color="black", linestyle="--", label=f"the card, {device / GIB:.0f} GiB")
    axes.set_yticks(range(len(plans)), [found.shape.name for found in plans])
    axes.set_xlim(0, 2.1 * device / GIB)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of generator and learner together")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12 - 0.6 / len(plans)), ncols=4, fontsize=8)
    figure.savefig(file, dpi=140)


def _words(found: Plan | Misfit) -> str:
    if isinstance(found, Misfit):
        return f"needs {found.needs / GIB:.0f} GiB"
    twice = {"none": "no recomputation", "full": "all layers twice", "mlp": "MLPs twice"}
    policy = found.checkpointing
    how = f"{policy} of {found.shape.layers} layers twice" if isinstance(policy, int) else twice[policy]
    return f"{found.layout}, {_base_words(found)} base, {how}, {found.sequences} sequences"


def _base_words(found: Plan) -> str:
    """How the base is stored."""
    if found.base == "nf4":
        return "4-bit"
    stored = found.shape.stored if found.base == "none" else FORMATS[found.base]
    return "16-bit" if stored is None else stored.name


def _rich(colour: str) -> str:
    return "grey50" if colour == "grey" else colour


def _plain(colour: str) -> str:
    return {"yellow": "gold", "cyan": "darkturquoise", "magenta": "mediumvioletred"}.get(colour, colour)
