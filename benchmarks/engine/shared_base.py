"""One base in two processes (memory.layout: shared), on a CPU: what both hold together, and whether it is the same
model.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.shared_base

Memory is the sum of the proportional set sizes (PSS: a page that n processes map counts 1/n in each) of a generator and
a learner that work on a random model of Qwen2.5-0.5B's shape in bfloat16: with one base; with a base of their own each;
and so with vLLM as it comes, which on a CPU repacks its weights and keeps the embedding twice. Equality is asked for
small models of several families, and in both types.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, MIB, as_table, conditions, save, under
from benchmarks.engine.shared_base_roles import OWN, REPACKED, SHARED
from examples.random_families import FAMILIES, make_family
from examples.random_model import EOS_IDS, make_tiny_model, make_tokenizer
from rollout.vllm.environment import required_env

ROLES = "benchmarks.engine.shared_base_roles"
KINDS = ("Pss_Anon", "Pss_Shmem", "Pss_File", "Pss")
ALLOWED = 1.1  # times the base, beside what both roles need without it
DTYPES = ("float32", "bfloat16")
PLAIN = ("Llama", "Qwen2")


def make_half_billion(folder: Path) -> int:
    """Bytes of a random model of Qwen2.5-0.5B's shape in bfloat16, written there."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=EOS_IDS[0], pad_token_id=259, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).bfloat16()
    model.generation_config = GenerationConfig(eos_token_id=list(EOS_IDS), pad_token_id=259)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return sum(weight.nbytes for weight in model.parameters())


class Role:
    """A process that says what it found on a line, and goes on at an empty one."""

    def __init__(self, *words: str) -> None:
        env = os.environ | required_env(cuda=False) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", ROLES, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()} before it said what it found")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def pss(self) -> dict[str, int]:
        """Bytes by kind."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()[1:]
        kilobytes = {line.split()[0].rstrip(":"): int(line.split()[1]) for line in lines}
        return {kind: kilobytes[kind] * 1024 for kind in KINDS}


@contextmanager
def role(*words: str) -> Iterator[Role]:
    started = Role(*words)
    try:
        yield started
        started.go_on()
        started.process.wait(60)
    finally:
        started.process.kill()


def memory(folder: Path, way: str) -> dict[str, Any]:
    """What both roles hold once each has done its work."""
    with role("generator", str(folder), way) as generator:
        generator.says()
        with role("learner", str(folder), way) as learner:
            learned = learner.says()
            generator.go_on()
            generated = generator.says()
            held = {"generator": generator.pss(), "learner": learner.pss()}
    return {"held": held} | learned | generated


def equality(dtype: str) -> list[dict[str, Any]]:
    """Of small models of every family."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in PLAIN:
            make_tiny_model(folder / name, family=name)
        for name in FAMILIES:
            make_family(folder / name, name)
        with role("equal", str(folder), dtype) as both:
            found = both.says()
    return [{"family": name, "dtype": dtype} | found[name] for name in (*PLAIN, *FAMILIES)]


def together(found: dict[str, Any]) -> int:
    return sum(found["held"][name]["Pss"] for name in ("generator", "learner"))


def report(found: dict[str, Any]) -> tuple[str, bool]:
    """(Markdown, whether the one base costs no more than ALLOWED and changes nothing)."""
    base, ways = found["base_bytes"], found["memory"]
    rows = [
        [way, name, *(f"{ways[way]['held'][name][kind] / MIB:.0f}" for kind in KINDS)]
        for way in ways
        for name in ("generator", "learner")
    ]
    rows += [[way, "sum", "", "", "", f"{together(ways[way]) / MIB:.0f}"] for way in ways]
    alone = together(ways[OWN]) - 2 * base
    limit, there = ALLOWED * base + alone, together(ways[SHARED])
    same = ways[OWN]["logprobs"] == ways[SHARED]["logprobs"]
    families = [
        [one["family"], one["dtype"], f"{one['views']} of {one['tensors']}", _verdict(one), one.get("refused", "")]
        for one in found["families"]
    ]
    good = there <= limit and same and all(_verdict(one) != "differ" for one in found["families"])
    text = (
        f"# One base for generator and learner, on a CPU\n\nA random model of Qwen2.5-0.5B's shape in bfloat16, "
        f"{base / MIB:.0f} MiB; MiB of proportional set size:\n\n"
        f"{as_table(['base', 'role', 'own memory', 'shared memory', 'files', 'PSS'], rows)}\n\n"
        f"Two bases apart, both roles need {alone / MIB:.0f} MiB. With one base they may hold {ALLOWED} of it more, "
        f"{limit / MIB:.0f} MiB, and hold {there / MIB:.0f} MiB ({(there - alone) / base:.2f} of it). The learner's "
        f"logprobs are {'the same' if same else 'NOT the same'} to the bit.\n\nSmall random models, learner on the "
        f"generator's base against learner on its own: logprobs, and the gradient of every part of the adapter.\n\n"
        f"{as_table(['family', 'type', 'tensors that are views', 'logprobs and gradients', 'refused'], families)}\n\n"
        f"{under(found['conditions'], 'A thread for each role')}\n"
    )
    return text, good


def _verdict(one: dict[str, Any]) -> str:
    if "refused" in one:
        return "refused"
    return "same bits" if one["logprobs"] and one["gradients"] else "differ"


def main() -> None:
    found: dict[str, Any] = {"conditions": conditions(ENGINE_PACKAGES), "memory": {}, "families": []}
    for dtype in DTYPES:
        found["families"] += equality(dtype)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found["base_bytes"] = make_half_billion(folder)
        for way in (REPACKED, OWN, SHARED):
            found["memory"][way] = memory(folder, way)
    text, good = report(found)
    save("shared_base", found, text)
    sys.exit(not good)


if __name__ == "__main__":
    main()
