"""What `make card-wheels` takes out of libraries, and what comes out of its bundles on the other machine."""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import wheels
from benchmarks.gpu.machine_code import CODE, PTX, strip

ROOT = Path(__file__).parents[2]
OTHER = 8  # a kind that is neither


def entry(kind: int, architecture: int, payload: bytes, header: int = 64) -> bytes:
    """As CUDA 13 writes it, the fields after the architecture left empty."""
    told = struct.pack("<HHIQIIHHI", kind, 0x101, header, len(payload), 0, 0, 8, 8, architecture)
    return told.ljust(header, b"\0") + payload


def container(*entries: bytes, short: int = 0) -> bytes:
    """short: by how many bytes it says less than it holds."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body) - short) + body


SOURCE = r"""
__asm__(".section .nv_fatbin,\"a\"\n.balign 8\n.incbin \"code\"\n.text");
int seven(void) { return 7; }
"""
# What is there, and what must be there afterwards.
CASES = {
    "code of Hopper": (
        container(entry(PTX, 80, b"p" * 24), entry(CODE, 80, b"8" * 40), entry(CODE, 90, b"9" * 32, header=112)),
        container(entry(PTX, 80, bytes(24)), entry(CODE, 80, bytes(40)), entry(CODE, 90, b"9" * 32, header=112)),
    ),
    "none, so the newest PTX that it can have compiled": (
        container(*(entry(PTX, one, b"p" * 8) for one in (75, 80, 120)), entry(CODE, 120, b"c" * 8)),
        container(
            entry(PTX, 75, bytes(8)), entry(PTX, 80, b"p" * 8), entry(PTX, 120, bytes(8)), entry(CODE, 120, bytes(8))
        ),
    ),
    "another kind stays": (
        container(entry(OTHER, 75, b"l" * 16), entry(CODE, 100, b"c" * 16)),
        container(entry(OTHER, 75, b"l" * 16), entry(CODE, 100, bytes(16))),
    ),
    "an entry longer than its container stays": (
        container(entry(CODE, 80, b"8" * 40), short=8),
        container(entry(CODE, 80, b"8" * 40), short=8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_payloads_for_other_cards_are_zero_and_nothing_else_changes(name: str) -> None:
    before, after = CASES[name]
    data = bytearray(before)
    found = strip(data, 90)
    assert bytes(data) == after
    assert found.zeroed == sum(a != b for a, b in zip(before, after, strict=True))
    skipped = {"another kind stays": {f"entry of kind {OTHER}": 1}}
    skipped["an entry longer than its container stays"] = {"bytes that look like a container and do not add up": 1}
    assert found.skipped == skipped.get(name, {})


def test_what_runs_on_a_card_of_the_same_generation_stays() -> None:
    entries = [(PTX, 80), (CODE, 75), (CODE, 80), (CODE, 86), (CODE, 90), (CODE, 120)]
    data = bytearray(container(*(entry(kind, one, b"x" * 8) for kind, one in entries)))
    strip(data, 89)
    assert bytes(data) == container(*(entry(kind, one, b"x" * 8 if one == 86 else bytes(8)) for kind, one in entries))


def test_a_stripped_library_is_as_long_and_works(tmp_path: Path) -> None:
    before, after = (b"".join(one) for one in zip(*CASES.values(), strict=True))
    (tmp_path / "code").write_bytes(before)
    (tmp_path / "a.c").write_text(SOURCE)
    subprocess.run(["cc", "-g", "-shared", "-fPIC", "-o", "a.so", "a.c"], cwd=tmp_path, check=True)
    library = tmp_path / "a.so"
    data = bytearray(library.read_bytes())
    place, size = data.index(before), len(data)

    strip(data, 90)
    (tmp_path / "b.so").write_bytes(data)

    assert len(data) == size
    assert bytes(data[place : place + len(before)]) == after
    assert ctypes.CDLL(str(tmp_path / "b.so")).seven() == 7
    sections = ["objcopy", "-O", "binary", "--only-section=.debug_info", "--set-section-flags", ".debug_info=alloc"]
    subprocess.run([*sections, "b.so", "debug"], cwd=tmp_path, check=True)
    assert set((tmp_path / "debug").read_bytes()) == {0}


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.integers(1, 17))
def test_what_is_cut_is_found_again(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], part: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    archives = [folder / f"{number}.tar.xz" for number in range(len(contents))]
    for archive, content in zip(archives, contents, strict=True):
        archive.write_bytes(content)

    told = wheels.cut(archives, "a", part, folder)

    joined = b"".join((folder / one["name"]).read_bytes() for one in told)
    assert joined == b"".join(contents)
    assert [one["bytes"] for one in told[:-1]] == [part] * (len(told) - 1)
    bundles, start = [folder / one["name"] for one in told], 0
    for content in contents:
        assert wheels.piece(bundles, part, start, len(content)) == content
        start += len(content)


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two groups: `first` of three bundles of a MiB, with a library for two cards, and `second` of one."""
    noise = random.Random(0).randbytes(5 * 2**19)
    code = container(entry(CODE, 80, b"8" * 40), entry(CODE, 90, b"9" * 32))
    library = b"\x7fELF\x02\x01".ljust(64, b"\0") + code
    contents = {
        "large-1-py3-none-any.whl": {
            "large/__init__.py": b"", "large/noise": noise, "large/lib.so": library, "large/tests/a.py": b"dropped",
            "large-1.data/purelib/apart.py": b"x = 1\n", "large-1.data/scripts/run": b"#!python\n",
            "large-1.dist-info/METADATA": b"Name: large\nRequires-Dist: small[more]\nRequires-Dist: unlisted\n",
        },
        "small-2-py3-none-any.whl": {
            "small.py": b"two = 2\n",
            "small-2.dist-info/METADATA": b'Name: small\nRequires-Dist: far; extra == "more"\n'
            b'Requires-Dist: absent; python_version < "3.12"\n',
        },
        "far-3-py3-none-any.whl": {"far.py": b"", "far-3.dist-info/METADATA": b"Name: far\n"},
    }  # fmt: skip
    folder, root = tmp_path / "out", tmp_path / "root"
    (folder / "wheels").mkdir(parents=True)
    for name, files in contents.items():
        with zipfile.ZipFile(folder / "wheels" / name, "w") as file:
            for place, data in files.items():
                file.writestr(place, data)
    for name, text in {
        "requirements/gpu.txt": "large==1\nsmall==2\n",
        "benchmarks/requirements.txt": "far==3\n",
    }.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    monkeypatch.setattr(wheels, "ROOT", root)
    groups = wheels.Group("first", "a", ("large",), ("small",)), wheels.Group("second", "b", ("large",))
    monkeypatch.setattr(wheels, "GROUPS", groups)
    wheels.main(["--folder", str(folder), "--part", "1"])
    return folder


def unpacked(folder: Path, into: Path) -> subprocess.CompletedProcess[str]:
    """As on a machine where nothing is installed: -S keeps site-packages off the path."""
    command = [sys.executable, "-S", "-m", "benchmarks.gpu.wheels", "--unpack", str(folder), "--into", str(into)]
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)


def test_bundles_become_packages_without_anything_installed(packed: Path, tmp_path: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    assert {name: len(one["bundles"]) for name, one in manifest["groups"].items()} == {"first": 3, "second": 1}
    into = tmp_path / "site"

    done = unpacked(packed, into)

    assert done.returncode == 0, done.stderr
    path = subprocess.run(
        f"PYTHONPATH=/before; {done.stdout} echo $PYTHONPATH", shell=True, cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert path == f"{into}:{tmp_path}:/before\n"
    found = {
        one.relative_to(into).as_posix() for one in into.rglob("*") if one.is_file() and ".bundles" not in one.parts
    }
    assert found == {
        "large/__init__.py", "large/noise", "large/lib.so", "large-1.dist-info/METADATA", "apart.py",
        "small.py", "small-2.dist-info/METADATA", "far.py", "far-3.dist-info/METADATA",
    }  # fmt: skip
    assert (into / "large" / "noise").read_bytes() == random.Random(0).randbytes(5 * 2**19)
    assert (into / "large" / "lib.so").read_bytes()[64:] == container(
        entry(CODE, 80, bytes(40)), entry(CODE, 90, b"9" * 32)
    )


def test_bundles_may_come_one_by_one_and_what_is_missing_or_damaged_is_named(packed: Path, tmp_path: Path) -> None:
    into, call = tmp_path / "site", tmp_path / "call"
    call.mkdir()

    def carried(*names: str) -> subprocess.CompletedProcess[str]:
        for one in call.iterdir():
            one.unlink()
        for name in (*names, "manifest.json"):
            (call / name).write_bytes((packed / name).read_bytes())
        return unpacked(call, into)

    first = carried("first-02.bundle", "second-01.bundle")
    assert first.returncode == 1
    assert "missing: first-01.bundle, first-03.bundle; carry them" in first.stderr
    assert first.stdout.startswith("export PYTHONPATH=")  # of the second group, which is whole
    assert not (into / "large").exists()

    whole = (packed / "first-03.bundle").read_bytes()
    (packed / "first-03.bundle").write_bytes(whole[:-1] + b"?")
    damaged = carried("first-01.bundle", "first-03.bundle")
    assert damaged.returncode == 1
    assert damaged.stderr.splitlines()[-1].startswith(f"{call / 'first-03.bundle'}: must have sha256 ")

    (packed / "first-03.bundle").write_bytes(whole)
    last = carried("first-03.bundle")
    assert last.returncode == 0, last.stderr
    assert (into / "large" / "noise").exists()
    assert list((into / ".bundles").glob("*.bundle")) == []


def test_what_is_complete_is_not_made_again(packed: Path, tmp_path: Path) -> None:
    def times() -> dict[Path, int]:
        return {one: one.stat().st_mtime_ns for one in sorted(packed.rglob("*")) if one.is_file()}

    before = times()
    wheels.main(["--folder", str(packed), "--part", "1"])
    assert times() == before

    (packed / "second-01.bundle").unlink()
    wheels.main(["--folder", str(packed), "--part", "1"])
    changed = {one.name for one, when in times().items() if before[one] != when}
    assert changed == {"second-01.bundle"}


def test_what_that_machine_has_in_the_same_version_stays_out(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text("Small==2\nfar==2\n")

    wheels.main(["--folder", str(packed), "--part", "1", "--there", str(tmp_path / "there.txt")])

    second = json.loads((packed / "manifest.json").read_text())["groups"]["second"]
    assert ([one["wheel"] for one in second["wheels"]], second["there"]) == (["far-3-py3-none-any.whl"], {"small": "2"})
    into = tmp_path / "site"
    refused = unpacked(packed, into)
    assert refused.stderr.splitlines()[-1].startswith("small: must be 2 on this machine (--there), is none")
