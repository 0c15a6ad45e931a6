"""Every command that reads weights refuses, by name, those that are not whole, and starts and writes nothing. Run
folders of others: whatever lies in them, each command ends soon, with a page or with one sentence.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from cluster.errors import WrongInput
from cluster.files import digests_in
from examples.random_families import make_family
from learner.config import load
from learner.config.load import load_config
from learner.driver import checkpoint
from learner.driver.preflight import place_output
from learner.tools.cli import main
from learner.tools.report import page
from learner.tools.report.summary import SHOWN, read_run
from learner.tools.server import server_of
from rollout import ledger
from rollout.fakes import make_group
from rollout.schema import SCHEMA
from tests.learner.tools.exports import STEP
from tests.learner.tools.reports import blocks, report_run
from tests.rollout.data.test_model_files import (
    Change,
    changed,
    having,
    without,
)

NORM = "model.norm.weight"
SHORT = ["rollout.max_completion_length=64"]  # the tiny model has a context of 512
DAMAGES: dict[str, tuple[Change, str]] = {
    "lost": (without("model.layers.0.mlp.up_proj.weight"), "lacks 1 tensor .*: model.layers.0.mlp.up_proj.weight;"),
    "no numbers": (having(model__norm__weight=torch.full((64,), -torch.inf)), "in 1 tensor: model.norm.weight;"),
}


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, tiny_path: str, tmp_path: Path) -> tuple[Path, str]:
    change, message = DAMAGES[request.param]
    return changed(Path(shutil.copytree(tiny_path, tmp_path / "damaged")), change), message


def refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert re.search(message, said[0]), said


def test_of_a_base(
    damaged: tuple[Path, str], made: Path, adapter_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, message = damaged
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    run = tmp_path / "mine"
    shutil.copytree(made, run)
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["model"]["path"] = str(base)
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(adapter_path, run / "adapter", dirs_exist_ok=True)
    data, out = ["--data", "rg:chain_sum", "--limit", "2", *SHORT], str(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    for words, key in (
        (["eval", "--model", str(base), *data, "--reward", "format"], "model.path"),
        (["export", str(run), out, "--model", str(base)], "model.path"),
        (["serve", str(run), "--port", "0"], "model.path"),
        (["reward-model", "train", str(tmp_path / "pairs.jsonl"), "--model", str(base), "--out", out], "--model"),
    ):
        refused(words, f"^error: {key}: {base} .*{message}", capsys)
        assert sorted(tmp_path.rglob("*")) == before


def test_of_an_adapter(made: Path, tiny_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "mine"
    shutil.copytree(made, run)
    folder = run / "checkpoints" / checkpoint.name_of(STEP)
    file = folder / "trainer" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file(tensors | {name: tensors[name] * torch.nan}, file)
    (folder / checkpoint.MANIFEST).unlink()
    (folder / checkpoint.MANIFEST).write_text(json.dumps({"step": STEP, "files": digests_in(folder)}))
    shutil.copytree(folder / "trainer", run / "adapter", dirs_exist_ok=True)
    message, out = f"not finite .nan or inf. in 1 tensor: {name};", str(tmp_path / "out")
    data = ["--data", "rg:chain_sum", "--limit", "2", "--reward", "format", *SHORT]
    refused(["export", str(run), out], f"^error: RUN: .*{message}", capsys)
    refused(["export", str(run), out, "--adapter-only"], f"^error: RUN: .*{message}", capsys)
    refused(["serve", str(run), "--port", "0"], f"^error: RUN: .*{message}", capsys)
    words = ["eval", "--model", tiny_path, "--adapter", str(run / "adapter"), *data]
    refused(words, f"^error: --adapter: .*{message}", capsys)
    assert not Path(out).exists()


def test_the_server_of_a_model_that_transformers_knows_asks_it(made: Path, tmp_path: Path) -> None:
    """What the server itself then says of it: tests/rollout/data/test_model_files.py."""
    run = tmp_path / "mine"
    shutil.copytree(made, run)
    shutil.copytree(run / "checkpoints" / checkpoint.name_of(STEP) / "trainer", run / "adapter", dirs_exist_ok=True)
    assert "vllm.entrypoints.openai.api_server" in server_of(run, "127.0.0.1", 1, []).command
    content = load_config(str(run / "config.yaml"), []).model_dump(mode="json")
    content["model"]["path"] = str(make_family(tmp_path / "granite", "granite"))
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    command = server_of(run, "127.0.0.1", 1, []).command
    assert command[2:5] == ["-m", "rollout.vllm.served", str(tmp_path / "granite")]


# Run folders of others: whatever lies in them, each command ends soon, with a page or with one sentence.


def link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def of(text: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 * 2**30)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
MAKERS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo, "device": link, "socket": a_socket, "folder": Path.mkdir, "sparse": sparse,
    "deep": of('{"a": ' * 20_000), "aliases": of(LAUGHS), "latin": of(b"name: \xe9t\xe9\n"), "nothing": of(""),
    "of YAML": of("steps: 2025-02-03\nmodel: {path: [1], revision: .inf}\n? [1]\n: !!binary aGk=\n3: .nan\n"),
    "of JSON": of('{"step": Infinity, "to": NaN, "learner": {"planned": NaN, "measured": 3, "parts": {"a": 1e999}}}'),
    "strange": of("learner: {algorithm: grpo, groups_per_step: -3, loss: {advantage: {}}}\nmodel: {path: 'a\\0'}\n"),
}  # fmt: skip

NO_LINES = ("FIFO", "device", "socket", "folder", "sparse")
REFUSED = {  # by replay, which passes over lines of policies.jsonl that are none
    "config.yaml": "config.yaml was written by another version",
    "metrics.jsonl": "no step with both its rollouts and its line in metrics.jsonl",
    "policies.jsonl": "policies.jsonl",
}


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "plan.json", "phases.jsonl", "policies.jsonl", ".lock"]
)
def test_a_strange_file_is_a_remark_of_the_page_and_a_sentence_elsewhere(
    name: str, made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = report_run(tmp_path)
    with (run / "config.yaml").open("a") as file:
        file.write("data: {path: d}\nrewards: [format]\n")  # whole, so that replay reads what else lies there
    (run / name).unlink(missing_ok=True)
    MAKERS[made](run / name)
    assert main(["report", str(run)]) == 0
    (told,) = blocks((run / "report.html").read_text())["head"]["runs"]
    if made in ("FIFO", "device", "socket", "folder") and name not in (".lock", "policies.jsonl"):
        assert any(f"{name} cannot be read" in one for one in told["remarks"])
    capsys.readouterr()
    assert main(["replay", str(run), "--from", "1"]) == 2  # there is no checkpoint, which is seen when all is read
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    refused = REFUSED.get(name, "") if name != "policies.jsonl" or made in NO_LINES else ""
    assert refused in said
    assert bool(refused) != said.startswith("error: --from: must be 0 or the step of a kept checkpoint (none)")


def test_a_page_is_written_in_the_place_of_what_is_there(tmp_path: Path) -> None:
    run, kept = report_run(tmp_path), tmp_path / "kept"
    kept.write_text("mine")
    (run / "report.html.partial").symlink_to(kept)
    assert main(["report", str(run)]) == 0
    assert kept.read_text() == "mine"


def problem(value: Any) -> dict[str, Any]:
    return {"problem": [value if isinstance(value, str) else json.dumps(value)] * 2}


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "deep": (problem('{"messages":' * 9000), "nested at most 200 deep"),
    "deep columns": (problem({"messages": "a", "columns": json.loads("[" * 250 + "]" * 250)}), "nested at most 200"),
    "text": (problem('"question"'), "column problem must hold a mapping, got str"),
    "number": (problem({"messages": 3.5, "columns": {}}), "must have messages: a text, or a list of mappings"),
    "texts": (problem({"messages": ["a"], "columns": {}}), "must have messages: a text, or a list of mappings"),
    "columns": (problem({"messages": "a", "columns": []}), "must have columns, a mapping"),
    "prefilled": (problem({"messages": "a", "columns": {}, "prefilled": 1}), "prefilled, a text"),
    "turns": ({"messages": ['{"role": "user"}', None]}, "column messages must hold a list of mappings"),
    "too few": ({"token_versions": [[0], []]}, "column token_versions must hold a value for each of completion_ids"),
    "no part": ({"reward_parts": [[None], []]}, "column reward_parts must hold no nulls in its lists"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_are_not_whole_are_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values, said = ROWS[kind]
    run = report_run(tmp_path)
    table = make_group(7)
    for name, column in values.items():
        table = table.set_column(
            SCHEMA.get_field_index(name), SCHEMA.field(name), pa.array(column, SCHEMA.field(name).type)
        )
    pq.write_table(table, run / "rollouts" / "step-000002.parquet")
    assert main(["rollouts", "show", str(run), "--step", "2"]) == 2
    assert said in capsys.readouterr().err
    assert main(["report", str(run)]) == 0
    assert any(said in one for one in blocks((run / "report.html").read_text())["head"]["runs"][0]["remarks"])


def few_bytes_for_many(path: Path) -> None:
    """Ten thousand times the same text, which Parquet holds once."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), pa.array(["x" * 2**14]))
    pq.write_table(pa.table({"completion": text}), path, store_schema=False)  # else it stays a dictionary


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "must be a regular file, and is a FIFO"),
        (Path.mkdir, "must be a regular file, and is a folder"),
        (sparse, "cannot be read"),
        (of(b"PAR1PAR1"), "cannot be read"),
        (few_bytes_for_many, "must take at most 64 MiB in memory, and takes more"),
        (lambda path: pq.write_table(make_group(1).slice(0, 0), path), "holds no completions"),
        (lambda path: pq.write_table(pa.table({"group_id": [1]}), path), "schema version must be 7, got none"),
    ],
)
def test_step_files_that_are_none(
    make: Callable[[Path], object],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "MOST", 2**26)
    run = report_run(tmp_path)
    make(run / "rollouts" / "step-000009.parquet")
    assert main(["rollouts", "show", str(run)]) == 2
    assert said in capsys.readouterr().err
    assert main(["report", str(run)]) == 0


def test_numbers_that_are_not_finite_are_none_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report_run(tmp_path)
    ledger.write(run / "rollouts", 3, [make_group(1, rewards=[float("inf"), float("-inf")])])
    assert main(["rollouts", "show", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert [one["reward"] for one in found] == [None, None]
    (run / "config.yaml").write_text("learner: {algorithm: grpo, loss: {advantage: batch}}\n")
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.partial", "timeline.json", "tracker_id", "rollouts"])
@pytest.mark.parametrize("made", ["FIFO", "device"])
def test_a_run_does_not_begin_where_its_files_are_none(name: str, made: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    MAKERS[made](tmp_path / "run" / name)
    config = load.load_config("configs/local_cpu.yaml", ["name=run", f"output_dir={tmp_path}"])
    with pytest.raises(WrongInput, match=rf"output_dir: .*{name} must be a (regular file|folder).*another name="):
        place_output(config)


def test_of_a_long_run_the_curves_keep_what_counts(tmp_path: Path) -> None:
    run = report_run(tmp_path)
    last = 3 * SHOWN
    rows = [
        {"step": s, "at": 100.0 + s, "time/step": 0.5} | ({"eval/accuracy": s} if s % 999 == 7 else {})
        for s in range(last + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "phases.jsonl").write_text(json.dumps({"at": 100.0 + 333, "wall": 100.0}) + "\n")
    found = read_run(run)
    assert len(found.steps) < SHOWN + 10
    assert {0, 1, last} | {s for s in range(last) if s % 999 == 7} <= {*found.steps}
    assert found.metrics["eval/accuracy"][found.steps.index(1006)] == 1006
    assert len(read_run(run, every=True).steps) == last + 1
    assert f"{len(found.steps):,} of {last + 1:,} steps are drawn" in "".join(found.remarks)
    assert main(["report", str(run)]) == 0
    (told,) = blocks((run / "report.html").read_text())["head"]["runs"]
    assert told["starts"][0]["steps"] == "steps 233 to 333"
    assert ["training", f"{(last + 1) / 2:.0f} s"] in told["facts"]


def test_a_page_holds_so_many_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = report_run(tmp_path)
    for step in range(3, 9):
        ledger.write(run / "rollouts", step, [make_group(step)])
    monkeypatch.setattr(page, "MOST_COMPLETIONS", 9)
    assert main(["report", str(run)]) == 0
    found = blocks((run / "report.html").read_text())
    assert [name for name in found if name.startswith("step-")] == ["step-1", "step-5", "step-8"]
    assert "Completions of 3 of 8 steps are shown" in found["head"]["runs"][0]["remarks"][-1]
