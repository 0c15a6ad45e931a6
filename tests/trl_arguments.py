"""Every argument of TRL's GRPOTrainer and GRPOConfig, by the class that has it: what docs/trl.md must have a place for.

    pip download --no-deps trl==1.16.0 && python -m tests.trl_arguments trl-1.16.0-py3-none-any.whl

writes tests/trl_arguments.json. TrainingArguments, from which GRPOConfig inherits, is read from the transformers that
is installed. Nothing is imported.
"""

import ast
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

FILE = Path(__file__).with_suffix(".json")
CONFIGS = {"GRPOConfig": "trl/trainer/grpo_config.py", "_BaseConfig": "trl/trainer/base_config.py"}
TRAINER = "trl/trainer/grpo_trainer.py"


def class_of(text: str, name: str) -> ast.ClassDef:
    """The class of that name at the top level of a source text."""
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def fields(node: ast.ClassDef) -> list[str]:
    """Names of a dataclass's fields."""
    return [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def parameters(node: ast.ClassDef) -> list[str]:
    """Names of what its constructor takes."""
    (init,) = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return [one.arg for one in init.args.args if one.arg != "self"]


def main(wheel: Path) -> None:
    with ZipFile(wheel) as files:
        found = {name: fields(class_of(files.read(path).decode(), name)) for name, path in CONFIGS.items()}
        trainer = parameters(class_of(files.read(TRAINER).decode(), "GRPOTrainer"))
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    inherited = class_of((Path(spec.origin).parent / "training_args.py").read_text(), "TrainingArguments")
    all_of_them = {
        "versions": {"trl": wheel.name.split("-")[1], "transformers": version("transformers")},
        "GRPOTrainer": trainer,
        "GRPOConfig": sorted({*found["GRPOConfig"], *found["_BaseConfig"]}),
        "TrainingArguments": sorted({*fields(inherited)} - {*found["GRPOConfig"], *found["_BaseConfig"]}),
    }
    FILE.write_text(json.dumps(all_of_them, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
