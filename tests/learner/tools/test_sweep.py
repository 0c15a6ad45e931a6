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
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import WrongInput
from learner.config.settings import NAME
from learner.tools.sweep.drive import Halving, LearnerTurn, Member, recorded
from learner.tools.sweep.report import over_seeds, read_members, settings_of, write_report
from learner.tools.sweep.runs import _split, check_keep, sweep_of

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
    assert [*_split(",".join(values))] == values
    assert [*_split("[" + ",".join(values) + "]")] == ["[" + ",".join(values) + "]"]


@given(st.lists(st.text(min_size=1, max_size=200).filter(lambda text: "," not in text), min_size=2, max_size=4))
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
        (["seed=0,1", "learner.push=merged"], "a sweep trains adapters on one base"),
        (["seed=0,1", "learner.mode=full", "model.dtype=float32"], "a sweep trains adapters on one base"),
        (["seed=0,1", "learner.algorithm=ppo"], "a sweep trains adapters on one base"),
        (["seed=0,1", "rollout.in_flight=continue", "max_staleness=1"], "set rollout.in_flight=finish"),
        (["seed=0,1", "cluster.learners=2"], "cluster.learners=1"),
        (["seed=0,1", "cluster.rewards.processes=1"], "leave cluster.rewards out"),
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

    def one(number: int, evaluations: Sequence[tuple[int, float]]) -> Member:
        found = [SimpleNamespace(step=step, metrics={"eval/accuracy": score}) for step, score in evaluations]
        progress = SimpleNamespace(evaluated=None, note=lambda text: None)
        prepared: Any = SimpleNamespace(total_steps=steps)
        member = Member(number, cast(Any, None), prepared, cast(Any, progress), phases=cast(Any, None))
        member.loop = cast(Any, SimpleNamespace(held_out=SimpleNamespace(evaluations=found)))
        return member

    return [one(number, evaluations) for number, evaluations in enumerate(scores)]


def test_the_better_half_goes_on_at_each_rung_once_all_have_reached_it() -> None:
    members = members_of([[(0, 0.1), (4, 0.2)], [(4, 0.5)], [(4, 0.3)], [(4, 0.2)]])
    behind = members[3].loop
    assert behind is not None
    behind.held_out.evaluations = []
    halving = Halving(members, keep=1)
    halving.decide()
    assert not any(member.dropped for member in members), "one run is not there yet"
    behind.held_out.evaluations = cast(Any, [SimpleNamespace(step=5, metrics={"eval/accuracy": 0.2})])
    halving.decide()
    assert [member.dropped for member in members] == [True, False, False, True]
    assert [member.stop.is_set() for member in members] == [True, False, False, True]
    for member, score in zip(members[1:3], (0.4, 0.6), strict=True):
        assert member.loop is not None
        member.loop.held_out.evaluations.append(cast(Any, SimpleNamespace(step=8, metrics={"eval/accuracy": score})))
    halving.decide()
    assert [member.dropped for member in members] == [True, True, False, True]


def test_halving_keeps_as_many_as_asked_for_and_failed_runs_do_not_count() -> None:
    members = members_of([[(8, 0.1)], [(8, 0.2)], [(8, 0.3)], [(8, 0.4)]])
    members[3].state = "failed"
    Halving(members, keep=2).decide()
    assert [member.dropped for member in members] == [True, False, False, False]


def test_what_keep_needs_is_said(file: str) -> None:
    with pytest.raises(WrongInput, match="--keep: must be less than the 2 runs"):
        check_keep(sweep_of(file, ["seed=0,1"]), 2)
    with pytest.raises(WrongInput, match="set data.eval.every"):
        check_keep(sweep_of(file, ["seed=0,1", "data.eval.every=0"]), 1)
    with pytest.raises(WrongInput, match="the same steps or epochs"):
        check_keep(sweep_of(file, ["steps=5,6"]), 1)


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
