"""`use` leads to a function, or to a sentence that says what is missing. Reward functions are tried before a run: a
broken one is one line. Addresses that a client of a reward function would miss are told before a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cluster.errors import WrongInput
from rewards import loader
from rewards.call import Group
from rewards.check import try_rewards, withheld_notes
from rewards.config import RewardConfig
from rewards.loader import BUILT_INS, load
from rewards.pool import RewardPool
from tests.rewards.pool_case import OneOf


@pytest.mark.parametrize("name", sorted(set(BUILT_INS) - {"judge", "math", "reasoning_gym"}))
def test_built_ins_load(name: str) -> None:
    assert callable(load(name))


def test_module_and_relative_file_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def one(completions): return [1.0]")
    assert load("mine.py:one")(completions=[""]) == [1.0]
    assert load("rewards.built_in.regex:regex") is load("regex")


def test_each_file_gets_its_own_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(loader, "_KEPT", {})
    late = "\ndef late(completions):\n    from my_helper import VALUE\n    return [VALUE]"
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_helper.py").write_text(f"VALUE = {value}")
        (tmp_path / name / "rewards.py").write_text(
            f"from my_helper import VALUE\ndef f(completions): return [VALUE]{late}"
        )
    path = list(sys.path)
    assert [load(f"{tmp_path / name}/rewards.py:f")(completions=[""]) for name in "ab"] == [[1], [2]]
    assert sys.path == path
    for name in "ab":  # either would get the helper of the other
        with pytest.raises(ModuleNotFoundError, match="my_helper"):
            load(f"{tmp_path / name}/rewards.py:late")(completions=[""])


def test_a_helper_may_be_imported_when_the_function_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(loader, "_KEPT", {})
    imported, inside = "from late_helper import VALUE\n", "def f(completions):\n"
    for name, value, code in (("a", 1, f"{inside}    {imported}"), ("b", 2, f"{imported}{inside}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "late_helper.py").write_text(f"VALUE = {value}")
        (tmp_path / name / "mine.py").write_text(f"{code}    return [VALUE]")
    assert load(f"{tmp_path}/a/mine.py:f")(completions=[""]) == [1]
    assert load(f"{tmp_path}/b/mine.py:f")(completions=[""]) == [2]  # loaded after a's was imported


def test_a_file_of_a_package_imports_what_is_relative_to_it(tmp_path: Path) -> None:
    for top, value in (("a", 1), ("b", 2)):  # two packages of one name
        inner = tmp_path / top / "pkg" / "rewards"
        inner.mkdir(parents=True)
        (inner.parent / "__init__.py").write_text(f"VALUE = {value}")
        (inner / "__init__.py").write_text("")
        (inner / "helpers.py").write_text("from .. import VALUE\ndef ten(): return 10 * VALUE")
        (inner / "mine.py").write_text(
            "from .helpers import ten\n"
            "def f(completions): return [ten()]\n"
            "def late(completions):\n    from ..rewards import helpers\n    return [helpers.VALUE]\n"
        )
    found = [
        load(f"{tmp_path}/{top}/pkg/rewards/mine.py:{name}")(completions=[""]) for top in "ab" for name in ("f", "late")
    ]
    assert found == [[10], [1], [20], [2]]
    assert "pkg" not in sys.modules


def test_relative_imports_in_a_folder_that_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3")
    (tmp_path / "mine.py").write_text("from .beside import VALUE\ndef f(completions): return [VALUE]")
    assert load(f"{tmp_path}/mine.py:f")(completions=[""]) == [3]


def test_what_a_package_imports_is_left_alone_without_relative_imports(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("import not_installed_here")
    (tmp_path / "mine.py").write_text("def f(completions): return [1.0]")
    (tmp_path / "part.py").write_text("from .mine import f")
    assert load(f"{tmp_path}/mine.py:f")(completions=[""]) == [1.0]
    for _ in range(2):
        with pytest.raises(WrongInput, match="part.py does not import: ModuleNotFoundError.*not_installed_here"):
            load(f"{tmp_path}/part.py:f")


def test_what_is_called_like_a_function_is_one(tmp_path: Path) -> None:
    (tmp_path / "kinds.py").write_text(
        "from functools import partial\n"
        "class Length:\n    def __call__(self, completions, **_): return [float(len(one)) for one in completions]\n"
        "class Twice(Length):\n"
        "    def __init__(self, times=2): self.times = times\n"
        "    def __call__(self, completions, **_): return [self.times * n for n in super().__call__(completions)]\n"
        "def of(times, completions): return [float(times)] * len(completions)\n"
        "three, ten = partial(of, 3), Twice(10)\n"
    )
    found = {name: load(f"{tmp_path}/kinds.py:{name}") for name in ("Length", "Twice", "three", "ten")}
    assert {name: call(completions=["ab", ""]) for name, call in found.items()} == {
        "Length": [2.0, 0.0],
        "Twice": [4.0, 0.0],
        "three": [3.0, 3.0],
        "ten": [20.0, 0.0],
    }
    with pytest.raises(WrongInput, match="functions there: Length, Twice, of, three, ten$"):
        load(f"{tmp_path}/kinds.py:four")


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        ("nunber", r"'nunber' is no built-in reward; did you mean 'number'\? Built-ins: format, json_match"),
        ("Skywork/Reward-V2", r"is no function, and may be a model of the hub; .* args: {model: Skywork/Reward-V2}}"),
        (
            "model",
            "'model' is no function, and is the folder of a model; for a classifier's score write {use: seq",
        ),
        ("adapter", "'adapter' is the folder of an adapter; .* write adapter:adapter"),
        ("gone.py:f", "there is no file .*gone.py; a relative path starts at the working directory"),
        ("syntax.py:f", r"syntax.py does not import: SyntaxError: .*\(syntax.py, line 2\)"),
        ("raises.py:f", r"raises.py does not import: ZeroDivisionError: division by zero \(raises.py, line 3\)"),
        ("exits.py:f", "exits.py does not import: SystemExit: 3"),
        ("mute.py:f", "mute.py does not import: Mute: its text cannot be read, since its __str__ raises TypeError"),
        ("good.py:f", "good.py has no function 'f'; functions there: accuracy, style"),
        (
            "good.py",
            "'good.py' names no function; write it after a colon, as in good.py:my_reward; functions there: acc",
        ),
        ("good.py:LIMIT", "good.py: 'LIMIT' is a int, not a function; functions there: accuracy, style"),
        ("good.py:Plain", "good.py:Plain: is a class without __call__; write __call__"),
        ("wants.py:Wants", r"raised TypeError: .*'limit'; if it wants some, make it in your file, reward = Wants\("),
        ("no_such_package.x:f", "module 'no_such_package.x' does not import: ModuleNotFoundError: No module named"),
    ],
)
def test_errors_say_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str, sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("LIMIT = 3\ndef accuracy(): ...\ndef style(): ...\nclass Plain: ...")
    (tmp_path / "wants.py").write_text(
        "class Wants:\n    def __init__(self, limit): ...\n    def __call__(self, completions): ..."
    )
    for folder, file in (("model", "config.json"), ("adapter", "adapter_config.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "raises.py").write_text("def f(): ...\n\nx = 1 / 0")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "mute.py").write_text("class Mute(Exception):\n    def __str__(self): return None\nraise Mute")
    with pytest.raises(WrongInput, match=sentence):
        load(use)


# Reward functions are tried before a run: a broken one is one line.


def test_the_trial_tells_a_broken_reward_in_one_line(rewards_file: OneOf, tmp_path: Path) -> None:
    group = Group(["p", "p"], ["c", "d"], [[1], [2]], {"answer": ["1", "2"]})
    (tmp_path / "bad.py").write_text("import nothing_of_this_name")
    assert try_rewards([rewards_file("good"), RewardConfig(use="number")], group).scores.reward == [1.0, 1.0]
    for reward, sentence in [
        (rewards_file("boom"), "ValueError: boom"),
        (RewardConfig(use=f"{tmp_path}/bad.py:f"), "bad.py does not import: ModuleNotFoundError"),
        (
            RewardConfig(use="format", args={"tag": "a"}),
            "reward 'format': error: args: unknown tag; this reward takes tags",
        ),
        (rewards_file("words"), "error: returned str for sample 0, must return numbers or None: 'good'"),
    ]:
        with pytest.raises(WrongInput) as caught:
            try_rewards([rewards_file("good"), reward], group)
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", ["float(len(completion))", "float(completion.count('b') > 1)", "len(set(completion))"])
def test_a_function_of_texts_that_is_given_messages_is_told(tmp_path: Path, body: str) -> None:
    (tmp_path / "of.py").write_text(
        f"def texts(completions, **_):\n    return [{body} for completion in completions]\n"
        "def messages(completions, **_):\n    return [float(len(one[0]['content']) > 9) for one in completions]\n"
        "def both(completions, **_):\n"
        "    return [float('b' in (one if isinstance(one, str) else one[0]['content'])) for one in completions]\n"
    )
    texts, messages, both = (RewardConfig(use=f"{tmp_path}/of.py:{name}") for name in ("texts", "messages", "both"))
    group = Group.of([{"role": "user", "content": "?"}], ["ab", "abb"], [[1], [2]], {})
    if "set" in body:
        with pytest.raises(
            WrongInput, match=r"unhashable type: 'dict'.* It treats completions as texts, and is given "
        ):
            try_rewards([texts], group)
    else:
        (note,) = try_rewards([messages, texts, both], group).notes
        assert note.startswith("reward 'texts': gives ")
        assert "set data.chat_template: none" in note
    plain = Group.of("?", ["ab", "abb"], [[1], [2]], {})
    assert try_rewards([texts], plain).notes == ()
    assert try_rewards([RewardConfig(use="number")], Group.of([], ["a", "b"], [[1], [2]], {"answer": 1})).notes == ()


def test_a_function_that_never_answers_is_waited_for_twice_at_most(
    rewards_file: OneOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time tells whether only its first call is late."""
    monkeypatch.setattr("rewards.check.PATIENCE_S", 0.4)
    endless = rewards_file("endless", timeout_s=0.2, args={"where": str(tmp_path / "calls")})
    with pytest.raises(WrongInput, match="timeout: no answer within 0.2 s, so its process was killed"):
        try_rewards([endless], Group(["p"], ["c"], [[1]], {}))
    assert (tmp_path / "calls").read_text() == "called called "


# Addresses that a client of a reward function would miss are told before a run.

HERE = {
    "OPENAI_BASE_URL": "http://127.0.0.1:9", "AZURE_OPENAI_ENDPOINT": "x", "OLLAMA_HOST": "x", "https_proxy": "x",
    "HF_ENDPOINT": "x", "PATH": "/bin", "OPENAI_API_KEY": "secret", "MY_JUDGE_URL": "x", "HOST": "x", "CI_HOST": "x",
}  # fmt: skip


def told(folder: Path, text: str, *env: str, helper: str = "") -> list[str]:
    (folder / "mine.py").write_text(text)
    (folder / "helper.py").write_text(helper)
    notes = withheld_notes(RewardConfig(use=f"{folder}/mine.py:f", env=env), "rewards.0", HERE)
    assert "secret" not in "".join(notes)
    assert all(f"set env=[{', '.join([*env, ''])}" in note for note in notes)
    return [note.removeprefix("rewards.0: ").partition(" ")[0] for note in notes]


@pytest.mark.parametrize(
    ("text", "env", "names"),
    [
        ("import openai", (), ["OPENAI_BASE_URL", "https_proxy"]),
        ("def f(completions): return []", ("OPENAI_API_KEY",), ["OPENAI_BASE_URL", "https_proxy"]),
        ("from openai import OpenAI", ("OPENAI_BASE_URL", "https_proxy"), []),
        ("import os; url = os.environ['MY_JUDGE_URL']", (), ["MY_JUDGE_URL"]),
        ("import ollama", (), ["OLLAMA_HOST"]),
        ("import httpx", (), ["https_proxy"]),
        ("def f(completions): return [len(c) for c in completions]", (), []),
    ],
)
def test_what_a_client_would_read(tmp_path: Path, text: str, env: tuple[str, ...], names: list[str]) -> None:
    assert told(tmp_path, text, *env) == names


def test_files_beside_it_count_and_what_is_no_file_does_not(tmp_path: Path) -> None:
    assert told(tmp_path, "import helper", helper="import openai") == ["OPENAI_BASE_URL", "https_proxy"]
    for use in ("number", "package.module:f", f"{tmp_path}/absent.py:f"):
        assert withheld_notes(RewardConfig(use=use), "rewards.0", HERE) == []


async def test_what_a_function_looks_for_in_a_run_is_told_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever it is looked for: its own code, a library, with a default or without."""
    for name in ("ACME_API_KEY", "ACME_BASE_URL", "OTHER_TOKEN", "ACME_COLOURS"):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "KEY = os.environ.get('ACME_API_KEY')\n"
        "def f(completions, **columns):\n"
        "    found = [os.getenv('ACME_BASE_URL', '-'), os.getenv('ACME_COLOURS'), 'OTHER_TOKEN' in os.environ]\n"
        "    return [float(found == ['-', None, False]), float(os.environ['PATH'] != '')]\n"
    )
    use = f"{tmp_path}/mine.py:f"
    async with RewardPool([RewardConfig(use=use), RewardConfig(use=use, name="given", env=("ACME_BASE_URL",))]) as pool:
        first = await pool.score(Group.of("?", ["a", "b"], [[0], [0]], {}))
        second = await pool.score(Group.of("?", ["a", "b"], [[0], [0]], {}))
    assert first.parts["f"] == [1.0, 1.0]
    told = [*first.asked.values()]
    assert [sentence.partition(", which")[0] for sentence in told] == [
        f"reward {name!r} looked for {variable}"
        for name, variable in (
            ("f", "ACME_API_KEY"), ("f", "ACME_BASE_URL"), ("f", "OTHER_TOKEN"), ("given", "OTHER_TOKEN"),
        )
    ]  # fmt: skip
    assert told[3].endswith("set its env=[ACME_BASE_URL, OTHER_TOKEN]")
    assert {(name, value) for name, value, _ in second.logged[0]} == {
        ("asked_for_ACME_BASE_URL", 1.0), ("asked_for_OTHER_TOKEN", 1.0),
    }  # fmt: skip
    assert "secret" not in repr((first, second))
