"""What keeps code that a policy wrote to its own computation: walls that a process puts up around itself, for good.

`confine` is called in a process of one thread that is about to run such code: a fresh interpreter (`command`), or a
fork. It puts up, as far as the kernel has them,

- a user and a network namespace of its own, and no capabilities;
- Landlock (Linux 5.13): files are read only of the interpreter and its libraries, and written only below the working
  folder; no TCP, no abstract socket and (Linux 6.12) no signal leads out;
- a filter of system calls (seccomp): those that Python computes with are let through and all others refused, among
  them those that start processes, reach a socket, signal another process, and share memory that no limit counts;
- limits of time, memory, files and threads.

`walls` says which of them this kernel gives. Standard library only, and quick to load, since a trajectory waits for it:
`typing` and `dataclasses` would take a tenth of the start.
"""

from __future__ import annotations

import _posixsubprocess
import ctypes
import errno
import os
import resource
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, NoReturn

    Walls = dict[str, tuple[bool, str]]
    """By name, whether it stands, and what there is to say of it."""
    Conditions = Sequence[tuple[int, int, Sequence[int]]]

USER, NETWORK, LANDLOCK, SECCOMP, LIMITS = "namespace", "network", "Landlock", "seccomp", "limits"
DESCRIPTORS = 64
THREADS = 64  # that code may have beside those that the machine has already
RESERVE = 4 << 30  # bytes of address space beside the memory limit: mapped libraries, and the arenas of threads
_NOBODY = 2_000_000_000  # and the process's number: a user that nobody is
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38  # linux/prctl.h
_SIGKILL = 9  # of `signal`, which takes longer to load than all else here
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PACKAGES = ("site-packages", "dist-packages")
_READABLE = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share", "/nix/store", "/etc/localtime",
    "/etc/timezone", "/etc/ld.so.cache", "/etc/mime.types", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf",
    "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
    "/sys/devices/system/cpu", "/dev/urandom", "/dev/random",
)  # fmt: skip

# Landlock, linux/landlock.h: rights by their bit, and how many bits of them each version of the interface knows.
_LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self: the same numbers everywhere
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_OF_FILES = 0b111 | _TRUNCATE | 1 << 15
_KNOWN_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # 16 from version 5 on
# All but devices, FIFOs and sockets, of which nobody who computes needs one.
_OWN_FOLDER = _WRITE_FILE | _READ_FILE | _READ_DIR | _TRUNCATE | sum(1 << bit for bit in (4, 5, 7, 8, 12, 13))

# System calls that are let through, by their numbers on x86_64 and aarch64 (asm/unistd.h), some of them under the
# conditions of _CHECKED. All others are refused: what is not here cannot be a way out that was forgotten.
_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, close 3 57, close_range 436 436, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
statx 332 291, statfs 137 43, fstatfs 138 44, lseek 8 62, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216,
madvise 28 233, msync 26 227, mincore 27 232, mlock 149 228, munlock 150 229, poll 7 -, ppoll 271 73, select 23 -,
pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86,
timerfd_gettime 287 87, pipe 22 -, pipe2 293 59, dup 32 23, dup2 33 -, dup3 292 24, flock 73 32, fsync 74 82,
fdatasync 75 83, ftruncate 77 46, fallocate 285 47, fadvise64 221 223, access 21 -, faccessat 269 48,
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -,
mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -,
linkat 265 37, symlink 88 -, symlinkat 266 36, creat 85 -, umask 95 166, utime 132 -, utimes 235 -, utimensat 280 88,
futimesat 261 -, getdents 78 -, getdents64 217 61, sendfile 40 71, copy_file_range 326 285, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133,
sigaltstack 131 132, pause 34 -, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, getitimer 36 102, setitimer 38 103, alarm 37 -,
futex 202 98, futex_waitv 449 449, set_robust_list 273 99, rseq 334 293, set_tid_address 218 96, exit 60 93,
exit_group 231 94, restart_syscall 219 128, wait4 61 260, waitid 247 95, sched_yield 24 124, sched_getaffinity 204 123,
sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
getpriority 140 141, getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155, getsid 124 156,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, getrusage 98 165, sysinfo 99 179, uname 63 160, getrlimit 97 163, setrlimit 160 164,
getrandom 318 278, getcpu 309 168, membarrier 324 283, get_mempolicy 239 236, sendto 44 206, recvfrom 45 207,
sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockname 51 204, getpeername 52 205, setsockopt 54 208,
getsockopt 55 209, capget 125 90, arch_prctl 158 -, open 2 -, openat 257 56, mmap 9 222, clone 56 220, clone3 435 435,
fcntl 72 25, ioctl 16 29, kill 62 129, tgkill 234 131, prctl 157 167, prlimit64 302 261, socketpair 53 199,
sched_setaffinity 203 122, setpriority 141 140, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
llistxattr 195 12, flistxattr 196 13, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452
"""
_NEWER = 452  # system calls beyond this number are answered as by a kernel that does not have them
_ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of _CALLS; linux/audit.h
_ALLOW, _KILL = 0x7FFF0000, 0x80000000  # linux/seccomp.h
_ANY = 0xFFFFFFFF
_SHARED_NOWHERE = 0x21  # MAP_SHARED | MAP_ANONYMOUS


def _refused(number: int) -> int:
    return 0x00050000 | number


_DENY = _refused(errno.EPERM)
# (conditions, what follows where all of them hold, what else); a condition: argument, mask, one of these values.
_CHECKED: dict[str, tuple[Conditions, int, int]] = {
    # Before Linux 6.2 Landlock sees no truncation by an open for reading.
    "open": ([(1, os.O_TRUNC | os.O_ACCMODE, [os.O_TRUNC])], _DENY, _ALLOW),
    "openat": ([(2, os.O_TRUNC | os.O_ACCMODE, [os.O_TRUNC])], _DENY, _ALLOW),
    # Counted by no limit, as are System V's shared memory, memfd and files on /dev/shm, which are not to be had at all.
    "mmap": ([(3, _SHARED_NOWHERE, [_SHARED_NOWHERE])], _refused(errno.ENOMEM), _ALLOW),
    "clone": ([(0, 0x10000, [0x10000])], _ALLOW, _DENY),  # CLONE_THREAD
    "clone3": ([], _refused(errno.ENOSYS), _ALLOW),  # whose flags a filter cannot see; libraries fall back on clone
    # Not F_SETOWN, F_SETSIG and their like, by which the kernel sends signals in our name; nor leases.
    "fcntl": ([(1, _ANY, [*range(8), 36, 37, 38, *range(1030, 1035)])], _ALLOW, _DENY),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": ([(1, _ANY, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])], _ALLOW, _refused(errno.ENOTTY)),
    "kill": ([(0, _ANY, [])], _ALLOW, _DENY),  # [] stands for the processes that it may signal
    "tgkill": ([(0, _ANY, [])], _ALLOW, _DENY),
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
    "prctl": ([(0, _ANY, [3, 15, 16, 0x53564D41])], _ALLOW, _DENY),
    "prlimit64": ([(0, _ANY, [0])], _ALLOW, _DENY),  # limits and priorities of others: of none
    "sched_setaffinity": ([(0, _ANY, [0])], _ALLOW, _DENY),
    "setpriority": ([(0, _ANY, [0]), (1, _ANY, [0])], _ALLOW, _DENY),
    # AF_UNIX, SOCK_STREAM, as event loops have one; a pair of datagrams can send to any address.
    "socketpair": ([(0, _ANY, [1]), (1, 0xF, [1])], _ALLOW, _DENY),
    # A disk would be full at once of files that stand in no folder any more; writing takes as long as the disk does.
    "fallocate": ([], _refused(errno.EOPNOTSUPP), _ALLOW),
    # As on a file system without them, which copying knows.
    **dict.fromkeys(
        ("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"),
        ([], _refused(errno.EOPNOTSUPP), _ALLOW),
    ),
    # Landlock does not see them. They are said to be done, since shutil.copy fails where they are refused.
    **dict.fromkeys(("chmod", "fchmod", "fchmodat", "fchmodat2"), ([], _refused(0), _ALLOW)),
}
# What Python says before it does it (docs.python.org, audit events), by its beginning.
_STARTS_PROCESSES = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn")
_OPENS_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostby",
                  "socket.getnameinfo")  # fmt: skip


def command(module: str, *arguments: str) -> list[str]:
    """What starts a fresh interpreter that calls `main` of one of our modules with these arguments: without `site`,
    whose .pth files take longer than all the rest, and with our own packages on its path for that import only."""
    program = (
        "import sys\n"
        "_, root, libraries, module, *given = sys.argv\n"
        f"sys.path += filter(None, libraries.split({os.pathsep!r}))\n"
        "sys.path.insert(0, root)\n"
        "main = __import__(module, fromlist=['main']).main\n"
        "sys.path.remove(root)\n"
        "sys.argv = ['']\n"
        "main(*given)\n"
    )
    root, libraries = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.pathsep.join(_packages())
    return [sys.executable, "-I", "-S", "-u", "-X", "utf8", "-c", program, root, libraries, module, *arguments]


def _packages() -> list[str]:
    return [path for path in sys.path if os.path.basename(path) in _PACKAGES]


def confine(
    seconds: int, memory_bytes: int, file_bytes: int, *, writes: bool = True, child: int | None = None
) -> Walls:
    """Puts the walls up, for good, and says which stand.

    Args:
        seconds: of CPU time.
        memory_bytes: that the process may write to, what it has already included.
        file_bytes: of any file that it writes.
        writes: whether it may write below its working folder.
        child: a process that it has started, and may end.

    Raises OSError where not even a limit can be set.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent, threads, mapped = os.getppid(), _threads_of_the_machine() + THREADS, _mapped()
    _be_the_first_to_go()
    if os.geteuid() == 0:
        _be_nobody()
    walls = _namespaces(libc)
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    try:
        walls[LANDLOCK] = _landlock(libc, _readable(), writes=writes, signals=child is not None)
    except OSError as error:
        walls[LANDLOCK] = False, f"the kernel has it and refuses it ({error})"
    _drop_capabilities(libc)
    _checked(libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before prctl could say so
        os._exit(1)
    signalled = (os.getpid(),) if child is None else (os.getpid(), child)
    walls[SECCOMP] = _seccomp(libc, signalled)
    # Without the filter of system calls it is the limit of processes that keeps all but root from starting one, and
    # then no thread can be started either.
    threads = threads if walls[SECCOMP][0] else 0
    limit(resource.RLIMIT_CPU, seconds)
    limit(resource.RLIMIT_DATA, memory_bytes)
    limit(resource.RLIMIT_AS, mapped + memory_bytes + RESERVE)
    limit(resource.RLIMIT_FSIZE, file_bytes)
    limit(resource.RLIMIT_NPROC, threads)
    limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    limit(resource.RLIMIT_CORE, 0)
    walls[LIMITS] = (
        True,
        "of CPU time, memory, files and threads" if threads else "of CPU time, memory and files; no threads",
    )
    sys.addaudithook(lambda event, arguments: _refuse(signalled, event, arguments))
    _posixsubprocess.fork_exec = _refuse_process  # of multiprocessing; there is no event of it
    return walls


def limit(kind: int, value: int) -> None:
    """Sets a limit that this process cannot raise again; a lower one that is set already stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def walls() -> Walls:
    """Those that this kernel gives, found out by a process that puts them up, in about 0.1 s."""
    import json
    import subprocess

    told = subprocess.run(command(__name__), capture_output=True, text=True, timeout=60, check=True, cwd="/").stdout
    return {name: (stands, text) for name, (stands, text) in json.loads(told).items()}


def missed(walls: Walls) -> list[str]:
    """What code can do, since these walls are all that stand; nothing where Landlock and seccomp do."""
    (landlock, no_landlock), (seccomp, no_seccomp) = walls[LANDLOCK], walls[SECCOMP]
    found = []
    if not landlock:
        others = (
            "" if walls[USER][0] else ", and the memory and environments of your processes, with the tokens in them"
        )
        found.append(f"{LANDLOCK}: {no_landlock}: it can read and change the files that you can{others}")
    if not seccomp:
        network = "" if walls[NETWORK][0] else ", and reach the network"
        found.append(f"{SECCOMP}: {no_seccomp}: it can start processes and signal yours{network}")
    return found


def main() -> None:
    """The process that `walls` asks."""
    import json

    print(json.dumps(confine(10, 1 << 30, 1 << 20, writes=False)))


def _threads_of_the_machine() -> int:
    """All of them, proc(5); the limit of a user's processes counts those that it has already."""
    return int(_told("/proc/loadavg", "0 0 0 0/4096 0").split()[3].partition("/")[2])


def _mapped() -> int:
    """Bytes of this process's address space."""
    return int(_told("/proc/self/statm", "0").split()[0]) * resource.getpagesize()


def _told(path: str, otherwise: str) -> str:
    """What a file of /proc says, of which some sandboxes have little."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return otherwise


def _be_the_first_to_go() -> None:
    """Where the machine runs out of memory, the kernel ends this process before those that it serves."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # the kernel chooses as it does without that
        return


def _be_nobody() -> None:
    """Root alone is not held to the limit of processes, nor of threads: so its real user, by which the kernel counts,
    becomes another. The effective one stays, which may read an interpreter below /root."""
    try:
        os.setresuid(_NOBODY + os.getpid(), -1, -1)
    except OSError:  # a user namespace that has few users, whose root is outside of it another
        return


def _namespaces(libc: Any) -> Walls:
    """In a user namespace of its own root has no rights outside."""
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        return {
            USER: (True, "code of a policy has a user namespace of its own"),
            NETWORK: (True, "such code has none but its loopback"),
        }
    why = f"the kernel refuses one ({os.strerror(ctypes.get_errno())})"
    alone = libc.unshare(_CLONE_NEWNET) == 0
    return {USER: (False, why), NETWORK: (alone, "such code has none but its loopback" if alone else why)}


def _drop_capabilities(libc: Any) -> None:
    """Also those in its own namespace. Without them root may not look into a process that has some."""
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        header, none = struct.pack("<Ii", 0x20080522, 0), bytes(24)  # linux/capability.h, version 3
        _checked(libc.syscall(number, header, none), "capset")


def _readable() -> Iterator[str]:
    """The interpreter and its libraries, and what they read of the system; not the whole of a path entry, which may be
    the folder with the user's data and the tests in it."""
    yield from _READABLE
    yield from _packages()
    yield os.path.dirname(os.__file__)
    yield from (os.path.join(sys.base_prefix, name) for name in ("lib", "lib64"))
    yield os.path.realpath(sys.executable)


def _landlock(libc: Any, readable: Iterator[str], *, writes: bool, signals: bool) -> tuple[bool, str]:
    create, add, restrict = _LANDLOCK
    version = libc.syscall(create, None, 0, 1)  # LANDLOCK_CREATE_RULESET_VERSION
    if version < 1:
        return False, f"the kernel has none ({os.strerror(ctypes.get_errno())})"
    every = (1 << _KNOWN_RIGHTS.get(version, 16)) - 1
    # The rights that are taken; TCP, binding and connecting; abstract sockets and signals to processes without it.
    taken = struct.pack("<QQQ", every, 3, 1 if signals else 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(create, taken, len(taken), 0)
    _checked(ruleset, "landlock_create_ruleset")
    rules = [(path, _READ_FILE | _READ_DIR) for path in readable]
    rules.append(("/dev/null", _READ_FILE | _WRITE_FILE | _TRUNCATE))
    if writes:
        rules.append((".", _OWN_FOLDER))
    for path, rights in rules:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # it is not there
            continue
        rights &= every if os.path.isdir(path) else every & _OF_FILES
        _checked(libc.syscall(add, ruleset, 1, struct.pack("<Qi", rights, place), 0), f"landlock_add_rule({path})")
        os.close(place)
    _checked(libc.syscall(restrict, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    return True, f"version {version}: such code reads libraries and writes its own folder"


def _seccomp(libc: Any, signalled: Sequence[int]) -> tuple[bool, str]:
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False, f"no list of system calls for {machine}"
    code = _packed(machine, signalled)
    steps = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(steps))  # struct sock_fprog
    if libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(program), 0, 0) != 0:
        return False, f"the kernel refuses it ({os.strerror(ctypes.get_errno())})"
    return True, f"{machine}: it can do no more than compute"


_PLACES = (0xFFFFFF01, 0xFFFFFF02)  # that no process has the number of
_known_filters: dict[str, bytes] = {}


def _packed(machine: str, signalled: Sequence[int]) -> bytes:
    """The filter as the kernel takes it; made once for a process and its forks, and then filled in."""
    if machine not in _known_filters:
        steps = system_call_filter(machine, _PLACES)
        _known_filters[machine] = b"".join(struct.pack("<HBBI", *step) for step in steps)
    code = _known_filters[machine]
    for place, pid in zip(_PLACES, (*signalled, *signalled), strict=False):
        code = code.replace(struct.pack("<I", place), struct.pack("<I", pid))
    return code


def system_call_filter(machine: str, signalled: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The program (code, jump if true, jump if false, operand) in classic BPF over struct seccomp_data. signalled: the
    processes to which signals may be sent."""
    column, architecture = _ARCHITECTURES[machine]
    load, equal, greater, at_least, mask, end = 0x20, 0x15, 0x25, 0x35, 0x54, 0x06
    # Calls of a 32-bit program have other numbers, and so have those of x32.
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, _KILL), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (end, 0, 0, _KILL)] if machine == "x86_64" else []
    numbers = {}
    for entry in _CALLS.split(","):
        call = entry.split()
        if call[column] != "-":
            numbers[call[0]] = int(call[column])
    for name, (conditions, then, otherwise) in _CHECKED.items():
        if name not in numbers:
            continue
        block = []
        for argument, bits, values in conditions:
            block += [(load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits)]  # of its eight bytes the lower four
            given = values or signalled
            block += [(equal, len(given) - i, 0, value) for i, value in enumerate(given)]
            block.append((end, 0, 0, otherwise))
        block.append((end, 0, 0, then))
        steps += [(equal, 0, len(block), numbers.pop(name)), *block]
    runs: list[list[int]] = []
    for number in sorted(numbers.values()):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    for first, last in runs:
        steps += [(at_least, 0, 2, first), (greater, 1, 0, last), (end, 0, 0, _ALLOW)]
    return [*steps, (greater, 0, 1, _NEWER), (end, 0, 0, _refused(errno.ENOSYS)), (end, 0, 0, _DENY)]


def _checked(answer: int, what: str) -> None:
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _refuse(signalled: Sequence[int], event: str, arguments: tuple[Any, ...]) -> None:
    """Says in a sentence what the kernel would refuse with a number, and is all that refuses where it has no walls."""
    if event.startswith(_STARTS_PROCESSES):
        _refuse_process()
    # A socket of the Unix kind is let be until it is to reach somebody: asyncio's event loop has a pair of them.
    other_kind = event == "socket.__new__" and arguments[1] != 1  # AF_UNIX
    addressed = event == "socket.sendmsg" and arguments[1] is not None
    if other_kind or addressed or event.startswith(_OPENS_NETWORK):
        raise PermissionError("code has no network here")
    if event == "os.killpg" or (event == "os.kill" and arguments[0] not in signalled):
        raise PermissionError("code may send no signals to others here")


def _refuse_process(*_: object) -> NoReturn:
    raise PermissionError("code may start no processes here")
