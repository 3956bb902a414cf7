"""Takes rights from a process, so that a decoder that a hostile member has taken over can do no harm.

Three parts of Linux, each as far as this kernel has it: Landlock (no file is opened or changed, no connection
made, no other process signalled), a filter of system calls (`seccomp`: an allow list; all others fail with EPERM),
and a process that is not dumpable, so that others of the same user cannot trace it. By ctypes: the numbers and
structures are those of the kernel's headers `linux/landlock.h`, `linux/seccomp.h`, `linux/filter.h` and
`asm/unistd.h`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS, _PR_SET_VMA = 4, 15, 38, 0x53564D41

# --- Landlock: the rights that each version of its interface has added
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # numbers of system calls, the same on all machines
_VERSION, _PATH_BENEATH = 1, 1
_READ = 1 << 2 | 1 << 3  # files, directories
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_BIND_CONNECT, _SOCKETS_SIGNALS = 3, 3  # TCP, since version 4; abstract sockets and signals, since version 6

# --- the filter of system calls: number on x86_64, number on aarch64 (None: there is no such call)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "poll": (7, None),
    "ppoll": (271, 73),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "brk": (12, 214),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "nanosleep": (35, 101),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_PRLIMIT, _PRCTL, _TGKILL = (302, 261), (157, 167), (234, 131)
_CLONE, _CLONE3, _SECCOMP = (56, 220), (435, 435), (317, 277)
_CLONE_THREAD = 1 << 16
_SET_FILTER, _ALL_THREADS = 1, 1
_ALLOW, _REFUSE, _MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions
_NUMBER_AT, _MACHINE_AT, _ARGUMENT_AT = 0, 4, 16  # of what a filter sees; the lower half of the first argument


def hide() -> None:
    """Forbid other processes of this user to trace this one or read its memory. Write no core file."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def begin() -> None:
    """Give up all but reading files, before any library has started a thread. For good."""
    hide()
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _restrict_files(_READ)


def close() -> None:
    """Give up opening files, and all system calls that decoding does not need. For good."""
    _restrict_files(0)
    _filter_calls()


def missing() -> list[str]:
    """Return the parts that this kernel or machine lacks."""
    without = [] if _landlock_version() else ["Landlock"]
    # Without a filter the kernel says EFAULT if it knows the call.
    machine = _MACHINES.get(os.uname().machine)
    if machine is None or _call(_SECCOMP[machine[0]], _SET_FILTER, 0, None) != errno.EFAULT:
        without.append("seccomp")
    return without


def _call(*arguments: object) -> int:
    """Make a system call; return its errno, 0 for none."""
    ctypes.set_errno(0)
    _libc.syscall(*arguments)
    return ctypes.get_errno()


def _landlock_version() -> int:
    return max(int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION)), 0)


def _restrict_files(allowed: int) -> None:
    """Refuse all that Landlock can refuse, except the rights in `allowed` for any file."""
    version = _landlock_version()
    if not version:
        return
    rights = max(right for since, right in _FILE_RIGHTS.items() if since <= version)
    attributes = struct.pack("=Q", rights)
    attributes += struct.pack("=Q", _BIND_CONNECT) if version >= 4 else b""
    attributes += struct.pack("=Q", _SOCKETS_SIGNALS) if version >= 6 else b""
    rules = int(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    if rules < 0:
        return
    try:
        if allowed:
            root = os.open("/", os.O_PATH | os.O_CLOEXEC)
            _call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, root), 0)
            os.close(root)
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _filter_calls() -> None:
    machine = _MACHINES.get(os.uname().machine)
    if machine is not None:
        program = b"".join(_program(*machine))
        buffer = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(buffer))
        _call(_SECCOMP[machine[0]], _SET_FILTER, _ALL_THREADS, header)


def _program(at: int, machine: int) -> list[bytes]:
    """Return the filter for a machine, by the column of its numbers and its name for the kernel."""
    program = [
        *(_instruction(_LOAD, _MACHINE_AT), _instruction(_EQUAL, machine, yes=1), _instruction(_RETURN, _REFUSE)),
        _instruction(_LOAD, _NUMBER_AT),
    ]
    for numbers in _CALLS.values():
        number = numbers[at]
        if number is not None:
            program += [_instruction(_EQUAL, number, no=1), _instruction(_RETURN, _ALLOW)]
    # The C library asks for the other call then, whose flags a filter can see.
    program += [_instruction(_EQUAL, _CLONE3[at], no=1), _instruction(_RETURN, _MISSING)]
    program += _if_first(_CLONE[at], _ANY_BIT, [_CLONE_THREAD])  # threads, not processes
    program += _if_first(_PRLIMIT[at], _EQUAL, [0])  # its own limits
    program += _if_first(_TGKILL[at], _EQUAL, [os.getpid()])  # `abort`
    program += _if_first(_PRCTL[at], _EQUAL, [_PR_SET_NAME, _PR_SET_VMA])  # names of threads and memory
    return [*program, _instruction(_RETURN, _REFUSE)]


def _if_first(number: int, test: int, values: Sequence[int]) -> list[bytes]:
    """Allow a system call if its first argument passes the test for one of these values."""
    checks = [
        part for value in values for part in (_instruction(test, value, no=1), _instruction(_RETURN, _ALLOW))
    ]
    inside = [_instruction(_LOAD, _ARGUMENT_AT), *checks, _instruction(_RETURN, _REFUSE)]
    return [_instruction(_EQUAL, number, no=len(inside)), *inside]


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Return an instruction of a filter; `yes` and `no` are how many others a test leaves out."""
    return struct.pack("=HBBI", code, yes, no, value)
