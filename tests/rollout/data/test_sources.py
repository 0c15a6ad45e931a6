"""Files and folders of this machine: every shape of data that people have, and every way in which it is broken.
Which problems are held out of training, and what is said where they cannot be.
"""

import bz2
import csv
import gzip
import io
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.errors import WrongInput
from rollout.config import DataConfig, EvalConfig
from rollout.data import files, sources, tables
from rollout.data.chat import Messages, Prompt
from rollout.data.problems import load
from rollout.data.sources import read

ROWS = [{"question": f"What is {i}+{i}?", "answer": 2 * i} for i in range(20)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def as_csv() -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ROWS[0])
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


FILES = {
    "a.jsonl": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES + b"\n\n",
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": LINES,
    "a.csv": as_csv(),
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.bz2": bz2.compress(LINES),
    "a.csv.gz": gzip.compress(as_csv()),
    "[a] *.csv": as_csv(),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_rows_from_every_kind_of_file(name: str) -> None:
    Path(name).write_bytes(FILES[name])
    assert [*read(name, "train", {}, None, 0)] == ROWS
    assert [*read(name, "train[:50%]", {}, 7, 0)] == ROWS[:7]
    assert [*read(name, None, {}, None, 0, files.EVAL)] == ROWS
    assert sources.label(str(Path(name).absolute()), "train") == name.partition(".")[0]


@pytest.mark.parametrize(
    ("split", "rows"),
    [("train[:3]", ROWS[:3]), ("train[-2:]", ROWS[-2:]), ("train[10%:20%]", ROWS[2:4]), ("train[5:]", ROWS[5:])],
)
def test_a_part_of_a_file(split: str, rows: list[dict[str, Any]]) -> None:
    Path("a.jsonl").write_bytes(LINES)
    pq.write_table(pa.Table.from_pylist(ROWS), "a.parquet")
    assert [*read("a.jsonl", split, {}, None, 0)] == rows
    assert [*read("a.parquet", split, {}, None, 0)] == rows


def test_folders_of_save_to_disk() -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk("one")
    datasets.DatasetDict(train=table, test=table.select(range(4))).save_to_disk("two")
    assert [*read("one", "train", {}, None, 0)] == ROWS
    assert [*read("one", None, {}, None, 0, files.EVAL)] == ROWS
    assert [*read("one", "train[:2]", {}, None, 0)] == ROWS[:2]
    assert [*read("two", "test", {}, 3, 0)] == ROWS[:3]
    assert [*read("two", None, {}, None, 0, files.EVAL)] == ROWS[:4]
    with pytest.raises(WrongInput, match=r"^data\.split: .*validation.* got 'validation'$"):
        read("two", "validation", {}, None, 0)


def test_a_delimiter_and_rows_of_different_columns() -> None:
    Path("a.csv").write_text("question;answer\n1+1?;2\n")
    assert [*read("a.csv", "train", {"sep": ";"}, None, 0)] == [{"question": "1+1?", "answer": 2}]
    Path("a.jsonl").write_text('{"question": "x"}\n{"question": "y", "hint": {"a": 1}, "n": 123456789012345678901}\n')
    first, second = read("a.jsonl", "train", {}, None, 0)
    assert first == {"question": "x", "hint": None, "n": None}
    assert second["n"] == 123456789012345678901  # exact, where datasets makes a float of it


CELLS: dict[str, list[float | str | None]] = {
    "2||7": [2, None, 7],
    "None|NA|nan|null|": ["None", "NA", "nan", "null", None],
    "00712|1234": ["00712", "1234"],
    f"{10**30}|-5| 6": [10**30, -5, 6],
    "1.10|2": ["1.10", "2"],
    "0.5||-2|1e-07": [0.5, None, -2, 1e-07],
    "1e400|inf": ["1e400", "inf"],
    "+5|-0|٣": ["+5", "-0", "٣"],
    "true|False": ["true", "False"],
    "True||False": [True, None, False],
    "|": [None, None],
    '"2"|"a, b"': ["2", "a, b"],
}


@pytest.mark.parametrize("written", CELLS)
def test_cells_of_csv_are_what_is_written_in_them(written: str) -> None:
    lines = [f"q,{cell}" for cell in written.split("|")]
    Path("a.csv").write_text("\n".join(["question,answer", *lines, ""]))
    found = [row["answer"] for row in read("a.csv", "train", {}, None, 0)]
    assert found == CELLS[written]
    assert [type(cell) for cell in found] == [type(cell) for cell in CELLS[written]]


def test_what_is_asked_of_a_csv_file_goes_before() -> None:
    Path("a.csv").write_text("answer,id,place,n\n1.10,7,007,7\nNA,8,008,8\n")
    asked = {"dtype": {"answer": "float", "id": "str"}, "keep_default_na": True}
    rows = read("a.csv", "train", asked, None, 0)
    assert [[*row.values()] for row in rows] == [[1.1, "7", "007", 7], [None, "8", "008", 8]]
    assert [*read("a.csv", "train", {"dtype": "str", "usecols": ["n"]}, None, 0)] == [{"n": "7"}, {"n": "8"}]


NAMED: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "jsonl": (
        (
            '{"question": "a", "answer": "2024-01-05"}\n{"question": "00712", "answer": null}\n'
            '{"question": "NA", "answer": 123456789012345678901}\n'
        ),
        [("a", "2024-01-05"), ("00712", None), ("NA", 123456789012345678901)],
    ),
    "csv": ("question,answer\na,2024-01-05\nNA,00712\n1e3,\n", [("a", "2024-01-05"), ("NA", "00712"), ("1e3", None)]),
    "tsv": ("question\tanswer\na, b\t007\nc\t7.10\n", [("a, b", "007"), ("c", "7.10")]),
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_file_has_the_same_values_however_it_is_named(kind: str) -> None:
    text, cells = NAMED[kind]
    wanted = [dict(zip(("question", "answer"), row, strict=True)) for row in cells]
    for folder, written in (("folder", text.encode()), ("packed", gzip.compress(text.encode()))):
        Path(folder).mkdir()
        Path(folder, f"train.{kind}{'.gz' * (folder == 'packed')}").write_bytes(written)
    Path("zipped").mkdir()
    with zipfile.ZipFile("zipped/train.zip", "w") as archive:
        archive.writestr(f"train.{kind}", text)
    file, builder = f"folder/train.{kind}", "json" if kind == "jsonl" else "csv"
    splits = {"train": "none.txt", "held": [file]}
    Path("none.txt").write_text("")
    named: list[tuple[str, str, dict[str, Any]]] = [
        (file, "train", {}), ("folder", "train", {}), (f"fold*/*.{kind}", "train", {}), ("packed", "train", {}),
        ("zipped", "train", {}), (builder, "train", {"data_files": file}), (builder, "held", {"data_files": splits}),
        ("folder", "train", {"data_files": f"*.{kind}"}),
    ]  # fmt: skip
    for path, split, args in named:
        assert [*read(path, split, args, None, 0)] == wanted, (path, split)
        assert [*read(path, f"{split}[1:]", args, 1, 0)] == wanted[1:2], (path, split)


def test_what_of_a_folder_is_not_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    Path("folder").mkdir()
    for name, content in (("train.csv", as_csv()), ("more.jsonl", LINES), ("dataset_infos.json", b"{}")):
        Path("folder", name).write_bytes(content)
    assert [*read("folder", "train", {}, None, 0)] == ROWS
    assert (
        "data.path: the folder folder is read as train, without more.jsonl; to read others name a file, or a pattern"
        in caplog.text
    )
    caplog.clear()
    assert [*read("folder", "train", {"data_files": "train.csv"}, None, 0)] == ROWS
    Path("folder/more.jsonl").rename("folder/test.csv")
    Path("folder/test.csv").write_bytes(as_csv())
    assert [*read("folder", "train", {}, None, 0)] == ROWS
    assert not caplog.text


MISFITS = {
    "the first row has one more": ("Add 1, then 2,3\nb,4\n", "line 2 must have 2 fields as its header, got 3"),
    "all rows have one more": ("Add 1, then 2,3\nAdd 4, then 5,9\n", "line 2 must have 2 fields .* got 3"),
    "one has fewer": ("a,1\nb\n", "line 3 must have 2 fields as its header, got 1: 'b'"),
    "a row behind a quoted line end": ('"a\nb, c",1\nd,2,3\n', "line 4 must have 2 fields as its header, got 3"),
    "an empty field more": ("a,1,\nb,2,\n", "line 2 must have 2 fields as its header, got 3"),
    "a space before the quote": ('a, "x, y"\n', "line 2 must have 2 fields as its header, got 3"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_row_that_does_not_fit_its_header_is_refused_by_its_line(case: str) -> None:
    written, sentence = MISFITS[case]
    Path("folder").mkdir()
    Path("folder/train.csv").write_text("question,answer\n" + written)
    Path("a.csv.gz").write_bytes(gzip.compress(("question,answer\r\n" + written.replace("\n", "\r\n")).encode()))
    for path in ("folder/train.csv", "folder", "fold*/*.csv", "a.csv.gz"):
        with pytest.raises(WrongInput, match=rf"^data\.path: .*{sentence}.*; put a field that holds the separator"):
            read(path, "train", {}, None, 0)


@pytest.mark.parametrize(
    ("name", "written", "sep"),
    [
        ("a.csv", "prompt|gold\nAdd 1, then 2|3\n", "|"),
        ("a.csv", "prompt\tgold\na\t1\n", "\\t"),
        ("a.tsv", "prompt,gold\na,1\n", ","),
    ],
)
def test_a_header_that_is_divided_by_something_else_names_it(name: str, written: str, sep: str) -> None:
    Path(name).write_text(written)
    with pytest.raises(WrongInput, match=rf'line 1 must name columns .*; set data.args={{sep: "{re.escape(sep)}"}}'):
        read(name, "train", {}, None, 0)
    given = {"sep": sep.replace("\\t", "\t")}
    assert next(iter(read(name, "train", given, None, 0))).keys() == {"prompt", "gold"}
    own = {"sep": "\t" if name == "a.tsv" else ";"}
    Path(name).write_text(written.splitlines()[0] + "\none\n")
    assert [*read(name, "train", own, None, 0)] == [{written.splitlines()[0]: "one"}]  # a name, if it is said


@pytest.mark.parametrize(
    "args",
    [
        {"comment": "#"}, {"engine": "python"}, {"on_bad_lines": "skip"}, {"sep": "[,]", "engine": "python"},
        {"skiprows": [1]},
    ],
)  # fmt: skip
def test_nor_does_one_pass_whose_lines_pandas_alone_can_divide(args: dict[str, Any]) -> None:
    Path("a.csv").write_text('question,answer\n#x,0\nb,1\nc\nd,2\n"e",\n')
    with pytest.raises(WrongInput, match=r"^data\.path: a\.csv row \d must have 2 fields .*, got 1: 'c'; correct"):
        read("a.csv", "train", args, None, 0)
    Path("a.csv").write_text("question,answer\n#x,0\nb,1\nd,\nc,2\n")
    rows = [*read("a.csv", "train", args, None, 0)]
    assert rows[-3:-1] == [{"question": "b", "answer": 1}, {"question": "d", "answer": None}]


@pytest.mark.parametrize("written", ['a,"1\nb,"2"\n', 'a,"5"" tall" or so\n'])
def test_quotes_that_end_within_a_field_are_refused_and_may_be_said_to_be_none(written: str) -> None:
    """pandas makes one row of the first two."""
    Path("a.csv").write_text("question,answer\n" + written)
    with pytest.raises(WrongInput, match=r"^data\.path: a\.csv line 2 cannot be read: .*; correct it: a quote"):
        read("a.csv", "train", {}, None, 0)
    assert read("a.csv", "train", {"quoting": 3}, None, 0)[0]["answer"] == written.split("\n")[0].partition(",")[2]


@pytest.mark.parametrize("index", [0, "question"])
def test_a_row_has_no_index_into_which_a_field_could_go(index: Any) -> None:
    Path("a.csv").write_text("question,answer\nAdd 1, then 2,3\n")
    with pytest.raises(WrongInput, match=r"^data\.args: index_col is not taken, .* got .*; leave it out"):
        read("a.csv", "train", {"index_col": index}, None, 0)
    with pytest.raises(WrongInput):  # of all rows that are longer pandas would take the first field for one
        read("a.csv", "train", {"index_col": None}, None, 0)


def test_a_header_names_each_column_once_and_files_that_are_read_together_have_one() -> None:
    Path("a.csv").write_text("question,answer,answer\na,1,2\n")
    with pytest.raises(WrongInput, match=r"^data\.path: a\.csv line 1 must name each column once, got 'answer' twice"):
        read("a.csv", "train", {}, None, 0)
    Path("a.csv").write_text("question,answer\na,1\n")
    Path("b.csv").write_text("question,gold\nb,2\n")
    with pytest.raises(WrongInput, match=r"b\.csv has the columns question, gold, and another file question, answer"):
        read("*.csv", "train", {}, None, 0)
    Path("b.csv").write_text("answer,question\n2,b\n")
    assert [*read("*.csv", "train", {}, None, 0)] == [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
    Path("c.jsonl").write_bytes(LINES)
    for pattern, told in (("[bc].*", "must be of one kind, got b.csv and c.jsonl"), ("*.parquet", "none fits")):
        with pytest.raises(WrongInput, match=rf"^data\.path: .*{told}"):
            read(pattern, "train", {}, None, 0)


def test_rows_are_read_by_their_positions_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory or in a file, in blocks or behind them, with the columns of all."""
    monkeypatch.setattr(tables, "MEMORY", 1000)
    given: list[dict[str, Any]] = [
        {"a": i} if i % 3 else {"b": [i, None, "\u00e9"], "c": {"d": 10**30}} for i in range(200)
    ]
    wanted = [{"b": None, "c": None, "a": None} | row for row in given]
    packed = tables.Packed()
    for row in given:
        packed.add(row)
    assert [*packed] == wanted == [packed[i] for i in range(200)]
    assert [*packed[0]] == ["b", "c", "a"]
    assert (packed[-1], packed[120:131], len(packed)) == (wanted[-1], wanted[120:131], 200)
    assert [*packed.part(1, 3)] == given[1:3]
    packed[5]["a"] = "changed"
    assert packed[5] == wanted[5]
    with pytest.raises(IndexError):
        packed[200]


def nested(depth: int) -> bytes:
    return b'{"question": ' + b"[" * depth + b"]" * depth + b"}"


BROKEN = {
    "latin.jsonl": (LINES + '{"question": "caf\xe9"}'.encode("latin-1"), "line 21 must be UTF-8, got the byte 0xe9"),
    "latin.csv": (
        "question\ncaf\xe9\n".encode("latin-1"),
        r"line 2 must be UTF-8, got the byte 0xe9; save it as .* \(data.args: {encoding: \"...\"}\)",
    ),
    "deep.jsonl": (nested(200_000), "line 1 is nested too deep; take levels out"),
    "nested.jsonl": (nested(100), "line 1 is nested more than 64 deep; take levels out"),
    "digits.jsonl": (b'{"question": ' + b"9" * 10_000 + b"}", "line 1 cannot be read: Exceeds the limit"),
    "half.jsonl": (b'{"question": "\\ud800"}', "line 1 holds half a surrogate pair"),
    "scalars.jsonl": (b"1\n", "line 1 must be a mapping of columns, got int"),
    "torn.jsonl": (LINES[:-20], "line 20 cannot be read: Unterminated string starting at character 13; correct it"),
    "pretty.json": (json.dumps(ROWS[0], indent=1).encode(), "line 1 cannot be read"),
    "scalars.json": (b"[1]", "entry 1 must be a mapping of columns, got int"),
    "cut.jsonl.gz": (gzip.compress(LINES)[:-12], "line [0-9]+ cannot be read: Compressed file ended"),
    "plain.jsonl.gz": (LINES, "line 1 cannot be read: Not a gzipped file"),
    "ragged.csv": (b"a,b\n1,2\n1,2,3\n", "line 3 must have 2 fields as its header, got 3: '1 . 2 . 3'; put a field"),
    "broken.parquet": (b"PAR1 no", "cannot be read: Parquet"),
    "empty.csv": (b"", r"data\.path: "),
    "empty.jsonl": (b"", "must hold at least one problem"),
    "train": (LINES, r"train is there, but its name must end in one of \.jsonl, \.json, \.csv, \.parquet"),
    "train.txt": (LINES, "is there, but its name must end in one of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_one_line(name: str) -> None:
    content, sentence = BROKEN[name]
    Path(name).write_bytes(content)
    with pytest.raises(WrongInput, match=sentence) as caught:
        read(name, "train", {}, None, 0)
    assert str(caught.value).startswith(f"data.path: {name}") or name in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("path", "split", "args", "sentence"),
    [
        ("a.jsonl", "test", {}, r"data\.split: the one split of a file is train, or a part .* got 'test'"),
        ("a.jsonl", "train[:x]", {}, r"data\.split: Unrecognized instruction format"),
        ("a.jsonl", "train[:2]+train[4:]", {}, r"data\.split: must be one part of one split"),
        ("a.jsonl", "train", {"sep": ";"}, r"data\.args: a JSON file takes none, got sep; leave it out"),
        ("a.csv", "train", {"password": "hunter2"}, r"split train, args password\) cannot be read"),
        ("rg:chain_sum", "test", {}, r"data\.split: a reasoning_gym task has no splits, got 'test'"),
        ("rg:chain_sum", "train", {"min_terms": "hunter2"}, r"settings of the task chain_sum, got min_terms"),
        ("~nosuchuser/a.jsonl", "train", {}, r"data\.path: must be a path or a hub name, got '~nosuchuser"),
        ("b" * 300 + ".jsonl", "train", {}, r"data\.path: (must be a path|file must exist)"),
        (
            "/no/such/thing",
            "train",
            {},
            r"data\.path: file must exist, got /no/such/thing; there is no",
        ),
    ],
)
def test_nothing_that_is_given_is_ignored(path: str, split: str, args: dict[str, Any], sentence: str) -> None:
    Path("a.jsonl").write_bytes(LINES)
    Path("a.csv").write_bytes(as_csv())
    with pytest.raises(WrongInput, match=sentence) as caught:
        read(path, split, args, None, 0)
    assert "hunter2" not in str(caught.value)  # values of data.args may be secrets


@pytest.mark.parametrize(("names", "key"), [(files.DATA, r"data\.size"), (files.EVAL, r"data\.eval\.size")])
def test_a_hundred_million_problems_are_refused_early(
    names: files.Names, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PROBE_S", 0.2)
    with pytest.raises(WrongInput, match=rf"^{key}: \d+ of 100000000 took \d+ s, .* take \d+ s of 60 .*; lower {key}$"):
        read("rg:chain_sum", None, {}, 100_000_000, 0, names, deadline_s=60)


def test_the_first_piece_says_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("rollout.data.sources.time.monotonic", lambda: now)
    one = sources.Pace(10, 4.0)
    now = 100.0
    assert one.late(1) == ""
    now = 102.9
    assert one.late(2) == ""  # too early to say
    now = 103.0
    assert one.late(5) == "5 of 10 took 3 s, so that all would take 7 s of 4"
    assert one.late(8) == ""


# Which problems are held out of training, and what is said where they cannot be.


class Letters:
    """The text's bytes as token ids; texts that begin with `slow` take 0.02 s by `self.now`, a clock of its own."""

    def __init__(self, slow: str = "?") -> None:
        self._slow = slow
        self.now = 0.0

    def render(self, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        text = messages[-1]["content"]
        if text.startswith(self._slow):
            self.now += 0.02
        return tuple(map(dict, messages)), tuple(text.encode())

    def count(self, text: str) -> int:
        return len(text.encode())


def jsonl(file: Path, questions: Sequence[str]) -> str:
    file.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    return str(file)


def config(path: str, /, **eval_: Any) -> DataConfig:
    return DataConfig(path=path, eval=EvalConfig(**eval_))


def test_a_prompt_that_training_repeats_stays_repeated(tmp_path: Path) -> None:
    """A tenth of the twenty different ones is held out, each of which is there three times."""
    problems, held_out = load(config(jsonl(tmp_path / "a.jsonl", [f"q{i // 3}" for i in range(60)])), Letters(), 99, 0)
    assert (len(problems), len(held_out)) == (54, 2)


def test_arguments_are_those_of_their_path(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question;answer\na;1\n")
    data = config(str(tmp_path / "a.csv"), path=jsonl(tmp_path / "b.jsonl", ["b"]))
    _, (held_out,) = load(data.model_copy(update={"args": {"sep": ";"}}), Letters(), 99, 0)
    assert held_out.columns == {"question": "b"}


@pytest.mark.parametrize(("slow", "key"), [("train", r"data\.size"), ("held", r"data\.eval\.size")])
def test_the_problems_that_take_too_long_are_named(
    slow: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = Letters(slow)
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=lambda: letters.now))
    train, held = (jsonl(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(900)]) for name in ("train", "held"))
    with pytest.raises(WrongInput, match=f"^{key}: tokenising .* took .*; lower {key}$"):
        load(config(train, path=held), letters, 99, 0, deadline_s=2)
