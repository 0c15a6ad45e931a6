"""Makes docs/configuration.md out of the configuration's models: every key, its default, and why one would change it.

python -m tests.config_table        # writes docs/configuration.md; tests/test_config_table.py compares
"""

import ast
import inspect
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from learner.config.load import Key, keys
from learner.config.run import RULES

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"


def reason(key: Key) -> str:
    """The text below the key's field in its model; '' where there is none."""
    inherited = [model for model in key.model.__mro__ if issubclass(model, BaseModel) and model is not BaseModel]
    return next((found[key.field] for model in inherited if key.field in (found := _reasons(model))), "")


@cache
def _reasons(model: type[BaseModel]) -> dict[str, str]:
    (body,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for pair in pairwise(body.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                found[field] = " ".join(text.split())
    return found


def document() -> str:
    """The content of docs/configuration.md."""
    sections: dict[str, list[str]] = {}
    for key in keys():
        head, dot, _ = key.name.partition(".")
        sections.setdefault(f"## `{head}`\n\n" if dot else "", []).append(_row(key))
    tables = [f"{heading}{HEADER}\n" + "\n".join(rows) for heading, rows in sections.items()]
    rules = "\n".join(f"| `{rule.setting.removesuffix(':')}` | {rule.rule} | {rule.mend} |" for rule in RULES)
    return TEXT.format(sections="\n\n".join(tables), count=sum(map(len, sections.values())), rules=rules)


def _row(key: Key) -> str:
    default = key.default if key.default == "required" else f"`{_size(key.default)}`"
    words = [word if word.startswith("a ") else f"`{word}`" for word in key.choices.split(" | ") if word]
    choices = f" One of: {', '.join(words)}." if words else ""
    return f"| `{key.name}` | {default} | {reason(key)}{choices} |"


def _size(default: str) -> str:
    """Whole numbers from a MiB on are bytes, and read better with a unit."""
    if not default.isdigit() or int(default) < 2**20:
        return default
    return f"{int(default) >> 30}GiB" if int(default) % 2**30 == 0 else f"{int(default) >> 20}MiB"


HEADER = """| key | default | what it is, and why you would change it |
|---|---|---|"""
TEXT = """# Configuration

Made by `python -m tests.config_table` from the models in `learner/config/`,
`learner/algo/surrogates.py`, `rollout/config.py`, `rewards/config.py` and `cluster/config.py`;
`tests/test_config_table.py` compares it with them.

A configuration is a YAML file of these {count} keys, and any of them can be set on the command line:
`learner.learning_rate=1e-4`, `rewards.0.weight=2`, `'data.eval={{size: 50}}'`. An unknown key is an error that names
the nearest one; all mistakes are told at once. Sizes are written with a unit (`24GiB`, `256MiB`). `configs/` has
examples; the README has one in ten lines. The keys that most runs touch: `model.path`, `data`, `rewards`, `steps`,
`learner.learning_rate`, `learner.groups_per_step`, `rollout.num_generations`, `rollout.max_completion_length`,
`max_staleness` and `cluster.gpus`.

{sections}

## Which settings go together

Made from `learner/config/run.py`, which also makes the errors.

| setting | rule | else |
|---|---|---|
{rules}
"""


if __name__ == "__main__":
    DOCUMENT.write_text(document())
