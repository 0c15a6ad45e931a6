"""The curve of `make demo-real` or `demo-numbers`: held-out accuracy of runs with intervals, as table and picture.

    for seed in 0 1 2; do make demo-real ARGS="seed=$seed output_dir=out"; done          7 to 30 minutes each
    make demo-real ARGS="name=control output_dir=out \\"rewards=[{use: 'examples/constraints/rewards.py:shuffled'},
        {use: 'examples/constraints/rewards.py:constraint', weight: 0}]\\" data.eval.reward=constraint"
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.demo_real out/demo-real-seed* --control out/control
    for seed in 0 1 2; do make demo-numbers ARGS="seed=$seed output_dir=out"; done
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.demo_real out/demo-numbers-seed*

A run's accuracy and seconds are read from its metrics.jsonl, the number of held-out problems from its config.yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import accuracies, rows
from cluster.reading import read_yaml
from learner.tools.evaluation import wilson


class Task(NamedTuple):
    """Of a table of runs with data in examples/NAME: its file, its title, what is counted, and what is held out."""

    file: str
    title: str
    counted: str
    held_out: str


TASKS = {
    "constraints": Task("demo_real", "`make demo-real`: SmolLM2-135M-Instruct learns to keep constraints",
                        "unseen constraints kept", "topics, wordings and values"),
    "word_problems": Task("demo_numbers", "`make demo-numbers`: SmolLM2-135M-Instruct learns word problems of one step",
                    "unseen problems solved", "pairs of numbers, wordings, names and things"),
}  # fmt: skip


class Curve(NamedTuple):
    """A run. points: step, and held-out accuracy at it. minutes: of its steps and evaluations, without the start."""

    name: str
    problems: int
    minutes: float
    points: list[tuple[int, float]]


def curve_of(run: Path) -> Curve:
    lines = rows(run)
    problems = len(Path(read_yaml(run / "config.yaml")["data"]["eval"]["path"]).read_text().splitlines())
    return Curve(run.name, problems, sum(line.get("time/step", 0.0) for line in lines) / 60, accuracies(lines))


def table(curves: list[Curve]) -> str:
    steps = [step for step, _ in curves[0].points]
    cells = []
    for curve in curves:
        found = []
        for _, accuracy in curve.points:
            low, high = wilson(accuracy, curve.problems)
            found.append(f"{accuracy:.3f} [{low:.3f}, {high:.3f}]")
        gain = curve.points[-1][1] - curve.points[0][1]
        cells.append([curve.name, *found, f"{gain:+.3f}", f"{curve.minutes:.1f}"])
    return as_table(["run", *(f"step {step}" for step in steps), "gain", "minutes"], cells)


def picture(curves: list[Curve], control: Curve | None, counted: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes: Any = figure.subplots()
    for curve in [*curves, *([control] if control else [])]:
        steps, accuracies = zip(*curve.points, strict=True)
        bands = [wilson(accuracy, curve.problems) for accuracy in accuracies]
        dashed = curve is control
        line = axes.plot(steps, accuracies, "--" if dashed else "-", marker="o", markersize=3, label=curve.name)
        axes.fill_between(steps, *zip(*bands, strict=True), alpha=0.12, color=line[0].get_color(), linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel(counted)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of the runs")
    parser.add_argument("--control", type=Path, help="the folder of the run with shuffled rewards")
    options = parser.parse_args()
    whole_runs = [*options.runs, *([options.control] if options.control else [])]
    tasks = {Path(read_yaml(run / "config.yaml")["data"]["path"]).parent.name for run in whole_runs}
    if len(tasks) != 1 or not tasks <= TASKS.keys():
        parser.error(f"runs must be of one task of {', '.join(TASKS)}, got {', '.join(sorted(tasks))}")
    told, task = conditions(), TASKS[tasks.pop()]
    curves = [curve_of(run) for run in options.runs]
    control = None if options.control is None else curve_of(options.control)
    whole = [*curves, *([control] if control else [])]
    picture(curves, control, task.counted, RESULTS / f"{task.file}.png")
    about_control = " `control`: the rewards of a group are shuffled." * (control is not None)
    text = (
        f"# {task.title}\n\n{table(whole)}\n\n"
        f"Greedy accuracy on held-out prompts, none of whose {task.held_out} is in a training prompt, with Wilson's "
        f"95 % interval. Minutes: of steps and evaluations.{about_control}\n\n"
        f"![the curves]({task.file}.png)\n\nConditions: {under(told, 'wall time')}"
    )
    save(task.file, {"conditions": told, "curves": [curve._asdict() for curve in whole]}, text)


if __name__ == "__main__":
    main()
