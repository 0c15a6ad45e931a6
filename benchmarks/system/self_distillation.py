"""Held-out accuracy of SmolLM2-135M-Instruct (`make smollm2`) as it learns from itself behind a privileged prompt
(learner.algorithm: distill with data.teacher), on the task of `make demo-real`.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.self_distillation

The teacher is the same model without an adapter, which reads two worked examples before each question (the column
`shown` of examples/constraints); the policy reads the question alone, in training and in evaluations. Rewards teach
nothing. First the teacher's own accuracy on the held-out questions is measured, by a run of one step that asks them
behind the examples. A quarter of an hour a seed on two quiet cores.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common import ENGINE_PACKAGES, ROOT, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import Tree, accuracies, finished, rows
from cluster.reading import read_yaml
from learner.tools.evaluation import wilson

LONGEST, LIMIT_S = 320, 3600.0  # tokens of the privileged prompt; seconds of a run


def demo_real(steps: int, every: int) -> Tree:
    """configs/real_cpu.yaml, evaluated every `every` steps."""
    tree: Tree = read_yaml(ROOT / "configs" / "real_cpu.yaml")
    tree["model"]["path"] = str(ROOT / tree["model"]["path"])
    tree["data"]["path"], tree["rewards"][0]["use"] = (
        str(ROOT / text) for text in (tree["data"]["path"], tree["rewards"][0]["use"])
    )
    tree["data"]["eval"] |= {"path": str(ROOT / tree["data"]["eval"]["path"]), "every": every}
    return tree | {"steps": steps, "checkpoint": {"every": steps}, "trackers": []}


def teacher() -> Tree:
    """Whose evaluation at step 0 is the teacher's accuracy."""
    tree = demo_real(1, 1)
    tree["data"]["prompt"], tree["rollout"]["max_prompt_length"] = "shown", LONGEST
    return tree


def student(options: Any, seed: int) -> Tree:
    """Begins as the teacher, and never reads the examples."""
    tree = demo_real(options.steps, options.every) | {"seed": seed}
    tree["data"]["teacher"] = {"prompt": "shown", "max_prompt_length": LONGEST}
    tree["learner"] |= {"algorithm": "distill", "loss": {"beta": 1}, "learning_rate": float(options.rate)}
    tree["model"]["dtype"] = options.dtype
    return tree


def cell(accuracy: float, problems: int) -> str:
    low, high = wilson(accuracy, problems)
    return f"{accuracy:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=15)
    parser.add_argument("--rate", default="1e-4")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    told, curves = conditions(ENGINE_PACKAGES), {}
    with finished(teacher(), LIMIT_S) as folder:
        above = accuracies(rows(folder))[0][1]
    for seed in options.seeds:
        with finished(student(options, seed), LIMIT_S) as folder:
            lines = rows(folder)
            apart = [line["policy/kl"] for line in lines if "policy/kl" in line]
            mismatch = max(line["policy/mismatch_k3"] for line in lines if "policy/mismatch_k3" in line)
        curves[seed] = {"accuracy": accuracies(lines), "kl": apart, "mismatch_k3": mismatch}
        print(seed, curves[seed]["accuracy"], flush=True)
    problems = len((ROOT / "examples/constraints/held_out.jsonl").read_text().splitlines())
    steps = [step for step, _ in curves[options.seeds[0]]["accuracy"]]
    cells = [
        [str(seed), *(cell(accuracy, problems) for _, accuracy in curve["accuracy"]),
         f"{curve['kl'][0]:.3f}", f"{curve['kl'][-1]:.3f}", f"{curve['mismatch_k3']:.1e}"]
        for seed, curve in curves.items()
    ]  # fmt: skip
    head = ["seed", *(f"step {step}" for step in steps), "KL at first", "at last", "largest mismatch"]
    text = (
        "# A model that learns from itself behind a privileged prompt: SmolLM2-135M-Instruct\n\n"
        f"{as_table(head, cells)}\n\nGreedy accuracy on {problems} held-out questions of `make demo-real`, read "
        f"without the examples, with Wilson's 95 % interval. The teacher, the model at step 0 behind two worked "
        f"examples, is at {cell(above, problems)}. {options.dtype}, learning rate {options.rate}, beta 1; KL to the "
        f"teacher (`policy/kl`) and `policy/mismatch_k3` in nats a token.\n\n"
        f"Conditions: {under(told, 'No times are compared')}\n"
    )
    name = "self_distillation" + "_bfloat16" * (options.dtype == "bfloat16")
    save(name, {"conditions": told, "teacher": above, "curves": curves}, text)


if __name__ == "__main__":
    main()
