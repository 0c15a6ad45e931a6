"""A checkpoint is continued by the run that made it, and by no other without a word: what each refusal says."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import files as run_lock
from cluster.errors import WrongInput
from examples.random_model import make_tiny_model
from learner.config import RunConfig, load
from learner.driver import checkpoint, launch, preflight
from learner.driver.identity import FILE, Fingerprints, check_allowed, check_same_run
from learner.main import main
from tests.learner.checkpoints import commit

REWARD = "def ok(prompts, completions, **columns):\n    return [0.5] * len(completions)\n"
SAME = Fingerprints({"number of rows": "30", "rows": "a" * 64}, {"ok of rewards.py": "b" * 64}, {"w.bin": "c" * 64})


def configure(**changed: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": {"path": "base"},
        "data": {"path": "train.jsonl"},
        "rewards": [{"use": "rewards.py:ok"}, {"use": "format"}],
    }
    return RunConfig.model_validate(given | changed)


def saved(folder: Path, config: RunConfig, inputs: Fingerprints | None = SAME) -> Path:
    """A checkpoint as far as check_same_run reads it."""
    checkpoint_folder = folder / "checkpoints" / "step-000003"
    checkpoint_folder.mkdir(parents=True)
    (checkpoint_folder / "config.json").write_text(config.model_dump_json())
    if inputs is not None:
        (checkpoint_folder / FILE).write_text(inputs.to_json())
    return checkpoint_folder


def refusal(config: RunConfig, inputs: Fingerprints, folder: Path) -> str:
    with pytest.raises(WrongInput) as caught:
        check_same_run(config, inputs, folder)
    return str(caught.value)


def test_the_refusal_names_every_difference_with_both_values_and_what_to_do(tmp_path: Path) -> None:
    folder = saved(tmp_path, configure(rewards=[{"use": "rewards.py:ok"}, {"use": "format", "weight": 0.5}]))
    assert (
        check_same_run(configure(rewards=[{"use": "rewards.py:ok"}, {"use": "format", "weight": 0.5}]), SAME, folder)
        == []
    )
    other = configure(seed=7, learner={"learning_rate": 1e-5, "schedule": {"kind": "cosine"}})
    less = Fingerprints(
        {"number of rows": "29", "rows": "d" * 64}, SAME.rewards, {"w.bin": "e" * 64, "x.bin": "f" * 64}
    )
    assert refusal(other, less, folder) == (
        f"resume: {folder} was made with another seed (0, now 7), rewards.1.weight (0.5, now 1.0), "
        "learner.learning_rate (2e-05, now 1e-05), learner.schedule.kind (constant, now cosine), "
        "content of data (number of rows 30, now 29, rows), content of base (w.bin, x.bin); give the same again, or "
        f"this run another name= (and model.adapter={tmp_path}/adapter to start from what was learned), or allow it: "
        "resume_allow_changed=[seed, rewards.1.weight, learner.learning_rate, learner.schedule.kind, data, base]"
    )


def test_numbers_that_are_not_finite_are_told_apart_and_nan_is_nan(tmp_path: Path) -> None:
    def given(value: Any) -> RunConfig:
        args = {"cap": float("nan"), "low": [float("-inf"), {"x": value}]}
        return configure(rewards=[{"use": "rewards.py:ok", "args": args}, {"use": "format"}])

    folder = saved(tmp_path, given(float("nan")))
    assert check_same_run(given(float("nan")), SAME, folder) == []
    for other in (float("inf"), None, 0.0):
        assert "another rewards.0.args.low; give the same" in refusal(given(other), SAME, folder)


@pytest.mark.parametrize(
    "text", ["[" * 30_000, '{"step": 3, "cursor": {"low": -1, "done": []}, "evaluations": []}', "3"]
)
def test_the_state_of_a_checkpoint_is_a_state_or_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / checkpoint.STATE).write_text(text)
    with pytest.raises(WrongInput) as caught:
        checkpoint.read_state(tmp_path)
    assert str(caught.value).startswith("resume: the state of a checkpoint must be as gleaner writes it: ")
    (tmp_path / "step-000003").mkdir()
    outside = json.dumps({"step": 3, "files": {"trainer/../../../x": {"bytes": 1, "sha256": ""}}})
    for manifest in (text, outside):
        (tmp_path / "step-000003" / checkpoint.MANIFEST).write_text(manifest)
        assert "is not usable" in str(checkpoint.verify(tmp_path / "step-000003"))


def test_what_is_allowed_by_name_passes_and_is_told_and_the_rest_does_not(tmp_path: Path) -> None:
    folder = saved(tmp_path, configure())
    learner = {"learning_rate": 1e-5, "schedule": {"kind": "cosine", "warmup": 0.1}}
    allowed = configure(learner=learner, resume_allow_changed=["learner.learning_rate", "learner.schedule", "data"])
    changed = Fingerprints({**SAME.data, "rows": "d" * 64}, SAME.rewards, SAME.base)
    check_allowed(allowed)
    assert check_same_run(allowed, changed, folder) == [
        "learner.learning_rate (2e-05, now 1e-05)",
        "learner.schedule.kind (constant, now cosine)",
        "learner.schedule.warmup (0.05, now 0.1)",
        "content of data (rows)",
    ]
    also = allowed.model_copy(update={"seed": 1})
    assert "was made with another seed (0, now 1); give" in refusal(also, changed, folder)


def test_what_no_checkpoint_can_change_is_refused_even_if_it_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, configure())
    ranked = configure(learner={"lora": {"rank": 8}}, resume_allow_changed=["learner"])
    check_allowed(ranked)
    assert refusal(ranked, SAME, folder).endswith("to start from what was learned)")
    with pytest.raises(WrongInput, match=r"^resume_allow_changed: learner.lora.rank cannot change, .* name= and"):
        check_allowed(configure(resume_allow_changed=["learner.lora.rank"]))
    ppo = configure(learner={"algorithm": "ppo"}, resume_allow_changed=["learner"])
    assert "learner.algorithm (grpo, now ppo)" in refusal(ppo, SAME, folder)  # there is no value in the checkpoint
    with pytest.raises(WrongInput, match="got learner.learning_rat; did you mean learner.learning_rate?"):
        check_allowed(configure(resume_allow_changed=["learner.learning_rat"]))


def test_states_in_8_bits_of_a_model_in_shards_are_of_as_many_ranks(tmp_path: Path) -> None:
    def ranks(count: int, kind: str) -> RunConfig:
        learner = {"mode": "full", "optimizer": {"kind": kind}}
        return configure(learner=learner, cluster={"learners": count}, memory={"layout": "sharded"})

    folder = saved(tmp_path / "blocks", ranks(2, "adamw_8bit"))
    assert check_same_run(ranks(2, "adamw_8bit"), SAME, folder) == []
    assert "another cluster.learners (2, now 3);" in refusal(ranks(3, "adamw_8bit"), SAME, folder)
    assert check_same_run(ranks(3, "adamw"), SAME, saved(tmp_path / "rows", ranks(2, "adamw"))) == []


def test_processes_bytes_and_paths_of_equal_content_are_free(tmp_path: Path) -> None:
    """Another copy of a submitted job's folder among them."""
    folder = saved(tmp_path, configure())
    moved = configure(
        model={"path": "/copy-2/base"},
        data={"path": "/copy-2/train.jsonl", "size": 30, "eval": {"every": 7}},
        rewards=[{"use": "/copy-2/rewards.py:ok", "env": ["MY_KEY"]}, {"use": "format"}],
        rollout={"workers": 3, "kv_cache": "1GiB", "process_memory": "1GiB"},
        learner={"token_budget": 512},
    )
    assert check_same_run(moved, SAME, folder) == []
    other = configure(rewards=[{"use": "/copy-2/rewards.py:other"}, {"use": "format"}])
    assert "another rewards.0.use (rewards.py:ok, now rewards.py:other);" in refusal(other, SAME, folder)
    assert "data.eval (200, now 9)" in refusal(configure(data={"path": "d", "eval": {"size": 9}}), SAME, folder)


def test_what_is_gone_is_a_difference_too(tmp_path: Path) -> None:
    folder = saved(tmp_path, configure())
    said = refusal(configure(rewards=[{"use": "rewards.py:ok"}]), Fingerprints(SAME.data, SAME.rewards, {}), folder)
    assert "rewards.1.use (format, now none), rewards.1.weight (1.0, now none)" in said
    assert "content of base (w.bin);" in said


def test_values_of_arguments_are_not_printed(tmp_path: Path) -> None:
    folder = saved(tmp_path, configure(rewards=[{"use": "format", "args": {"key": "hunter2"}}]))
    said = refusal(configure(rewards=[{"use": "format", "args": {"key": "hunter3"}}]), SAME, folder)
    assert "another rewards.0.args.key;" in said
    assert "hunter" not in said


def test_a_checkpoint_that_recorded_no_content_is_compared_by_paths(tmp_path: Path) -> None:
    folder = saved(tmp_path, configure(), inputs=None)
    assert check_same_run(configure(), SAME, folder) == []
    assert "data.path (train.jsonl, now other.jsonl)" in refusal(configure(data={"path": "other.jsonl"}), SAME, folder)
    (folder / "config.json").write_text("{}")
    assert "was made by another version of gleaner" in refusal(configure(), SAME, folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("resume") / "tiny")


@pytest.fixture
def run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a checkpoint of its last step, as the real run leaves it, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "tiny")
    Path("my_rewards.py").write_text(REWARD)
    Path("data.jsonl").write_text("".join(json.dumps({"question": f"Say {i}", "answer": i}) + "\n" for i in range(30)))
    config = {
        "steps": 6,
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"path": "data.jsonl"},
        "rewards": [{"use": "my_rewards.py:ok"}],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    prepared = preflight.prepare(load.load_config("config.yaml", []))
    run_dir = prepared.config.run_dir
    for step in (3, 6):
        files = {
            "config.json": prepared.config.model_dump_json(),
            FILE: prepared.fingerprints.to_json(),
            "state.json": json.dumps(
                {"cursor": {"low": 0, "done": []}, "evaluations": [{"step": 0, "metrics": {}, "samples": []}]}
            ),
            "trainer/adapter_config.json": "{}",
            "trainer/adapter_model.safetensors": f"weights {step}",
        }
        commit(run_dir / "checkpoints", step, files)
    return run_dir


def start(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["--config", "config.yaml", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_other_content_behind_the_same_paths_is_refused_by_name(
    run: Path, no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data.jsonl").write_text("".join(Path("data.jsonl").read_text().splitlines(keepends=True)[5:]))
    Path("my_rewards.py").write_text(REWARD.replace("0.5", "0.25"))
    weights = bytearray(Path("tiny/model.safetensors").read_bytes())
    weights[-1] ^= 1  # the same names, shapes and sizes
    Path("tiny/model.safetensors").write_bytes(weights)
    words = [
        "content of data (number of rows 27, now 23, rows)",
        "content of rewards (ok of my_rewards.py)",
        "content of base (model.safetensors)",
    ]
    code, _, err = start(capsys, "steps=9")
    assert code == 2
    assert err == (
        f"error: resume: {run}/checkpoints/step-000006 was made with another {', '.join(words)}; give the same again, "
        f"or this run another name= (and model.adapter={run}/adapter to start from what was learned), or allow it: "
        "resume_allow_changed=[data, rewards, base]\n"
    )
    code, out, err = start(capsys, "steps=9", "--dry-run", "resume_allow_changed=[data, rewards, base]")
    assert code == 0, err
    assert [f"changed      {one}, as resume_allow_changed allows" in out for one in words] == [True] * 3


def test_a_run_that_is_done_is_left_alone_but_for_what_it_publishes(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill between commit and publication; neither Ray nor the learner is needed to make it good."""
    monkeypatch.setattr(launch, "connect", lambda *_, **__: pytest.fail("Ray was started"))
    (run / "adapter").mkdir()
    (run / "adapter" / "adapter_model.safetensors").write_text("weights 3")
    code, out, err = start(capsys)
    assert code == 0, err
    assert f"{run}/adapter was not that of step-000006: it is now" in out
    assert "all 6 steps are done already" in out
    assert f"step 6 was not evaluated, which does: gleaner eval --run {run}" in out
    assert (run / "adapter" / "adapter_model.safetensors").read_text() == "weights 6"
    assert (run / "adapter" / "adapter_config.json").read_text() == "{}"
    assert "it is now" not in start(capsys)[1]


def test_two_runs_at_once(run: Path, no_trials: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}  # but for run, where the lock comes and goes
    with run_lock.lock_held(run):
        code, _, err = start(capsys)
        assert start(capsys, "--dry-run")[0] == 0  # writes nothing, so it may look
    assert code == 2
    assert re.fullmatch(
        rf"error: output_dir: a run folder has one writer, and {run} is in use by process \d+ on host \S+ since [-\d]+ "
        r"[:\d]+; wait for its end or stop it, or give this run another name=\n",
        err,
    )
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_no_checkpoint_is_passed_over_in_silence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = start(capsys, "resume=none")
    assert code == 2
    assert "give another name=" in err
    (run / "checkpoints" / "step-000006" / "trainer" / "adapter_config.json").write_text("[]")
    prepared = preflight.prepare(load.load_config("config.yaml", []))
    assert prepared.resume_from == run / "checkpoints" / "step-000003"
    assert prepared.finished_steps == 3
    assert "step-000006: trainer/adapter_config.json has another sha256" in prepared.skipped_checkpoints[0]
