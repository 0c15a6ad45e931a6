"""Completions have the form that is asked for, and the logprobs that the learner scores, on the real vLLM. Its engines
take the shared one with them, see conftest.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from examples.random_model import make_tiny_model
from rewards.built_in.json_schema import json_schema
from rollout.config import StructuredOutputs
from rollout.data.chat import Chat
from rollout.types import Completion, Sampling
from rollout.vllm.structured import Grammars
from rollout.vllm.trial import wrong_with_form as wrong_with
from tests.rollout.engine_case import PROMPT, EngineCase, run

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
DIGITS = re.compile("([0-9]{2}-)+!")


def is_of_schema(text: str) -> bool:
    return json_schema([text], schema=[SCHEMA]) == [1.0]


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "regex": ({"regex": DIGITS.pattern}, DIGITS.fullmatch),
    "json_schema": ({"json_schema": SCHEMA}, is_of_schema),
    "choice": ({"choice": ['say "a"', "say b\n", "\U0001f600"]}, ('say "a"', "say b\n", "\U0001f600").__contains__),
    "grammar": (
        {"grammar": 'root ::= "(" inner ")"\ninner ::= root | "x"'},
        lambda text: re.fullmatch(r"\(+x\)+", text) and text.count("(") == text.count(")"),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize(
    "kind", ["json_schema", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("grammar", "regex", "choice"))]
)
def test_completions_have_the_form_and_the_logprobs_of_the_whole_distribution(kind: str, model: Path) -> None:
    pytest.importorskip("vllm")
    given, fits = FORMS[kind]
    chat = Chat.load(str(model))
    form, stop_ids = StructuredOutputs(**given).form, chat.stops(())[0]
    own = EngineCase(model, truncates=True, form=form, stop_ids=stop_ids, max_num_seqs=10)  # fewer than are asked for
    run(own.push())

    async def several() -> list[Completion]:
        asked = [Sampling(n=8, max_tokens=150, seed=8 * i) for i in range(3)]
        asked += [Sampling(n=1, max_tokens=150, temperature=0), Sampling(n=4, max_tokens=3, seed=99)]
        return [
            one for group in await asyncio.gather(*(own.engine.generate(PROMPT, a) for a in asked)) for one in group
        ]

    texts = set()
    for completion in run(several()):
        ids = completion.token_ids.tolist()
        own.check(completion, PROMPT, own.newest)
        if completion.finish_reason == "stop":
            assert ids[-1] in stop_ids
            text = chat.decode(ids[:-1])
            assert fits(text), text
            texts.add(text)
    assert len(texts) > 1
    assert len(run(own.engine.probe(PROMPT))) == len(PROMPT) - 1  # which has no form
    run(own.engine.close())


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"regex": "([0-9"}, "regex"),
        ({"grammar": "root ::= nowhere"}, "grammar"),
        ({"json_schema": {"type": 3}}, "json"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_told_in_one_line(given: dict[str, Any], key: str, model: Path) -> None:
    with pytest.raises(WrongInput, match=rf"^rollout\.structured_outputs\.{key}[a-z_]*: cannot be compiled"):
        Grammars(str(model), 300).matcher(StructuredOutputs(**given).form, [1])
    config: dict[str, Any] = {"model": {"path": str(model), "revision": None}, "data": {}}
    (line,) = wrong_with(config | {"rollout": {"structured_outputs": given}})
    assert "\n" not in line
    assert wrong_with(config | {"rollout": {"structured_outputs": {"regex": "[a-z]+", "choice": None}}}) == []


def test_one_form_at_a_time() -> None:
    assert StructuredOutputs().form == ""
    with pytest.raises(ValueError, match="one form at a time, got regex and choice"):
        StructuredOutputs(regex="a", choice=("a", "b"))
    for given in ([True, "no"], ["yes"], "yes"):
        with pytest.raises(ValueError, match="must be a list of at least two texts, in quotes where YAML"):
            StructuredOutputs.model_validate({"choice": given})
