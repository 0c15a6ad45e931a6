"""Files that somebody else made: what is read, what is refused in a sentence; nothing waits, or fills memory."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.errors import WrongInput
from cluster.reading import json_value, lines, opened, read_bytes, read_mapping, read_text
from cluster.telemetry import MOST_BAD, MetricsFile


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 * 2**30)


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "must be a regular file, and is a FIFO"),
    "link to a device": (lambda path: path.symlink_to("/dev/urandom"), "must be a regular file, and is a device"),
    "folder": (Path.mkdir, "must be a regular file, and is a folder"),
    "socket": (a_socket, "must be a regular file, and is a socket"),
    "link to itself": (lambda path: path.symlink_to(path), "cannot be read (Too many levels of symbolic links)"),
    "sparse": (sparse, "must have at most 64 MiB, and has more"),
    "no UTF-8": (lambda path: path.write_bytes(b"ab\xe9"), "must be UTF-8 text, got the byte 0xe9 at 2"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_of_text_is_a_sentence(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    file = Path("read")
    make, said = NO_FILES[kind]
    make(file)
    with pytest.raises(WrongInput) as raised:
        read_text(file)
    assert str(raised.value) == f"read {said}"


def test_a_file_that_is_not_there_and_one_behind_a_link(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "a" / "b"):
        with pytest.raises(FileNotFoundError), opened(path):
            pass
    (tmp_path / "there").write_text('{"a": [NaN, -Infinity]}')
    (tmp_path / "link").symlink_to("there")
    assert str(read_mapping(tmp_path / "link")) == "{'a': [nan, -inf]}"
    with pytest.raises(WrongInput, match=r"at most 9\.5.*e-05 MiB"):  # it has no size, and more than it says
        read_bytes(Path("/proc/self/status"), 100)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a":' * 90_000, "what must be nested at most 200 deep"),
        ("[" * 300 + "]" * 300, "what must be nested at most 200 deep"),
        ("9" * 5000, "what must be JSON: Exceeds the limit"),
        ("{'a': 1}", "what must be JSON: Expecting property name"),
        ("", "what must be JSON: Expecting value"),
    ],
)
def test_json_that_is_none_or_too_deep(text: str, said: str) -> None:
    with pytest.raises(WrongInput) as raised:
        json_value(text, "what")
    assert str(raised.value).startswith(said)
    assert json_value("[" * 200 + "]" * 200, "what")


def test_lines_are_found_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.reading.BLOCK", 7)
    file = tmp_path / "lines"
    file.write_bytes(b"one\n\nthree and more\r\nlast")
    assert [*lines(file)] == [(0, b"one"), (4, b""), (5, b"three and more\r"), (21, b"last")]
    with pytest.raises(WrongInput, match=r"line 3 must have at most .* MiB"):
        [*lines(file, 8)]


def test_metrics_are_found_by_step_and_those_of_others_are_parsed(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    own = [{"step": s, "at": 10.5 + s, "eval/accuracy" if s == 2 else "x": 1.0, "time/step": 0.25 * s} for s in (1, 2)]
    other = [
        '{"at": "2026-01-01", "step": 7}', '{"step": 2024-01-01}', '{"step": NaN}', '{"step": true}', '{"step": -1}',
        '{"step": 1e3}', f'{{"step": {10**17}}}', f'{{"step": {"8" * 6000}}}', '{"step": 3, "at": 2.0, "x',
        '{"step": 4, "at": 2.0, "x": 1.}', "[" * 50_000,
    ]  # fmt: skip
    file.write_text("\n".join([json.dumps(own[0]), *other, json.dumps(own[1]), json.dumps(own[1] | {"x": 3})]) + "\n")
    found = MetricsFile(file)
    assert (found.steps, found.total, found.bad, found.first_bad) == ([1, 2, 4, 7], 14, 9, 3)
    assert ([*found.rows([1, 2, 4])], found.evaluated()) == ([own[0], own[1] | {"x": 3}, {}], [2])
    assert (found.seconds(), found.seconds(1), found.time(2)) == (0.75, 0.25, 12.5)
    assert [*found.whole(2)] == [f"{json.dumps(row)}\n".encode() for row in (own[0], own[1] | {"x": 3})]
    file.write_text("\n" * (MOST_BAD + 1))
    with pytest.raises(WrongInput, match="100,000 lines are none"):
        MetricsFile(file)
