"""Steps to a held-out accuracy of 0.85 by a teacher (learner.algorithm: distill) and by rewards, on the demo.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.distill

The teacher is the adapter that the demo (configs/local_cpu.yaml, seed 0) ends with. Then for each seed and learning
rate a student of it and a run of GRPO, one after the other, from the same new adapter and the same problems; each
evaluates every five steps, which is the grain of the answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import ENGINE_PACKAGES, ROOT, as_table, conditions, parser_of, save, under

REACHED, RATES, EVERY = 0.85, ("1e-4", "3e-4"), 5
Curve = list[tuple[int, float]]


def curve_of(folder: Path, name: str, *settings: str) -> Curve:
    """Step and held-out accuracy of a run of the demo with these settings."""
    command = [sys.executable, "-m", "learner.main", "--config", "configs/local_cpu.yaml", f"output_dir={folder}"]
    run = subprocess.run(
        [*command, f"name={name}", f"data.eval.every={EVERY}", *settings], cwd=ROOT, capture_output=True, text=True
    )
    if run.returncode != 0:
        raise RuntimeError(f"{name}: the run must end with 0, ended with {run.returncode}:\n{run.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [(int(row["step"]), float(row["eval/accuracy"])) for row in rows if row.get("eval/accuracy") is not None]


def reached(curve: Curve) -> str:
    """The first step whose evaluation is at least REACHED."""
    return next((str(step) for step, accuracy in curve if accuracy >= REACHED), f"not in {curve[-1][0]}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    told, found = conditions(ENGINE_PACKAGES), {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found["teacher"] = curve_of(folder, "teacher")
        taught = "learner.algorithm=distill", "learner.loss.beta=1", f"model.reference={folder / 'teacher' / 'adapter'}"
        for rate in RATES:
            for seed in options.seeds:
                own = f"learner.learning_rate={rate}", f"seed={seed}", f"steps={options.steps}"
                for name, settings in (("distill", taught), ("GRPO", ())):
                    run = f"{name} {rate} seed {seed}"
                    found[run] = curve_of(folder, run.replace(" ", "-"), *own, *settings)
                    print(run, found[run], flush=True)
    rows = [
        [rate, str(seed), *(reached(found[f"{name} {rate} seed {seed}"]) for name in ("distill", "GRPO")),
         *(f"{found[f'{name} {rate} seed {seed}'][2][1]:.3f}" for name in ("distill", "GRPO"))]
        for rate in RATES for seed in options.seeds
    ]  # fmt: skip
    at = f"accuracy at step {2 * EVERY}"
    head = ["learning rate", "seed", f"steps to {REACHED}: distill", "GRPO", f"{at}: distill", "GRPO"]
    text = (
        f"# Distillation on the policy's own samples, against GRPO: the demo\n\n{as_table(head, rows)}\n\n"
        f"The teacher, an adapter of the same base by GRPO, is at {found['teacher'][-1][1]:.3f}; a new adapter at "
        f"{found['teacher'][0][1]:.3f}. 200 held-out problems, answered greedily every {EVERY} steps.\n\n"
        f"Conditions: {under(told, 'No times are compared')}\n"
    )
    save("distill", {"conditions": told, "curves": found}, text)


if __name__ == "__main__":
    main()
