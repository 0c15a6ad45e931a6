"""Fingerprints change with the content and with nothing else, and no reward function runs for them."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from learner.config import RunConfig
from learner.driver import identity
from learner.driver.identity import Fingerprints, differing, fingerprints_of
from rewards.loader import source_of
from tests import hub_cache
from tests.moved_functions import MOVED, now


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
    assert sorted(moved.values()) == sorted(map(now, MOVED.values())), "python -m tests.moved_functions"
    old, new = next(iter(moved.items()))
    file = tmp_path / "fingerprints.json"
    given = Fingerprints(
        {}, {"a of number.py": f"{old} math 1", "b of judge_settings.py": "x", "c of mine.py": "y"}, {}
    )
    file.write_text(given.to_json())
    assert Fingerprints.read(file).rewards == {
        "a of number.py": f"{new} math 1",
        "b of judge.py": "x",
        "c of mine.py": "y",
    }
