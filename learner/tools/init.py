"""gleaner init: writes the files that a first run needs, for the user to read and change."""

import json
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated

import typer

from cluster import machine
from cluster.errors import WrongInput
from cluster.files import writing
from learner.driver import process
from learner.main import Request, epilog


@dataclass(frozen=True, slots=True)
class InitRequest(Request):
    """Write the files of a first run.

    They are a commented configuration, a reward function and a hundred rows of data. Nothing there is overwritten.
    """

    EPILOG = epilog(
        "gleaner init my-run && cd my-run && gleaner train --config config.yaml",
        "gleaner init my-run --model Qwen/Qwen2.5-1.5B-Instruct",
        failed="it failed on the way",
    )

    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; it is made.")] = Path()
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Hub name or folder; else the demo's model, which runs on a CPU.")
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(metavar="CARD", help="The card that --model will run on (rtx4090, t4); else what is here."),
    ] = None


# The files that gleaner init writes; the reward function is that of the README.

CONFIG = """\
# A run of gleaner, to be started in this folder:
#   gleaner train --config config.yaml --dry-run     says all that is wrong, and starts nothing
#   gleaner train --config config.yaml               any key can be set behind it: learner.lora.rank=32
# gleaner train --keys lists every key; docs/keys.md says why one would change it.
name: first-run                  # the run's folder is runs/first-run; each run wants its own
steps: 20                        # optimizer steps; more while eval/accuracy still rises
model:
  path: {model}  # hub name or folder
  dtype: {dtype}
data:
  path: data.jsonl               # or a CSV or Parquet file, or a hub name such as openai/gsm8k
  prompt: question               # the column that the model is asked; all others go to the reward functions
  {system}
  eval: {{size: 10, every: 10}}    # problems that are held out of training; 100 and more tell a small gain from chance
rewards:                         # their weighted sum; gleaner rewards list says what is built in
  - {{use: "my_rewards.py:accuracy", weight: 1.0}}
  - {{use: format, weight: 0.2}}   # <reasoning>...</reasoning><answer>...</answer>{asked}
rollout:
  num_generations: 8             # completions per problem, which are compared with each other
  max_prompt_length: {prompt}          # tokens
  max_completion_length: {completion}      # tokens
  kv_cache: {kv_cache}
learner:
  learning_rate: {rate}
  groups_per_step: 4             # problems per step
# cluster: {{gpus: {{generator: 0, learner: 0}}}}     # CPUs alone; without this line: the card, if one is here
"""

REWARD = '''\
# my_rewards.py
import re


def accuracy(prompts, completions, answer, **columns):
    """One number per completion; `answer` is a column of the data, repeated once per completion."""
    scores = []
    for completion, gold in zip(completions, answer):
        text = completion[0]["content"]  # a str instead, without a chat template
        found = re.findall(r"-?\\d+", text)
        scores.append(1.0 if found and found[-1] == str(gold) else 0.0)
    return scores
'''

SUMS = [(a, (3 * a + b) % 10, (a + 2 * b) % 10) for a in range(10) for b in range(10)]
ROWS = [
    {
        "question": f"State the final answer to the following arithmetic problem: {a} + {b} - {c} =",
        "answer": str(a + b - c),
    }
    for a, b, c in SUMS
]


DEMO = Path(__file__).parents[2] / "examples" / "tiny-arithmetic"
DEMO_SETTINGS = {
    "dtype": "float32", "prompt": 64, "completion": 64, "kv_cache": "64MiB", "rate": "1e-4", "asked": "",
    "system": '# system: "Think, then answer in <answer> tags."   # this model was taught to without being asked',
}  # fmt: skip
SETTINGS = {
    "prompt": 256, "completion": 256, "kv_cache": "auto", "rate": "2e-5", "asked": ", as the system prompt asks",
    "system": 'system: "Think first, inside <reasoning> and </reasoning>. Then give the answer, and nothing else, '
    'inside <answer> and </answer>."',
}  # fmt: skip


def run(asked: InitRequest) -> int:
    """Exit code: 0; 2 where the files cannot be written, of which a sentence is printed."""
    process.streams_are_commentary()
    try:
        print(write(asked.folder, asked.model, asked.gpu))
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write(folder: Path, model: str | None, gpu: str | None = None) -> str:
    """Writes config.yaml, my_rewards.py and data.jsonl, and returns a text on what to do next. gpu: the card that runs
    `model`, if it is another machine's. Raises WrongInput; if one of the files exists, before anything is written."""
    if gpu is not None and model is None:
        raise WrongInput("--gpu: goes with --model; the demo's model runs on a CPU")
    if model is not None and Path(model).is_dir():  # the path is made absolute, since commands run in the folder
        model = str(Path(model).resolve())
    chosen = {
        "model": json.dumps(model or str(_demo())),
        **(SETTINGS | {"dtype": _dtype(gpu)} if model else DEMO_SETTINGS),
    }
    files = {
        "config.yaml": CONFIG.format(**chosen),
        "my_rewards.py": REWARD,
        "data.jsonl": "".join(f"{json.dumps(row)}\n" for row in ROWS),
    }
    if there := [name for name in files if (folder / name).exists()]:
        raise WrongInput(f"FOLDER: nothing is overwritten, and {folder} holds {', '.join(there)}; give another folder")
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
    except OSError as error:
        raise WrongInput(f"FOLDER: {error.filename} cannot be written ({error.strerror}); give another") from None
    inside = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    return (
        f"wrote {', '.join(files)} in {folder.resolve()}\n"
        f"check:  {inside}gleaner train --config config.yaml --dry-run\n"
        f"train:  {inside}gleaner train --config config.yaml"
    )


def _dtype(gpu: str | None) -> str:
    """The type in which the card, else this machine, computes fastest. Raises WrongInput."""
    from cluster.memory.plan import BF16  # imported here, so that --help is fast

    if gpu is not None:
        from learner.driver.memory import card_size

        try:
            named = card_size(gpu).card
        except ValueError as error:
            raise WrongInput(f"--gpu: {error}") from None
        return "float16" if named is not None and named.capability < BF16 else "bfloat16"
    if usable := machine.usable_cards():
        return "bfloat16" if min(card.capability for card in usable) >= BF16 else "float16"
    return machine.cpu_dtype()


def _demo() -> Path:
    """Returns the folder of the demo's model: the repository's, or that of the installed wheel."""
    if DEMO.is_dir():
        return DEMO
    try:
        installed = [file for file in files("gleaner-rl") or [] if file.match(f"{DEMO.name}/config.json")]
    except PackageNotFoundError:
        installed = []
    if not installed:
        raise WrongInput(f"--model: the demo's model is not at {DEMO}; name a model")
    return Path(str(installed[0].locate())).resolve().parent
