"""Fingerprints change with the content and with nothing else, and no reward function runs for them. A checkpoint is
continued by the run that made it, and by no other without a word: what each refusal says.
"""

import datetime
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
from learner.driver import checkpoint, identity, launch, preflight
from learner.driver.identity import FILE, Fingerprints, check_allowed, check_same_run, differing, fingerprints_of
from learner.main import main
from rewards.loader import source_of
from tests import hub_cache
from tests.learner.checkpoints import commit
from tests.moved_functions import BEFORE, now, table, then


def made(base: Path, *uses: str, rows: Any = ({"a": 1},), **changed: Any) -> Fingerprints:
    config = RunConfig.model_validate(
        {"model": {"path": str(base)}, "data": {"path": "d"}, "rewards": [{"use": use} for use in uses or ["format"]]}
        | changed
    )
    return fingerprints_of(config, rows)


def test_rows_count_by_content_and_order(tmp_path: Path) -> None:
    def rows(*rows: dict[str, Any]) -> Any:
        return made(tmp_path, rows=rows).data["rows"]

    one, two = {"a": 1, "b": ["x", None]}, {"a": 2, "b": []}
    assert rows(one, two) == rows({"b": ["x", None], "a": 1}, two)
    assert len({rows(one, two), rows(two, one), rows(one), rows(), rows({"a": "1", "b": ["x", None]}, two)}) == 5
    assert rows({"a": b"1"}) != rows({"a": b"2"})
    assert rows({"a": datetime.date(2026, 1, 1)}) != rows({"a": datetime.date(2026, 1, 2)})
    assert rows({"a": object()}) == rows({"a": object()})  # whose repr differs each time


def test_a_large_base_counts_by_size_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "BLOCKS", 8)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 16)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("of no weight")
    file, content = tmp_path / "model.safetensors", bytes(range(256)) * 10

    def digest(data: bytes) -> str:
        file.write_bytes(data)
        return made(tmp_path).base["model.safetensors"]

    def flipped(place: int) -> bytes:
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    places = [block * (len(content) - 16) // 7 for block in range(8)]
    seen = [digest(content), digest(content + b"x"), *(digest(flipped(place)) for place in (0, *places[1:], 2559))]
    assert len(set(seen)) == 2 + 9
    assert all(one.startswith("sampled ") for one in seen)
    assert digest(flipped(20)) == seen[0]  # between two blocks: what the docstring says is not seen
    assert set(made(tmp_path).base) == {"config.json", "model.safetensors"}
    monkeypatch.setattr(identity, "WHOLE_BYTES", 10_000)
    assert digest(flipped(20)) != digest(content)


def test_an_adapter_counts_where_the_run_stays_close_to_it(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    model = {"path": str(base), "adapter": str(adapter)}
    assert set(made(base, model=model).base) == {"config.json"}
    assert set(made(base, model=model, learner={"loss": {"beta": 0.1}}).base) == {
        "config.json",
        "reference config.json",
    }


def test_a_larger_teacher_counts_by_its_files_in_place_of_a_reference(tmp_path: Path) -> None:
    for name in ("base", "adapter", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    model = {name if name != "base" else "path": str(tmp_path / name) for name in ("base", "adapter", "teacher")}
    learner = {"loss": {"beta": 0.1}}
    first = made(tmp_path / "base", model=model, learner=learner)
    assert set(first.base) == {"config.json", "teacher config.json"}
    (tmp_path / "teacher" / "config.json").write_text("another")
    assert differing(made(tmp_path / "base", model=model, learner=learner).base, first.base) == ["teacher config.json"]
    replayed = configure(model=model, learner=learner)  # it has what the teacher said
    assert set(fingerprints_of(replayed, (), asks=False).base) == {"config.json"}


def test_a_reward_model_counts_by_the_files_of_its_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_text("one")
    seen = made(tmp_path, "format", f"adapter:{tmp_path}").rewards
    name = f"{tmp_path.name}, adapter_model.safetensors"
    assert set(seen) == {"format of format.py", name}
    (tmp_path / "adapter_model.safetensors").write_text("two")
    again = made(tmp_path, "format", f"adapter:{tmp_path}").rewards
    assert [key for key in seen if seen[key] != again[key]] == [name]


def test_what_a_value_starts_from_counts_by_its_files(tmp_path: Path) -> None:
    base, start = tmp_path / "base", tmp_path / "start"
    for folder in (base, start):
        folder.mkdir()
        (folder / "weights.safetensors").write_text("one")
    tree = {"model": {"path": str(base)}, "data": {"path": "d"}, "rewards": [{"use": "format"}]}
    learner = {"algorithm": "ppo", "value": {"start": str(start)}}
    found = fingerprints_of(RunConfig.model_validate(tree | {"learner": learner}), []).base
    (start / "weights.safetensors").write_text("two")
    again = fingerprints_of(RunConfig.model_validate(tree | {"learner": learner}), []).base
    assert [key for key in found if found[key] != again[key]] == ["value weights.safetensors"]


def test_a_model_of_the_hub_counts_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text("{}")
    hub_cache.use(tmp_path, monkeypatch)
    commit = hub_cache.write(tmp_path, "a/b", {"main": copy})["main"]
    folder = tmp_path / "models--a--b" / "snapshots" / commit
    by_name = made(Path("a/b")).base
    assert by_name == {"revision": commit}
    by_folder, by_copy = made(folder).base, made(copy).base
    assert by_folder == {**by_name, **by_copy}
    assert differing(by_folder, by_name) == differing(by_name, by_folder) == []  # goes on, whatever the hub has by then
    assert differing(by_folder, by_copy) == differing(by_copy, by_folder) == []
    assert differing(by_name, by_copy) == ["config.json", "revision"]
    (copy / "config.json").write_text("[]")
    assert differing(made(copy).base, by_folder) == ["config.json"]
    assert differing(by_folder, {"revision": "7" * 40, "config.json": by_folder["config.json"]}) == ["revision"]
    several = {"revision": commit, "reference config.json": "1", "reference revision": "2"}
    assert differing(several, {"revision": commit, "reference config.json": "3"}) == ["reference config.json"]


def test_the_source_of_a_reward_function_is_found_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine" / "deep"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "score.py", tmp_path / "own.py"):
        file.write_text("raise SystemExit('was run')\n")
    assert source_of("mine.deep.score:f") == package / "score.py"
    assert source_of("own:f") == source_of("own.py:f") == tmp_path / "own.py"
    assert source_of("number") == Path(__file__).parents[3] / "rewards" / "built_in" / "number.py"
    assert source_of("nowhere.at.all:f") is source_of("sys:f") is source_of("no.py:f") is None
    found = made(tmp_path, "own.py:f", "mine.deep.score:f", "math", "reasoning_gym").rewards
    assert set(found) == {"f of own.py", "f_2 of score.py", "math of math.py", "reasoning_gym of reasoning_gym.py"}
    assert "math-verify 0." in found["math of math.py"]
    (tmp_path / "own.py").write_text("def f(): ...\n")
    assert made(tmp_path, "own.py:f").rewards["f of own.py"] != found["f of own.py"]


def test_what_a_reward_functions_file_imports_from_beside_it_counts(tmp_path: Path) -> None:
    """Helpers of helpers and packages, too; what is installed, and what is not imported, does not."""
    (tmp_path / "pkg").mkdir()
    files = {
        "mine.py": "import json, helpers\nfrom pkg import deep\ndef f(completions, **_):\n    import late\n",
        "helpers.py": "from more import x\nimport helpers",
        "more.py": "x = 1",
        "late.py": "",
        "pkg/__init__.py": "",
        "pkg/deep.py": "from . import near\nfrom ... import above",
        "pkg/near.py": "",
        "other.py": "x = 1",
        "json.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    use = f"{tmp_path}/mine.py:f"
    before = made(tmp_path, use).rewards
    beside = ("helpers.py", "late.py", "more.py", "pkg/__init__.py", "pkg/deep.py", "pkg/near.py")
    assert set(before) == {"f of mine.py", *(f"f of mine.py, {name}" for name in beside)}
    (tmp_path / "other.py").write_text("x = 2")
    assert made(tmp_path, use).rewards == before
    (tmp_path / "more.py").write_text("x = 2")
    assert differing(made(tmp_path, use).rewards, before) == ["f of mine.py, more.py"]
    (tmp_path / "more.py").write_text("x = (")  # whoever imports it says so
    assert set(made(tmp_path, use).rewards) == set(before)


def test_a_run_of_before_our_functions_were_moved_has_the_same_ones(tmp_path: Path) -> None:
    moved = json.loads(identity.MOVED_FILE.read_text())
    assert moved == table(), "python -m tests.moved_functions"
    old, new = next(iter(moved.items()))
    file = tmp_path / "fingerprints.json"
    given = Fingerprints(
        {},
        {"a of number.py": f"{old} math 1", "b of judge_settings.py": "x", "c of mine.py": "y"},
        {},
        env={"TrlRolloutFunc of trl_rollout.py": then(BEFORE[0], "rollout/env/adapters/trl_rollout.py", "")},
    )
    file.write_text(given.to_json())
    assert Fingerprints.read(file).env == {"TrlRolloutFunc of trl.py": now("rollout/env/adapters/trl.py")}
    assert Fingerprints.read(file).rewards == {
        "a of number.py": f"{new} math 1",
        "b of judge.py": "x",
        "c of mine.py": "y",
    }


# A checkpoint is continued by the run that made it, and by no other without a word: what each refusal says.

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
    ("text", "said"),
    [
        ("[" * 30_000, "nested"),
        ('{"step": 3, "cursor": {"low": -1, "done": []}, "evaluations": []}', "state.json: cursor.low: Input should"),
        ("3", "state.json"),
    ],
)
def test_the_state_of_a_checkpoint_is_a_state_or_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / checkpoint.STATE).write_text(text)
    with pytest.raises(WrongInput) as caught:
        checkpoint.read_state(tmp_path)
    assert str(caught.value).startswith("resume: the state of a checkpoint must be as gleaner writes it: ")
    assert said in str(caught.value)
    (tmp_path / "step-000003").mkdir()
    outside = ["trainer/../../../x", "trainer\0x"]
    manifests = [json.dumps({"step": 3, "files": {name: {"bytes": 1, "sha256": ""}}}) for name in outside]
    for manifest, why in zip(
        [text, *manifests], ["is not usable", *["lies outside of the checkpoint"] * 2], strict=True
    ):
        (tmp_path / "step-000003" / checkpoint.MANIFEST).write_text(manifest)
        assert why in str(checkpoint.verify(tmp_path / "step-000003"))


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
    bounded = saved(tmp_path / "bounded", configure(learner={"loss": {"bounds": {"cap": 3}}}))
    with pytest.raises(
        WrongInput, match=r"with another learner.loss.bounds.cap \(3.0, now none\); .*=\[learner.loss.bounds.cap\]"
    ):
        check_same_run(configure(), SAME, bounded)
    for allowed in ("learner.loss.bounds", "learner.loss.bounds.cap"):
        check_allowed(changed := configure(resume_allow_changed=[allowed]))
        assert len(check_same_run(changed, SAME, bounded)) == 1
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
    begun = configure(data={"path": "train.jsonl", "curriculum": "/runs/first"})
    ordered = saved(tmp_path / "ordered", begun)
    here = configure(data={"path": "train.jsonl", "curriculum": "/copy-2/first"})
    assert check_same_run(here, SAME, ordered) == []
    assert "another data.curriculum (first, now none)" in refusal(configure(), SAME, ordered)
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
