"""A teacher that reads a prompt of its own, in the whole system: rollouts have it, and resume, ranks and replay go by
it."""

import json
import shutil
from pathlib import Path

import pytest

from examples.random_model import make_tiny_model
from learner.driver import checkpoint
from rollout import ledger
from rollout.data.chat import Chat
from rollout.schema import ragged
from tests.flow.run import Run

TAUGHT = (
    "learner.algorithm=distill", "learner.loss.beta=1", 'data.teacher.prompt="{question} ({answer})"',
    "data.teacher.system=Think.", "data.teacher.max_prompt_length=128", "cluster.learners=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", family="Llama")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_what_a_teacher_read_is_recorded_and_learned_from_again(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path, model)
    run.finish(*TAUGHT)
    assert all(line["policy/kl"] > 1e-3 for line in run.metrics() if line["step"] > 0)  # it reads more from the start
    chat = Chat.load(str(model), {}, ())
    for file in ledger.steps(run.folder / "rollouts"):
        rows = ledger.read(file)
        for text, ids in zip(rows.column("problem").to_pylist(), ragged(rows, "teacher_prompt_ids"), strict=True):
            asked = "{question} ({answer})".format(**json.loads(text)["columns"])
            told = [{"role": "system", "content": "Think."}, {"role": "user", "content": asked}]
            assert tuple(ids.tolist()) == chat.render(told)[1]
    shutil.rmtree(run.folder / "checkpoints" / checkpoint.name_of(4))  # as if it had been stopped after step 2
    refused = run.start(*TAUGHT, "data.teacher.system=null", "--dry-run")
    output, _ = run.communicate(refused, 120)
    assert "data.teacher.system (Think., now none)" in " ".join(output.split()), output
    assert "resumed at step 2" in run.finish(*TAUGHT)
    found = json.loads(run.gleaner("replay", str(run.folder), "--json"))  # in one process
    assert (found["same"], found["to"]) == (True, 4), found
