"""Confines a process that is about to run code written by the policy: `confine` restricts the calling process for good,
so that the code can compute and little else.

`confine` is called in a process with one thread: a fresh interpreter (`command`), or a fork. It sets up these walls, as
far as the kernel has them:

- a user namespace and a network namespace of its own, without capabilities;
- Landlock (Linux 5.13): the process reads only the files of the interpreter and its libraries, writes only below its
  working folder, and has no TCP, no abstract sockets of others, and (Linux 6.12) no signals to others;
- a filter of system calls (seccomp): those with which Python computes are allowed. All others are refused, among them
  those that start processes, connect sockets, signal other processes, or share memory that no limit counts;
- limits of CPU time, memory, files and threads.

`walls` says which of them this kernel has. The module imports only parts of the standard library that load quickly,
since a trajectory waits for it: `typing` and `dataclasses` would take a tenth of the start.
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
    """By name of a wall: whether it is in place, and a text for the user."""
    Conditions = Sequence[tuple[int, int, Sequence[int]]]

USER, NETWORK, LANDLOCK, SECCOMP, LIMITS = "namespace", "network", "Landlock", "seccomp", "limits"
DESCRIPTORS = 64  # open files of a confined process, at most
THREADS = 64  # threads of a confined process, at most, added to the threads that the machine has at its start
RESERVE = 4 << 30  # bytes of address space beyond the memory limit, for mapped libraries and the arenas of threads
_NOBODY = 2_000_000_000  # added to the process id, this is a user id that no user has
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38  # linux/prctl.h
_SIGKILL = 9  # signal.SIGKILL; loading `signal` takes longer than loading all other modules here
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PACKAGES = ("site-packages", "dist-packages")
_READABLE = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share", "/nix/store", "/etc/localtime",
    "/etc/timezone", "/etc/ld.so.cache", "/etc/mime.types", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf",
    "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
    "/sys/devices/system/cpu", "/dev/urandom", "/dev/random",
)  # fmt: skip

# Landlock, linux/landlock.h: bits of rights, and how many bits each version of the interface knows.
_LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self: the same numbers on all architectures
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_OF_FILES = 0b111 | _TRUNCATE | 1 << 15  # rights that apply to files; the others apply to folders only
_KNOWN_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version -> bits; 16 from version 5 on
# All rights in the working folder, except to create devices, FIFOs and sockets, which computing does not need.
_OWN_FOLDER = _WRITE_FILE | _READ_FILE | _READ_DIR | _TRUNCATE | sum(1 << bit for bit in (4, 5, 7, 8, 12, 13))

# The allowed system calls with their numbers on x86_64 and aarch64 (asm/unistd.h); some are allowed only under the
# conditions of _CHECKED. All others are refused, so that a call which nobody thought of cannot be a way out.
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
_NEWER = 452  # system calls beyond this number fail as on a kernel that does not have them
_ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of _CALLS; linux/audit.h
_ALLOW, _KILL = 0x7FFF0000, 0x80000000  # linux/seccomp.h
_ANY = 0xFFFFFFFF
_SHARED_NOWHERE = 0x21  # MAP_SHARED | MAP_ANONYMOUS


def _refused(number: int) -> int:
    return 0x00050000 | number


_DENY = _refused(errno.EPERM)
# System call -> (conditions, answer if all of them hold, answer if not). A condition is (index of an argument, mask,
# allowed values).
_CHECKED: dict[str, tuple[Conditions, int, int]] = {
    # Before Linux 6.2 Landlock does not see that an open for reading truncates a file.
    "open": ([(1, os.O_TRUNC | os.O_ACCMODE, [os.O_TRUNC])], _DENY, _ALLOW),
    "openat": ([(2, os.O_TRUNC | os.O_ACCMODE, [os.O_TRUNC])], _DENY, _ALLOW),
    # No limit counts shared anonymous memory. (The same is true of System V's shared memory and memfd, whose calls are
    # not allowed, and of files in /dev/shm, which cannot be opened.)
    "mmap": ([(3, _SHARED_NOWHERE, [_SHARED_NOWHERE])], _refused(errno.ENOMEM), _ALLOW),
    "clone": ([(0, 0x10000, [0x10000])], _ALLOW, _DENY),  # CLONE_THREAD
    "clone3": ([], _refused(errno.ENOSYS), _ALLOW),  # a filter cannot see its flags; libraries fall back on clone
    # F_SETOWN, F_SETSIG and the like are refused, since the kernel then sends signals for this process, and leases.
    "fcntl": ([(1, _ANY, [*range(8), 36, 37, 38, *range(1030, 1035)])], _ALLOW, _DENY),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": ([(1, _ANY, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])], _ALLOW, _refused(errno.ENOTTY)),
    "kill": ([(0, _ANY, [])], _ALLOW, _DENY),  # [] stands for the processes that may be signalled
    "tgkill": ([(0, _ANY, [])], _ALLOW, _DENY),
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
    "prctl": ([(0, _ANY, [3, 15, 16, 0x53564D41])], _ALLOW, _DENY),
    "prlimit64": ([(0, _ANY, [0])], _ALLOW, _DENY),  # 0 is this process; those of other processes are refused
    "sched_setaffinity": ([(0, _ANY, [0])], _ALLOW, _DENY),
    "setpriority": ([(0, _ANY, [0]), (1, _ANY, [0])], _ALLOW, _DENY),
    # AF_UNIX with SOCK_STREAM, which event loops need; a pair of datagram sockets could send to any address.
    "socketpair": ([(0, _ANY, [1]), (1, 0xF, [1])], _ALLOW, _DENY),
    # With it, deleted files that are still open could fill the disk at once; writing them takes time.
    "fallocate": ([], _refused(errno.EOPNOTSUPP), _ALLOW),
    # The answer of a file system without extended attributes, which functions that copy files accept.
    **dict.fromkeys(
        ("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"),
        ([], _refused(errno.EOPNOTSUPP), _ALLOW),
    ),
    # Landlock does not control them. They do nothing and report success, since shutil.copy would fail on an error.
    **dict.fromkeys(("chmod", "fchmod", "fchmodat", "fchmodat2"), ([], _refused(0), _ALLOW)),
}
# Beginnings of the names of Python's audit events (docs.python.org), which are raised before the action.
_STARTS_PROCESSES = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn")
_OPENS_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostby",
                  "socket.getnameinfo")  # fmt: skip


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that starts a fresh interpreter and calls `main` of one of our modules with these arguments.
    It starts without `site`, whose .pth files take longer than all the rest, and has our packages on its path for that
    import only."""
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
    """Confines this process for good, and returns which walls are in place.

    Args:
        seconds: CPU time.
        memory_bytes: writable memory, with what the process has already.
        file_bytes: size of any file that the process writes.
        writes: whether the process may write below its working folder.
        child: a child process that it may signal (None: no process but itself).

    Raises OSError if not even a limit can be set.
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
    if os.getppid() != parent:  # the parent ended before prctl was called
        os._exit(1)
    signalled = (os.getpid(),) if child is None else (os.getpid(), child)
    walls[SECCOMP] = _seccomp(libc, signalled)
    # Without the filter of system calls, the limit of processes keeps all users but root from starting a process, and
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
    _posixsubprocess.fork_exec = _refuse_process  # used by multiprocessing, without an audit event
    return walls


def limit(kind: int, value: int) -> None:
    """Sets a resource limit that this process cannot raise again; a lower limit that is already set is kept."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def walls() -> Walls:
    """Which walls this kernel has. A process is started that confines itself, which takes about 0.1 s."""
    import json
    import subprocess

    told = subprocess.run(command(__name__), capture_output=True, text=True, timeout=60, check=True, cwd="/").stdout
    return {name: (stands, text) for name, (stands, text) in json.loads(told).items()}


def missed(walls: Walls) -> list[str]:
    """A sentence for each missing wall on what confined code can do therefore; none with Landlock and seccomp."""
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
    """Entry point of the process that `walls` starts."""
    import json

    print(json.dumps(confine(10, 1 << 30, 1 << 20, writes=False)))


def _threads_of_the_machine() -> int:
    """The number of all threads of the machine, proc(5). It is added to the limit of processes, which also counts those
    that the user has already."""
    return int(_told("/proc/loadavg", "0 0 0 0/4096 0").split()[3].partition("/")[2])


def _mapped() -> int:
    """Bytes of this process's address space."""
    return int(_told("/proc/self/statm", "0").split()[0]) * resource.getpagesize()


def _told(path: str, otherwise: str) -> str:
    """The text of a file in /proc, or `otherwise` in sandboxes without that file."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return otherwise


def _be_the_first_to_go() -> None:
    """Makes the kernel kill this process before all others when the machine runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # without this the kernel chooses by its own rule
        return


def _be_nobody() -> None:
    """Changes root's real user id, by which the kernel counts processes and threads, since root is exempt from their
    limit. The effective user id stays root's, so that an interpreter below /root can be read."""
    try:
        os.setresuid(_NOBODY + os.getpid(), -1, -1)
    except OSError:  # the user namespace lacks that id, and its root is an ordinary user outside of it
        return


def _namespaces(libc: Any) -> Walls:
    """Moves this process into a user and a network namespace of its own, in which root has no rights outside."""
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        return {
            USER: (True, "code of a policy has a user namespace of its own"),
            NETWORK: (True, "such code has none but its loopback"),
        }
    why = f"the kernel refuses one ({os.strerror(ctypes.get_errno())})"
    alone = libc.unshare(_CLONE_NEWNET) == 0
    return {USER: (False, why), NETWORK: (alone, "such code has none but its loopback" if alone else why)}


def _drop_capabilities(libc: Any) -> None:
    """Drops all capabilities, also those in its own user namespace. Without them, root cannot read the memory of a
    process that has some."""
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        header, none = struct.pack("<Ii", 0x20080522, 0), bytes(24)  # linux/capability.h, version 3
        _checked(libc.syscall(number, header, none), "capset")


def _readable() -> Iterator[str]:
    """Paths of the interpreter, its libraries, and the system files that these read. Entries of sys.path are not among
    them, since one may be the folder with the user's data and tests."""
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
    # What the ruleset controls: files; bind and connect of TCP; sockets of and signals to other processes.
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
        except OSError:  # the path does not exist
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


_PLACES = (0xFFFFFF01, 0xFFFFFF02)  # placeholders for process ids, which no process has
_known_filters: dict[str, bytes] = {}


def _packed(machine: str, signalled: Sequence[int]) -> bytes:
    """The filter in the kernel's format. It is made once with _PLACES, also for forks of this process, and the process
    ids are then put in."""
    if machine not in _known_filters:
        steps = system_call_filter(machine, _PLACES)
        _known_filters[machine] = b"".join(struct.pack("<HBBI", *step) for step in steps)
    code = _known_filters[machine]
    for place, pid in zip(_PLACES, (*signalled, *signalled), strict=False):
        code = code.replace(struct.pack("<I", place), struct.pack("<I", pid))
    return code


def system_call_filter(machine: str, signalled: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The filter of system calls, as a classic BPF program over struct seccomp_data: (code, jump if true, jump if
    false, operand) of each step. signalled: ids of the processes to which signals may be sent."""
    column, architecture = _ARCHITECTURES[machine]
    load, equal, greater, at_least, mask, end = 0x20, 0x15, 0x25, 0x35, 0x54, 0x06
    # System calls of 32-bit programs and of x32 have other numbers, and end the process.
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
            block += [(load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits)]  # the lower four bytes of the argument
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
    """The audit hook. It refuses with a sentence what the kernel would refuse with an error number, and is the only
    refusal on a kernel without the walls."""
    if event.startswith(_STARTS_PROCESSES):
        _refuse_process()
    # Sockets of the Unix kind are allowed until they are addressed, since asyncio's event loop has a pair of them.
    other_kind = event == "socket.__new__" and arguments[1] != 1  # AF_UNIX
    addressed = event == "socket.sendmsg" and arguments[1] is not None
    if other_kind or addressed or event.startswith(_OPENS_NETWORK):
        raise PermissionError("code has no network here")
    if event == "os.killpg" or (event == "os.kill" and arguments[0] not in signalled):
        raise PermissionError("code may send no signals to others here")


def _refuse_process(*_: object) -> NoReturn:
    raise PermissionError("code may start no processes here")
