"""What a notebook shows of the results of train() and plan(): tables, curves and completions, in plain HTML."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollout import ledger
from rollout.schema import asked_of

WIDTH, HEIGHT, EDGE = 300, 90, 4
CURVES = ("reward/mean", "eval/accuracy")
SHOWN = 600  # characters of a prompt or completion


def table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of cells with plain text."""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{body}</table>"


def curves(metrics: Sequence[Mapping[str, float | None]]) -> str:
    """A curve of each metric of CURVES that has two values or more, over the steps."""
    found = []
    for name in CURVES:
        points = [(float(row["step"] or 0), value) for row in metrics if (value := row.get(name)) is not None]
        if len(points) > 1:
            found.append(_curve(name, points))
    return "".join(found)


def _curve(name: str, points: Sequence[tuple[float, float]]) -> str:
    values = [value for _, value in points]
    first, last, low, high = points[0][0], points[-1][0], min(values), max(values)
    across, up = (WIDTH - 2 * EDGE) / ((last - first) or 1.0), (HEIGHT - 2 * EDGE) / ((high - low) or 1.0)
    places = " ".join(f"{EDGE + (x - first) * across:.1f},{HEIGHT - EDGE - (y - low) * up:.1f}" for x, y in points)
    told = f"{name}, steps {first:g} to {last:g}: {low:.3f} to {high:.3f}"
    return (
        f'<figure style="display:inline-block;margin:0 1em 0 0"><svg width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(told)}"><polyline points="{places}" fill="none" stroke="currentColor" '
        f'stroke-width="1.5"/></svg><figcaption>{escape(told)}</figcaption></figure>'
    )


def examples(run_dir: Path) -> str:
    """The completion with the highest reward of the first step whose completions are there, and of the last. Of a file
    that cannot be read it has the error's sentence."""
    files = ledger.steps(run_dir / "rollouts")
    rows = [["step", "reward", "prompt", "completion"]]
    for file in dict.fromkeys((*files[:1], *files[-1:])):
        try:
            rows += [[str(int(file.stem.removeprefix("step-"))), *cells] for cells in _best(ledger.read(file))]
        except (OSError, ValueError) as error:
            return f"<p>{escape(f'{file} cannot be read: {error}')}</p>"
    return table(rows) if len(rows) > 1 else ""


def _best(found: pa.Table) -> Iterator[list[str]]:
    rows = found.select(["problem", "completion", "reward"]).to_pylist()
    scored = [row for row in rows if row["reward"] is not None]
    if scored:
        best = max(scored, key=lambda row: row["reward"])
        messages = asked_of(best["problem"]).messages
        prompt = messages if isinstance(messages, str) else str(messages[-1].get("content"))
        yield [f"{best['reward']:.3g}", prompt[:SHOWN], best["completion"][:SHOWN]]


class PlanRows(list[dict[str, Any]]):
    """The rows of plan(), which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        head = ["way of training", "fits", "GiB of a card", "layout", "base", "recomputed", "tokens of a micro-batch"]
        rows = [
            [
                str(row["method"]), "yes" if row["fits"] else "no",
                f"{row.get('device_peak', row.get('needs', 0)) / 2**30:.1f}",
                *(str(row.get(name, "")) for name in ("layout", "base", "checkpointing", "token_budget")),
            ]
            for row in self
        ]  # fmt: skip
        return table([head, *rows])
