"""Steps to a held-out accuracy of 0.85 by a teacher (learner.algorithm: distill) and by rewards, on the demo.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.distill

The teacher is the adapter that the demo (configs/local_cpu.yaml, seed 0) ends with. Then for each seed and learning
rate a student of it and a run of GRPO, one after the other, from the same new adapter and the same problems; each
evaluates every five steps, which is the grain of the answer.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import Tree, accuracies, demo, finished, rows

REACHED, RATES, EVERY = 0.85, ("1e-4", "3e-4"), 5
TEACHER_STEPS, LIMIT_S = 60, 600.0
Curve = list[tuple[int, float]]


def student(rate: str, seed: int, steps: int, teacher: Path | None) -> Tree:
    """The demo from a new adapter, taught by the run in the folder; None: by rewards, with GRPO."""
    tree = demo(steps, EVERY) | {"seed": seed}
    tree["learner"] |= {"learning_rate": float(rate)}
    if teacher is not None:
        tree["learner"] |= {"algorithm": "distill", "loss": {"beta": 1}}
        tree["model"] |= {"reference": str(teacher / "adapter")}
    return tree


def reached(curve: Curve) -> str:
    """The first step whose evaluation is at least REACHED."""
    return next((str(step) for step, accuracy in curve if accuracy >= REACHED), f"not in {curve[-1][0]}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    told, found = conditions(ENGINE_PACKAGES), {}
    with finished(demo(TEACHER_STEPS, EVERY), LIMIT_S) as teacher:
        found["teacher"] = accuracies(rows(teacher))
        for rate, seed in product(RATES, options.seeds):
            for name, taught_by in (("distill", teacher), ("GRPO", None)):
                run = f"{name} {rate} seed {seed}"
                with finished(student(rate, seed, options.steps, taught_by), LIMIT_S) as folder:
                    found[run] = accuracies(rows(folder))
                print(run, found[run], flush=True)
    cells = [
        [rate, str(seed), *(reached(found[f"{name} {rate} seed {seed}"]) for name in ("distill", "GRPO")),
         *(f"{found[f'{name} {rate} seed {seed}'][2][1]:.3f}" for name in ("distill", "GRPO"))]
        for rate, seed in product(RATES, options.seeds)
    ]  # fmt: skip
    at = f"accuracy at step {2 * EVERY}"
    head = ["learning rate", "seed", f"steps to {REACHED}: distill", "GRPO", f"{at}: distill", "GRPO"]
    text = (
        f"# Distillation on the policy's own samples, against GRPO: the demo\n\n{as_table(head, cells)}\n\n"
        f"The teacher, an adapter of the same base by GRPO, is at {found['teacher'][-1][1]:.3f}; a new adapter at "
        f"{found['teacher'][0][1]:.3f}. 200 held-out problems, answered greedily every {EVERY} steps.\n\n"
        f"Conditions: {under(told, 'No times are compared')}\n"
    )
    save("distill", {"conditions": told, "curves": found}, text)


if __name__ == "__main__":
    main()
