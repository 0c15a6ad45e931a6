"""memory.device: null on cards is what is free there; what is known of cards is said, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import WrongInput
from cluster.machine import Card
from cluster.memory.shape import SHAPES
from learner.config import RunConfig
from learner.driver import memory
from learner.driver.memory import Cards, cards_present, settle, settled, size_for

GIB = 2**30
HALVES = {"gpus": {"generator": 0.5, "learner": 0.5}}


def config_of(**changes: Any) -> RunConfig:
    tree = {"model": {"path": "Llama-3.2-1B"}, "data": {"path": "x"}, "rewards": [{"use": "format"}], "cluster": HALVES}
    return RunConfig.model_validate(tree | changes)


def test_the_card_with_least_room_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [Card("H100", "a", 80 * GIB, 79 * GIB, (9, 0)), Card("H100", "b", 80 * GIB, 75 * GIB, (9, 0))]
    monkeypatch.setattr(memory, "visible_cards", lambda: here)
    both = config_of(cluster={"gpus": {"generator": 1, "learner": 1}})
    found = cards_present(both)
    assert found is not None
    assert (found.count, found.size, found.assumed) == (2, 75 * GIB, False)
    assert found.note == "cards: 2 x H100, of whose 80.0 GiB only 75.0 GiB are free: other processes have the rest"
    assert size_for(config_of(), found) == 75 * GIB
    of_one = cards_present(config_of())
    assert of_one is not None
    assert of_one.size == 79 * GIB  # the run gets the first, so the second may be as full as it likes
    monkeypatch.setattr(memory, "visible_cards", lambda: here[:1])
    assert cards_present(both) == Cards(1, 79 * GIB, False, "cards: 1 x H100")
    monkeypatch.setattr(memory, "visible_cards", list)
    assert cards_present(both) is None


def test_defaults_on_a_card_are_the_plan_s() -> None:
    """Of a 1B on 79 GiB: no recomputation, and room for every completion of a step, where a run without a plan has
    256 MiB of KV cache and computes every layer twice."""
    config = config_of(rollout={"num_generations": 16, "max_completion_length": 786})
    budgets = settle(config, SHAPES["Llama-3.2-1B"].to_config(), 79 * GIB)
    assert budgets.plan is not None
    assert (budgets.arrangement.name, budgets.learner.checkpointing, budgets.learner.token_budget) == (
        "slices",
        "none",
        12816,
    )  # a group
    assert budgets.plan.sequences == budgets.sequences == 128 == 16 * config.learner.groups_per_step
    assert budgets.kv_cache > 4 * GIB
    assert budgets.learner_bytes is not None
    assert settled(config, budgets).rollout.max_num_seqs == 128
    assert settle(config.model_copy(update={"cluster": config_of(cluster={}).cluster}),
                  SHAPES["Llama-3.2-1B"].to_config(), None).plan.device_bytes > 2**50  # type: ignore[union-attr]  # fmt: skip


def test_sequences_follow_the_step_and_the_room() -> None:
    model = SHAPES["Llama-3.1-8B"].to_config()
    many = config_of(model={"path": "Llama-3.1-8B"}, learner={"groups_per_step": 32})
    assert settle(many, model, 139 * GIB).sequences == 256  # 32 groups of 8
    many = config_of(
        model={"path": "Llama-3.1-8B"}, learner={"groups_per_step": 32}, rollout={"max_completion_length": 256}
    )
    small = settle(many, SHAPES["Llama-3.2-1B"].to_config(), int(8.25 * GIB))
    assert small.plan is not None
    assert (small.plan.sequences, small.sequences) == (33, 64)  # the logits of 256 would leave room for fewer
    env = {"use": "number_guessing", "step_timeout_s": 40}  # 64 are under way, of which 2 * 64 or 2 * 8 play at once
    deadline = [settled(config_of(env=env), replace(small, sequences=n)).group_deadline_s for n in (64, 8)]
    assert deadline == [900, 4 * 900]
    fixed = config_of(rollout={"max_num_seqs": 11})
    assert settle(fixed, model, 79 * GIB).sequences == 11


def test_a_run_that_caches_fewer_sequences_than_it_asks_for_says_so() -> None:
    asked = config_of(rollout={"kv_cache": "256MiB", "max_completion_length": 786})
    few = settle(asked, SHAPES["Llama-3.2-1B"].to_config(), 79 * GIB)
    assert few.plan is not None
    assert few.plan.sequences == 7  # of 1042 tokens, 32 KiB each
    assert few.note.endswith("7 sequences of full length); 64 are generated at once: those that find no room wait, "
                             "unless they end early")  # fmt: skip
    enough = settle(config_of(rollout={"max_completion_length": 786}), SHAPES["Llama-3.2-1B"].to_config(), 79 * GIB)
    assert enough.note.endswith("sequences of full length)")


def test_a_policy_s_bytes_take_time_and_room() -> None:
    """8.03e9 weights of two bytes; an adapter of rank 16 on all linear layers of the 8B has 41.9 million weights."""
    model = SHAPES["Llama-3.1-8B"].to_config()
    whole = config_of(learner={"mode": "full", "optimizer": {"kind": "adamw_8bit"}}, cluster={"gpus": {"generator": 1,
                      "learner": 1}})  # fmt: skip
    budgets = settle(whole, model, 80 * GIB)
    assert budgets.policy_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert settled(whole, budgets).cluster.deadlines.push == pytest.approx(120 + 16.06e9 / 50e6, rel=1e-3)
    assert settle(config_of(), model, 79 * GIB).policy_bytes == 2 * 41_943_040


@pytest.mark.parametrize(
    ("changes", "known", "words"),
    [
        ({"memory": {"device": "81GiB"}}, Cards(1, 79 * GIB, False), "at most the 79.0 GiB that are free on a card"),
        ({"memory": {"device": "81GiB"}}, Cards(1, 80 * GIB), "at most the 80.0 GiB of the assumed cards"),
        ({"cluster": HALVES | {"address": "auto"}}, None, "no card is visible where the run was started"),
        ({"cluster": {}}, Cards(1, 80 * GIB), "this configuration runs on CPUs alone"),
    ],
)
def test_what_cannot_be_is_one_sentence(changes: dict[str, Any], known: Cards | None, words: str) -> None:
    with pytest.raises(WrongInput, match=words):
        size_for(config_of(**changes), known)


def test_a_job_s_cards_are_the_cluster_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(WrongInput, match="memory.device: no card is visible where the run was started"):
        size_for(config_of(), None)


def test_a_cluster_elsewhere_wants_its_size_written_down() -> None:
    there = config_of(cluster=HALVES | {"address": "auto"}, memory={"device": "24GiB"})
    assert size_for(there, None) is None
    assert size_for(config_of(cluster={}), Cards(1, 79 * GIB, False)) is None  # a run on CPUs beside a card
