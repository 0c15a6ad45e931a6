"""The walls around a policy's code, attacked from within: as root and as another user, with and without namespaces."""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import confinement
from cluster.confinement import LANDLOCK, LIMITS, SECCOMP, missed, system_call_filter, walls
from tests.cluster.contexts import CONTEXTS, ENTER, skip_unless_possible

SECRET = "hf_secret"
# What is tried once the walls stand; `through` where the code got what it wanted. It loads all that it needs before,
# since another user may not read an interpreter below /root.
ATTACKS: dict[str, tuple[str, str]] = {
    "environment of another process": (LANDLOCK, "SECRET in open(f'/proc/{victim}/environ').read()"),
    "memory of another process": (LANDLOCK, "os.open(f'/proc/{victim}/mem', os.O_RDWR) >= 0"),
    "files of another process": (LANDLOCK, "os.listdir(f'/proc/{victim}/fd') is not None"),
    "a file outside": (LANDLOCK, "SECRET in open(outside).read()"),
    "the list of a folder outside": (LANDLOCK, "bool(os.listdir(os.path.dirname(outside)))"),
    "writing outside": (LANDLOCK, "open(outside, 'w') is not None"),
    "emptying by an open for reading": (LANDLOCK, "os.open(outside, os.O_RDONLY | os.O_TRUNC) >= 0"),
    "emptying a library by an open for reading": (SECCOMP, "os.open(library, os.O_RDONLY | os.O_TRUNC) >= 0"),
    "emptying by its name": (SECCOMP, "os.truncate(outside, 0) is None"),
    "a link out of the folder": (LANDLOCK, "os.symlink(outside, 'there') is None and bool(open('there').read())"),
    "a second name for a file outside": (LANDLOCK, "os.link(outside, 'same') is None"),
    "its own root, through /proc": (LANDLOCK, "SECRET in open('/proc/self/root' + outside).read()"),
    "memory on /dev/shm": (LANDLOCK, "open(f'/dev/shm/gleaner-{os.getpid()}', 'w') is not None"),
    "a device": (LANDLOCK, "os.mknod('device', 0o600 | stat.S_IFCHR, os.makedev(1, 3)) is None"),
    "a FIFO": (LANDLOCK, "os.mkfifo('fifo') is None"),
    "all the room of a disk at once": (SECCOMP, "call(285, os.open('room', os.O_CREAT | os.O_WRONLY), 0, 0, 1 << 20)"),
    "shared memory": (SECCOMP, "mmap.mmap(-1, 1 << 20) is not None"),
    "a file in memory": (SECCOMP, "os.memfd_create('x') >= 0"),
    "memory of System V": (SECCOMP, "call(29, 0, 1 << 20, 0o1600)"),
    "a fork": (SECCOMP, "call(57)"),
    "a clone": (SECCOMP, "call(56, 17, 0, 0, 0, 0)"),
    "a clone3": (SECCOMP, "call(435, struct.pack('<QQQQQ48x', 0, 0, 0, 0, 17), 88)"),
    "a program": (SECCOMP, "call(59, b'/bin/true', 0, 0)"),
    "a session of its own": (SECCOMP, "call(112)"),
    "a signal": (SECCOMP, "call(62, victim, 18)"),
    "a signal to all": (SECCOMP, "call(62, -1, 0)"),
    "a signal to its group": (SECCOMP, "call(62, 0, 0)"),
    "a signal to a thread": (SECCOMP, "call(234, victim, victim, 18) or call(200, victim, 18)"),
    "a queued signal": (SECCOMP, "call(129, victim, 18, struct.pack('<iii116x', 18, 0, -1))"),
    "a descriptor of a process": (SECCOMP, "call(434, victim, 0)"),
    "a signal by the kernel's hand": (SECCOMP, "fcntl.fcntl(0, fcntl.F_SETOWN, victim) == 0"),
    "limits of another process": (SECCOMP, "resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1)) is not None"),
    "the pace of another process": (SECCOMP, "os.setpriority(os.PRIO_PROCESS, victim, 19) is None"),
    "the cores of another process": (SECCOMP, "os.sched_setaffinity(victim, {0}) is None"),
    "tracing": (SECCOMP, "call(101, 16, victim, 0, 0)"),
    "memory of another process, read": (SECCOMP, "call(310, victim, 0, 0, 0, 0, 0)"),
    "TCP": (SECCOMP, "_socket.socket(2, 1).connect(('127.0.0.1', port)) is None"),
    "UDP": (SECCOMP, "_socket.socket(2, 2).sendto(b'x', ('127.0.0.1', port)) > 0"),
    "a socket of the Unix kind": (SECCOMP, "call(41, 1, 1, 0)"),
    "netlink": (SECCOMP, "call(41, 16, 3, 0)"),
    "datagrams of the Unix kind": (SECCOMP, "_socket.socketpair(1, 2) is not None"),
    "keys": (SECCOMP, "call(250, 0, -3, 0)"),
    "io_uring": (SECCOMP, "call(425, 1, ctypes.create_string_buffer(120))"),
    "bpf": (SECCOMP, "call(321, 0, struct.pack('<IIII112x', 2, 4, 4, 1), 128)"),
    "perf": (SECCOMP, "call(298, struct.pack('<IIQ96x', 1, 112, 0), 0, -1, -1, 0)"),
    "a user namespace": (SECCOMP, "call(272, 0x10000000)"),
    "a mount": (SECCOMP, "call(165, 0, b'.', b'tmpfs', 0, 0)"),
    "being told nothing of its parent's end": (SECCOMP, "call(157, 1, 0, 0, 0, 0)"),
    "rights of others' files": (SECCOMP, "os.chmod(outside, 0) is None and not os.stat(outside).st_mode & 0o777"),
    "memory": (LIMITS, "len(bytearray(1 << 30)) > 0"),
    "a large file": (LIMITS, "open('large', 'wb', 0).write(bytes(2 << 20)) == 2 << 20"),
    "very many threads": (LIMITS, "threads(400) == 400"),
}  # fmt: skip
# What must go on.
HONEST = {
    "threads": "threads(8) == 8",
    "an event loop": "asyncio.run(asyncio.sleep(0, 5)) == 5",
    "a file of its own": "open('own', 'w').write('x') == 1 and os.listdir('.') != [] and os.remove('own') is None",
    "folders": "os.mkdir('d') is None and os.rename('d', 'e') is None and os.rmdir('e') is None",
    "copying": "open('a', 'w').close() is None and shutil.copy('a', 'b') == 'b' and shutil.copy2('a', 'c') == 'c'",
    "room in a file": "os.posix_fallocate(os.open('g', os.O_CREAT | os.O_RDWR), 0, 9) is None",
    "what no file need be": "pathlib.Path('f').touch() is None and os.path.exists('f')",
    "a signal to itself": "os.kill(os.getpid(), 0) is None",
    "time and chance": "time.sleep(0) is None and len(os.urandom(4)) == 4",
    "nothing": "open('/dev/null', 'w').write('x') == 1",
}
DRIVER = (
    ENTER
    + """
import _socket, asyncio, asyncio.selector_events, concurrent.futures.thread, fcntl, json, mmap, pathlib, resource
import shutil, stat, sys, threading, time
from cluster import confinement
context, attacks, honest = json.loads(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
SECRET, victim, outside, port = (context[name] for name in ("secret", "victim", "outside", "port"))
library = os.__file__
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(number, *arguments) >= 0
def threads(count):
    done, started = threading.Event(), []
    try:
        while len(started) < count:
            thread = threading.Thread(target=done.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:  # can't start new thread
        pass
    done.set()
    for thread in started:
        thread.join()
    return len(started)
def tried(code):
    try:
        return bool(eval(code))
    except Exception as error:
        return False
os.chdir(context["home"])
enter(context["user"], context["namespaces"])
walls = confinement.confine(20, 256 << 20, 1 << 20)
through = [name for name, code in attacks.items() if tried(code)]
broken = [name for name, code in honest.items() if not tried(code)]
print(json.dumps([walls, through, broken]))
"""
)


def has(wall: str) -> bool:
    return WALLS[wall][0]


WALLS = walls()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls in it are those of x86_64")
@pytest.mark.parametrize(("user", "namespaces"), CONTEXTS)
def test_nothing_gets_through_and_what_computes_goes_on(user: int | None, namespaces: bool, tmp_path: Path) -> None:
    skip_unless_possible(user, starts_python=False)
    if not namespaces and not has(SECCOMP):
        pytest.skip("no namespaces: a filter of system calls refuses them, and this kernel has none")
    home, outside = tmp_path / "home", tmp_path / "outside"
    home.mkdir()
    outside.write_text(SECRET)
    for path in (tmp_path, home, outside):
        os.chown(path, user or os.geteuid(), -1)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    victim = subprocess.Popen(
        ["sleep", "60"],
        env={"TOKEN": SECRET, "PATH": os.defpath},
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    known = {name: code for name, (wall, code) in ATTACKS.items() if has(wall)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = {
            "secret": SECRET, "victim": victim.pid, "outside": str(outside), "home": str(home),
            "port": server.getsockname()[1], "user": user, "namespaces": namespaces,
        }  # fmt: skip
        command = [sys.executable, "-c", DRIVER, *map(json.dumps, (context, known, HONEST))]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        finally:
            alive = victim.poll() is None
            victim.kill()
            victim.wait()
    assert told.returncode == 0, told.stderr
    found, through, broken = json.loads(told.stdout)
    assert (through, broken) == ([], [])
    assert alive
    assert found["namespace"][0] == (namespaces and WALLS["namespace"][0])
    assert outside.read_text() == SECRET
    if missing := [wall for wall in (LANDLOCK, SECCOMP) if not has(wall)]:
        pytest.skip(f"attacks that these walls are for were not tried, as this kernel has none: {', '.join(missing)}")


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter of system calls says of one, computed as the kernel does (seccomp(2), classic BPF)."""
    own = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    words = [number, architecture or own, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
    at, held = 0, 0
    program = system_call_filter(machine, (1234, 77))
    while True:
        code, yes, no, operand = program[at]
        at += 1
        if code == 0x20:
            held = words[operand // 4]
        elif code == 0x54:
            held &= operand
        elif code == 0x06:
            return operand
        else:
            at += yes if {0x15: held == operand, 0x25: held > operand, 0x35: held >= operand}[code] else no


ALLOWED, KILLED = 0x7FFF0000, 0x80000000


def refused(number: int) -> int:
    return 0x50000 | number


@pytest.mark.parametrize(
    ("x86_64", "aarch64", "arguments", "wanted"),
    [
        (0, 63, (), ALLOWED),  # read
        (56, 220, (0x3D0F00,), ALLOWED),  # clone of a thread
        (56, 220, (17,), refused(errno.EPERM)),  # of a process
        (435, 435, (), refused(errno.ENOSYS)),  # clone3
        (59, 221, (), refused(errno.EPERM)),  # execve
        (62, 129, (1234, 9), ALLOWED),  # kill itself
        (62, 129, (77, 9), ALLOWED),  # or its child
        (62, 129, (1, 9), refused(errno.EPERM)),
        (62, 129, (2**32 - 1, 9), refused(errno.EPERM)),
        (9, 222, (0, 1, 3, 0x22), ALLOWED),  # mmap of private memory
        (9, 222, (0, 1, 3, 0x21), refused(errno.ENOMEM)),
        (9, 222, (0, 1, 3, 0x23), refused(errno.ENOMEM)),
        (257, 56, (0, 0, os.O_RDONLY), ALLOWED),
        (257, 56, (0, 0, os.O_WRONLY | os.O_TRUNC), ALLOWED),
        (257, 56, (0, 0, os.O_RDONLY | os.O_TRUNC), refused(errno.EPERM)),
        (53, 199, (1, 1 | 0o2000000), ALLOWED),  # a pair of streams
        (53, 199, (1, 2), refused(errno.EPERM)),
        (53, 199, (30, 1), refused(errno.EPERM)),
        (41, 198, (2, 1), refused(errno.EPERM)),  # socket
        (72, 25, (0, 8), refused(errno.EPERM)),  # F_SETOWN
        (72, 25, (0, 1030), ALLOWED),  # F_DUPFD_CLOEXEC
        (302, 261, (0,), ALLOWED),
        (302, 261, (1,), refused(errno.EPERM)),  # limits of another
        (91, 52, (), refused(0)),  # fchmod: said to be done
        (285, 47, (), refused(errno.EOPNOTSUPP)),  # fallocate, in whose place libraries write
        (425, 425, (), refused(errno.EPERM)),  # io_uring_setup
        (999, 999, (), refused(errno.ENOSYS)),  # of a kernel to come
    ],
)
def test_the_filter_of_either_architecture(x86_64: int, aarch64: int, arguments: tuple[int, ...], wanted: int) -> None:
    assert (verdict("x86_64", x86_64, *arguments), verdict("aarch64", aarch64, *arguments)) == (wanted, wanted)


def test_calls_of_another_architecture_end_the_process() -> None:
    assert verdict("x86_64", 1, architecture=0x40000003) == verdict("aarch64", 1, architecture=0x40000028) == KILLED
    assert verdict("x86_64", 0x40000000 | 59) == KILLED  # x32


def test_what_this_kernel_lacks_is_said_with_what_that_means(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(WALLS) == {"namespace", "network", LANDLOCK, SECCOMP, LIMITS}
    bare = dict.fromkeys(WALLS, (False, "none here"))
    of_processes = ", and the memory and environments of your processes, with the tokens in them"
    assert missed(bare) == [
        f"Landlock: none here: it can read and change the files that you can{of_processes}",
        "seccomp: none here: it can start processes and signal yours, and reach the network",
    ]
    named = bare | {"namespace": (True, ""), "network": (True, "")}
    assert [one.rpartition(": ")[2] for one in missed(named)] == [
        "it can read and change the files that you can", "it can start processes and signal yours",
    ]  # fmt: skip
    other = (*os.uname()[:4], "riscv64")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(other))
    found: Any = confinement._seccomp(None, (1,))
    assert found == (False, "no list of system calls for riscv64")
