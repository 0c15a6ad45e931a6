"""What users load is what the newest checkpoint holds, whenever the run was killed, and it is there at any moment."""

import os
import threading
from pathlib import Path

import pytest

from learner.driver.checkpoint import publish
from tests.learner import checkpoints


def commit(run: Path, step: int, files: dict[str, str]) -> Path:
    return checkpoints.commit(run / "checkpoints", step, {f"trainer/{name}": text for name, text in files.items()})


def adapter(run: Path, step: int) -> Path:
    return commit(run, step, {"adapter_config.json": "{}", "adapter_model.safetensors": str(step), "trainer.pt": "s"})


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["missing", "behind", "half", "cut", "killed amid"])
def test_whatever_is_there_becomes_the_checkpoints(tmp_path: Path, damage: str) -> None:
    older, newer = adapter(tmp_path, 1), adapter(tmp_path, 2)
    if damage != "missing":
        assert publish(older, tmp_path, whole_model=False) == tmp_path / "adapter"
    if damage == "half":
        (tmp_path / "adapter" / "adapter_config.json").unlink()
    if damage == "cut":
        (tmp_path / "adapter" / "adapter_model.safetensors").write_text("")
    if damage == "killed amid":
        (tmp_path / "adapter" / ".partial-adapter_model.safetensors").write_text("2 and a ha")
    assert publish(newer, tmp_path, whole_model=False) == tmp_path / "adapter"
    assert texts(tmp_path / "adapter") == {"adapter_config.json": "{}", "adapter_model.safetensors": "2"}
    assert publish(newer, tmp_path, whole_model=False) is None


def test_a_whole_model_and_not_its_masters(tmp_path: Path) -> None:
    files = {"adapter_model.safetensors": "masters", "model/config.json": "{}", "model/model.safetensors": "weights"}
    assert publish(commit(tmp_path, 1, files), tmp_path, whole_model=True) == tmp_path / "model"
    assert texts(tmp_path / "model") == {"config.json": "{}", "model.safetensors": "weights"}
    assert not (tmp_path / "adapter").exists()


def test_content_is_on_the_disk_before_it_has_its_name_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, events, fsync, replace = adapter(tmp_path, 1), [], os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        events.append(f"rename to {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    publish(folder, tmp_path, whole_model=False)
    files = ("adapter_config.json", "adapter_model.safetensors")
    assert events[:-2] == [event for name in files for event in (f".partial-{name}", f"rename to {name}")]
    assert events[-2:] == ["adapter", tmp_path.name]


def test_who_looks_meanwhile_always_finds_a_whole_adapter(tmp_path: Path) -> None:
    folders = [adapter(tmp_path, step) for step in range(1, 5)]
    publish(folders[0], tmp_path, whole_model=False)
    seen: list[dict[str, str]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            names = ("adapter_config.json", "adapter_model.safetensors")
            seen.append({name: (tmp_path / "adapter" / name).read_text() for name in names})

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(20):
        for folder in folders:
            publish(folder, tmp_path, whole_model=False)
    stop.set()
    looking.join()
    assert len(seen) > 20
    assert all(one["adapter_model.safetensors"] in "1234" and one["adapter_config.json"] == "{}" for one in seen)
    assert all(len(one["adapter_model.safetensors"]) == 1 for one in seen)


def test_an_adapter_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = adapter(tmp_path, 1), adapter(tmp_path, 2)
    publish(older, tmp_path, whole_model=False)
    (tmp_path / "adapter" / ".partial-adapter_model.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"\[Errno 28\] .*partial-adapter_model.safetensors"):
        publish(newer, tmp_path, whole_model=False)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_text() == "1"
