"""Steps to a held-out accuracy of 0.85 by a teacher (learner.algorithm: distill) and by rewards, on the demo.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.distill [--model]

The teacher is the adapter that the demo (configs/local_cpu.yaml, seed 0) ends with. Then for each seed and learning
rate a student of it and a run of GRPO, one after the other, from the same new adapter and the same problems; each
evaluates every five steps, which is the grain of the answer.

--model: the teacher is that adapter merged into its base, as a model in a process of its own (model.teacher), which is
asked for the sampled token alone, or for its eight likeliest as well.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import Tree, accuracies, demo, finished, rows

REACHED, RATES, EVERY = 0.85, ("1e-4", "3e-4"), 5
TEACHER_STEPS, LIMIT_S = 60, 600.0
Curve = list[tuple[int, float]]


def student(rate: str, seed: int, steps: int, taught: dict[str, Any], top: int = 0) -> Tree:
    """The demo from a new adapter, taught by what these settings of `model` name; {}: by rewards, with GRPO."""
    tree = demo(steps, EVERY) | {"seed": seed}
    tree["learner"] |= {"learning_rate": float(rate)}
    if taught:
        tree["learner"] |= {"algorithm": "distill", "loss": {"beta": 1, "teacher_top": top}}
        tree["model"] |= taught
    return tree


def merged(run: Path, folder: Path) -> Path:
    """What the run has learned, as a whole model."""
    subprocess.run([sys.executable, "-m", "learner.tools.cli", "export", str(run), str(folder)], check=True)
    return folder


def reached(curve: Curve) -> str:
    """The first step whose evaluation is at least REACHED."""
    return next((str(step) for step, accuracy in curve if accuracy >= REACHED), f"not in {curve[-1][0]}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--model", action="store_true", help="the teacher is a model in a process of its own")
    options = parser.parse_args()
    told, found = conditions(ENGINE_PACKAGES), {}
    with finished(demo(TEACHER_STEPS, EVERY), LIMIT_S) as teacher, TemporaryDirectory() as out:
        found["teacher"] = accuracies(rows(teacher))
        kinds: dict[str, tuple[dict[str, Any], int]]
        if options.model:
            whole = {"teacher": str(merged(teacher, Path(out) / "model"))}
            kinds = {"sampled token": (whole, 0), "8 likeliest": (whole, 8)}
        else:
            kinds = {"distill": ({"reference": str(teacher / "adapter")}, 0), "GRPO": ({}, 0)}
        for rate, seed in product(options.rates, options.seeds):
            for name, taught in kinds.items():
                run = f"{name} {rate} seed {seed}"
                with finished(student(rate, seed, options.steps, *taught), LIMIT_S) as folder:
                    found[run] = accuracies(rows(folder))
                print(run, found[run], flush=True)
    cells = [
        [rate, str(seed), *(reached(found[f"{name} {rate} seed {seed}"]) for name in kinds),
         *(f"{found[f'{name} {rate} seed {seed}'][2][1]:.3f}" for name in kinds)]
        for rate, seed in product(options.rates, options.seeds)
    ]  # fmt: skip
    (first, second), at = kinds, f"accuracy at step {2 * EVERY}"
    head = ["learning rate", "seed", f"steps to {REACHED}: {first}", second, f"{at}: {first}", second]
    what = "by a model in a process of its own" if options.model else "against GRPO"
    whose = "a merged adapter" if options.model else "an adapter"
    text = (
        f"# Distillation on the policy's own samples, {what}: the demo\n\n{as_table(head, cells)}\n\n"
        f"The teacher, {whose} of the same base by GRPO, is at {found['teacher'][-1][1]:.3f}; a new adapter at "
        f"{found['teacher'][0][1]:.3f}. 200 held-out problems, answered greedily every {EVERY} steps.\n\n"
        f"Conditions: {under(told, 'No times are compared')}\n"
    )
    save("distill_model" if options.model else "distill", {"conditions": told, "curves": found}, text)


if __name__ == "__main__":
    main()
