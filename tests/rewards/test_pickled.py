"""Functions that have no file: sent to another process, known again there, refused by the variable that is to blame."""

import functools
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from rewards import functions
from rewards.call import Group, score
from rewards.functions import digest
from rewards.loader import load, source_of

CELL = """
import dataclasses, functools, re

@dataclasses.dataclass
class Gold:
    words: frozenset
    @property
    def size(self): return len(self.words)

class Judge:
    def __init__(self, weight): self.weight = weight
    def __call__(self, completions, **columns): return [self.weight * even(len(c)) for c in completions]

def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
PATTERN, GOLD = re.compile("a+"), Gold(frozenset({"x", "y", "zed"}))

def accuracy(completions, bonus=1, **columns):
    # COMMENT
    near = lambda text: bonus * (text in {"red", "green", "blue"})
    return [near(c) + GOLD.size + len(PATTERN.findall(c)) for c in completions]
"""


def cell(text: str) -> dict[str, Any]:
    """The names of a cell, which stands in `__main__`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)
    return names


def sent(function: Callable[..., Any], folder: Path) -> str:
    packed = functions.pack(function)
    file = folder / f"{packed.name}.pickle"
    file.write_bytes(packed.content)
    return f"{file}:{packed.name}"


def test_a_function_arrives_in_a_process_that_has_only_the_file(tmp_path: Path) -> None:
    names = cell(CELL)
    uses = [sent(names["accuracy"], tmp_path), sent(names["Judge"](0.5), tmp_path)]
    code = f"from rewards.loader import load\nprint([load(use)(completions=['red', 'aab']) for use in {uses}])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[[4, 4], [0.0, 0.0]]\n"  # 1 + 3 + 0, 0 + 3 + 1; both are of odd length
    assert source_of(uses[0]) == tmp_path / "accuracy.pickle"
    partial = functools.partial(names["accuracy"], bonus=5)
    group = Group(["", ""], ["red", "aab"], [[], []], {})
    assert score(load(sent(partial, tmp_path)), group, {}, built_in=False).values == [8, 4]


CACHED = """
import functools, pydantic, torch

class Gold(pydantic.BaseModel):
    words: list[str] = pydantic.Field(default_factory=list)
    most: int = 3

@functools.lru_cache(maxsize=8)
def length(text): return 1 + length(text[1:]) if text else 0

WEIGHTS = torch.arange(3.0)
def scored(completions, **columns):
    return [length(c) * float(WEIGHTS[2]) + Gold(words=["a"]).most for c in completions]
"""


def test_a_cached_function_of_a_script_goes_along(tmp_path: Path) -> None:
    use = sent(cell(CACHED)["scored"], tmp_path)
    code = f"from rewards.loader import load\nprint(load({use!r})(completions=['red', '']))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[9.0, 3.0]\n"


def test_it_finds_the_modules_that_its_author_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_helper.py").write_text("VALUE = 7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # the working directory, as a notebook has it
    use = sent(cell("def f(completions):\n import my_helper\n return [my_helper.VALUE]")["f"], tmp_path)
    code = f"from rewards.loader import load\nprint(load({use!r})(completions=['']))"
    env = {"PYTHONPATH": ":".join(sys.path[1:])}
    told = subprocess.run([sys.executable, "-c", code], cwd="/", env=env, capture_output=True, text=True, check=True)
    assert told.stdout == "[7]\n"


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# COMMENT", "# another\n    # place", True),
        ('"red", "green", "blue"', '"red", "green", "blau"', False),
        ("bonus=1", "bonus=2", False),
        ('"zed"', '"yet"', False),
        ('"a+"', '"b+"', False),
        ("return len(self.words)", "return 2", False),
    ],
)
def test_its_digest_is_that_of_what_it_does(old: str, new: str, same: bool) -> None:
    assert old in CELL
    before = digest(cell(CELL)["accuracy"])
    assert (digest(cell("\n\n" + CELL.replace(old, new))["accuracy"]) == before) is same


@pytest.mark.parametrize(
    ("old", "new"), [("1 + length", "2 + length"), ("arange(3.0)", "arange(4.0)"), ("most: int = 3", "most: int = 4")]
)
def test_so_it_is_of_cached_functions_tensors_and_models(old: str, new: str) -> None:
    assert old in CACHED
    assert digest(cell(CACHED)["scored"]) != digest(cell(CACHED.replace(old, new))["scored"])


@pytest.mark.long
def test_its_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Sets of texts are in another order there."""
    code = (
        f"from rewards.functions import digest\n{CELL}\n{CACHED}\n"
        "print(digest(accuracy), digest(Judge(1)), digest(even), digest(scored))"
    )
    (tmp_path / "cell.py").write_text(code)
    told = {
        subprocess.run(
            [sys.executable, tmp_path / "cell.py"], capture_output=True, text=True, check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(told) == 1


def test_a_module_of_the_users_counts_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for value in (1, 1, 2):
        (tmp_path / "my_gold.py").write_text(f"VALUE = {value}")
        sys.modules.pop("my_gold", None)
        found.append(digest(cell("import my_gold\ndef f(completions): return [my_gold.VALUE]")["f"]))
    assert (found[0] == found[1], found[1] == found[2]) == (True, False)
    found = []
    for value in (1, 1, 2):
        text = "import functools, threading\nLOCK = threading.Lock()\n@functools.cache\ndef half(n): return LOCK, n / "
        (tmp_path / "my_half.py").write_text(f"{text}{value}")
        sys.modules.pop("my_half", None)
        found.append(digest(cell("from my_half import half\ndef f(completions): return [half(1)]")["f"]))
    assert (found[0] == found[1], found[1] == found[2]) == (True, False)


@pytest.fixture
def unpicklable(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with socket.socket() as one, (tmp_path / "log").open("w") as log, (tmp_path / "log").open() as reading:
        yield {"one": one, "log": log, "reading": reading, "lock": threading.Lock()}


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def f(completions): return log.write('')", "f cannot be sent .*: its variable log is a TextIOWrapper, which"),
        ("def f(completions): return reading.read()", "its variable reading is a TextIOWrapper"),
        ("def g(): return one\ndef f(completions): return g()", "its variable g.one is a socket"),
        ("held = {'a': [lock]}\nf = lambda completions: held", r"<lambda> .* variable held\['a'\]\[0\] is a lock"),
        ("class F:\n def __init__(self): self.k = lock\n def __call__(self): ...\nf = F()", "F .* variable k is a"),
    ],
)
def test_what_cannot_be_sent_is_named(unpicklable: dict[str, Any], code: str, sentence: str) -> None:
    names = {"__name__": "__main__", **unpicklable}
    exec(code, names)
    with pytest.raises(WrongInput, match=sentence):
        functions.pack(names["f"])


def test_what_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its digest is made, which takes several times its size."""
    monkeypatch.setattr(functions, "LARGEST", 2**20)
    monkeypatch.setattr(functions, "digest", lambda function: pytest.fail("it was made"))
    names = cell("small, table = 'x', 'x' * 2**21\ndef f(completions): return small + table")
    with pytest.raises(WrongInput, match="f must be at most 1 MiB .*, of them 2 MiB its variable table;"):
        functions.pack(names["f"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: b"no function", "is not a function that learner.train wrote; call it again"),
        (lambda text: re.sub(rb'"3\.\d+"', b'"2.7"', text, count=1), "was written by Python 2.7, and this is 3"),
        (lambda text: text[:-20], "does not load: .*truncated"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], sentence: str) -> None:
    use = sent(cell(textwrap.dedent(CELL))["even"], tmp_path)
    file = tmp_path / "even.pickle"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(WrongInput, match=sentence):
        load(use)


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="gone.pickle cannot be read: No such file"):
        load(f"{tmp_path}/gone.pickle:f")
