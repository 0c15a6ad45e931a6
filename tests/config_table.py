"""Makes docs/keys.md out of the configuration's models: every key, its default, and why one would change it.

python -m tests.config_table        # writes docs/keys.md; tests/test_config_table.py compares
"""

import ast
import inspect
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from learner.config.load import Key, keys
from learner.config.run import RULES

DOCUMENT = Path(__file__).parents[1] / "docs" / "keys.md"


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
    """The content of docs/keys.md."""
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
TEXT = """# Keys of the configuration

Made by `python -m tests.config_table` from the models in `learner/config/`,
`learner/algo/surrogates.py`, `rollout/config.py`, `rewards/config.py` and `cluster/config.py`;
`tests/test_config_table.py` compares it with them.

This page lists the {count} keys of a configuration, section by section, and below them the
[rules of settings that go together](#rules-of-settings-that-go-together). [configuration.md](configuration.md) says how
settings are given and which to set first. `gleaner train --keys` prints the keys, too. In the names `<i>` stands for an
item's index in a list, from 0: `rewards.0.weight`.

## Keys without a section

{sections}

## Rules of settings that go together

A configuration that breaks a rule is refused before a run starts. The table is made from the rules in
`learner/config/run.py` and `learner/config/arrangement.py`, which also make the errors.

| setting | rule | else |
|---|---|---|
{rules}
"""


if __name__ == "__main__":
    DOCUMENT.write_text(document())
