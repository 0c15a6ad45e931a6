"""Wheels for a machine with a card and without a network: what `make card` needs there, in bundles that fit a call.

    make card-wheels                                    all of it for Hopper and Python 3.12, in build/card-wheels
    make card-wheels ARGS="--only learner --part 50"    the first group alone, in bundles of at most 50 MiB
    make card-wheels ARGS="--there there.txt"           less what is there in the same version (`pip freeze` there)

On the machine with the card, from the root of the repository, with its own Python and nothing installed:

    python3 -m benchmarks.gpu.wheels --unpack build/card-wheels --into /tmp/site

Bundles may come over several calls, manifest.json with each: what came is kept beside what is unpacked, and what is
missing is named. A group is unpacked once it is whole, and the last line is the one that puts it on the path; then
`python3 -m benchmarks.gpu.card`. Packages and versions are those of requirements/gpu.txt and of
benchmarks/requirements.txt. Left out: machine code of other cards (benchmarks/gpu/machine_code.py), FlashInfer and
what else only some models ask for (LEFT_OUT), and files that nobody opens there (DROPPED).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu import machine_code

if TYPE_CHECKING:
    from typing_extensions import Buffer

ROOT = Path(__file__).parents[2]
FOLDER = Path("build") / "card-wheels"
MIB = 2**20
CHUNK = MIB
# Jumps and calls of x86 code, made absolute, compress better. Preset 6 saves 5 to 10 % more and takes thrice as long.
FILTERS: list[dict[str, Any]] = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 3}]
MANIFEST = "manifest.json"
Record = dict[str, Any]


class Group(NamedTuple):
    """rows: those of benchmarks/gpu/card.py that can run once it is there. without: not these, nor what they need."""

    name: str
    rows: str
    roots: tuple[str, ...]
    without: tuple[str, ...] = ()


LEARNER = (
    "accelerate", "bitsandbytes", "blake3", "cloudpickle", "jaxtyping", "liger-kernel", "markdown-it-py", "numpy",
    "nvidia-ml-py", "pebble", "peft", "psutil", "pyarrow", "pydantic", "pyyaml", "rich", "safetensors", "transformers",
)  # fmt: skip
# In the order in which they bring rows; a group needs those before it.
GROUPS = (
    Group("learner", "a to e, on the torch that is there", LEARNER, ("torch", "triton")),
    Group("torch", "a to e on the torch that gleaner asks for", ("torch", "torchvision", "torchaudio")),
    Group("vllm", "f", ("vllm", "vllm-bnb-plugin", "xgrammar")),
    Group("ray", "g", ()),  # and all that pyproject.toml names
    Group("trl", "h", ("trl", "datasets")),
)
# Asked for, but imported only for some models or cards, or (hf-xet) to download.
LEFT_OUT = {
    "flashinfer-python", "hf-xet", "humming-kernels", "instanttensor", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl",
    "opencv-python-headless", "pynvvideocodec", "quack-kernels", "tilelang", "tokenspeed-mla", "torchcodec",
}  # fmt: skip
DROPPED = (
    r"(^|/)tests?/",
    r"\.(a|jar|js\.map)$",  # to link with; Ray for Java; of the dashboard's script
    r"^nvidia/.*/include/",  # Triton has headers of its own
    r"^nvidia/.*/lib(cusolverMg|cufftw|nvblas|nvrtc\.alt|nvrtc-builtins\.alt)\.so",  # torch is not linked to these
    r"^nvidia/nvshmem/.*\.bc$",
    r"^torch/bin/protoc",
    r"^triton/backends/nvidia/(bin/ptxas-blackwell$|lib/cupti/)",  # of later cards; of Triton's profiler
    r"^pyarrow/(include/|(_|lib|libarrow_|libarrow_python_)(flight|s3|s3fs)\.)",
    r"^bitsandbytes/libbitsandbytes_(cuda(?!130)|rocm|xpu)",  # of another CUDA than torch's 13.0
    r"^vllm/vllm-rs$",  # a server
)
# FlashAttention 2, where vLLM takes 3.
DROPPED_FOR = {90: (r"^vllm/vllm_flash_attn/_vllm_fa2_C\.",)}
# pip takes exactly the tags that it is given. glibc up to 2.39, that of Ubuntu 24.04.
TAGS = ("1", "2010", "2014", *(f"_2_{minor}" for minor in range(5, 40)))


class Hashed(io.BufferedIOBase):
    """Passes on what is written to a file or read from it, and knows the sha256 of that."""

    def __init__(self, file: lzma.LZMAFile) -> None:
        self._file, self._sha = file, hashlib.sha256()

    def write(self, data: Buffer) -> int:
        self._sha.update(data)
        return self._file.write(data)

    def read(self, size: int | None = -1) -> bytes:
        data = self._file.read(size)
        self._sha.update(data)
        return data

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # stdout has the line for the shell


def sha256_of(file: Path) -> str | None:
    """None if there is no such file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- Which wheels ----


def pins(text: str) -> dict[str, str]:
    """Version by name, of lines NAME==VERSION."""
    pairs = (line.split("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {canonical(name.strip()): version.strip() for name, version in pairs}


def wheels_in(folder: Path) -> dict[tuple[str, str], Path]:
    """By name and version."""
    return {(canonical(one.name.split("-")[0]), one.name.split("-")[1]): one for one in sorted(folder.glob("*.whl"))}


def downloaded(names: Sequence[str], pinned: dict[str, str], folder: Path, python: str) -> dict[str, Path]:
    """By pip, but for those that lie there."""
    missing = [f"{name}=={pinned[name]}" for name in names if (name, pinned[name]) not in wheels_in(folder)]
    if missing:
        told(f"pip download: {len(missing)} packages, {missing[0]} first")
        tags = [f"--platform=manylinux{tag}_x86_64" for tag in TAGS]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *tags]
        done = subprocess.run([*command, "-d", str(folder), *missing], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"pip download must find a wheel for Python {python} of each package; it said:\n{done.stderr[-2000:]}"
            )
    there = wheels_in(folder)
    return {name: there[name, pinned[name]] for name in names}


def needs(wheel: Path, extra: str, python: str) -> Iterator[tuple[str, str]]:
    """Names and extras ("" for the package itself) that this wheel asks for, in its extra or, for "", in any case."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as file:
        place = next(one for one in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one))
        text = file.read(place).decode()
    surroundings = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
    for line in Parser().parsestr(text, headersonly=True).get_all("Requires-Dist", []):
        one = Requirement(line)
        if one.marker.evaluate(surroundings) if one.marker else not extra:
            yield from ((canonical(one.name), each) for each in ("", *one.extras))


def collected(
    roots: Iterable[str], without: Iterable[str], pinned: dict[str, str], folder: Path, python: str
) -> dict[str, Path]:
    """The wheels of these and of all that they need, by name, as far as the lists name it."""
    from packaging.requirements import Requirement

    asked = [Requirement(one) for one in roots]
    now = {(canonical(one.name), extra) for one in asked for extra in ("", *one.extras)}
    seen: set[tuple[str, str]] = set()
    found: dict[str, Path] = {}
    while now:
        seen |= now
        found |= downloaded(sorted({name for name, _ in now} - found.keys()), pinned, folder, python)
        wanted = {need for name, extra in now for need in needs(found[name], extra, python)} - seen
        now = {need for need in wanted if need[0] in pinned and need[0] not in without}
    return found


def roots_of(group: Group) -> tuple[str, ...]:
    if group.name != "ray":
        return group.roots
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return tuple(one for one in project["dependencies"] if not one.startswith("torch"))


# ---- From wheels to bundles ----


def placed(name: str) -> str | None:
    """Where pip would put this file of a wheel, below the folder; None for one that has no place there."""
    inside = re.fullmatch(r"[^/]+\.data/(purelib|platlib|data|scripts|headers)/(.+)", name)
    if inside is None:
        return name
    kind, rest = inside.groups()
    return {"headers": None, "scripts": f"bin/{rest}"}.get(kind, rest)


def kept(wheel: zipfile.ZipFile, architecture: int) -> dict[str, zipfile.ZipInfo]:
    """By their places, in order, without those that are dropped."""
    dropped = re.compile("|".join([*DROPPED, *DROPPED_FOR.get(architecture, ())]))
    found = {place: one for one in wheel.infolist() if not one.is_dir() and (place := placed(one.filename))}
    return {place: found[place] for place in sorted(found) if not dropped.search(place)}


def archived(wheel: Path, folder: Path, architecture: int) -> Record:
    """The stripped files of a wheel as <wheel>.tar.xz in the folder, unless it lies there of the same files, by the
    same code."""
    archive, note = (folder / f"{wheel.name}{end}" for end in (".tar.xz", ".json"))
    with zipfile.ZipFile(wheel) as source:
        members = kept(source, architecture)
        of = hashlib.sha256(Path(machine_code.__file__).read_bytes())
        of.update(repr((architecture, FILTERS, [(place, one.CRC) for place, one in members.items()])).encode())
        if note.exists() and archive.exists():
            old: Record = json.loads(note.read_text())
            if (old["of"], old["bytes"]) == (of.hexdigest(), archive.stat().st_size):
                return old
        record: Record = {
            "wheel": wheel.name,
            "of": of.hexdigest(),
            "files": 0,
            "unpacked": 0,
            "zeroed": 0,
            "skipped": {},
        }
        unfinished = archive.with_suffix(f".{os.getpid()}.part")  # two commands at once do not share it
        with lzma.open(unfinished, "wb", filters=FILTERS) as file:
            hashed = Hashed(file)
            with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.GNU_FORMAT) as tar:
                for place, info in members.items():
                    add(tar, place, source.read(info), bool(info.external_attr >> 16 & 0o111), architecture, record)
    os.replace(unfinished, archive)
    record |= {"sha256": hashed.hexdigest(), "bytes": archive.stat().st_size}
    note.write_text(json.dumps(record))
    told(f"{wheel.name}: {wheel.stat().st_size / MIB:.1f} -> {record['bytes'] / MIB:.1f} MiB")
    return record


def add(tar: tarfile.TarFile, place: str, data: bytes, executable: bool, architecture: int, record: Record) -> None:
    """One file, stripped; the same bytes whenever it is made."""
    if place.startswith("bin/") and data.startswith(b"#!"):
        return  # a script begins with the path of an interpreter
    if data.startswith(machine_code.ELF64):
        changed = bytearray(data)
        found = machine_code.strip(changed, architecture)
        record["zeroed"] += found.zeroed
        for what, count in found.skipped.items():
            record["skipped"][f"{place}: {what}"] = count
        data = bytes(changed)
    member = tarfile.TarInfo(place)
    member.size, member.mode = len(data), 0o755 if executable else 0o644
    tar.addfile(member, io.BytesIO(data))
    record["files"] += 1
    record["unpacked"] += len(data)


def cut(archives: Sequence[Path], name: str, part: int, folder: Path) -> list[Record]:
    """The archives, one after another, in bundles of `part` bytes, the last one shorter."""
    found: list[Record] = []
    rest = bytearray()

    def write() -> None:
        data = bytes(rest[:part])
        del rest[:part]
        file = folder / f"{name}-{len(found) + 1:02}.bundle"
        file.write_bytes(data)
        found.append({"name": file.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})

    for archive in archives:
        rest += archive.read_bytes()
        while len(rest) >= part:
            write()
    if rest:
        write()
    return found


def bundled(group: Group, records: list[Record], old: Record, part: int, folder: Path) -> Record:
    """What the manifest says of a group; its bundles are cut unless the old one says the same and they lie there."""
    wheels = [{key: one[key] for key in ("wheel", "bytes", "sha256", "files", "unpacked", "zeroed")} for one in records]
    same = (old.get("wheels"), old.get("part")) == (wheels, part)
    if same and all(sha256_of(folder / one["name"]) == one["sha256"] for one in old["bundles"]):
        return old
    for file in folder.glob(f"{group.name}-*.bundle"):
        file.unlink()
    archives = [folder / "archives" / f"{one['wheel']}.tar.xz" for one in records]
    return {"rows": group.rows, "part": part, "bundles": cut(archives, group.name, part, folder), "wheels": wheels}


def pack(options: argparse.Namespace) -> Record:
    """The manifest, which is written beside the bundles after each group."""
    folder: Path = options.folder
    for one in (folder / "wheels", folder / "archives"):
        one.mkdir(parents=True, exist_ok=True)
    lists = (ROOT / "requirements" / "gpu.txt", ROOT / "benchmarks" / "requirements.txt")
    pinned = pins("\n".join(one.read_text() for one in lists))
    here = pins(options.there.read_text()) if options.there else {}
    file, made_for = folder / MANIFEST, {"architecture": options.arch, "python": options.python}
    old = json.loads(file.read_text()) if file.exists() else {}
    groups = old.get("groups", {}) if {key: old.get(key) for key in made_for} == made_for else {}
    manifest, before = old, set[str]()
    for group in GROUPS[: 1 + max(GROUPS.index(one) for one in options.groups)]:
        found = collected(roots_of(group), {*group.without, *LEFT_OUT}, pinned, folder / "wheels", options.python)
        new, before = {name: found[name] for name in sorted(found.keys() - before)}, before | found.keys()
        if group in options.groups:
            stay = {name: pinned[name] for name in new if here.get(name) == pinned[name]}
            with ThreadPoolExecutor(options.jobs) as pool:
                wheels = [wheel for name, wheel in new.items() if name not in stay]
                records = list(pool.map(lambda one: archived(one, folder / "archives", options.arch), wheels))
            told_of_skipped(records)
            cut_now = bundled(group, records, groups.get(group.name, {}), options.part * MIB, folder)
            groups[group.name] = cut_now | {"there": stay}
            manifest = made_for | with_total({one.name: groups[one.name] for one in GROUPS if one.name in groups})
            text = json.dumps(manifest, indent=1) + "\n"
            if not file.exists() or file.read_text() != text:
                file.write_text(text)
    return manifest


def with_total(groups: Record) -> Record:
    bundles = [bundle["bytes"] for group in groups.values() for bundle in group["bundles"]]
    unpacked = sum(wheel["unpacked"] for group in groups.values() for wheel in group["wheels"])
    return {"total": {"bundles": len(bundles), "bytes": sum(bundles), "unpacked": unpacked}, "groups": groups}


def told_of_skipped(records: Iterable[Record]) -> None:
    for one in records:
        for what, count in one["skipped"].items():
            told(f"left as it is: {what} ({count} times)")


def overview(manifest: Record, wheels: Path) -> str:
    """A line for each group."""
    lines = [f"For sm_{manifest['architecture']}, Python {manifest['python']}; MiB of wheels -> unpacked -> bundles:"]
    for name, group in manifest["groups"].items():
        downloads = sum((wheels / one["wheel"]).stat().st_size for one in group["wheels"])
        unpacked, packed = (sum(one[key] for one in group["wheels"]) for key in ("unpacked", "bytes"))
        lines.append(
            f"{name}: {len(group['wheels'])} wheels, {downloads / MIB:.0f} -> {unpacked / MIB:.0f} -> "
            f"{packed / MIB:.0f}, {len(group['bundles'])} bundles; then rows {group['rows']}"
        )
    total = manifest["total"]
    return "\n".join([*lines, f"{total['bundles']} bundles, {total['bytes'] / MIB:.0f} MiB"])


# ---- On the other machine ----


def whole(file: Path, wanted: Record, stage: Path) -> None:
    """Copies a bundle to those that came before, if it is what was packed."""
    if (found := sha256_of(file)) != wanted["sha256"]:
        raise SystemExit(f"{file}: must have sha256 {wanted['sha256']}, has {found}; carry it again")
    unfinished = stage / f"{wanted['name']}.part"
    shutil.copyfile(file, unfinished)
    os.replace(unfinished, stage / wanted["name"])


def piece(bundles: Sequence[Path], part: int, start: int, size: int) -> bytes:
    """These bytes of the bundles joined, each `part` long but the last."""
    found = bytearray()
    while len(found) < size:
        number, place = divmod(start + len(found), part)
        with bundles[number].open("rb") as file:
            file.seek(place)
            found += file.read(min(part - place, size - len(found)))
    return bytes(found)


def extracted(data: bytes, wheel: Record, into: Path) -> None:
    """The files of one wheel, whose sha256 is that of its archive before compression."""
    with lzma.open(io.BytesIO(data)) as file:
        hashed = Hashed(file)
        with tarfile.open(fileobj=hashed, mode="r|") as tar:
            for member in tar:
                place, source = into / member.name, tar.extractfile(member)
                if place.is_symlink():  # of this machine's own file, which an earlier packing left out (linked)
                    place.unlink()
                if source is None or not place.resolve().is_relative_to(into.resolve()):
                    raise SystemExit(f"{wheel['wheel']}: {member.name} must be a file below {into}; pack it again")
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as out:
                    shutil.copyfileobj(source, out, CHUNK)
                place.chmod(member.mode)
        while hashed.read(CHUNK):
            pass
    if hashed.hexdigest() != wheel["sha256"]:
        raise SystemExit(
            f"{wheel['wheel']}: unpacked it must have sha256 {wheel['sha256']}, has {hashed.hexdigest()}; pack it again"
        )


def linked(there: dict[str, str], into: Path) -> None:
    """What was left out since this machine has it: links to its files."""
    for name, version in there.items():
        try:
            found = distribution(name)
        except PackageNotFoundError:
            found = None
        if found is None or found.version != version:
            has = found.version if found else "none"
            raise SystemExit(f"{name}: must be {version} on this machine (--there), is {has}; pack without --there")
        for file in found.files or ():
            place = into / file
            if ".." not in file.parts and not place.exists() and not place.is_symlink():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(Path(str(found.locate_file(file))))


def opened(name: str, group: Record, folders: Sequence[Path], into: Path) -> list[str]:
    """Unpacks a group whose bundles are all there; the names of those that are not."""
    stage = into / ".bundles"
    done, state = stage / f"{name}.done", json.dumps(group, sort_keys=True)
    if done.exists() and done.read_text() == state:
        told(f"{name}: unpacked already")
        return []
    if done.exists():
        raise SystemExit(
            f"{into}: must be empty for another packing, holds {name} of an earlier one; give another folder"
        )
    missing = []
    for wanted in group["bundles"]:
        if not (stage / wanted["name"]).exists():
            file = next((one for folder in folders if (one := folder / wanted["name"]).exists()), None)
            if file is None:
                missing.append(wanted["name"])
            else:
                whole(file, wanted, stage)
    if missing:
        return missing
    bundles, starts = [stage / one["name"] for one in group["bundles"]], [0]
    for wheel in group["wheels"]:
        starts.append(starts[-1] + wheel["bytes"])

    def unpacked(start: int, wheel: Record) -> None:
        try:
            extracted(piece(bundles, group["part"], start, wheel["bytes"]), wheel, into)
        except (lzma.LZMAError, EOFError, tarfile.TarError) as error:
            raise SystemExit(
                f"{wheel['wheel']}: must be a whole tar.xz in its bundles, {error}; pack it again"
            ) from None

    with ThreadPoolExecutor() as pool:
        list(pool.map(unpacked, starts, group["wheels"]))
    linked(group["there"], into)
    done.write_text(state)
    for bundle in bundles:
        bundle.unlink()
    told(f"{name}: unpacked, {len(group['wheels'])} wheels; rows {group['rows']}")
    return []


def unpack(folders: Sequence[Path], into: Path, only: Sequence[str]) -> list[str]:
    """Unpacks what is whole. The names of the bundles that are missing, of these groups, or of all."""
    stage = into / ".bundles"
    stage.mkdir(parents=True, exist_ok=True)
    files = [file for folder in (*folders, stage) if (file := folder / MANIFEST).exists()]
    if not files:
        raise SystemExit(
            f"{MANIFEST}: must be in one of {', '.join(map(str, folders))}, is in none; carry it with the bundles"
        )
    text = files[0].read_text()
    groups: Record = json.loads(text)["groups"]
    kept = stage / MANIFEST
    if not kept.exists() or kept.read_text() != text:
        wanted = {bundle["sha256"] for group in groups.values() for bundle in group["bundles"]}
        for file in stage.glob("*.bundle"):
            if sha256_of(file) not in wanted:  # of another packing
                file.unlink()
        kept.write_text(text)
    return [
        name for one, group in groups.items() if not only or one in only for name in opened(one, group, folders, into)
    ]


def exports(into: Path) -> str:
    """The line for the shell. FlashInfer is left out, and vLLM is told so."""
    place = shlex.quote(str(into.absolute()))
    return f'export PYTHONPATH={place}:"$PWD${{PYTHONPATH:+:$PYTHONPATH}}" VLLM_USE_FLASHINFER_SAMPLER=0'


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the wheels and bundles")
    parser.add_argument("--arch", type=int, default=90, help="of the card: 90 is sm_90")
    parser.add_argument("--python", default="3.12", help="of the machine with the card")
    parser.add_argument("--part", type=int, default=50, help="MiB of a bundle at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="wheels at once")
    parser.add_argument("--there", type=Path, help="file of lines NAME==VERSION: what that machine has, and keeps")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in GROUPS], default=[], help="these groups")
    parser.add_argument("--unpack", nargs="+", type=Path, metavar="FOLDER", help="where bundles are")
    parser.add_argument("--into", type=Path, default=Path("/tmp/site"), help="where packages are unpacked")
    options = parser.parse_args(arguments)
    options.groups = [one for one in GROUPS if not options.only or one.name in options.only]
    if options.unpack is None:
        told(overview(pack(options), options.folder / "wheels"))
        return
    missing = unpack(options.unpack, options.into, options.only)
    if any((options.into / ".bundles").glob("*.done")):
        print(exports(options.into))
    if missing:
        raise SystemExit(f"missing: {', '.join(missing)}; carry them, and say the same command again")


if __name__ == "__main__":
    main()
