"""What is wrong with a run's inputs: one clear line each, exit code 2, nothing written, nothing expensive started.
Mistakes that cost nothing to find are told together, before any code of the model is loaded. How many steps a run
has that goes on with other settings, by hand. What may mean something else than the user believes is told before a
run; what is meant as it is written is not.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow.parquet import write_table

from cluster.errors import WrongInput
from cluster.files import digests_in
from examples.random_model import make_tiny_model
from learner.config import RunConfig
from learner.config.load import WrongSettings, load_config
from learner.driver import checkpoint, preflight
from learner.driver.launch import curriculum_of
from learner.driver.memory import cards_of
from learner.driver.preflight import setting_notes, total_steps
from learner.main import main
from rollout import ledger
from rollout.data import files, sources
from rollout.fakes import make_group
from tests.learner.checkpoints import commit
from tests.learner.loops import configure

REWARD = "def ok(prompts, completions, **columns):\n    return [0.5] * len(completions)\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("preflight") / "tiny")


@pytest.fixture
def config(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A configuration that is in order, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text(REWARD)
    Path("data.jsonl").write_text("".join(json.dumps({"question": f"Say {i}", "answer": i}) + "\n" for i in range(30)))
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": "data.jsonl"},
        "rewards": [{"use": "my_rewards.py:ok"}],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
    }


def check(config: dict[str, Any], *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    Path("config.yaml").write_text(yaml.safe_dump(config))
    code = main(["--config", "config.yaml", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_dry_run_says_what_would_run_and_writes_nothing(
    config: dict[str, Any], no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = check(config, "--dry-run", "--verbose", "rollout.workers=2", capsys=capsys)
    assert code == 0
    assert "generator-1: 1 CPU, 0 GPU" in out
    assert "27 to train on, 3 held out" in out
    assert "learning_rate: 2.0e-05" in out
    assert "memory.device is null, so no limit is applied" in out
    assert "were asked for" not in out
    assert not Path("runs").exists()


def test_more_than_the_memory_of_a_machine_is_said(
    config: dict[str, Any], no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    few, many = (check(config, "--dry-run", f"rollout.workers={count}", capsys=capsys)[1] for count in (1, 9000))
    assert "together" not in few
    assert re.search(r"; together \d+\.\d GiB, and this machine has \d+\.\d GiB\n", many)


@pytest.mark.parametrize("address", ["foo", "-1", ":6379", "here:0", "here:65536", "a b:1", "http://127.0.0.1:8265"])
def test_an_address_is_that_of_a_ray(config: dict[str, Any], capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, _, err = check(config, "--dry-run", f"cluster.address={address}", capsys=capsys)
    assert (code, "cluster.address: must be local, auto, or host:port" in err) == (2, True)


def test_fewer_held_out_problems_than_asked_for_are_said(
    config: dict[str, Any], no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = check(config, "--dry-run", "data.eval.size=4", capsys=capsys)
    assert "data.eval.size: 3 problems are held out, 4 were asked for: at most a tenth of the different prompts" in out
    _, out, _ = check(config, "--dry-run", "data.eval.size=3", capsys=capsys)
    assert "were asked for" not in out
    Path("other.jsonl").write_text('{"question": "Say what?", "answer": 1}\n')
    _, out, _ = check(config, "--dry-run", "data.eval.size=4", "data.eval.path=other.jsonl", capsys=capsys)
    assert "data.eval.size: 1 problems are held out, 4 were asked for: there are no more" in out


WRONG = {
    "missing model": (["model.path=/no/such/model"], "model.path: folder must exist, got /no/such/model"),
    "missing column": (["data.prompt=questoin"], "questoin.*question"),
    "missing data": (["data.path=nothing.jsonl"], "nothing.jsonl"),
    "reward file that does not import": (["rewards=[{use: 'broken.py:ok'}]"], "broken.py.*no_such_module"),
    "reward that is not there": (["rewards=[{use: formt}]"], "formt.*format"),
    "reward that raises": (["rewards=[{use: 'raises.py:ok'}]"], "KeyError.*gold"),
    "empty data": (["data.path=empty.jsonl"], "empty"),
    "prompts that are too long": (["rollout.max_prompt_length=8"], "max_prompt_length.*30 of 30.*data-0, data-1"),
    "context that is too short": (["rollout.max_completion_length=4000"], "context of 512"),
    "output that is no folder": (["output_dir=data.jsonl"], "output_dir: .*not a writable folder"),
    "output on a disk that is not there": (["output_dir=away"], "output_dir: .*away is a link to /no/such/disk, which"),
    "output where no folder can be made": (
        ["output_dir=/proc/runs"],
        "output_dir: /proc/runs(/run cannot be| is no folder)",
    ),
    "name that is too long": (["name=" + "n" * 300, "output_dir=new"], "no folder for n+ .File name too long.; give"),
    "accuracy that is not there": (["data.eval.reward=truth"], "data.eval.reward: must be one of ok, got truth"),
    "more GPUs than there are": (["cluster.gpus.learner=1"], "needs .*1 GPU"),
    "memory that is too small": (["memory.device=1GiB"], "memory.device: .* needs .* GiB .*: .*memory.device of"),
    "layout that cannot be": (["memory.device=8GiB", "memory.layout=separate"], "memory.layout: separate needs a card"),
    "reward named as a metric": (["rewards.0.name=mean"], "a metric is named so already.*got mean"),
    "reward named as a number of an evaluation": (["rewards.0.name=turns"], "a metric is named so already.*got turns"),
    "reference that is no model": (
        ["learner.mode=full", "learner.loss.beta=0.1", "model.reference=."],
        "model.reference: must be a model's folder or hub name, got .*; give another, or null",
    ),
    "rollouts that are not there": (
        ["data.curriculum=data.jsonl"],
        "data.curriculum: must be own, or the folder of a run with rollouts, and .*data.jsonl is not there; give",
    ),
    "rollouts of the run itself": (["data.curriculum=runs/run"], "data.curriculum: must be own for the rollouts of th"),
    "checkpoint that is not there": (["resume=runs/run/checkpoints/step-000007"], "resume: .*not there"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case: str, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    overrides, pattern = WRONG[case]
    Path("broken.py").write_text("import no_such_module\n")
    Path("raises.py").write_text("def ok(prompts, completions, **columns):\n    return columns['gold']\n")
    Path("empty.jsonl").write_text("")
    Path("away").symlink_to("/no/such/disk")
    before = set(Path().rglob("*")) - {Path("config.yaml")}
    code, _, err = check(config, *overrides, capsys=capsys)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith(("error: ", "config: "))]
    assert re.search(pattern, line), line
    left = {p for p in set(Path().rglob("*")) - before if "__pycache__" not in p.parts}
    assert left == {Path("config.yaml")}


def test_other_steps_than_a_run_was_planned_for_say_what_they_do_to_its_rate(config: dict[str, Any]) -> None:
    from learner.config.load import load_config
    from learner.driver.preflight import _other_rate

    cosine = {"learner": {"schedule": {"kind": "cosine", "warmup": 0.5}}}
    Path("config.yaml").write_text(yaml.safe_dump(config | cosine))
    run = load_config("config.yaml", [])
    run.run_dir.mkdir(parents=True)
    line = {
        "step": 2,
        "sha256": "",
        "total_steps": 4,
        "arithmetic": {"torch": "2", "device": "x", "threads": 1, "products": "none"},
    }
    (run.run_dir / "policies.jsonl").write_text(json.dumps(line) + "\n")
    assert _other_rate(run, 4, 2) == ()
    (told,) = _other_rate(run, 12, 2)  # of 6 steps of warm-up the third
    assert "for 12 steps now and was for 4, so step 3 learns at 0.5 times" in told
    assert told.endswith("where step 2 had 1")


def test_a_vocabulary_that_does_not_fit(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    small = Path("small")
    make_tiny_model(small)
    shape = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(shape | {"vocab_size": 200}))
    code, _, err = check(config, "model.path=small", capsys=capsys)
    assert code == 2
    assert "vocab_size 200" in err


def test_epochs_are_problems_and_what_a_checkpoint_consumed_counts(config: dict[str, Any]) -> None:
    from learner.config.load import load_config
    from learner.driver.preflight import prepare, total_steps

    Path("config.yaml").write_text(yaml.safe_dump(config))  # 27 problems, 8 a step
    assert [prepare(load_config("config.yaml", [f"epochs={n}"])).total_steps for n in (0.1, 1, 2)] == [1, 4, 7]
    for low, done, total in ((20, [22, 24], 4), (20, [*range(21, 28)], 3)):  # groups were replaced
        same = prepare(load_config("config.yaml", ["epochs=1", f"name=low-{len(done)}"])).config
        state = json.dumps({"cursor": {"low": low, "done": done}})
        commit(same.run_dir / "checkpoints", 3, {"config.json": same.model_dump_json(), "state.json": state})
        prepared = prepare(load_config("config.yaml", ["epochs=1", f"name=low-{len(done)}"]))
        assert (prepared.finished_steps, prepared.total_steps) == (3, total)
    changed = same.model_copy(update={"learner": same.learner.model_copy(update={"groups_per_step": 2})})
    for then, planned, total in ((same, 9, 9), (same, 4, 4), (changed, 9, 3 + 1)):  # 22 of 27 are consumed
        state = json.dumps({"cursor": {"low": 20, "done": [22, 24]}, "total_steps": planned, "problems": 27})
        folder = commit(same.run_dir.with_name("planned") / "checkpoints", 3, {
            "config.json": then.model_dump_json(), "state.json": state,
        })  # fmt: skip
        again = load_config("config.yaml", ["epochs=1", "name=planned"])
        assert total_steps(again, 27, folder) == total
        assert total_steps(again.model_copy(update={"epochs": 2.0}), 27, folder) == (7 if planned == 4 else 3 + 4)
        assert total_steps(again, 100, folder) == 3 + 10  # more rows, as resume_allow_changed allows
    steps = commit(same.run_dir.with_name("steps") / "checkpoints", 3, {
        "config.json": same.model_copy(update={"epochs": None}).model_dump_json(),
        "state.json": json.dumps({"cursor": {"low": 20, "done": [22, 24]}, "total_steps": 60, "problems": 27}),
    })  # fmt: skip
    assert total_steps(again, 27, steps) == 4  # planned for 60 steps before, for epochs now
    fewer = ["epochs=1", "name=low-2", "learner.groups_per_step=1", "resume_allow_changed=[learner.groups_per_step]"]
    assert prepare(load_config("config.yaml", fewer)).total_steps == 3 + 27 - 22


def test_a_run_with_checkpoints_does_not_go_on_from_anothers(config: dict[str, Any]) -> None:
    from cluster.errors import WrongInput
    from learner.config.load import load_config
    from learner.driver.preflight import prepare

    Path("config.yaml").write_text(yaml.safe_dump(config))
    runs = [prepare(load_config("config.yaml", [f"name={name}"])).config for name in ("base", "branch")]
    state = json.dumps({"cursor": {"low": 0, "done": []}})
    for run in runs:
        commit(run.run_dir / "checkpoints", 3, {"config.json": run.model_dump_json(), "state.json": state})
    base = runs[0].run_dir / "checkpoints" / "step-000003"
    assert prepare(load_config("config.yaml", ["name=new", f"resume={base}"])).resume_from == base
    assert prepare(load_config("config.yaml", ["name=base", f"resume={base}"])).resume_from == base
    with pytest.raises(WrongInput, match="base.* is another run's, and .*branch holds checkpoints of its own"):
        prepare(load_config("config.yaml", ["name=branch", f"resume={base}"]))


def test_a_curriculum_begins_with_another_runs_rollouts_until_a_checkpoint_has_what_they_say(
    config: dict[str, Any],
) -> None:
    Path("config.yaml").write_text(yaml.safe_dump(config))
    plain = preflight.prepare(load_config("config.yaml", []))
    assert plain.estimates is None
    problem = plain.problems.at(0)
    scored: dict[str, Any] = {"problem": [problem.to_json()] * 2, "problem_id": [problem.id] * 2}
    parts = [[("ok", reward)] for reward in (0.0, 0.5)]
    ledger.write(Path("first/rollouts"), 1, [make_group(rewards=(1.0, 1.0), reward_parts=parts, **scored)])
    begun = preflight.prepare(load_config("config.yaml", ["data.curriculum=first"]))
    assert begun.estimates is not None
    assert (begun.estimates.known.count.sum(), begun.estimates.high) == (2, 0.5)  # by the score that is the accuracy
    assert f"data.curriculum: {Path('first').absolute()} has rollouts of 1 of 27 problems" in begun.notes
    order = curriculum_of(begun.config, begun.problems, begun.estimates)
    assert order is not None
    order.at(0)
    folder = commit(begun.config.run_dir / "checkpoints", 3, {
        "config.json": begun.config.model_dump_json(), "state.json": json.dumps({"cursor": {"low": 0, "done": []}}),
        "inputs.json": begun.fingerprints.to_json(),
    })  # fmt: skip
    with pytest.raises(WrongInput, match=r"another data\.curriculum \(first, now own\)"):
        preflight.prepare(load_config("config.yaml", ["data.curriculum=own"]))
    shutil.rmtree("first")
    with pytest.raises(WrongInput, match=r"data\.curriculum: .*first is not there"):
        preflight.prepare(load_config("config.yaml", ["data.curriculum=first"]))
    (folder / "manifest.json").unlink()
    order.save(folder, low=0)
    (folder / "manifest.json").write_text(json.dumps({"step": 3, "files": digests_in(folder)}))
    again = preflight.prepare(load_config("config.yaml", ["data.curriculum=first"]))
    assert again.resume_from == folder
    resumed = curriculum_of(again.config, again.problems, again.estimates)
    assert resumed is not None
    resumed.restore(folder, 0, own=True)
    assert [resumed.at(position) for position in range(27)] == [order.at(position) for position in range(27)]


# Mistakes that cost nothing to find are told together, before any code of the model is loaded.

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples/tiny-arithmetic"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that is in order, in a working directory of its own; each call of its reward leaves a mark."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from pathlib import Path\n"
        "def seen(completions, answer, **columns):\n"
        "    with Path('calls').open('a') as calls:\n"
        "        calls.write(type(completions[0]).__name__ + '\\n')\n"
        "    return [float(answer[0]), 0.0]\n"
        "def halves(completions, half, **columns):\n    return half\n"
    )
    Path("data.csv").write_text("question,answer\n" + "".join(f"{i} + 1,{i + 1}\n" for i in range(30)))
    config: dict[str, Any] = {
        "model": {"path": str(TINY), "dtype": "float32"},
        "data": {"path": "data.csv"},
        "rewards": ["mine.py:seen"],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


TOGETHER = {
    "files of every section": (
        ["data.eval.path=held.csv", "rewards=[mine.py:seen,yours.py:seen]", "model.adapter=nowhere"],
        ["error: model.adapter: .*nowhere", "error: data.eval.path: .*held.csv.*data.csv", "error: reward .*yours.py"],
    ),
    "columns, and rewards that ask for others": (
        ["data.eval.path=data.csv", "data.eval.split=test", "rewards=[mine.py:halves,mine.py:quarters]"],
        ["error: data.eval.split: .*got 'test'", "error: reward 'halves'.*half", "error: reward 'quarters'.*halves"],
    ),
    "keys, and what other keys name": (
        ["rollout.max_promt_length=64", "rewards=[mine.py:halves]"],
        ["config: rollout.max_promt_length: .*max_prompt_length", "error: reward 'halves'.*half"],
    ),
    "a rule between settings, and a column": (
        ["steps=3", "epochs=1", "data.prompt=query"],
        ["config: steps: does not go with epochs", "error: data.prompt: .*'query'; columns are question, answer"],
    ),
    "a wrong key of a section hides no missing file of it": (
        ["data.shufle=false", "data.path=dada.csv", "rewards.0.weight=much"],
        ["config: rewards.0.weight", "config: data.shufle: .*shuffle", "error: data.path: .*dada.csv.*data.csv"],
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_mistakes_of_all_sections_are_told_together(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, patterns = TOGETHER[case]
    assert main(["--config", "config.yaml", *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(patterns), lines
    for pattern in patterns:
        assert any(re.match(pattern, line) for line in lines), (pattern, lines)
    assert not Path("runs").exists()


@pytest.mark.parametrize("more", [["data.path=dada.csv"], ["rewards=[mine.py:halves]", "lerner.mode=full"]])
def test_they_are_told_without_the_code_of_a_model(more: list[str]) -> None:
    code = (
        "import sys; from learner.main import main\n"
        f"code = main({['--config', 'config.yaml', *more]!r})\n"
        "print(code, sorted({'torch', 'transformers', 'datasets', 'ray', 'vllm'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["2 []"], done.stdout + done.stderr


@pytest.mark.parametrize(("template", "given"), [("auto", "list"), ("none", "str")])
def test_a_function_is_tried_once_before_a_run(template: str, given: str) -> None:
    Path("calls").touch()
    preflight.prepare(load_config("config.yaml", [f"data.chat_template={template}"]))
    assert Path("calls").read_text().split() == [given]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", b"a,b\n1,00\n2,00\n3,00\nx,01\n"),  # a column of texts, by its last row
        ("rows.tsv", b"a\tb\n1\t2\n"),
        ("rows.jsonl", b'{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a": 4, "b": 5}\n'),
        ("rows.json", b'[{"a": 1}, {"a": 2}]'),
    ],
)
def test_the_first_rows_are_as_in_a_run_or_said_not_to_be(
    name: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(name).write_bytes(content)
    whole = list(sources.read(name, None, {}, None, 0))[:3]
    assert sources.first_rows(name, None, {}, None) == (whole, True)
    assert sources.first_rows(name, None, {}, 1) == (list(sources.read(name, None, {}, 1, 0)), True)
    monkeypatch.setattr(files, "SMALL", 5)
    begun = sources.first_rows(name, None, {}, None)
    assert not begun.whole
    assert [*map(list, begun.rows)] == ([] if "json" in name else [*map(list, whole)])


def test_of_parquet_the_columns_are_known_and_what_is_in_them_is_the_librarys_to_say() -> None:
    write_table(pa.table({"a": [[1.5], None] * 9, "b": ["x", "y"] * 9}), "rows.parquet")
    rows, whole = sources.first_rows("rows.parquet", "train[5:]", {}, None)
    assert (list(rows[0]), whole) == (["a", "b"], False)
    begun = preflight.look(load_config("config.yaml", ["data.path=rows.parquet", "data.prompt=b"]))
    assert (begun.wrong, begun.group) == ((), None)
    begun = preflight.look(load_config("config.yaml", ["data.path=rows.parquet", "data.prompt=c"]))
    assert "there is no column 'c'; columns are a, b" in begun.wrong[0]
    Path("rows.parquet").write_bytes(b"PAR1")
    assert sources.first_rows("rows.parquet", None, {}, None) == ((), False)  # `read` says why


def test_cells_of_a_large_csv_are_not_judged_by_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SMALL", 5)
    Path("data.csv").write_text("question,answer\n1984,a\n2024,b\n7,c\nWhen?,d\n")
    assert preflight.look(load_config("config.yaml", [])).wrong == ()


@pytest.mark.parametrize(("more", "tried"), [({}, True), ({"env": ["OPENAI_API_KEY"]}, False)])
def test_functions_that_may_ask_somebody_are_not_tried_for_a_mistyped_key(more: dict[str, Any], tried: bool) -> None:
    reward = json.dumps({"use": "mine.py:seen", **more})
    assert main(["--config", "config.yaml", f"rewards=[{reward}]", "steps=0"]) == 2
    assert Path("calls").exists() == tried


def test_a_run_that_goes_on_needs_room_for_one_more_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        "config.yaml", ["learner.mode=full", "learner.optimizer.kind=adamw", "learner.learning_rate=1e-6"]
    )
    monkeypatch.setattr(preflight, "free_disk", lambda _: 10_000)
    (told,) = preflight.look(config).wrong
    assert "output_dir: must have room for 2 checkpoints, " in told
    monkeypatch.setattr(checkpoint, "listing", lambda folder: [folder / "step-000001"])
    (told,) = preflight.look(config).wrong
    assert "room for 1 checkpoint, " in told
    assert preflight.look(config, cards_of("h100")).wrong == ()  # of another machine
    monkeypatch.setattr(preflight, "free_disk", lambda _: 2**40)
    assert preflight.look(config).wrong == ()


@pytest.mark.parametrize("tree", [{"data": 3}, {"model": {}}, {"rewards": "x"}, {"data": {"path": ["a"]}}])
def test_what_leaves_no_configuration_is_told_by_itself(tree: dict[str, Any]) -> None:
    Path("config.yaml").write_text(yaml.safe_dump({**yaml.safe_load(Path("config.yaml").read_text()), **tree}))
    with pytest.raises(WrongInput) as caught:
        load_config("config.yaml", [])
    assert isinstance(caught.value, WrongSettings)
    others = caught.value.others()
    assert others is None or next(iter(tree)) not in others[1]


# How many steps a run has that goes on with other settings, by hand.

PROBLEMS = 100  # of an epoch


def run_length_config(epochs: float, groups_per_step: int) -> RunConfig:
    return configure(epochs=epochs, learner={"groups_per_step": groups_per_step})


def checkpoint_at(folder: Path, step: int, consumed: int, then: RunConfig, total: int) -> Path:
    saved = folder / f"step-{step:06d}"
    saved.mkdir()
    state = {"cursor": {"low": consumed, "done": []}, "total_steps": total, "problems": PROBLEMS}
    (saved / "state.json").write_text(json.dumps(state))
    (saved / "config.json").write_text(then.model_dump_json())
    return saved


def test_batches_then_epochs_change(tmp_path: Path) -> None:
    """Each time the rest is divided: steps of the first batch size count as they were."""
    assert total_steps(run_length_config(1, 8), PROBLEMS, None) == 13
    first = checkpoint_at(tmp_path, 5, 40, run_length_config(1, 8), 13)
    assert total_steps(run_length_config(1, 4), PROBLEMS, first) == 5 + 15  # 60 are left
    second = checkpoint_at(tmp_path, 10, 60, run_length_config(1, 4), 20)
    assert total_steps(run_length_config(1, 4), PROBLEMS, second) == 20
    assert total_steps(run_length_config(2, 4), PROBLEMS, second) == 10 + 35  # 140 are left


# What may mean something else than the user believes is told before a run; what is meant as it is written is not.

NEEDED = ["model.path=m", "data.path=d", "rewards=[{use: number}]", "model.dtype=float32"]
GSPO = "learner.loss.ratio=gspo"


def told(*overrides: str, model: dict[str, Any] | None = None, row: dict[str, Any] | None = None) -> list[str]:
    return [*setting_notes(load_config(None, [*NEEDED, *overrides]), model or {}, row or {})]


def test_gspo_with_the_default_mean_weights_by_length() -> None:
    (line,) = told(GSPO)
    assert line.startswith("learner.loss.ratio: gspo with kind: dapo, the default, weights a completion by its length")
    assert told(GSPO, "learner.loss.kind=grpo") == told(GSPO, "learner.loss.kind=dapo") == []
    assert told("learner.loss.ratio=clip") == []


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "What is it?", "video": b"..."}, "is not given video, which reward functions are"),
        ({"images": ["a.png"], "audio": "a.wav", "text": "?"}, "is not given images, audio, which"),
    ],
)
def test_columns_that_a_model_of_text_is_not_given(row: dict[str, Any], named: str) -> None:
    (line,) = told(row=row)
    assert named in line
    assert told(row=row | dict.fromkeys(("images", "audio", "video"))) == []


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_a_model_wants(name: str) -> None:
    (line,) = told(model={name: "flash_attention_3"})
    assert line.startswith(f"model.path: {name} of its config.json, flash_attention_3, is not followed: ")
