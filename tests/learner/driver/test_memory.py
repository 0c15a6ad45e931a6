"""memory: of a run -> budgets: what is asked for stays, what is auto is planned, what cannot be is refused.
memory.device: null on cards is what is free there; what is known of cards is said, and what cannot be is refused.
plan.json of a run: what was planned, and what it turned out to take.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.errors import WrongInput
from cluster.machine import Card
from cluster.memory import shape as units
from cluster.memory.generator import asleep
from cluster.memory.plan import BETWEEN, USABLE, kind_of
from cluster.memory.shape import SHAPES, Shape
from learner.algo.surrogates import LossConfig
from learner.config import RunConfig
from learner.driver import memory
from learner.driver.memory import (
    Budgets,
    Cards,
    PlanFile,
    cards_present,
    layouts,
    pace_of,
    settle,
    settled,
    size_for,
    wish_of,
    workload,
)
from learner.driver.roles import teacher_spec, worker_spec
from learner.model.adapter_config import HEAD
from rollout.config import DEFAULT_KV

GIB = 2**30
BERT = {"model_type": "bert"}


def run(name: str = "Llama-3.2-3B", **changes: Any) -> tuple[RunConfig, dict[str, Any]]:
    tree = {
        "model": {"path": name}, "data": {"path": "x"}, "rewards": [{"use": "format"}],
        "cluster": {"gpus": {"generator": 0.5, "learner": 0.5}},
        "rollout": {"kv_cache": "auto", "max_completion_length": 786},
    }  # fmt: skip
    return RunConfig.model_validate(tree | changes), SHAPES[name].to_config()


def test_two_slices_share_a_card_within_its_bytes() -> None:
    config, model = run(memory={"device": "18GiB", "layout": "slices"})
    budgets = settle(config, model)
    assert budgets.plan is not None
    assert budgets.plan.layout == "slices"
    assert budgets.learner_bytes is not None
    together = budgets.learner_bytes + units.CONTEXT + budgets.plan.generator_bytes
    assert together == pytest.approx(USABLE * 18 * GIB)
    assert budgets.plan.learner_bytes - units.CONTEXT <= budgets.learner_bytes
    assert budgets.learner.checkpointing != "auto"
    assert isinstance(budgets.learner.token_budget, int)
    assert budgets.kv_cache == budgets.plan.kv_bytes


def test_runs_that_share_their_processes_cost_adapters_optimizers_and_cache_and_no_base() -> None:
    config, model = run(
        memory={"device": "24GiB", "layout": "slices"}, learner={"checkpointing": "full", "token_budget": 4096},
        rollout={"kv_cache": "1GiB", "max_completion_length": 786},
    )  # fmt: skip
    of_four = config.model_copy(update={"memory": config.memory.shared_by(4)})
    alone, shared = settle(config, model), settle(of_four, model)
    assert alone.plan is not None
    assert shared.plan is not None
    assert (alone.kv_cache, shared.kv_cache, shared.plan.kv_bytes) == (GIB, GIB, 4 * GIB)
    for name, times in {"weights": 1, "gradients": 1, "adapters": 4, "optimizer": 4}.items():
        assert shared.plan.learner[name] == times * alone.plan.learner[name], name
    for name, times in {"weights": 1, "kv_cache": 4, "lora_slots": 4}.items():
        assert shared.plan.generator[name] == times * alone.plan.generator[name], name
    assert shared.plan.generator["workspace"] > alone.plan.generator["workspace"]  # logits of as many more sequences


def test_ranks_that_share_a_memory_divide_it_and_hold_exact_sums() -> None:
    (one, model), (several, _) = (
        run(memory={"device": "64GiB"}, cluster={"learners": count}) for count in (1, 3)
    )  # on a CPU
    alone, ranks = settle(one, model), settle(several, model)
    assert alone.plan is not None
    assert ranks.plan is not None
    assert ranks.plan.learner["gradients"] == 5 * alone.plan.learner["gradients"]  # 4 bytes a weight, and 16 of sums
    assert ranks.plan.learner["undo"] == 3 * alone.plan.learner["gradients"]  # 12 bytes a weight, to go back to
    assert ranks.plan.device_peak == 3 * ranks.plan.learner_bytes + ranks.plan.generator_bytes
    assert ranks.learner_bytes is not None
    context = ranks.plan.learner["context"]
    together = 3 * (ranks.learner_bytes + context) + ranks.plan.generator_bytes
    assert together == pytest.approx(USABLE * 64 * GIB)
    assert "each of 3 learner ranks" in ranks.note


def test_every_role_of_ppo_is_planned() -> None:
    config, model = run(learner={"algorithm": "ppo", "lora": {"rank": 32}}, memory={"device": "40GiB"})
    scored = [{"use": "format"}, {"use": "adapter:a", "name": "a"}, {"use": "adapter:b", "name": "b"}]
    both, _ = run(learner={"lora": {"rank": 32}}, rewards=scored, memory={"device": "40GiB"})
    alone, _ = run(learner={"lora": {"rank": 32}}, memory={"device": "40GiB"})
    ppo, rewarded, grpo = (settle(one, model).plan for one in (config, both, alone))
    assert ppo is not None
    assert rewarded is not None
    assert grpo is not None
    shape = SHAPES["Llama-3.2-3B"]
    n = shape.lora_params(32)
    assert ppo.learner["optimizer"] == 2 * grpo.learner["optimizer"] + 8 * shape.hidden
    assert ppo.learner["adapters"] == 2 * grpo.learner["adapters"] + 4 * shape.hidden
    assert rewarded.learner["adapters"] == grpo.learner["adapters"] + 2 * 2 * n


def test_adapters_are_planned_at_their_own_rank(tmp_path: Path) -> None:
    settings = {"task_type": "SEQ_CLS", "peft_type": "LORA", "r": 128, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file({HEAD: np.zeros((1, 2), np.float32)}, tmp_path / "adapter_model.safetensors")
    fixed = {"checkpointing": "none", "token_budget": 4096}
    started = {"algorithm": "ppo", "value": {"start": str(tmp_path)}}
    scored = [{"use": "format"}, {"use": f"adapter:{tmp_path}", "name": "a"}]
    cases: list[dict[str, Any]] = [{}, {"rewards": scored}, {"learner": started}, {"learner": {"lora": {"rank": 128}}}]
    for case in cases:
        case["learner"] = fixed | case.get("learner", {})
    plans = [settle(*run(memory={"device": "80GiB"}, **case)).plan for case in cases]
    grpo, rewarded, ppo, wide = (plan.learner for plan in plans if plan is not None)
    shape = SHAPES["Llama-3.2-3B"]
    assert rewarded["adapters"] == grpo["adapters"] + 2 * shape.lora_params(128)
    assert ppo["optimizer"] == grpo["optimizer"] + wide["optimizer"] + 8 * shape.hidden
    assert ppo["activations"] == wide["activations"] > grpo["activations"]


def test_one_base_for_both_roles_is_counted_with_the_generator() -> None:
    config, model = run("Llama-3.1-8B", memory={"device": "24GiB", "layout": "shared"})
    budgets = settle(config, model)
    assert budgets.plan is not None
    assert (budgets.plan.layout, budgets.plan.learner["weights"]) == ("slices", 0)
    assert budgets.learner_bytes is not None
    together = budgets.learner_bytes + units.CONTEXT + budgets.plan.generator_bytes
    assert together == pytest.approx(USABLE * 24 * GIB)
    spec = worker_spec(config, 0, budgets).engine
    assert spec.shares_base
    assert spec.room == 2 * SHAPES["Llama-3.1-8B"].params + budgets.kv_cache
    own, _ = run("Llama-3.1-8B", memory={"device": "24GiB"})
    with pytest.raises(WrongInput, match="Change one of: .*memory.layout=shared"):
        settle(own, model)
    config, model = run()
    assert worker_spec(config, 0, settle(config, model)).engine.room == 0


def test_a_card_for_each_role() -> None:
    config, model = run(memory={"device": "16GiB"}, cluster={"gpus": {"generator": 1, "learner": 1}})
    budgets = settle(config, model)
    assert budgets.plan is not None
    assert budgets.plan.layout == "separate"
    assert budgets.learner_bytes == round(USABLE * 16 * GIB) - units.CONTEXT
    assert budgets.kv_cache > GIB


def taught(tmp_path: Path, gpus: dict[str, float], name: str = "Llama-3.1-8B", **changes: Any) -> Budgets:
    """Of a run of Llama-3.2-3B, whose teacher is `name`."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name].to_config()))
    model = {"path": "Llama-3.2-3B", "teacher": str(tmp_path)}
    return settle(*run(model=model, cluster={"gpus": gpus}, learner={"loss": {"beta": 1}}, **changes))


def test_a_teacher_is_planned_on_its_card_or_beside_the_others(tmp_path: Path) -> None:
    shape, slices = SHAPES["Llama-3.1-8B"], {"generator": 0.4, "learner": 0.4}
    alone = taught(tmp_path, {"generator": 1, "learner": 1, "teacher": 1}, memory={"device": "24GiB"})
    without = settle(*run(cluster={"gpus": {"generator": 1, "learner": 1}}, memory={"device": "24GiB"}))
    assert alone.teacher is not None
    assert alone.teacher.parts is not None
    assert alone.teacher.parts["weights"] == 2 * shape.params == alone.teacher.room - alone.teacher.kv_bytes
    assert (alone.teacher.step, alone.teacher.longest) == (2**30 // (4 * shape.vocab), 256 + 786 + 1)
    assert alone.learner_bytes == without.learner_bytes  # it takes nothing of the others' cards
    assert f"model.teacher: {alone.teacher.takes / GIB:.1f} GiB planned on a card (weights 15.0 GiB" in alone.note
    # 3 in float32 a token and entry: what vLLM holds of a step
    assert alone.teacher.parts["logits"] == 12 * shape.vocab * alone.teacher.step
    together = taught(tmp_path, slices | {"teacher": 0.2}, memory={"device": "80GiB", "layout": "slices"})
    assert together.plan is not None
    assert together.teacher is not None
    assert together.plan.device_bytes == 80 * GIB - together.teacher.takes
    for gpus in ({"generator": 1.0, "learner": 1.0, "teacher": 1.0}, slices | {"teacher": 0.2}):
        with pytest.raises(WrongInput, match=r"^model.teacher: .* needs .* and 16.0 GiB are there; .*teacher=2"):
            taught(tmp_path, gpus, memory={"device": "16GiB"})
    with pytest.raises(WrongInput, match="^memory.device: .* needs .* Change one of"):  # it fits, but not beside them
        taught(tmp_path, slices | {"teacher": 0.2}, memory={"device": "21GiB"})
    two = taught(tmp_path, {"generator": 1, "learner": 1, "teacher": 2}, memory={"device": "16GiB"})
    assert two.teacher is not None
    assert two.teacher.kv_bytes == alone.teacher.kv_bytes // 2
    assert two.teacher.room < 16 * GIB / 2


def test_a_teacher_of_a_kind_that_is_not_known_and_one_with_more_rows(tmp_path: Path) -> None:
    gpus = {"generator": 1, "learner": 1, "teacher": 1}
    (tmp_path / "config.json").write_text(json.dumps(BERT | {"vocab_size": 128_300}))
    model = {"path": "Llama-3.2-3B", "teacher": str(tmp_path)}
    config, policy = run(model=model, cluster={"gpus": gpus}, learner={"loss": {"beta": 1}}, memory={"device": "24GiB"})
    found = settle(config, policy)
    assert found.teacher is not None
    assert (found.teacher.parts, found.teacher.kv_bytes, found.teacher.room) == (None, DEFAULT_KV, 0)
    assert (found.teacher.vocabulary, found.teacher.others) == (128_256, 8)
    assert "model.teacher: no plan for its architecture" in found.note
    spec = teacher_spec(config, found.teacher)
    assert (spec.engine.prompt_logprobs, spec.top, spec.vocabulary) == (0, 0, 128_256)  # nobody asks for likeliest ones
    several = config.model_copy(
        update={"learner": config.learner.model_copy(update={"loss": LossConfig(teacher_top=4)})}
    )
    spec = teacher_spec(several, found.teacher)
    assert (spec.engine.prompt_logprobs, spec.top, spec.engine.max_lora_rank) == (12, 4, 0)
    assert spec.engine.step_tokens == 2**30 // (4 * 128_300)


def test_a_generator_of_two_cards_holds_half_of_its_model_on_each() -> None:
    cards: dict[str, Any] = {"memory": {"device": "16GiB"}, "rollout": {"kv_cache": "2GiB"}}
    (config, model), (one, _) = (run(**cards, cluster={"gpus": {"generator": n, "learner": 1}}) for n in (2, 1))
    budgets, whole = settle(config, model).plan, settle(one, model).plan
    assert budgets is not None
    assert whole is not None
    for part in ("weights", "kv_cache"):
        assert budgets.generator[part] == whole.generator[part] // 2
    assert budgets.sequences == whole.sequences
    engine = worker_spec(config, 0, settle(config, model)).engine
    assert (engine.shards, engine.kv_cache_bytes) == (2, GIB)


def test_where_slices_do_not_fit_the_roles_take_turns() -> None:
    fixed: dict[str, Any] = {
        "rollout": {"kv_cache": "2GiB", "max_completion_length": 786},
        "learner": {"checkpointing": "none", "token_budget": 4096},
    }
    config, shape = run(memory={"device": "24GiB"}, **fixed)
    budgets = settle(config, shape)
    found = budgets.plan
    assert found is not None
    assert budgets.arrangement.in_turns
    # While it trains the learner may have all that a sleeping engine leaves, and between two steps the engine fits.
    sleeping = units.total(asleep(found.generator))
    assert budgets.learner_bytes == round(USABLE * 24 * GIB) - sleeping - units.CONTEXT
    assert found.learner_bytes + sleeping <= USABLE * 24 * GIB
    between = sum(found.learner[name] for name in BETWEEN)
    assert between + found.generator_bytes <= USABLE * 24 * GIB < found.learner_bytes + found.generator_bytes
    with pytest.raises(WrongInput, match="needs"):
        settle(run(memory={"device": "24GiB"}, max_staleness=1, **fixed)[0], shape)

    asked = run(memory={"layout": "alternating"})
    assert settle(*asked).arrangement.in_turns  # without limits, too
    assert settle(asked[0], BERT).arrangement.in_turns
    assert not settle(*run()).arrangement.in_turns
    for prepared in (settle(*asked), settle(*run())):
        assert worker_spec(config, 0, prepared).engine.sleeps == prepared.arrangement.in_turns


def test_generators_on_a_card_are_counted_as_they_are_placed() -> None:
    """The learner's card has room for one; the two others of three share the next."""
    for workers, most in ((2, 1), (3, 2)):
        config, model = run(memory={"device": "80GiB"}, rollout={"workers": workers})
        found = settle(config, model).plan
        assert found is not None
        assert found.generators == most


@pytest.mark.parametrize(("dtype", "width"), [("auto", 112), ("fp8", 56)])
def test_a_cache_that_holds_no_sequence_is_refused(dtype: str, width: int) -> None:
    """1042 tokens are 66 blocks of 16, and vLLM keeps one: 67 x 16 tokens x 112 KiB in bfloat16."""
    needed = 67 * 16 * width * 2**10
    for size, fits in ((needed, True), (needed - 1, False)):
        rollout = {"kv_cache": size, "kv_cache_dtype": dtype, "max_completion_length": 786}
        config, model = run(rollout=rollout)
        if fits:
            assert settle(config, model).plan.sequences == 1  # type: ignore[union-attr]
        else:
            with pytest.raises(WrongInput, match=r"rollout.kv_cache: must hold one sequence of 1042 tokens"):
                settle(config, model)


def test_an_fp8_cache_on_a_cpu_wants_heads_that_its_kernel_takes() -> None:
    config, _ = run(cluster={}, rollout={"kv_cache": "1GiB", "kv_cache_dtype": "fp8"})
    narrow, wide = (Shape("x", "llama", 160, 288, 3, 2, 2, width, 310, tied=True).to_config() for width in (80, 96))
    with pytest.raises(WrongInput, match=r"rollout.kv_cache_dtype: fp8 on a CPU .* got 80"):
        settle(config, narrow)
    settle(config, wide)


def test_on_a_cpu_a_role_is_a_process() -> None:
    """As measured with configs/local_cpu.yaml: 863 MB at full length, 1130 after 30 steps."""
    config, _ = run(cluster={}, memory={"device": "3GiB"}, model={"path": "x", "dtype": "float32"})
    shape = Shape("tiny-arithmetic", "llama", 96, 288, 3, 3, 3, 32, 310, tied=True)
    rollout = config.rollout.model_copy(
        update={"max_prompt_length": 64, "max_completion_length": 64, "kv_cache": 64 * 2**20}
    )
    found = settle(config.model_copy(update={"rollout": rollout}), shape.to_config()).plan
    assert found is not None
    assert found.learner_bytes == pytest.approx(863e6, rel=0.1)
    assert found.generator_bytes == pytest.approx(1130e6, rel=0.1)
    assert found.token_budget == 8 * (64 + 8 * 63)  # a step has no more
    assert "graphs" not in found.generator


def test_merged_weights_are_counted_where_they_lie() -> None:
    tiny = Shape("tiny", "llama", 8, 16, 2, 2, 1, 4, 100, tied=True).to_config()  # widths: q 8, k and v 4
    merged = {"push": "merged", "lora": {"targets": ["q_proj", "v_proj"]}}
    attention, ffn, norms = 8 * 8 + 2 * 8 * 4 + 8 * 8, 3 * 8 * 16, 2 * 8
    whole = 2 * (attention + ffn + norms) + 8 + 100 * 8
    # Of several ranks it goes through the object store, which has it twice beside the rank's own.
    for learner, ranks, sent, held in ((merged, 1, 2 * attention, 2), ({"mode": "full"}, 1, whole, 2),
                                       (merged, 2, 2 * attention, 3)):  # fmt: skip
        config, _ = run(cluster={"learners": ranks}, model={"path": "x", "dtype": "float32"}, learner=learner)
        found = settle(config, tiny).plan
        assert found is not None
        assert (found.learner["push"], found.generator["push"]) == (held * 4 * sent, 2 * 4 * sent)
    config, model = run(memory={"device": "24GiB"}, learner=merged)
    budgets = settle(config, model)
    assert budgets.plan is not None
    assert budgets.plan.generator["lora_slots"] == 0
    assert "push" not in budgets.plan.generator | budgets.plan.learner  # of the host's memory
    assert worker_spec(config, 0, budgets).engine.max_lora_rank == 0


def test_targets_count_by_the_last_part_of_their_name() -> None:
    for targets, known in (
        (["q_proj", "mlp.down_proj"], ("q_proj", "down_proj")),
        (["model.layers.3.self_attn.q_proj", "v_proj"], ("q_proj", "v_proj")),
    ):
        config, _ = run(learner={"lora": {"targets": targets}})
        assert wish_of(config, layouts(config)).targets == known


def test_what_is_given_stays() -> None:
    learner = {"checkpointing": "full", "token_budget": 2048}
    config, model = run(memory={"device": "24GiB"}, learner=learner, rollout={"kv_cache": "1GiB"})
    budgets = settle(config, model)
    assert (budgets.learner.checkpointing, budgets.learner.token_budget) == ("full", 2048)
    assert budgets.kv_cache == GIB


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(WrongInput, match="needs .*model.base=nf4"):
        settle(*run(memory={"device": "12GiB"}))


def test_without_a_device_nothing_is_limited() -> None:
    config, model = run()
    budgets = settle(config, model)
    assert (budgets.learner_bytes, budgets.kv_cache) == (None, DEFAULT_KV)
    assert budgets.learner == config.learner
    assert "no limit" in budgets.note
    assert settle(config, BERT).plan is None
    with pytest.raises(WrongInput, match="bert"):
        settle(run(memory={"device": "16GiB"})[0], BERT)


# memory.device: null on cards is what is free there; what is known of cards is said, and what cannot be is refused.

HALVES = {"gpus": {"generator": 0.5, "learner": 0.5}}


def config_of(**changes: Any) -> RunConfig:
    tree = {"model": {"path": "Llama-3.2-1B"}, "data": {"path": "x"}, "rewards": [{"use": "format"}], "cluster": HALVES}
    return RunConfig.model_validate(tree | changes)


def test_a_teachers_longer_prompts_are_planned_for() -> None:
    plain, distills = {"path": "x"}, {"algorithm": "distill", "loss": {"beta": 1}}
    hinted = config_of(data=plain | {"teacher": {"prompt": "y", "max_prompt_length": 900}}, learner=distills)
    assert workload(hinted, 8) == replace(workload(config_of(data=plain), 8), taught=900)
    same = config_of(data=plain | {"teacher": {"prompt": "y", "max_prompt_length": 256}}, learner=distills)
    assert pace_of(hinted).further > pace_of(same).further == 1.0  # a longer pass


def test_a_teacher_in_a_process_of_its_own_is_no_reference_of_the_learner() -> None:
    loss = {"beta": 1, "teacher_top": 4}
    larger = config_of(model={"path": "Llama-3.2-1B", "teacher": "x"}, learner={"mode": "full", "loss": loss})
    own = config_of(learner={"mode": "full", "loss": {"beta": 1}})
    wished = [wish_of(config, layouts(config)) for config in (larger, own)]
    assert [(wish.reference, wish.top) for wish in wished] == [("none", 4), ("auto", 0)]
    assert [pace_of(config).further for config in (larger, own)] == [0.0, 1.0]


def test_the_card_with_least_room_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [Card("H100", "a", 80 * GIB, 79 * GIB, (9, 0)), Card("H100", "b", 80 * GIB, 75 * GIB, (9, 0))]
    monkeypatch.setattr(memory, "visible_cards", lambda: here)
    both = config_of(cluster={"gpus": {"generator": 1, "learner": 1}})
    found = cards_present(both)
    assert found is not None
    assert (found.count, found.size, found.assumed) == (2, 75 * GIB, False)
    taken = "of whose 80.0 GiB only 75.0 GiB are free: other processes have the rest"
    roles = "; cluster.gpus: generator 1, learner 1 (0 and 0: CPUs)"
    assert found.note == f"cards: 2 x H100, {taken}{roles}"
    assert size_for(config_of(), found) == 75 * GIB
    of_one = cards_present(config_of())
    assert of_one is not None
    assert of_one.size == 79 * GIB  # the run gets the first, so the second may be as full as it likes
    assert str(of_one.note).endswith("learner 0.5 (0 and 0: CPUs), 1 of 2 cards (more: rollout.workers)")
    monkeypatch.setattr(memory, "visible_cards", lambda: here[::-1])
    assert f"{taken} (CUDA_VISIBLE_DEVICES can name a freer one)" in str(
        getattr(cards_present(config_of()), "note", "")
    )
    monkeypatch.setattr(memory, "visible_cards", lambda: here[:1])
    assert cards_present(both) == Cards(1, 79 * GIB, False, f"cards: 1 x H100{roles}", kind_of("h100", 80 * GIB))
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
    assert (small.plan.sequences, small.sequences) == (39, 64)  # the logits of 256 would leave room for fewer
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


# plan.json of a run: what was planned, and what it turned out to take.


def settled_run() -> Budgets:
    """Of a 3B in two slices of a card."""
    tree = {
        "model": {"path": "m"}, "data": {"path": "x"}, "rewards": [{"use": "format"}],
        "cluster": {"gpus": {"generator": 0.5, "learner": 0.5}},
        "rollout": {"kv_cache": "auto", "max_completion_length": 786}, "memory": {"device": "16GiB"},
    }  # fmt: skip
    return settle(RunConfig.model_validate(tree), SHAPES["Llama-3.2-3B"].to_config())


def test_the_file_holds_plan_and_measure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    budgets = settled_run()
    assert budgets.plan is not None
    file = PlanFile(tmp_path, budgets)
    file.measure({"memory/learner_peak": 5e9, "memory/generator_peak": 1e9})
    file.measure({"memory/learner_peak": 4e9, "memory/generator_peak": 0.5e9})
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["learner"]["measured"] == 5e9
    assert content["generator"]["measured"] == 1e9
    assert content["learner"]["planned"] == budgets.plan.learner_bytes == sum(content["learner"]["parts"].values())
    tensors = budgets.plan.generator_room - 1_500_000_000  # 0.8 GB of context, 0.7 that the allocator keeps
    with caplog.at_level(logging.WARNING):
        file.measure({"memory/generator_peak": 0.89 * tensors})
        assert caplog.records == []
        for share in (0.92, 0.94):
            file.measure({"memory/generator_peak": share * tensors})
    assert len(caplog.records) == 1


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*plan\.partial'"):
        PlanFile(tmp_path, settled_run())
