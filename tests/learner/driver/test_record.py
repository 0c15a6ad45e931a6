"""What a resumed run keeps of the record of its steps. What is said of idle times, by hand. What a run saves is what
it goes on from and what it publishes, wherever it was cut off, wherever its parts are.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cluster.actor import Local
from cluster.errors import WrongInput
from cluster.files import Digest, WriteFailed
from cluster.telemetry import Timeline
from learner.config import RunConfig
from learner.driver import checkpoint
from learner.driver import record as run_checkpoints
from learner.driver.checkpoint import publish
from learner.driver.evaluate import Evaluation
from learner.driver.identity import Fingerprints
from learner.driver.record import (
    IdleTimes,
    StepMetrics,
    StepRecord,
    advice,
    read_mismatch,
    read_policies,
    write_mismatch,
)
from learner.trainer.service import Arithmetic
from rewards.limits import NAME as OUTPUT
from rollout import ledger
from rollout.fakes import make_group
from rollout.types import PolicyId
from tests.learner.loops import PROBLEMS, Trainer, build, configure, finish, first, started, waiting
from tests.learner.rollouts import make_groups


class Learner:
    """Says what it computes with."""

    async def arithmetic(self) -> Arithmetic:
        return Arithmetic("2", "cpu", 1, "default")


async def taken(folder: Path, begin: int, end: int, digest: str) -> None:
    """A process of the run: from a checkpoint after step `begin` to `end`."""
    learner: Any = Local("learner", Learner, [])
    record = StepRecord(folder, end, learner, 5.0)
    await record.begin(begin)
    for step in range(begin, end + 1):
        if step > begin:
            record.rollouts(step, make_groups([[0.0, 1.0]], lambda _, ids: [-1.0] * len(ids), seed=step))
        record.policy(PolicyId(step, digest))


def lines(folder: Path) -> list[tuple[int, str, int]]:
    return [(line.step, line.sha256, line.total_steps) for line in read_policies(folder)]


def steps(folder: Path) -> list[str]:
    return [file.stem[-1] for file in ledger.steps(folder / "rollouts")]


@pytest.mark.parametrize("cut", [0, 9])
def test_a_resumed_run_takes_the_steps_after_its_checkpoint_anew(tmp_path: Path, cut: int) -> None:
    asyncio.run(taken(tmp_path, 0, 4, "first"))
    file = tmp_path / "policies.jsonl"
    file.write_text(file.read_text()[: -cut or None])  # where a kill cut the last line short
    asyncio.run(taken(tmp_path, 2, 3, "second"))
    assert lines(tmp_path) == [(0, "first", 4), (1, "first", 4), (2, "first", 4), (3, "second", 3)]
    assert steps(tmp_path) == ["1", "2", "3"]


def test_a_run_from_the_beginning_forgets_all(tmp_path: Path) -> None:
    asyncio.run(taken(tmp_path, 0, 4, "first"))
    asyncio.run(taken(tmp_path, 0, 1, "second"))
    assert lines(tmp_path) == [(0, "second", 1), (1, "second", 1)]
    assert steps(tmp_path) == ["1"]


@pytest.mark.parametrize("change", [{"step": "2"}, {"step": True}, {"sha256": 3}, {"sha256": None}])
def test_a_line_of_another_type_is_no_policy(tmp_path: Path, change: dict[str, Any]) -> None:
    asyncio.run(taken(tmp_path, 0, 2, "first"))
    file = tmp_path / "policies.jsonl"
    *kept, last = file.read_text().splitlines()
    file.write_text("\n".join([*kept, json.dumps(json.loads(last) | change)]) + "\n")
    assert lines(tmp_path) == [(0, "first", 2), (1, "first", 2)]


def test_the_mismatch_of_a_step_is_kept_by_group(tmp_path: Path) -> None:
    groups = [make_group(position, rewards=(1.0, 0.0)) for position in (3, 4)]
    values = pa.array([[0.5], None, [0.25], [0.0, 1.0]], pa.list_(pa.float16()))
    path = write_mismatch(tmp_path, 7, groups, values)
    ids = [group.column("group_id")[0].as_py() for group in groups]
    assert read_mismatch(path) == {ids[0]: [[0.5], None], ids[1]: [[0.25], [0.0, 1.0]]}


# What is said of idle times, by hand.

CARDS = {"gpus": {"generator": 1, "learner": 1}}


def advised(max_staleness: int, cluster: dict[str, Any] | None = None, reward: str = "format") -> RunConfig:
    asks = {"args": {"model": "m", "prompt": "{completion}"}} if reward == "judge" else {}
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d.jsonl"},
            "rewards": [{"use": reward, **asks}],
            "max_staleness": max_staleness,
            "cluster": cluster or {},
        }
    )


def step(total: float, generator_idle: float, learner_idle: float, **more: float) -> dict[str, float]:
    spent = {"time/step": total, "time/generator_idle": generator_idle, "time/learner_idle": learner_idle}
    return spent | {"time/evaluate": 0.0, "time/checkpoint": 0.0, "reward/ms": 250.0} | more


def test_steps_of_less_than_a_second_are_spoken_of_too() -> None:
    assert advice(IdleTimes(0.0, 0.0, 0.0), advised(0)) is None
    told = advice(IdleTimes(1.0, 0.4, 0.6), advised(0, CARDS))
    assert told is not None
    assert "at most 1.7 times" in told


def test_steps_with_an_evaluation_or_a_checkpoint_in_them_do_not_count() -> None:
    idle = IdleTimes()
    idle.add(step(10, 4, 6))
    idle.add(step(90, 1, 89, **{"time/evaluate": 80.0}))
    idle.add(step(50, 1, 49, **{"time/checkpoint": 40.0}))
    idle.add(step(10, 5, 5))
    assert idle == IdleTimes(20, 9, 11, 0.5)


@pytest.mark.parametrize(
    ("idle", "config", "words"),
    [
        # 10 s, generators busy for 6 of them, the learner for 4: overlapped a step takes 6, hence 10 / 6 = 1.7.
        (IdleTimes(10, 4, 6), advised(0, CARDS), ["40 %", "60 %", "max_staleness=1", "at most 1.7 times"]),
        (IdleTimes(10, 4, 6), advised(0), ["at most 1.7 times", "here they share it"]),
        (IdleTimes(10, 4, 6, 2.9), advised(0), ["generators were idle 40 %", "at most 1.7 times"]),
        (IdleTimes(10, 0, 5), advised(1), ["generation is the longer side", "rollout.workers"]),
        (IdleTimes(10, 5, 0), advised(1), ["training is the longer side"]),
        (IdleTimes(10, 5, 0, 9), advised(1), ["training is the longer side"]),
        (
            IdleTimes(10, 4, 6, 3.2),
            advised(0),
            ["reward took 32 % of the time of a step;", "rollout.reward_workers"],
        ),
        (IdleTimes(10, 4, 6, 3.2), advised(0, reward="judge"), ["reward took 32 %", "(a judge's args.at_once)"]),
    ],
)
def test_the_longer_side_and_the_bound_are_named(idle: IdleTimes, config: RunConfig, words: list[str]) -> None:
    told = advice(idle, config)
    assert told is not None
    assert [word for word in words if word not in told.replace("%", " %")] == []


@pytest.mark.parametrize(
    ("generator", "learner", "shared"),
    [(0.5, 0.5, True), (1, 0.5, False), (0.5, 1, False), (1, 1, False), (0, 0.5, False)],
)
def test_only_slices_of_one_card_are_shared(generator: float, learner: float, shared: bool) -> None:
    told = advice(IdleTimes(10, 4, 6), advised(0, {"gpus": {"generator": generator, "learner": learner}}))
    assert told is not None
    assert ("here they share it" in told) == shared


@pytest.mark.parametrize(
    ("idle", "max_staleness"),
    [
        (IdleTimes(), 0),
        (IdleTimes(10, 1, 1), 0),
        (IdleTimes(10, 9.5, 0.5), 0),
        (IdleTimes(10, 1.4, 1), 1),
        (IdleTimes(10, 1, 1, 2.6), 1),
    ],
)
def test_without_a_gain_nothing_is_said(idle: IdleTimes, max_staleness: int) -> None:
    assert advice(idle, advised(max_staleness)) is None


async def test_a_learner_that_trains_or_makes_the_next_policy_is_not_idle(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json")
    noted: list[str] = []
    phases, progress = SimpleNamespace(split=lambda *_: None), SimpleNamespace(note=noted.append)
    sinks: Any = SimpleNamespace(folder=tmp_path, timeline=timeline, phases=phases, progress=progress)
    feeds = [SimpleNamespace(receipt=SimpleNamespace(load_s=seconds), answer=None) for seconds in (0.5, 2.0)]
    producers: list[Any] = [SimpleNamespace(feed=feed) for feed in feeds]
    signal: Any = None
    metrics = StepMetrics(sinks, producers, signal, signal, signal)
    metrics.note("a line")
    assert noted == ["a line"]
    metrics.start()
    for work in ("train", "policy"):
        with timeline.span(work, "learner"):
            await asyncio.sleep(0.04)
    with timeline.span("generate", "generator-0", concurrent=True):
        await asyncio.sleep(0.04)
    spent = metrics.times(60.0)
    timeline.close()
    assert (spent["time/push_load"], spent["time/push_probe"]) == (2.0, 0.0)
    assert 0.04 <= spent["time/train"] <= spent["time/step"] - 0.08
    assert 0.04 <= spent["time/learner_idle"] <= spent["time/step"] - 0.08
    generating = spent["time/generate"]  # by one of two
    assert 0.04 <= generating <= spent["time/step"] - 0.08
    assert spent["time/generator_idle"] == pytest.approx(spent["time/step"] - generating / 2)
    assert spent["rollout/tokens_per_s"] == 60.0 / spent["time/step"]


# What a run saves is what it goes on from and what it publishes, wherever it was cut off, wherever its parts are.


async def test_each_step_that_is_due_is_saved_once_with_all_that_a_resumed_run_needs(tmp_path: Path) -> None:
    loop = build(tmp_path, configure(), 5)
    trainer, saved = loop.trainer._object, []  # type: ignore[attr-defined]
    save = trainer.save

    def noted(folder: Path) -> Any:
        saved.append(trainer.version)
        return save(folder)

    trainer.save = noted
    loop.pipes.buffer.dropped_stale = 7
    await finish(loop)
    assert saved == [2, 4, 5]
    folder = tmp_path / "checkpoints" / "step-000005"
    state = json.loads((folder / "state.json").read_text())
    assert state.keys() == {"step", "total_steps", "problems", "cursor", "dropped_stale", "evaluations"}
    assert [state[name] for name in ("step", "total_steps", "problems", "dropped_stale")] == [5, 5, PROBLEMS, 7]
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    trained = {"trainer/adapter_config.json", "trainer/adapter_model.safetensors"}
    assert found == trained | {"config.json", "inputs.json", "manifest.json", "state.json"}
    assert Fingerprints.read(folder / "inputs.json") == Fingerprints({}, {}, {})

    fresh = build(tmp_path, configure(), 9, resume_step=5)
    assert await fresh.checkpoints.load(folder) == (5, loop.evaluations)
    assert fresh.checkpoints.saved == 5
    assert fresh.pipes.buffer.dropped_stale == 7
    assert fresh.pipes.cursor.state() == loop.pipes.cursor.state()
    assert fresh.trainer._object.version == 5  # type: ignore[attr-defined]


async def test_a_checkpoint_that_cannot_be_published_is_a_checkpoint_all_the_same(tmp_path: Path) -> None:
    loop = build(tmp_path, configure(), 4)
    (tmp_path / "adapter").write_text("in its way")
    with pytest.raises(ExceptionGroup) as raised:
        await finish(loop)
    assert raised.group_contains(FileExistsError)
    assert loop.checkpoints.saved == 2  # not committed and published once more by the end of the run
    assert [path.name for path in checkpoint.listing(tmp_path / "checkpoints")] == ["step-000002"]


async def test_the_metrics_of_every_step_are_measured_against_the_plan(tmp_path: Path) -> None:
    run, measured = build(tmp_path, configure(), 2), list[dict[str, float]]()
    plan: Any = SimpleNamespace(measure=measured.append)
    run.sinks.plan = plan
    await finish(run)
    assert len(measured) == 2
    assert all("memory/generator_peak" in metrics for metrics in measured)


async def test_what_reward_functions_print_is_told_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, noted = build(tmp_path, configure(), 2), list[str]()
    monkeypatch.setattr(run.sinks.progress, "note", noted.append)
    (tmp_path / OUTPUT).write_text("a guess\nanother\n")
    await finish(run)
    told = [line for line in noted if line is not None and "reward functions print" in line]
    assert told == [f"reward functions print, into {tmp_path / OUTPUT}; its first lines: a guess | another"]
    assert None not in noted


class Asked(Local[Any]):
    """Notes what is asked of the learner, and for how long at most."""

    def __init__(self) -> None:
        super().__init__("learner", Trainer, [0.0, 0.0])
        self.asked: list[tuple[str, float]] = []

    async def call(self, method: Any, deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        self.asked.append((method.__name__, deadline_s))
        return await super().call(method, deadline_s, *args, **kwargs)


async def test_each_call_of_a_run_has_the_deadline_of_its_kind(tmp_path: Path) -> None:
    learner = Asked()
    await finish(build(tmp_path, waiting(configure(), step=41, push=42), 2, trainer=learner))
    pushes = {(name, 42) for name in ("arithmetic", "mismatch", "outgoing", "probe", "sees")}
    assert set(learner.asked) == pushes | {("save", 41), ("step", 41)}


async def test_the_learner_has_its_deadlines_and_a_checkpoint_says_what_its_run_was_made_from(tmp_path: Path) -> None:
    config = waiting(configure(), step=41, push=42)
    inputs = Fingerprints({"rows": "a"}, {"vowels": "b"}, {"model": "c"})
    evaluations = [Evaluation(0, {"eval/accuracy": 0.5}, [{"prompt": "2+2"}]), Evaluation(1, {}, [])]
    learner, loop = Asked(), build(tmp_path, config, 6)
    checkpoints = run_checkpoints.RunCheckpoints(config, 8, inputs, learner, loop.pipes, loop.sinks)
    assert checkpoints.saved is None
    await checkpoints.check_shared()
    await checkpoints.save(1, evaluations)
    folder = tmp_path / "checkpoints" / "step-000001"
    assert checkpoints.saved == 1
    assert await checkpoints.load(folder) == (1, evaluations)
    assert learner.asked == [("sees", 42), ("save", 41), ("load", 41)]
    assert json.loads((folder / "config.json").read_text()) == config.model_dump(mode="json")
    assert Fingerprints.read(folder / "inputs.json") == inputs
    loop.sinks.timeline.close()
    span = json.loads((tmp_path / "timeline.json").read_text())[0]
    assert (span["name"], span["tid"], span["args"]) == ("checkpoint", "loop", {"step": 1})


@pytest.mark.parametrize("mode", ["lora", "full"])
async def test_what_is_published_is_what_the_mode_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    published: list[tuple[Path, Path, bool]] = []

    def note(folder: Path, run_dir: Path, *, whole_model: bool) -> None:
        published.append((folder, run_dir, whole_model))

    monkeypatch.setattr(run_checkpoints, "publish", note)
    await build(tmp_path, configure(learner={"groups_per_step": 2, "mode": mode}), 6).checkpoints.save(2, [])
    assert published == [(tmp_path / "checkpoints" / "step-000002", tmp_path, mode == "full")]


class Killed(BaseException):
    """As SIGKILL: nothing after it runs."""


async def test_a_kill_between_commit_and_publication_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_at_4(folder: Path, run_dir: Path, **how: Any) -> Path | None:
        if folder.name == "step-000004":
            raise Killed
        return publish(folder, run_dir, **how)

    monkeypatch.setattr(run_checkpoints, "publish", kill_at_4)
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(build(tmp_path, configure(), 6))
    assert isinstance(first(caught.value), Killed)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    assert weights.read_text() == "2"
    newest, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert newest == tmp_path / "checkpoints" / "step-000004"
    publish(newest, tmp_path, whole_model=False)  # as learner.driver.launch does at the next start
    assert weights.read_text() == "4"


class Elsewhere(Trainer):
    """The learner on another node, whose disk has a folder of the same name."""

    def __init__(self, disk: Path, sees: bool) -> None:
        super().__init__(0.0, 0.0)
        self.disk, self.sees_it = disk, sees

    async def sees(self, file: Path) -> bool:
        return self.sees_it

    async def save(self, folder: Path) -> dict[str, Digest]:
        self.disk.mkdir(exist_ok=True)
        return await super().save(self.disk / folder.parent.name)


@pytest.mark.parametrize(("sees", "trained"), [(False, 0), (True, 2)], ids=["at the start", "at a checkpoint"])
async def test_a_learner_whose_folder_is_elsewhere_is_refused_and_nothing_is_sealed(
    tmp_path: Path, sees: bool, trained: int
) -> None:
    """By the first look; and where the folder went away later, by the digests of the first checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    loop = build(folder, configure(), 6, trainer=Local("learner", Elsewhere, [tmp_path / "other", sees]))
    with pytest.raises((BaseExceptionGroup, WrongInput)) as caught:
        await finish(loop)
    sentence = str(first(caught.value))
    assert sentence.startswith("output_dir: must be a folder that the learner's node and the driver's share")
    assert str(folder) in sentence
    assert loop.step == trained
    assert not list(folder.glob("checkpoints/*"))
    assert not (folder / "adapter").exists()
    assert not list(folder.glob(".seen-*"))


async def test_a_run_whose_folder_is_deleted_does_not_end_well(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    loop = build(folder, configure(checkpoint={"every": 100}), 100, pace_s=1e-3)
    running = await started(loop, 3)
    shutil.rmtree(folder, ignore_errors=True)  # the run may write into it meanwhile
    if folder.exists():
        folder.rename(tmp_path / "away")
    with pytest.raises((BaseExceptionGroup, FileNotFoundError)) as caught:
        await running
    assert str(first(caught.value)).startswith(f"{folder}: the run folder was deleted or replaced while")


async def test_a_run_whose_folder_is_deleted_says_so_whichever_file_misses_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    loop, keep = build(folder, configure(), 5), StepRecord.policy

    def away(record: StepRecord, sent: Any) -> None:
        if sent.version == 3:
            folder.rename(tmp_path / "away")
        keep(record, sent)

    monkeypatch.setattr(StepRecord, "policy", away)
    with pytest.raises(FileNotFoundError, match=f"^{folder}: the run folder was deleted or replaced while .*step 3"):
        await finish(loop)


async def test_a_disk_that_is_full_has_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, write = build(tmp_path, configure(), 2), Path.write_text

    def full(path: Path, text: str, *args: Any) -> int:
        if path.name == "state.json":
            path.symlink_to("/dev/full")
        return write(path, text, *args)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(loop)
    assert "[Errno 28] No space left on device: '" in str(first(caught.value))
    assert f"{tmp_path}/checkpoints" in str(first(caught.value))
    assert list((tmp_path / "checkpoints").iterdir()) == []


async def test_the_learner_says_which_file_has_no_room_and_how_much_is_needed(tiny_path: str, tmp_path: Path) -> None:
    from tests.learner.trainers import make_trainer  # here: torch is slow to import

    (tmp_path / "trainer.pt").symlink_to("/dev/full")
    with pytest.raises(WriteFailed) as caught:
        await make_trainer(tiny_path).save(tmp_path)
    said = r"the disk of \S+/trainer.pt is full \(No space left on device\); free some .* left, [\d.]+ KiB needed\)"
    assert re.fullmatch(said, caught.value.sentence())
    sent = pickle.loads(pickle.dumps(caught.value))  # from process to process
    assert sent.sentence() == caught.value.sentence()


async def test_the_learner_says_what_it_wrote_and_its_checkpoint_is_an_adapter(tiny_path: str, tmp_path: Path) -> None:
    from tests.learner.trainers import make_trainer

    written: dict[str, Digest] = {}
    async with checkpoint.commit(tmp_path, 1, keep=1, written=written) as folder:
        told = await make_trainer(tiny_path).save(folder / "trainer")
        written |= {f"trainer/{name}": digest for name, digest in told.items()}
    sealed = json.loads((tmp_path / "step-000001" / "manifest.json").read_text())["files"]
    assert sealed == written
    assert set(told) == {"adapter_config.json", "adapter_model.safetensors", "trainer.pt"}
