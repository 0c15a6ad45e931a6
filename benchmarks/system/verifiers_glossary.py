"""verifiers' own `glossary` environment (an MCP tool), unchanged, through a whole rollout worker into a ledger.

    python -m venv build/verifiers
    build/verifiers/bin/pip install verifiers==0.4.0 uv GLOSSARY      # environments/glossary of verifiers' repository
    python -m benchmarks.system.verifiers_glossary build/verifiers/bin/python build/glossary

The policy is written by hand here, so that there are tool calls without a large model: it calls the tool letter by
letter, in tokens that no tokenizer would choose, and answers with what the tool said. Everything else is as in a run:
processes, endpoint, renderer, tool server, rewards, table.
"""

import argparse
import asyncio
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rollout import ledger
from rollout.engine import Engine, EngineSettings
from rollout.env.adapters.verifiers import CHILD
from rollout.env.config import EnvConfig
from rollout.env.play import Limits
from rollout.env.rollouts import EnvSettings
from rollout.fake_engine import FakeEngine
from rollout.schema import Problem, parts_of
from rollout.types import Adapter, Completion, Sampling
from rollout.worker import RolloutWorker, WorkerSpec

ENVIRONMENT = {
    "taskset": {"id": "glossary"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4},
}
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> None:
    """A tokenizer with Qwen3's marks, and what a rollout worker reads beside it; there are no weights."""
    source = Path(__file__).parents[2] / "examples" / "tiny-gsm8k"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]})
    tokenizer.add_tokens(MARKS)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", TEMPLATE
    tokenizer.save_pretrained(folder)
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(config))
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)


class Hand(FakeEngine):
    """The policy: looks up what it is asked for, then repeats it. Every logprob is -0.5."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(len(tokenizer))
        self._tokenizer = tokenizer

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        text = str(self._tokenizer.decode(list(prompt_ids)))
        if "<tool_response>" in text:
            found = text.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
            ids = self._ids(f"<answer>{found}</answer>")
        else:
            name = re.findall(r'look up "([^"]+)"', text)[-1]
            call = json.dumps({"name": "facts_lookup", "arguments": {"name": name}})
            letters = [token for letter in f"\n{call}\n" for token in self._ids(letter)]
            ids = [*self._ids("<tool_call>"), *letters, *self._ids("</tool_call>")]
        ids += self._ids("<|im_end|>")
        assert len(ids) <= sampling.max_tokens
        ones = np.ones(len(ids), np.float32)
        return [Completion(np.array(ids, np.int32), -0.5 * ones, "stop", np.ones(len(ids), np.int32))]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def worker_spec(folder: Path, python: str, variables: Sequence[str]) -> WorkerSpec:
    """A rollout worker for the environment."""
    args = {"python": python, "environment": ENVIRONMENT, "model": str(folder), "renderer": {"name": "qwen3"}}
    env = EnvConfig(
        use="verifiers", args=args, variables=tuple(variables), memory=2**32,
        start_timeout_s=250, step_timeout_s=120, timeout_s=400,
    )  # fmt: skip
    engine = EngineSettings(
        model=str(folder), dtype="float32", max_model_len=4096, kv_cache_bytes=1 << 20, max_num_seqs=8, max_lora_rank=8,
        adapter_window=2, seed=0,
    )  # fmt: skip

    def make(settings: EngineSettings) -> Engine:
        return Hand(AutoTokenizer.from_pretrained(settings.model))

    return WorkerSpec(0, "glossary", engine, (), 1, 2**30, make, EnvSettings(env, Limits(1024, 2048, 4, 400), 1, 0))


async def play(spec: WorkerSpec, rows: Sequence[dict[str, object]], out: Path) -> None:
    """A group of one trajectory of each task, printed and written."""
    worker = RolloutWorker(spec)
    await worker.take_policy(Adapter.build(1, b"one", {}))
    tables = []
    for index, row in enumerate(rows):
        messages = ({"role": "user", "content": str(row["prompt"])},)
        problem = Problem(f"glossary-{index}", messages, dict(row), (1,), index, 0)
        table = await worker.rollout(problem, Sampling(n=1, max_tokens=2048), 0)
        assert table is not None
        tables.append(table)
        (one,) = table.to_pylist()
        turns = [(turn["start"], turn["stop"]) for turn in one["turns"]]
        print(
            f"{problem.id}: {one['finish_reason']}, reward {one['reward']}, parts {parts_of(table)[0]}, turns {turns}, "
            f"{sum(one['loss_mask'])} of {len(one['loss_mask'])} tokens sampled"
        )
    await worker.close()
    print(f"ledger: {ledger.write(out, 1, tables)}")


def main() -> None:
    """Read the command line, list the tasks, play."""
    parser = argparse.ArgumentParser(description="Play verifiers' glossary environment.")
    parser.add_argument("python", help="interpreter of the virtual environment with verifiers, uv and glossary")
    parser.add_argument("out", type=Path, help="folder to write the ledger to")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--variables", nargs="*", default=[], help="environment variables that verifiers may see")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
        listed = subprocess.run(
            [args.python, "-P", str(CHILD), "tasks", str(folder / "environment.json")],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        rows = [json.loads(line) for line in listed.stdout.splitlines()][: args.tasks]
        asyncio.run(play(worker_spec(folder, args.python, args.variables), rows, args.out))


if __name__ == "__main__":
    main()
