"""A sweep's runs: which they are, why they cannot share processes, whose turn it is, and which are dropped."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.errors import WrongInput
from learner.config.settings import NAME
from learner.tools.sweep.drive import Halving, LearnerTurn, Member, recorded
from learner.tools.sweep.report import over_seeds, read_members, settings_of, write_report
from learner.tools.sweep.runs import _split, check_folder, check_keep, largest, sweep_of

TREE: dict[str, Any] = {
    "name": "try-{seed}", "output_dir": "out", "model": {"path": "somewhere"}, "data": {"path": "rg:chain_sum"},
    "rewards": ["number"], "cluster": {"gpus": {"generator": 0, "learner": 0}},
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(TREE))
    return str(path)


def test_keys_with_several_values_make_a_grid(file: str) -> None:
    sweep = sweep_of(file, ["seed=0,1", "learner.learning_rate=1e-4, 3e-4", "steps=7"])
    assert [one.name for one in sweep.runs] == [
        f"seed-{seed}_learning_rate-{rate}" for seed in (0, 1) for rate in ("1e-4", "3e-4")
    ]
    assert [(one.seed, one.learner.learning_rate, one.steps) for one in sweep.configs] == [
        (0, 1e-4, 7), (0, 3e-4, 7), (1, 1e-4, 7), (1, 3e-4, 7),
    ]  # fmt: skip
    assert {one.run_dir.parent for one in sweep.configs} == {Path("out/try").absolute()}


def test_zip_pairs_them(file: str) -> None:
    words = ["learner.lora.rank=8,16", "learner.groups_per_step=2,4", "rewards.0.weight=2"]
    sweep = sweep_of(file, words, zipped=True)
    assert [(one.learner.lora.rank, one.learner.groups_per_step) for one in sweep.configs] == [(8, 2), (16, 4)]
    with pytest.raises(WrongInput, match=r"--zip: .* \(got learner.lora.rank 2, seed 3\)"):
        sweep_of(file, ["learner.lora.rank=8,16", "seed=0,1,2"], zipped=True)


def test_lists_and_texts_with_commas_are_one_value(file: str) -> None:
    rewards = "rewards=[number],[{use: number, weight: 2}, {use: format}]"
    sweep = sweep_of(file, [rewards, "data.system='Be brief, please','Think, then answer'"])
    assert [len(one.rewards) for one in sweep.configs] == [1, 1, 2, 2]
    assert [one.data.system for one in sweep.configs[:2]] == ["Be brief, please", "Think, then answer"]


@given(st.lists(st.text(alphabet="ab1.e-_", min_size=1, max_size=6), min_size=1, max_size=5))
def test_values_are_those_between_commas(values: list[str]) -> None:
    assert _split("key", ",".join(values)) == values
    assert _split("key", "[" + ",".join(values) + "]") == ["[" + ",".join(values) + "]"]


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4))
def test_texts_as_json_are_values_whatever_is_in_them(values: list[str]) -> None:
    words = [json.dumps(value, ensure_ascii=False) for value in values]
    assert _split("key", ",".join(words)) == words


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Don't hurry,Be brief", ["Don't hurry", "Be brief"]),
        ("a),b", ["a)", "b"]),
        ("[{use: 'a,b'}],[c]", ["[{use: 'a,b'}]", "[c]"]),
        (r'"say \"yes, sir\"",no', [r'"say \"yes, sir\""', "no"]),
    ],
)
def test_quotes_and_brackets(text: str, values: list[str]) -> None:
    assert _split("key", text) == values


@pytest.mark.parametrize("text", ["'a,b", "[a,b", r'"a\",b'])
def test_what_is_not_closed_is_refused(text: str) -> None:
    with pytest.raises(WrongInput, match="key: a .* is not closed"):
        _split("key", text)


@given(st.lists(st.text(min_size=1, max_size=200), min_size=2, max_size=4, unique=True))
@example(["a+", "a", "a-1"])
@example(["x" * 150, "x" * 151])
def test_each_run_has_a_name_of_its_own_that_a_folder_can_have(values: list[str]) -> None:
    from learner.tools.sweep.runs import _names

    names = _names([{"data.system": value} for value in values])
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(NAME, name) and len(name) < 200 for name in names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1"], "sweep: needs a key with several values"),
        (["seed=0,1", "seed=2,3"], "seed: is given twice"),
        (["seed=1,2,1"], "seed: must have different values, got 1 twice"),
        (["learner.optimizer.kind=adamw,adamw_8bit"], "learner.optimizer.kind: must be the same in all runs"),
        (["seed=0,1", "learner.push=merged"], "a sweep trains adapters on one base"),
        (["seed=0,1", "learner.mode=full", "model.dtype=float32"], "a sweep trains adapters on one base"),
        (["seed=0,1", "learner.algorithm=ppo"], "a sweep trains adapters on one base"),
        (["seed=0,1", "rollout.in_flight=continue", "max_staleness=1"], "set rollout.in_flight=finish"),
        (["seed=0,1", "cluster.learners=2"], "cluster.learners=1"),
        (["seed=0,1", "cluster.rewards.processes=1"], "leave cluster.rewards out"),
        (["seed=0,1", "model.teacher=t", "learner.loss.beta=1"], "a sweep has no process of a teacher (model.teacher)"),
        (["seed=0,1", "trackers=[prometheus]"], "trackers: wandb, trackio and prometheus hold one run in a process"),
        (["model.dtype=float32,bfloat16"], "model.dtype: must be the same in all runs"),
        (["model.path=a,b", "rollout.workers=1,2"], "rollout.workers: must be the same in all runs"),
        (["name=a,b"], "name: must be the same in all runs"),
        (["rollout.top_p=1.0,0.9"], "top_p, top_k, min_p: must be given in all runs of a sweep or in none"),
        (["seed=0,x"], "seed"),
        (["seed=" + ",".join(map(str, range(65)))], "at most 64 runs, got 65"),
        (["seed=0,1", "resume=/somewhere"], "resume: must be auto or none"),
    ],
)
def test_what_cannot_share_processes_is_refused(file: str, words: list[str], said: str) -> None:
    with pytest.raises(WrongInput, match=re.escape(said)):
        sweep_of(file, words)


async def test_a_turn_of_the_learner_is_whole_and_first_come_first_served() -> None:
    turn, order = LearnerTurn(), list[str]()

    async def step(run: int) -> None:
        async with turn.of(run):
            for part in ("train", "export"):
                async with turn.of(run):
                    await asyncio.sleep(0.01)
                    order.append(f"{run} {part}")

    async def save(run: int) -> None:
        async with turn.of(run):
            order.append(f"{run} save")

    first = asyncio.create_task(step(0))
    await asyncio.sleep(0)
    others = [asyncio.create_task(one) for one in (step(1), save(2), step(4))]
    lost = asyncio.create_task(step(3))
    await asyncio.sleep(0)
    lost.cancel()
    await asyncio.gather(first, *others)
    assert order == ["0 train", "0 export", "1 train", "1 export", "2 save", "4 train", "4 export"]


def members_of(scores: Sequence[Sequence[tuple[int, float]]], steps: int = 16) -> list[Member]:
    """Members with evaluations [(step, accuracy)], without processes."""

    def one(number: int) -> Member:
        progress = SimpleNamespace(evaluated=None, note=lambda text: None)
        prepared: Any = SimpleNamespace(total_steps=steps)
        member = Member(number, cast(Any, None), prepared, cast(Any, progress), phases=cast(Any, None))
        member.state = "running"
        return member

    members = [one(number) for number in range(len(scores))]
    for member, evaluations in zip(members, scores, strict=True):
        member.before = [*evaluations]
    return members


def dropped(members: Sequence[Member]) -> list[int]:
    assert [member.dropped for member in members] == [member.stop.is_set() for member in members]
    return [member.number for member in members if member.dropped]


def second_rung(halving: Halving, members: Sequence[Member]) -> None:
    """Of runs 1 and 2, which are left, the better goes on."""
    members[1].before.append((8, 0.4))
    members[2].before.append((8, 0.6))
    halving.decide()
    assert dropped(members) == [0, 1, 3]


def test_the_better_half_goes_on_at_each_rung_once_all_have_reached_it() -> None:
    members = members_of([[(0, 0.1), (4, 0.2)], [(4, 0.5)], [(4, 0.3)], [(0, 0.9)]])
    halving = Halving(members, keep=1)
    halving.decide()
    assert dropped(members) == [], "one run is not there yet"
    members[3].before.append((5, 0.2))
    halving.decide()
    assert dropped(members) == [0, 3]
    second_rung(halving, members)


def test_rungs_that_were_decided_before_a_new_start_drop_nobody_again() -> None:
    members = members_of([[(4, 0.2)], [(4, 0.5)], [(4, 0.3)], [(4, 0.2)]])
    for member in (members[0], members[3]):  # as _remember does
        member.dropped, member.state = True, "dropped"
        member.stop.set()
    halving = Halving(members, keep=1)
    halving.decide()
    assert dropped(members) == [0, 3]
    second_rung(halving, members)


def test_runs_that_have_ended_hold_up_nobody() -> None:
    members = members_of([[(2, 0.9)], [(8, 0.2)], [(8, 0.3)], []])
    members[0].state = "done"  # by early_stop, before the rung
    halving = Halving(members, keep=2)
    halving.decide()
    assert dropped(members) == []
    members[3].state = "failed"
    halving.decide()
    assert dropped(members) == [1]


def prepared_of(count: int, steps: int, every: int) -> Any:
    config = SimpleNamespace(data=SimpleNamespace(eval=SimpleNamespace(every=every)))
    return [SimpleNamespace(total_steps=steps, config=config) for _ in range(count)]


def test_what_keep_needs_is_said() -> None:
    check_keep(prepared_of(8, 16, 2), 1)
    with pytest.raises(WrongInput, match="--keep: must be less than the 2 runs"):
        check_keep(prepared_of(2, 16, 2), 2)
    for steps, every in ((16, 0), (16, 3), (6, 1)):
        with pytest.raises(WrongInput, match="--keep: compares 8 runs of .* data.eval.every must be"):
            check_keep(prepared_of(8, steps, every), 1)
    with pytest.raises(WrongInput, match=r"--keep: compares runs at the same steps, and these have \[16, 20\]"):
        check_keep([*prepared_of(1, 16, 2), *prepared_of(1, 20, 2)], 1)


def test_a_run_s_folder_is_no_sweep_s(tmp_path: Path) -> None:
    check_folder(tmp_path / "fresh")
    (tmp_path / "config.yaml").touch()
    with pytest.raises(WrongInput, match="holds config.yaml, so it is the folder of a run"):
        check_folder(tmp_path)


def test_processes_are_made_for_the_largest_whatever_the_order(file: str) -> None:
    words = ["learner.lora.rank=8,64", "rollout.max_completion_length=512,128", "max_staleness=0,1"]
    sweep = sweep_of(file, words, zipped=True)
    for configs in (sweep.configs, sweep.configs[::-1]):
        found = largest(configs, ["auto", "auto"])
        assert (found.learner.lora.rank, found.rollout.max_completion_length, found.max_staleness) == (64, 512, 1)
        assert found.rollout.max_num_seqs == "auto"
        assert largest(configs, [16, 32]).rollout.max_num_seqs == 32


def written(folder: Path, name: str, given: dict[str, str], accuracies: Sequence[float]) -> None:
    """A run's folder as far as a report looks at it."""
    (folder / name).mkdir()
    lines = [
        {"step": 4 * i, "at": 1.0 + i, "reward/mean": value / 2, "eval/accuracy": value}
        for i, value in enumerate(accuracies)
    ]
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = recorded(folder)
    found["runs"][name] = {"given": given, "state": "done", "of": 8, "error": "<b>why</b>"}
    (folder / "sweep.json").write_text(json.dumps(found))


def test_the_report_has_means_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, scores in ((0, [0.1, 0.5, 0.9]), (1, [0.3, 0.4])):  # the second run is not as far
        written(tmp_path, f"seed-{seed}_rate-1", {"seed": str(seed), "rate": "1"}, scores)
    written(tmp_path, "seed-0_rate-2", {"seed": "0", "rate": "2"}, [0.2, 0.2, 0.2])
    groups = settings_of(read_members(tmp_path))
    assert {name: len(own) for name, own in groups.items()} == {"rate=1": 2, "rate=2": 1}
    found = over_seeds(groups["rate=1"], "eval/accuracy")
    assert [(step, round(middle, 9), least, most) for step, middle, least, most in found] == [
        (0, 0.2, 0.1, 0.3), (4, 0.45, 0.4, 0.5),
    ]  # fmt: skip
    assert write_report(tmp_path, None) == 0
    text = (tmp_path / "report.html").read_text()
    assert "0.450 [0.400, 0.500] at step 4" in text
    assert "&lt;b&gt;why&lt;/b&gt;" in text
    assert "<script" not in text
    assert text.count("<polyline") == 4
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


@pytest.mark.parametrize("text", ["[]", '{"runs": {"../out": {}}}', '{"runs": {"a": 1}}', "{"])
def test_a_damaged_record_is_said(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text(text)
    assert write_report(tmp_path, None) == 2
    assert "sweep.json" in capsys.readouterr().err
