"""The table of docs/recipes.md: the largest model that each recipe trains on a card, by the plan of the run itself.

python -m tests.recipe_table        # writes it; tests/test_recipe_table.py compares
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cluster.memory.generator import cache_bytes
from cluster.memory.plan import Misfit
from cluster.memory.search import plan
from cluster.memory.shape import SHAPES
from learner.config import RunConfig
from learner.driver import memory
from learner.driver.memory import layouts, planned, wish_of, workload

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "recipes.md"
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
CARDS = {"8 GB": "8", "12 GB": "12", "16 GB": "16", "24 GB": "24", "40 GB": "40", "80 GB": "80"}
MODELS = ("14B", "7B", "3B", "1.5B", "0.5B")  # of Qwen2.5; a Coder model has the shape of its size
OWN: dict[str, Any] = {}
SHARED = {"memory": {"layout": "shared"}}
SEPARATE = {"cluster": {"gpus": {"generator": 1, "learner": 1}}, "rollout": {"workers": 7}, "max_staleness": 1}
ENOUGH = 8  # completions of full length at once: with fewer a card mostly waits
TABLE = re.compile(r"^\| recipe \| 8 GB .*?\n(?=\n)", re.DOTALL | re.MULTILINE)


def table() -> str:
    lines = [f"| recipe | {' | '.join(CARDS)} | 8 x 80 GB |", f"|---|{'---|' * (len(CARDS) + 1)}"]
    for file in RECIPES:
        tree = yaml.safe_load(file.read_text())
        cells = [_cell(tree, size, {"": OWN, ", shared": SHARED}) for size in CARDS.values()]
        lines.append(f"| {file.stem} | {' | '.join([*cells, _cell(tree, '80', {'': SEPARATE})])} |")
    return "\n".join(lines) + "\n"


def _cell(tree: Mapping[str, Any], card: str, ways: Mapping[str, Mapping[str, Any]]) -> str:
    """The largest model with a base in 16 bits; and with one in 4 bits, if that is larger."""
    size, found = memory.card_size(card).bytes, []
    for base, label in (("none", ""), ("nf4", " nf4")):
        fits = (
            f"{model}{label}{way}"
            for model in MODELS
            for way, changes in ways.items()
            if _fits(_changed(tree, {**changes, "model": {"base": base}}), model, size)
        )
        found.append(next(fits, ""))
    plain, packed = found
    larger = packed if _place(packed) < _place(plain) else ""
    return "; or ".join(cell for cell in (plain, larger) if cell) or "-"


def _place(cell: str) -> int:
    return MODELS.index(re.split("[ ,]", cell)[0]) if cell else len(MODELS)


def _changed(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> RunConfig:
    merged = {
        key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    return RunConfig.model_validate({**tree, **merged})


def _fits(config: RunConfig, model: str, card: int) -> bool:
    """Whether the run's own plan has room for ENOUGH. It is not asked where the least of settings has none: what it
    says to that takes a second."""
    shape, work = SHAPES[f"Qwen2.5-{model}"], workload(config, ENOUGH)
    wish = wish_of(config, layouts(config))
    cache = cache_bytes(shape, wish.kv_dtype, work.whole, ENOUGH, cuda=True)
    small = replace(wish, checkpointing="full", token_budget=int(work.longest), kv_bytes=cache)
    if isinstance(plan(shape, card, work, small), Misfit):
        return False
    found = planned(config, shape, card)
    return not isinstance(found, Misfit) and found[0].sequences >= ENOUGH


if __name__ == "__main__":
    DOCUMENT.write_text(TABLE.sub(lambda _: table(), DOCUMENT.read_text()))
