"""Makes docs/model_tables.md: what the learner does with a tiny random model of each architecture, and what vLLM has.

python -m tests.model_table        # writes docs/model_tables.md; tests/test_model_table.py compares
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, as_table
from examples.random_families import FAMILIES, TINY
from examples.random_towers import CHECKPOINTS, make_checkpoint
from tests.model_rows import BY_CONFIG, ROWS
from tests.template_table import section

DOCUMENT = Path(__file__).parents[1] / "docs" / "model_tables.md"
OWN_NAMES = ("bloom", "falcon", "gpt2")  # their configs share no names with TINY
HEADER = ("model_type", "learner", "why", "all-linear", "experts", "vLLM")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    handler, logger = _Kept(), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def row(kind: str, folder: Path) -> tuple[str, ...]:
    """What the code that trains says of a tiny random model of that kind: a row of the table."""
    import torch
    import transformers

    hf: Any = transformers
    settings = ROWS[kind] if kind in OWN_NAMES else TINY | ROWS[kind]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **settings)).float()
    model.save_pretrained(folder)
    return _said(kind, folder, type(model).__name__)


def row_of_checkpoint(name: str, folder: Path) -> tuple[str, ...]:
    """The same of a tiny random checkpoint with towers, whose text part is trained."""
    from transformers import AutoConfig

    from rollout.text_part import text_part

    make_checkpoint(folder, name)
    (kind,) = text_part(AutoConfig.from_pretrained(folder)).architectures
    return _said(f"{name} (text of {CHECKPOINTS[name][0]})", folder, kind)


def _said(kind: str, folder: Path, model_class: str) -> tuple[str, ...]:
    import torch

    from learner.config import ModelConfig
    from learner.config.settings import LoraConfig
    from learner.model.policy import Policy

    served = _served(model_class)
    try:
        with _heard("learner.model.packing_check") as warnings:
            policy = Policy(
                ModelConfig(path=str(folder), dtype="float32"), LoraConfig(rank=8), checkpointing="none", seed=0,
                device=torch.device("cpu"),
            )  # fmt: skip
    except ValueError as error:
        return kind, "refused", _plain(str(error), folder), "", "", served
    assert policy.peft_config is not None
    leaves = sorted({name.rpartition(".")[2] for name in policy.peft_config["target_modules"]})
    why = "" if policy.packed else _plain(warnings[-1].partition("(")[2].rpartition("): ")[0], folder)
    return kind, "packed" if policy.packed else "padded", why, ", ".join(leaves), _experts(folder), served


def _experts(folder: Path) -> str:
    """Whether learner.lora.targets may name the experts of a model, or why not; "" for a model without any."""
    import torch
    import transformers

    from learner.model.experts import expert_parameters
    from rollout.architecture import has_experts
    from rollout.text_part import text_part

    hf: Any = transformers
    config = text_part(hf.AutoConfig.from_pretrained(folder))
    if not has_experts(config.to_dict()):
        return ""
    with torch.device("meta"):
        lm = hf.AutoModelForCausalLM.from_config(config)
    try:
        expert_parameters(lm)
    except ValueError as error:
        return _plain(str(error).removeprefix("learner.lora.targets: "), folder)
    return "yes"


def refused_by_config(kind: str) -> tuple[str, ...]:
    """A row of the table for a model that its config.json alone refuses."""
    import transformers

    from cluster.errors import WrongInput
    from rollout.architecture import check_architecture

    hf: Any = transformers
    config = hf.AutoConfig.for_model(kind).to_dict() | {"architectures": [BY_CONFIG[kind]]}
    try:
        check_architecture(config, "/it", lora=True)
    except WrongInput as error:
        return kind, "refused", _plain(str(error), Path("/it")), "", "", ""
    raise AssertionError(f"{kind} is no longer refused: give it a row of its own")


def _plain(text: str, folder: Path) -> str:
    """Without what differs from machine to machine and without advice, on one line of Markdown."""
    text = text.removeprefix("model.path: ").replace(str(folder), "this one")
    told = re.split("; (?:give|name|leave)|[.] Train", text)[0]
    text = re.sub("rows differ by .*", "packed it differs by more than rounding", told)
    return " ".join(text.replace("|", "/").split())


def _served(model_class: str) -> str:
    """What the installed vLLM does with a class of transformers."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    entry = ModelRegistry.models.get(model_class)
    if entry is None:
        return "no class of its own"
    try:
        own = entry.load_model_cls()
    except ModuleNotFoundError as error:
        return f"its module imports {error.name}, which is not here"
    if "transformers" in own.__module__.split("."):
        return "LoRA, by transformers' code"
    return "LoRA" if supports_lora(own) else "without LoRA"


def table() -> str:
    """The content of docs/model_tables.md."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for models this small a second one only waits
    rows = []
    try:
        for kind in sorted([*ROWS, *BY_CONFIG]):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(refused_by_config(kind) if kind in BY_CONFIG else row(kind, Path(folder)))
        for name in CHECKPOINTS:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row_of_checkpoint(name, Path(folder)))
    finally:
        torch.set_num_threads(threads)
    found = json.loads((RESULTS / "model_families.json").read_text())
    proven = {name: one["steps"] for name, one in found.items()}
    greatest = {name: max(step["policy/mismatch_max"] for step in steps) for name, steps in proven.items()}
    lines = [
        [f"{name} ({FAMILIES[name][1]})" if name in FAMILIES else name, f"{len(proven[name])}", f"{value:.1e}"]
        for name, value in greatest.items()
    ]
    proven_table = as_table(("family", "steps", "largest, nats"), lines)
    return TEXT.format(table=as_table(HEADER, rows), proven=proven_table, templates=section())


TEXT = """# Tables of models and chat templates

Made by `python -m tests.model_table` from a tiny random model of each architecture; `tests/test_model_table.py`
compares it with what the code says now. [models.md](models.md) says what follows from it for a run.

## Architectures

- **learner**: `packed`, `padded` or `refused`, as [models.md](models.md#what-a-run-finds-out-about-a-model) explains;
  with LoRA. Models with attention sinks are padded in `learner.mode: full`, which trains the sinks.
- **why**: the reason for which the architecture is padded or refused.
- **all-linear**: the layers that `learner.lora.targets: all-linear` adapts.
- **text of**: the model is the text part of a checkpoint with towers of that model_type.
- **experts**: whether `learner.lora.targets` may also name `experts` ([models.md](models.md#experts)), or why not.
- **vLLM**: what the installed vLLM has for adapters of the architecture. `no class of its own`: vLLM tries
  transformers' code.

{table}

## In the whole system

The table has the largest difference between the sampler's and the learner's logprob of a token, in runs with Ray, vLLM
on a CPU and the learner, in float32, with LoRA on all-linear (`python -m benchmarks families`).

{proven}

{templates}"""


if __name__ == "__main__":
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(table())
