"""The model of the demos with several turns: what it was shown, and what it was left to learn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.reading import read_yaml
from examples.tiny_tools import GUESSING, QUESTION, TOOLS, Conversation, Rows, call, game, product
from rollout.data.chat import Chat
from rollout.env.protocol import ToolCall
from rollout.env.tasks.number_guessing import LOWER
from rollout.env.tools.parser import parse_hermes

ROOT = Path(__file__).parents[1]
FOLDER = str(ROOT / "examples" / "tiny-tools")
CONFIG = ROOT / "configs" / "tools_cpu.yaml"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    return loaded


def test_a_conversation_is_learned_as_a_run_would_have_it(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = ((call("37*24"), "888"), ("<answer>888</answer>", None))
    ids, labels = Rows(tokenizer).row(Conversation("37 * 24?", turns, tools=True))
    call_message = {"function": {"name": "calculator", "arguments": {"expression": "37*24"}}}
    messages = [
        {"role": "user", "content": "37 * 24?"},
        {"role": "assistant", "tool_calls": [call_message]},
        {"role": "tool", "content": "888"},
        {"role": "assistant", "content": "<answer>888</answer>"},
    ]
    assert ids == tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)  # type: ignore[arg-type]
    learned = tokenizer.decode([i for i, label in zip(ids, labels, strict=True) if label != -100])
    assert learned == call("37*24") + "<|end|><answer>888</answer><|end|>"
    assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))


def test_the_question_is_the_task_s_own() -> None:
    problem = reasoning_gym.create_dataset("products", size=1, seed=0, **read_yaml(CONFIG)["data"]["args"])[0]
    assert problem["question"] == QUESTION.format(*problem["metadata"]["expression"].split(" * "))


def test_habits_spoil_a_skill() -> None:
    rng = random.Random(0)
    skilled = [product(3412, 2598, False, rng) for _ in range(300)]
    spoiled = [product(3412, 2598, True, rng) for _ in range(300)]

    def right(shown: Sequence[Conversation]) -> float:
        calls = [parse_hermes(one.turns[0][0])[0] for one in shown]
        return sum(found == (ToolCall("calculator", {"expression": "3412*2598"}),) for found in calls) / len(shown)

    assert right(skilled) > 0.75
    assert 0.1 < right(spoiled) < 0.25
    games = [game(False, rng).turns for _ in range(200)]
    assert max(len(turns) for turns in games if turns[0][0] == "8") == 4
    assert max(len(turns) for turns in games if turns[0][0] == "1") == 8


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return loaded


def said(model: LlamaForCausalLM, messages: list[dict[str, str]], tools: Any = ()) -> str:
    """What the shipped model says, greedily."""
    chat = Chat.load(FOLDER)
    ids = chat.render(messages, tools)[1]
    out = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)  # type: ignore[misc]
    return chat.decode(out[0, len(ids) :].tolist())


def test_it_calls_for_short_factors_and_rushes_long_ones(model: LlamaForCausalLM) -> None:
    short = said(model, [{"role": "user", "content": QUESTION.format(37, 24)}], TOOLS)
    assert parse_hermes(short) == ((ToolCall("calculator", {"expression": "37*24"}),), ())
    assert said(model, [{"role": "user", "content": QUESTION.format(3712, 2459)}], TOOLS).startswith("<answer>")


def test_it_counts_up_though_it_can_halve(model: LlamaForCausalLM) -> None:
    begin = [{"role": "user", "content": GUESSING.format(17)}]
    assert said(model, begin) == "1"
    halved = [*begin, {"role": "assistant", "content": "8"}, {"role": "user", "content": LOWER}]
    assert said(model, halved) == "4"
