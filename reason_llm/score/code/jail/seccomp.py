"""System calls that no untrusted program needs are refused with EPERM, by a seccomp filter.

A second wall, not the first: sockets but local ones, new namespaces, mounts, tracing, memory that
no resource limit counts, keyrings, BPF, io_uring. x86_64 and aarch64; elsewhere no filter.

Source: linux/seccomp.h, linux/filter.h, and the kernel's system call tables.
"""

import ctypes
import errno
import platform
import struct
import sys

_NUMBERS = {  # name: (x86_64, aarch64)
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "syslog": (103, 116),
    "acct": (163, 89),
    "personality": (135, 92),
}
# The same number everywhere: io_uring, the new mount calls, pidfd_getfd, mount_setattr,
# memfd_secret.
_NUMBERS_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
_CLONE3 = 435
_CLONE_AND_SOCKET = {"x86_64": (56, 41), "aarch64": (220, 198)}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_NEW_NAMESPACE_FLAGS = 0x7E020000
_AF_UNIX = 1

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


def is_available() -> bool:
    """Whether there is a filter for this processor."""
    return sys.platform == "linux" and platform.machine() in _AUDIT_ARCH


def compiled() -> bytes | None:
    """The filter for this processor, an array of ``struct sock_filter``; None without one."""
    if not is_available():
        return None
    machine = platform.machine()
    column = 0 if machine == "x86_64" else 1
    clone, socket = _CLONE_AND_SOCKET[machine]
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        refuse,
    ]
    numbers = [pair[column] for pair in _NUMBERS.values()]
    for number in (*numbers, *_NUMBERS_EVERYWHERE):
        code += [(_JUMP_EQUAL, 0, 1, number), refuse]
    # ENOSYS: the C library then takes clone, whose flags can be read here.
    code += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    code += [(_JUMP_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    code += [(_JUMP_BITS, 0, 5, _NEW_NAMESPACE_FLAGS), refuse]
    code += [(_JUMP_EQUAL, 0, 3, socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    code += [(_JUMP_EQUAL, 1, 0, _AF_UNIX), refuse, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


_libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(code: bytes) -> None:
    """Put the filter on this process and all that it starts; ``no_new_privs`` must be set.

    Args:
        code: of ``compiled``.

    Raises:
        OSError: the kernel has no seccomp.
    """
    wanted = _FilterProgram(len(code) // 8, code)
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(wanted), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the seccomp filter is refused")
