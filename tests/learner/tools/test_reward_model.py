"""gleaner reward-model train: its gradient against textbook code, what it writes against PEFT, what it refuses."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.errors import WrongInput
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig, LoraConfig, OptimizerConfig
from learner.model.policy import Policy
from learner.model.roles import ScoredRole
from learner.tools.bradley_terry import ROLE, Pair, PairLearner, _loss, read_pairs
from learner.tools.cli import main
from learner.trainer.memory_limit import TokenBudget
from rollout.data.chat import Chat
from tests.learner.model.test_reference import theirs

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PAIRS = [
    Pair((5, 9), (2, 7, 258), (3, 258)),
    Pair((5, 9), (8, 258), (2, 2, 4, 258)),
    Pair((1, 1, 6), (4, 258), (7, 4, 258)),
]


@pytest.fixture
def learner(tiny_path: str, tmp_path: Path) -> PairLearner:
    theirs(tiny_path).save_pretrained(tmp_path / "start")
    policy = Policy(
        ModelConfig(path=tiny_path, dtype="float32"), LoraConfig(rank=8),
        checkpointing="none", seed=0, device=torch.device("cpu"),
        roles=[ScoredRole(ROLE, str(tmp_path / "start"), trained=True, key="here")],
    )  # fmt: skip
    config = LearnerConfig(learning_rate=1e-2, optimizer=OptimizerConfig(max_grad_norm=1e9))
    return PairLearner(policy, config, TokenBudget(8192), dtype="float32", total_steps=10)


def textbook(tiny_path: str, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the PEFT model, one sequence at a time."""
    model = theirs(tiny_path, str(folder))

    def score(*parts: tuple[int, ...]) -> Tensor:
        logits: Tensor = model(input_ids=torch.tensor([sum(parts, ())])).logits
        return logits[0, 0]

    differences = [score(p.prompt, p.chosen) - score(p.prompt, p.rejected) for p in PAIRS]
    loss = -F.logsigmoid(torch.stack(differences)).mean()
    loss.backward()
    return loss.detach(), {
        name.replace(".default", "").replace("modules_to_save.", ""): weight.grad
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


@pytest.mark.parametrize("tokens", [1, 12, 8192])
def test_gradient_and_loss_are_the_textbook_s_whatever_the_micro_batches(
    learner: PairLearner, tiny_path: str, tmp_path: Path, tokens: int
) -> None:
    loss, wanted = textbook(tiny_path, tmp_path / "start")
    learner._gradient(learner._plan(PAIRS, tokens), len(PAIRS))
    assert learner.judge(PAIRS).loss == pytest.approx(float(loss), abs=1e-6)
    for name, weight in learner._masters.named.items():
        torch.testing.assert_close(weight.grad, wanted[name], atol=1e-6, rtol=1e-4)


def test_where_two_answers_score_alike_the_slope_is_a_half(learner: PairLearner) -> None:
    """As all do at first: a fresh head is 0."""
    assert torch.autograd.grad(_loss(zero := torch.zeros(2, requires_grad=True)).sum(), zero)[0].tolist() == [
        -0.5,
        -0.5,
    ]


def test_it_learns_and_peft_reads_what_it_has_learned(learner: PairLearner, tiny_path: str, tmp_path: Path) -> None:
    before = learner.judge(PAIRS)
    for _ in range(8):
        learner.learn(PAIRS)
    after = learner.judge(PAIRS)
    assert after.loss < before.loss / 2
    assert after.accuracy == 1.0
    learner.adapter.save(tmp_path / "out", tiny_path)
    model: Any = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=1)
    model.eval()
    with torch.no_grad():
        said = [
            [float(model(input_ids=torch.tensor([pair.prompt + own])).logits) for own in (pair.chosen, pair.rejected)]
            for pair in PAIRS
        ]
    assert after.margin == pytest.approx(float(np.mean([a - b for a, b in said])), abs=1e-5)


def written(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_texts_and_conversations_become_what_a_run_would_score(tiny_path: str, tmp_path: Path) -> None:
    chat = Chat.load(tiny_path)
    asked: dict[str, str] = {"role": "user", "content": "1+1?"}
    told: Any = partial(dict, role="assistant")
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": [asked], "chosen": [told(content="2")], "rejected": [told(content="3")]},
        {"chosen": [asked, told(content="2")], "rejected": [asked, told(content="3")]},
        {"prompt": "1+1?", "chosen": [asked, told(content="2")], "rejected": [asked, told(content="3")]},
    ]
    pairs = read_pairs(written(tmp_path, *rows), chat)
    end = chat.tokenizer.eos_token_id
    prompt = chat.render([asked])[1]
    answers = [(*chat.tokenizer.encode(text), end) for text in ("2", "3")]
    assert pairs == [Pair(prompt, *answers)] * 4


def test_pairs_are_read_from_the_split_train_unless_another_is_named(tiny_path: str, tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    splits = {"train": [row] * 3, "test": [row]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    saved.save_to_disk(tmp_path / "saved")
    chat, path = Chat.load(tiny_path), str(tmp_path / "saved")
    assert [len(read_pairs(path, chat, split)) for split in (None, "test")] == [3, 1]
    with pytest.raises(WrongInput, match="^--split: .*'nope'"):
        read_pairs(path, chat, "nope")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"row 2 has no rejected \(its columns: prompt, chosen.*\); rename"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "row 2 has no rejected"),
        ({"chosen": "b", "rejected": "c"}, "texts need a prompt beside them, .*row 2 has none; add a column prompt"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt of .*row 2 is '3'; repair it"),
        ({"prompt": "a", "chosen": [{"role": "user"}], "rejected": "c"}, "chosen of .*row 2 is .*repair it"),
        (
            {"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"},
            "begin with role assistant, or be .*; chosen of .*row 2 begins with role user; take the row out",
        ),
        (
            {"prompt": "z", "chosen": TALK, "rejected": TALK},
            "a conversation that begins with the prompt's own messages; chosen of .*row 2 begins with role user",
        ),
        (
            {"chosen": TALK[:1], "rejected": "c"},
            "one message of role assistant, chosen of .*row 2 has the roles user; take the row out",
        ),
    ],
)
def test_a_pair_that_cannot_be_learned_from_is_named(
    row: dict[str, Any], message: str, tiny_path: str, tmp_path: Path
) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(WrongInput, match=f"^pairs: .*{message}"):
        read_pairs(written(tmp_path, good, row), Chat.load(tiny_path))


def test_the_command_from_pairs_to_a_folder(
    tiny_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"say {i}", "chosen": "yes " * (1 + i % 3), "rejected": "no"} for i in range(40)]
    useless = [{"prompt": "say", "chosen": "no", "rejected": "no"}, {"prompt": "say", "chosen": "no", "rejected": ""}]
    pairs, new = written(tmp_path, *rows, *useless), str(tmp_path / "new")
    words = ["--model", tiny_path, "--out", str(tmp_path / "out"), "--dtype", "float32", "--batch", "8"]
    words = ["reward-model", "train", pairs, *words, "--learning-rate", "5e-3", "--epochs", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "1 of 42 rows are left out: pairs: each row must give chosen and rejected" in out
    assert "1 of 41 pairs have the same answer twice and are left out" in out
    assert "36 pairs to learn from, 4 held out, 10 steps" in out
    assert "held-out accuracy 1.000, mean margin" in out
    assert "worse than chance" not in out
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:4]]
    (tmp_path / "swapped").mkdir()
    assert main([*words, "--out", new, "--eval", written(tmp_path / "swapped", *swapped)]) == 0
    assert "that is worse than chance: are chosen and rejected swapped" in capsys.readouterr().out

    def told(*more: str) -> str:
        assert main([*words, *more]) == 2
        out, err = capsys.readouterr()
        assert ("steps" in out) == ("finite" in err or "fit in memory" in err)  # all else is told before
        return err

    assert "error: --out: must be a new folder" in told()
    assert "error: --out: must be a folder that can be made" in told("--out", f"{pairs}/below")
    words += ["--out", str(tmp_path / "newer")]
    assert "--max-length: must leave pairs" in told("--max-length", "3")
    assert not (tmp_path / "newer").exists()
    assert "lower --learning-rate" in told("--learning-rate", "1e38")
    monkeypatch.setattr(PairLearner, "_difference", _out_of_memory)
    assert re.search("--max-length: two answers of [0-9]+ tokens .* must fit in memory", told())
    words[2] = written(tmp_path, *rows[:5])
    assert "must have ten prompts or more" in told()


def _out_of_memory(*_: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")
